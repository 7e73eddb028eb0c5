"""Ranks with all of the package's code, in one process, whatever goes wrong: exact, or named in time."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from shardwright.policy import SchedulePolicy
from tests.storm.nights import Fault, Night, Plan, drawn, told, with_a_flipped_bit


def hybrid(seed: int, **changes: Any) -> Plan:
    """A night of two nodes of two ranks, which share all of the model, and of which nothing breaks."""
    nodes = ["host 0", "host 0", "host 1", "host 1"]
    plan = replace(drawn(seed), worlds=[nodes], copies=2, over_all=True, faults=[Fault()], microbatches=1)
    return replace(plan, **changes)


KEPT = {
    "a rank that was stopped as ranks met doesn't take that for a silent store": replace(
        drawn(1037), network=(5e-4, 10.0, float("inf"))
    ),
    "a host that goes dark before the watch of its ranks has begun is missed": replace(
        drawn(2916860656), worlds=drawn(2916860656).worlds[:1], faults=drawn(2916860656).faults[:1]
    ),
    "ranks of two nodes that take other routes launch the second hops in one order": drawn(56),
    "ranks of two nodes that wait for a reduction early or late launch gathers in one order": hybrid(
        3, steps=15, policy=SchedulePolicy(forward_prefetch=True, bucket_cap_mb=0.0, max_reductions=1)
    ),
    "ranks of a node that wait for gathers in another order launch the second hops in one": hybrid(
        33, evaluations=0.3, uniform=0.0
    ),
}
"""Nights that have found a fault, and what is right now."""
FRESH_S = 20.0


def lived(plan: Plan) -> Night:
    night = Night(plan)
    try:
        night.run()
    except AssertionError as error:
        raise AssertionError(f"seed {plan.seed}: {error}\n{told(night.history)[-6000:]}") from error
    return night


@pytest.mark.slow
@pytest.mark.parametrize("plan", KEPT.values(), ids=KEPT)
def test_a_night_that_has_found_a_fault_is_survived(plan):
    lived(plan)


def test_ranks_agree_on_more_groups_than_a_word_of_the_channel_has_bits():
    groups = {"widths": [1] * 70, "reshard": [True] * 70, "frozen": []}
    lived(replace(drawn(16), **groups, worlds=[["host 0", "host 1"]], steps=3, faults=[Fault()]))


class WaitsAlone(Night):
    """Before each step all ranks unshard a block by hand, for which one rank waits at once."""

    def check(self, model: Any, attempt: int, rank: int, *place: int) -> None:
        super().check(model, attempt, rank, *place)
        handle = model.blocks[0].unshard(async_op=True)
        if rank == 1:
            handle.wait()


def test_a_rank_may_wait_alone_for_what_was_begun_before_ranks_meet():
    WaitsAlone(hybrid(3, steps=3, every=100, uniform=1.0)).run()


def test_a_bit_that_flips_on_the_way_is_told_in_time_and_never_taken_in():
    flips = [lived(with_a_flipped_bit(drawn(seed))).flips for seed in (1, 2)]
    assert sum(flips) > 1


@pytest.mark.parametrize(("rank", "every"), [(0, 20), pytest.param(1, 120, marks=pytest.mark.slow)])
def test_whenever_a_host_goes_dark_as_ranks_start_the_other_says_who_or_the_store_is_lost(rank, every):
    plan = replace(
        drawn(2), worlds=[["host 0", "host 1"]], steps=1, network=(2e-5, 0.0, float("inf")), copies=1
    )
    for events in range(10, 500, every):  # the store is on the host of rank 0
        lived(replace(plan, faults=[Fault("dark", rank=rank, events=events)]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", (0, 1, 12, 14, 16, 17, 18, 21, 26, 31, 52, 59, 60, 66, 72, 941767042))
def test_every_rank_of_the_same_nights_has_the_weights_of_one_process_or_names_who_is_missing(seed):
    lived(drawn(seed))


@pytest.mark.exhaustive
def test_every_rank_of_fresh_nights_has_the_weights_of_one_process_or_names_who_is_missing_in_time():
    began = time.monotonic()
    seed = int(time.time()) % 1_000_000 * 1000
    while time.monotonic() - began < FRESH_S:
        lived(drawn(seed))
        seed += 1


@pytest.mark.slow
def test_a_seed_gives_the_same_night_in_every_process():
    code = (
        "from tests.storm.nights import *; n = Night(drawn(3)); n.run(); print(n.switches, told(n.history))"
    )
    command = [sys.executable, "-c", code]
    environments = ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    said = {
        subprocess.run(command, capture_output=True, text=True, check=True, env=each).stdout
        for each in environments
    }
    assert len(said) == 1
