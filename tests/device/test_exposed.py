"""What a step waits for on a simulated accelerator, in milliseconds: those of a schedule, and no others."""

import random

import pytest
import torch

from shardwright import SchedulePolicy
from tests.device import cases
from tests.device.ranks import Job
from tests.device.sim import Durations
from tests.ranks.pool import run_ranks

COPIES_MS = 3.0
"""Of the operations beside collectives that a step may wait for: copies in, casts, divisions."""
ON_DEMAND = {"depth": 0, "backward_prefetch": "none", "forward_prefetch": False, "max_reductions": 1}


def exposed_ms(rank, world, policy, durations, seed):
    """Of steps after the first two, in which compute has nothing to do but to wait; on rank 0."""
    found = []

    def steps(kind, number, rank, place):
        model, inputs = cases.model_of(kind, number, rank, random.Random(1), place)
        place.sharded(model)
        model.set_schedule_policy(SchedulePolicy(**policy))
        optimizer, x, device = torch.optim.SGD(model.parameters(), lr=0.1), next(inputs), place._accelerator
        for step in range(4):
            device.synchronize()
            before_ms = device.compute.exposed_ms
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            device.synchronize()
            found.extend([device.compute.exposed_ms - before_ms] if step > 1 and rank == 0 else [])
        return []

    job = Job("plain", seed, function=steps)
    job.world.durations = durations
    job.run(2)
    return found


@pytest.mark.parametrize("collective_ms", [1.0, pytest.param(8.0, marks=pytest.mark.slow)])
def test_a_step_waits_for_three_collectives_and_for_all_where_nothing_is_launched_before(collective_ms):
    for policy, num_waited in (({}, 3), (ON_DEMAND, 5)):
        for seed in range(2):
            [found] = run_ranks(1, exposed_ms, policy, Durations(collective_ms=collective_ms), seed)
            assert found == [pytest.approx(num_waited * collective_ms + COPIES_MS / 2, abs=COPIES_MS / 2)] * 2


def test_a_host_that_is_behind_its_device_lets_collectives_end_in_time():
    [found] = run_ranks(1, exposed_ms, {}, Durations(host_ms=2.0), 0)
    assert found == [0.0, 0.0]
