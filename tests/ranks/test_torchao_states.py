"""The states of torchao's 8-bit, 4-bit and fp8 optimizers in checkpoints, and in torch's own."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import checkpoint, fully_shard
from tests.ranks.pool import run_ranks

optim = pytest.importorskip(
    "torchao.optim", reason="needs torchao: make setup-hf, and this in its environment"
)
KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


class Net(nn.Module):
    """Matrices, vectors that torchao keeps plain, and one row, of which all ranks but one hold nothing."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, rows), nn.Linear(rows, 4096, bias=False)
        self.one = nn.Linear(4096, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.down(self.up(x).tanh()))


def build(seed: int, kind: str, rows: int):
    torch.manual_seed(seed)
    model = fully_shard(Net(rows))
    return model, getattr(optim, kind)(model.parameters(), lr=0.01)


def train(model, optimizer, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        x = torch.randn(2, 256, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().sum()
        loss.backward()
        with torch.compiler.set_stance("force_eager"):  # compiling takes minutes
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def held(optimizer) -> list[list[torch.Tensor]]:
    """Of each parameter, what this rank holds of its state."""
    found = []
    for state in optimizer.state.values():
        found.append([])
        for _, value in sorted(state.items()):
            local = value._local_tensor if isinstance(value, DTensor) else value
            names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
            parts = [getattr(local, name) for name in names] or [local]
            found[-1] += [part.reshape(-1).view(torch.uint8).clone() for part in parts]
    return found


def equal(a, b) -> bool:
    pairs = [pair for one, other in zip(a, b, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


def save(rank: int, world: int, path: str, kind: str, rows: int):
    model, optimizer = build(1, kind, rows)
    train(model, optimizer, range(2))
    checkpoint.save(path, model=model, optimizer=optimizer, step=2)
    return held(optimizer), [p.to_local() for p in model.parameters()], train(model, optimizer, range(2, 4))


def load(rank: int, world: int, path: str, kind: str, rows: int):
    model, optimizer = build(2, kind, rows)
    checkpoint.load(path, model=model, optimizer=optimizer)
    state = held(optimizer)
    return state, [p.to_local() for p in model.parameters()], train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "rows"), [(1, 192), (2, 192), (3, 256)])
def test_its_states_come_back_to_the_bit_and_training_goes_on_with_the_same_losses(
    tmp_path: Path, kind: str, world: int, rows: int
) -> None:
    saved, loaded = (run_ranks(world, call, str(tmp_path), kind, rows) for call in (save, load))
    for (state, weights, losses), (others, other_weights, other_losses) in zip(saved, loaded, strict=True):
        assert equal(state, others)
        assert all(torch.equal(*pair) for pair in zip(weights, other_weights, strict=True))
        assert losses == other_losses


@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 1), (1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_its_states_are_the_same_blocks_on_another_number_of_ranks(tmp_path, kind, before, after) -> None:
    saved, loaded = (
        run_ranks(world, call, str(tmp_path), kind, 192 if 2 in (before, after) else 256)
        for world, call in ((before, save), (after, load))
    )
    for i in (0, 2):  # the two matrices
        for parts, others in zip(
            *(zip(*(rank[0][i] for rank in side), strict=True) for side in (saved, loaded)), strict=True
        ):
            if len(parts[0]) == len(others[0]):  # the number of steps, or what codes mean: one for all
                assert all(torch.equal(parts[0], other) for other in others)
            else:
                assert torch.equal(torch.cat(parts), torch.cat(others))
