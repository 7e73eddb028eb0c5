"""torchao's own ``NF4Tensor`` as a weight given straight to ``fully_shard``, beside torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F

from shardwright import checkpoint, full_state_dict, fully_shard, stream_state_dict
from tests.ranks.models import Run
from tests.ranks.pool import on_ranks

nf4 = pytest.importorskip(
    "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
    reason="needs torchao: make setup-hf, and this in its environment",
)
WIDTH = 512


class Lora(nn.Module):
    """A frozen 4-bit weight and its adapter, as torchtune has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nf4.to_nf4(torch.randn(WIDTH, WIDTH) / 23), requires_grad=False)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nf4.linear_nf4(x, self.weight) + self.b(self.a(x))


def build(shards=None, seed=5) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(Lora(), nn.Tanh(), Lora())
    for module in (model[0], model[2], model) if shards else ():
        shards(module)
    return model


def inner(weight) -> dict[str, torch.Tensor]:
    return {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}


def train(model, rank, world, steps=3):
    run = Run.of(model, lr=0.5)
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(3))
    outputs = []
    for _ in range(steps):
        out = model(x[rank % 2])
        outputs.append(out.detach().clone())
        F.mse_loss(out, torch.ones_like(out)).backward()
        run.step()
    return outputs


@on_ranks(1, 2)
def test_a_given_nf4_tensor_trains_the_very_weights_that_were_given(rank, world):
    ours, theirs = build(fully_shard), build(torch_fully_shard)
    twin = copy.deepcopy(ours)
    assert type(ours[0].weight.to_local()) is nf4.NF4Tensor
    expected = train(theirs if world > 1 else build(), rank, world)  # torch fails in a world of one
    for model in (ours, twin):
        assert all(torch.equal(*pair) for pair in zip(train(model, rank, world), expected, strict=True))
    if world == 2:
        whole = build()
        assert torch.equal(whole[0](torch.ones(1, WIDTH)), build(fully_shard)[0](torch.ones(1, WIDTH)))


@on_ranks(1, 2)
def test_its_state_is_saved_loaded_and_collected_bit_for_bit(rank, world, tmp_path):
    folder = str(tmp_path)
    model, plain = build(fully_shard), build()
    train(model, rank, world, 1)
    state = full_state_dict(model)
    assert list(state) == ([] if rank else list(plain.state_dict()))
    for name, value in state.items():
        if name.endswith("weight") and isinstance(value, nf4.NF4Tensor):
            expected = inner(plain.state_dict()[name])
            assert all(torch.equal(part, expected[key]) for key, part in inner(value).items()), name
    assert sum(isinstance(value, nf4.NF4Tensor) for value in state.values()) == (0 if rank else 2)
    assert [name for name, _ in stream_state_dict(model)] == list(state)
    checkpoint.save(folder, model=model, step=1)
    other = build(fully_shard, seed=6)
    checkpoint.load(folder, model=other)
    for out, same in zip(train(other, rank, world), train(model, rank, world), strict=True):
        assert torch.equal(out, same)
