"""Gradients of several backwards are those of one process, also where modules run in some of them only, or by
themselves."""

from functools import partial

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from tests.ranks.models import full
from tests.ranks.pool import run_ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.block, self.branch = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x, branch=False):
        x = self.block(x)
        return self.norm(x + self.branch(x) if branch else x)


def beside(rank, world, way, reshard, steps=4):
    """Four steps of ``way(model, rows, seed)``, with norm and head in one group, and of one process."""
    ours, whole = Model(), Model()
    for part in (ours.block, ours.branch, [ours.norm, ours.head], ours):
        fully_shard(part, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (ours, whole)]
    for step in range(steps):
        way(ours, partial(rows, step, rank))
        for other in range(world):
            way(whole, partial(rows, step, other))
        for (name, own), theirs in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert (own.grad is None) == (theirs.grad is None), (step, name)
            if own.grad is not None:
                theirs.grad /= world
                assert torch.allclose(full(own.grad), theirs.grad, atol=1e-5), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rows(step, rank, number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def of(out):
    return out.square().mean()


def branch_first(model, batch):
    """A branch (a vision tower, an adapter) that the last microbatch leaves out."""
    for number, branch in enumerate((False, True, False)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == 2)
        of(model.head(model(batch(number), branch))).backward()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_only_an_earlier_microbatch_ran_is_reduced_in_the_last_one(world, reshard):
    run_ranks(world, beside, branch_first, reshard)


def head_after(model, batch):
    of(model.head(model(batch(0)))).backward()


def chunked(model, batch):
    """The loss of chunks: torchtitan's calls the head of the list [norm, head] once for each."""
    hidden = model(batch(0))
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(2):
        of(model.head(chunk)).backward()
    hidden.backward(leaf.grad)


def head_before(model, batch):
    of(model.head(batch(0))).backward()
    of(model(batch(1))).backward()


def each_alone(model, batch):
    model.head(batch(0))
    model.norm(batch(1))
    with torch.no_grad():
        model.norm(batch(2))
    of(model.head(model(batch(3)))).backward()


@pytest.mark.parametrize("way", [head_after, chunked, head_before, each_alone])
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("world", [1, 2])
def test_modules_of_a_list_may_run_by_themselves_in_any_order_any_number_of_times(world, reshard, way):
    run_ranks(world, beside, way, reshard)
