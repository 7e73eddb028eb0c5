"""After Ctrl-C at any instruction of a step on a device the next step gives the same bits, or ranks that were
interrupted at different places are told so: nothing that was queued by then writes into memory that is used
again."""

import random

import pytest
import torch

from shardwright.errors import CommError, Diverged
from tests.device import cases
from tests.device.ranks import Job
from tests.device.sim import Stuck
from tests.interrupts import Interrupt
from tests.ranks.pool import run_ranks

ALONE = ("plain", "half", "another dim", "quantised", "subclass")
TOGETHER = ("plain", "quantised", "offloaded", "hybrid", "smaller world", "quantised in a smaller world")


def trained(model, x, place):
    model(x).square().mean().backward()
    grads = place.read([p.grad.to_local().clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return grads


def interrupted(first, every, done):
    """What a rank does. done: by rank, the place that it has come to, and whether there are no more."""

    def train(kind, number, rank, place):
        model, inputs = cases.model_of(kind, number, rank, random.Random(f"{kind} {number}"), place)
        place.sharded(model)
        x, at = next(inputs), first
        trained(model, x, place)
        wanted = trained(model, x, place)
        while True:
            done[rank] = at, False
            with Interrupt(at) as interrupt:
                trained(model, x, place)
            if interrupt.place is None:
                done[rank] = at, True
                return []
            model.zero_grad()
            got = trained(model, x, place)
            assert all(map(torch.equal, got, wanted)), f"other gradients after {at}, {interrupt.place}"
            at += every

    return train


def outcomes(rank, world, kind, size, every):
    """How many places were followed by a right step, and how many by an error that says why not."""
    at, right, refused, ended = 1, 0, 0, False
    while not ended:
        done = {}
        job = Job(kind, at, function=interrupted(at, every, done), size=size, apart=False)
        try:
            job.run(at % 5)
        except (CommError, Diverged, Stuck):
            refused += 1
        except RuntimeError as error:
            # Ranks that were interrupted at different places met in collectives of different sizes.
            assert "doesn't match the broadcast shape" in str(error)
            refused += 1
        last = max(place for place, _ in done.values())
        ended = any(ended for _, ended in done.values())
        right += (last - at) // every
        at = last + every
    return right, refused


NOT_IN_CI = [pytest.mark.exhaustive, pytest.mark.slow]
CASES = [
    ("half", 1, 409),
    ("quantised", None, 409),
    *(pytest.param(kind, 1, 23, marks=NOT_IN_CI) for kind in ALONE),
    *(pytest.param(kind, None, 61, marks=NOT_IN_CI) for kind in TOGETHER),
]
"""Kinds, ranks where not the kind's own, and every which place is tried."""


@pytest.mark.parametrize(("kind", "size", "every"), CASES)
def test_after_ctrl_c_on_a_device_the_next_step_gives_the_same_bits(kind, size, every):
    [(right, refused)] = run_ranks(1, outcomes, kind, size, every, limit_s=1200.0)
    assert right > max(5, refused)
    assert size is None or not refused
