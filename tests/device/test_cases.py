"""Rows of the table of ranks (tests/ranks/cases.py) give on a simulated accelerator the bits of the CPU."""

import pytest
import torch.distributed as dist

from tests.device.cases import Place
from tests.device.ranks import Job
from tests.device.test_runtime import same
from tests.ranks.cases import CASES, trained
from tests.ranks.pool import run_ranks

ROWS = (
    "tied ends",
    "reduced once",
    "recomputed",
    "recomputed, reentrant",
    "a penalty on the gradient",
    "called twice or sometimes",
)
"""What the kinds of tests/device/cases.py don't have. Rows that make meshes of their own can't run here."""


def on_cpu(rank, world, name):
    return trained(name, 0, rank, Place())


def on_device(rank, world, name, size, wanted):
    dist.destroy_process_group()
    assert all(map(same, Job(name, 0, function=trained, size=size).run(0), wanted))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "recomputed")) for n in ROWS]
)
def test_losses_gradients_and_shards_of_a_row_are_those_of_the_cpu(name):
    size = min(world for world, _ in CASES[name].runs if world > 1)
    run_ranks(1, on_device, name, size, run_ranks(size, on_cpu, name))
