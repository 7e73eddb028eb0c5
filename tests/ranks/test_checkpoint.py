"""What is saved at one number of ranks comes back bit-equal at any other, optimizer state included."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from tests.ranks.pool import run_ranks


class Net(nn.Module):
    """Uneven (5 rows), empty on some ranks (1 row), tied and frozen parameters, bf16 and fp32 in one group;
    a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 5)
        self.one = nn.Linear(5, 1)
        self.down = nn.Linear(5, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.embed(x)).tanh()
        h = self.down(h * self.one(h))
        h = h + self.narrow(h.bfloat16()).float()
        return self.head(self.norm(self.frozen(h)))


def build(kind: str, seed: int, shard: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.up, model.one, model.down, model.frozen):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, rest = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]
    if kind == "adamw":
        return model, torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95))
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 11)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    state = {k: full(v) for k, v in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        state |= {f"group {i} {k}": v for k, v in group.items() if k != "params"}
        for p in group["params"]:
            state |= {f"{names[id(p)]} {k}": full(v) for k, v in optimizer.state[p].items()}
    return state


def assert_equal(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], torch.Tensor):
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key
        else:
            assert a[key] == b[key], key


def save_trained(rank: int, world: int, path: str, kind: str) -> dict:
    model, optimizer = build(kind, seed=1)
    train(model, optimizer, range(2))
    save(path, model=model, optimizer=optimizer, extra={"tokens": 123, "note": (1, None)}, step=2)
    return everything(model, optimizer)


def load_fresh(rank: int, world: int, path: str, kind: str) -> dict:
    model, optimizer = build(kind, seed=rank + 100)
    restored = load(path, model=model, optimizer=optimizer)
    assert (restored.step, restored.extra) == (2, {"tokens": 123, "note": (1, None)})
    assert model.head.weight is model.embed.weight
    return everything(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("adamw", 1, 3),
        ("adamw", 2, 1),
        ("adamw", 2, 2),
        ("adamw", 3, 2),
        ("adamw", 4, 5),
        ("sgd", 2, 4),
        ("sgd", 4, 1),
    ],
)
def test_any_world_size_restores_bit_equal(tmp_path: Path, kind: str, saved: int, loaded: int) -> None:
    before = run_ranks(saved, save_trained, str(tmp_path), kind)[0]
    assert {before["narrow.weight"].dtype, before["up.weight"].dtype} == {torch.bfloat16, torch.float32}
    for after in run_ranks(loaded, load_fresh, str(tmp_path), kind):
        assert_equal(before, after)
