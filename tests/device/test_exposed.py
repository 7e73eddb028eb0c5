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


def exposed_ms(rank, world, policy, durations, seed, depth=10**6):
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
    job.world.durations, job.world.depth = durations, depth
    job.run(2)
    return found


@pytest.mark.parametrize("collective_ms", [1.0, pytest.param(8.0, marks=pytest.mark.slow)])
def test_a_step_waits_for_three_collectives_and_for_all_where_nothing_is_launched_before(collective_ms):
    for policy, num_waited in (({}, 3), (ON_DEMAND, 5)):
        for seed in range(2):
            [found] = run_ranks(1, exposed_ms, policy, Durations(collective_ms=collective_ms), seed)
            assert found == [pytest.approx(num_waited * collective_ms + COPIES_MS / 2, abs=COPIES_MS / 2)] * 2


def test_a_host_that_waits_for_room_in_its_queues_lets_a_step_wait_for_nothing_more():
    for policy in ({}, ON_DEMAND):
        [[full, _]] = run_ranks(1, exposed_ms, policy, Durations(), 0, 4)
        [[free, _]] = run_ranks(1, exposed_ms, policy, Durations(), 0)
        assert 0 < full <= free


def test_a_host_that_is_behind_its_device_lets_collectives_end_in_time():
    [found] = run_ranks(1, exposed_ms, {}, Durations(host_ms=2.0), 0)
    assert found == [0.0, 0.0]


def step_ms(rank, world, durations, reads):
    """What a steady step takes, of eight; reads: the host reads each step's loss, and so is never ahead."""
    seen_ms = []

    def steps(kind, number, rank, place):
        model, inputs = cases.model_of(kind, number, rank, random.Random(1), place)
        place.sharded(model)
        optimizer, x, device = torch.optim.SGD(model.parameters(), lr=0.1), next(inputs), place._accelerator
        for step in range(12):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if reads or step in (3, 11):
                device.synchronize()
            seen_ms.extend([device.host_ms] if step in (3, 11) and rank == 0 else [])
        return []

    job = Job("plain", 0, function=steps)
    job.world.durations, job.world.depth = durations, 10**6
    job.run(2)
    return (seen_ms[1] - seen_ms[0]) / 8


@pytest.mark.parametrize("reads", [False, True])
def test_words_that_take_three_hops_of_a_fifth_of_a_millisecond_cost_a_step_of_fifty_nothing(reads):
    """Three hops: 64 ranks on 8 hosts. A host that isn't ahead has launched a forward's first gathers."""
    durations = Durations(kernel_ms=0.35, host_ms=0.05)
    [without], [exchanged] = (
        run_ranks(1, step_ms, durations._replace(words_ms=words_ms), reads) for words_ms in (0.0, 3 * 0.2)
    )
    assert without == pytest.approx(50, abs=3)
    assert exchanged <= 1.005 * without
