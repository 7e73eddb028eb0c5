"""Parameters that are frozen and unfrozen between steps, by whichever face the model shows at that moment."""

import pytest
import torch
from torch import nn

from shardwright import fully_shard, stats
from shardwright.engine.unit import unit_of
from shardwright.errors import StageError
from shardwright.schedule.schedule import ActionKind
from tests.ranks.models import Block, Run, both_step, twins
from tests.ranks.pool import on_ranks

WIDTH = 13


def built(**options):
    """Two sharded modules without a common root, and the same in one process."""
    model, reference = twins(lambda: nn.Sequential(Block(), Block()))
    for block in model:
        fully_shard(block, **options)
    return model, reference


def step_beside(ours, theirs, rank, world, step):
    x = torch.randn(world, 4, WIDTH, generator=torch.Generator().manual_seed(step))
    ours.model(x[rank]).square().mean().backward()
    torch.stack([theirs.model(rows).square().mean() for rows in x]).mean().backward()
    both_step(ours, theirs)


def in_turn(rank, world, options, frozen):
    """A module is frozen for every other step: through what the model shows, and what an optimizer holds."""
    model, reference = built(**options)
    held = [list(block.parameters()) for block in model]
    ours = Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = Run(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    for step in range(6):
        trains = step % 2 == 1
        if step < 4:
            model[frozen].requires_grad_(trains)
        else:
            for param in held[frozen]:
                param.requires_grad_(trains)
        reference[frozen].requires_grad_(trains)
        step_beside(ours, theirs, rank, world, step)
        assert [p.requires_grad for p in model[frozen].parameters()] == [trains] * len(held[frozen])
        assert [p.requires_grad for p in held[frozen]] == [trains] * len(held[frozen])


@on_ranks(1, 2, limit_s=30.0)
def test_what_was_frozen_for_a_step_trains_in_the_next(rank, world):
    for frozen in (0, 1):
        for reshard in (False, True):
            in_turn(rank, world, {"reshard_after_forward": reshard}, frozen)


@on_ranks(2, limit_s=30.0)
def test_frozen_between_a_forward_and_its_backward():
    """Frozen after the forward: as in one process, the backward brings those parameters no gradient."""
    model, reference = built(reshard_after_forward=False)
    x = torch.ones(4, WIDTH)
    held = list(model[0].parameters())
    for each, params in ((model, held), (reference, list(reference[0].parameters()))):
        loss = each(x).square().mean()
        for param in params[:2]:
            param.requires_grad_(False)
        loss.backward()
        for param in params[:2]:
            param.requires_grad_(True)
    ours, theirs = ([p.grad is None for p in each[0].parameters()] for each in (model, reference))
    assert ours == theirs
    assert any(theirs)
    assert not all(theirs)
    assert all(stats(block).unsharded_nbytes == 0 for block in model)


@on_ranks(2, limit_s=30.0)
def test_no_rank_asks_for_ever():
    """If asking did not help, it would be for ever: an error says so."""
    model, _ = built()
    unit_of(model[0]).runtime.executor.do[ActionKind.REDUCE] = lambda action: None  # the gradients stay
    with pytest.raises(StageError, match="still holds gradients"):
        model(torch.ones(4, WIDTH)).square().mean().backward()
