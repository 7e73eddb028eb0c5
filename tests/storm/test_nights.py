"""Ranks with all of the package's code, in one process, whatever goes wrong: exact, or named in time."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.storm.nights import Fault, Night, Plan, drawn, told

HOSTS = ["host 0", "host 0", "host 1"]
KEPT = {
    "a rank that answers each call late, since the store is slow, is no silent one": replace(
        drawn(1), worlds=[HOSTS], network=(2e-2, 10.0, 1e9), faults=[Fault()], steps=25, every=5
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


@pytest.mark.parametrize("plan", KEPT.values(), ids=KEPT)
def test_a_night_that_has_found_a_fault_is_survived(plan):
    lived(plan)


def test_every_rank_of_fresh_nights_has_the_weights_of_one_process_or_names_who_is_missing_in_time():
    began = time.monotonic()
    seed = int(time.time()) % 1_000_000 * 1000
    while time.monotonic() - began < FRESH_S:
        lived(drawn(seed))
        seed += 1


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
