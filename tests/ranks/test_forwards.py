"""What a forward takes and gives may be anything; gradients are those of one process."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardwright import fully_shard
from tests.ranks.models import full
from tests.ranks.pool import run_ranks


class Block(nn.Module):
    """Gives its result in its own way: ``give(self, hidden)``, and ``taken(block, given)`` takes it."""

    def __init__(self, give):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.give = give
        self.left = None

    def forward(self, x):
        return self.give(self, self.second(torch.tanh(self.first(x))))


def as_attribute(block, hidden):
    block.left = hidden


def as_closure(block, hidden):
    return lambda: hidden


def as_generator(block, hidden):
    yield torch.tanh(hidden)
    yield hidden


def beside_detached(block, hidden):
    block.left = hidden
    return hidden.detach()


def as_late_generator(block, hidden):
    return (block.second(hidden + number) for number in range(2))


def taken(block, given):
    if block.left is not None:
        left, block.left = block.left, None
        return left
    if callable(given):
        return given()
    return sum(given)


class Model(nn.Module):
    def __init__(self, give):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block(give) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = taken(block, block(x))
        return self.head(x)


WAYS = {
    way.__name__: way for way in (as_attribute, as_closure, as_generator, beside_detached, as_late_generator)
}


def trained(rank, world, way, reshard, outermost):
    give = WAYS[way]
    models = Block(give), Block(give)
    models = ours, whole = models if outermost else (Model(give), Model(give))
    whole.load_state_dict(ours.state_dict())
    for block in [] if outermost else ours.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(ours, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(4):
        for number, model in enumerate(models):
            for sample in range(world):
                if model is whole or sample == rank:
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + sample))
                    out = taken(model, model(x)) if outermost else model(x)
                    out.square().mean().backward()
        for (name, mine), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert torch.allclose(full(mine.grad), other.grad / world, atol=1e-5), (step, name)
            other.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_block_gives_may_hide_its_tensors(way, reshard):
    run_ranks(2, trained, way, reshard, False)


@pytest.mark.parametrize("way", [way for way in WAYS if "late" not in way])
def test_what_a_model_gives_may_hide_its_tensors(way):
    run_ranks(2, trained, way, True, True)
