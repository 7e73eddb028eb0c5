"""A bit that flips in memory is told before the optimizer's next step has used it."""

import os
import subprocess
import sys

import pytest


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_each_bit_that_flips_in_shards_state_or_gathered_copies_is_told_and_nothing_else(count):
    ran = run("-m", "tests.ranks.flips", str(count), "7", SHARDWRIGHT_CHECKSUMS="all")
    assert ran.stdout == f"{count} of {count} flips were told\n", ran.stderr[-3000:]


def test_what_is_to_be_summed_is_spelt_right():
    ran = run("-c", "from shardwright import fully_shard", SHARDWRIGHT_CHECKSUMS="none")
    assert "SHARDWRIGHT_CHECKSUMS (environment) must be off, messages or all, got 'none'" in ran.stderr
