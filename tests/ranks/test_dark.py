"""A host goes dark, whichever it is and whatever its ranks do: those that are left end in time, and say why.

Three network namespaces on a bridge, with a rank each; rank 0 has the job's store. One of them is taken from
the bridge, which tells nobody anything.
"""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint import load, save
from shardwright.observe.watch import lifecycle
from shardwright.observe.watch.delivery import HELD
from tests.ranks.faults import built, step
from tests.ranks.nodes import cut, nodes
from tests.ranks.scripts import fault, run_scripts

LOST_S = 2.0
IN_TIME_S = LOST_S + 10.0
POLICY = f"lost_s={LOST_S}"


@pytest.fixture(scope="module")
def hosts():
    with nodes(3) as made:
        yield made


class Extra:
    """State that takes until the cut to be given, or taken."""

    def __init__(self, saving, loading):
        self.saving, self.loading = saving, loading

    def state_dict(self):
        self.saving()
        return {"a": 1}

    def load_state_dict(self, state):
        self.loading()


def at_the_moment(folder, moment, rank, world):
    """A script that is at the moment when the host is cut."""

    def until_cut(now="", done=[]):  # noqa: B006  # once
        if now == moment and not done:
            done.append(now)
            Path(folder, f"ready{rank}").touch()
            while not Path(folder, "cut").exists():
                time.sleep(0.02)
            fault()

    while not lifecycle._lifecycle.watch.reach.hosts():  # what takes a second after the group has begun
        time.sleep(0.02)
    until_cut("before")
    model = built()
    step(model)
    until_cut("step")
    if moment in ("step", "saving", "loading"):
        extra = {"extra": Extra(partial(until_cut, "saving"), partial(until_cut, "loading"))}
        save(Path(folder, "saved"), model=model, extra=extra, step=1)
        load(Path(folder, "saved"), model=model, extra=extra)
        step(model)
    until_cut("own")
    while moment == "own":
        dist.all_reduce(torch.ones(2))
    until_cut("exit")


MOMENTS = ["before", "step", "saving", "loading", "own", "exit"]
IN_CI = [(0, "saving"), (0, "own"), (1, "before"), (2, "step")]


@pytest.mark.parametrize(
    ("host", "moment"),
    [
        pytest.param(host, moment, marks=() if (host, moment) in IN_CI else pytest.mark.exhaustive)
        for moment in MOMENTS
        for host in range(3)
    ],
)
def test_whichever_host_goes_dark_all_ranks_end_in_time_and_say_why(tmp_path, hosts, host, moment):
    script = partial(at_the_moment, str(tmp_path), moment)
    with ThreadPoolExecutor(1) as pool:
        names = [node.name for node in hosts]
        running = pool.submit(run_scripts, 3, script, POLICY, limit_s=90.0, hosts=names)
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(3)) and not running.done():
            time.sleep(0.02)
        cut(hosts[host])
        try:
            (tmp_path / "cut").touch()
            outcomes = running.result()
        finally:
            cut(hosts[host], on=False)
    for rank, outcome in enumerate(outcomes):
        if moment == "exit":
            assert outcome.code == 0, outcome
            continue
        at_fault = rf"lost: rank {host} is {'cut off' if rank == host else 'lost'}"
        assert re.search(at_fault, outcome.stderr), outcome.stderr
        assert re.search(r"(test_dark|faults).py:\d+ in ", outcome.stderr), outcome.stderr
        assert outcome.code in ((1, HELD) if moment == "own" else (1,)), outcome
        assert outcome.took_s < IN_TIME_S, outcome


def with_a_stopped_store(rank, world):
    """Rank 1 comes late, for less than lost_s, while the store's process is stopped."""
    model = built()
    step(model)
    while not lifecycle._lifecycle.watch.reach.hosts():
        time.sleep(0.02)
    dist.barrier()
    store = int(Path(os.environ["SCRIPT_FOLDER"], "STORE").read_text())
    if rank == 0:
        os.kill(store, signal.SIGSTOP)
    for _ in range(2):
        time.sleep(2.5 * LOST_S if rank == 1 else 0.0)
        step(model)
    if rank == 0:
        os.kill(store, signal.SIGKILL)


def test_a_stopped_store_accuses_nobody_while_ranks_answer_each_other():
    for outcome in run_scripts(3, with_a_stopped_store, POLICY, store="served"):
        assert outcome.code == 0, outcome
        assert "lost" not in outcome.stderr


def stopped(rank, world):
    """Rank 2 is stopped until the others have ended without it."""
    pid = Path(os.environ["SCRIPT_FOLDER"], "pid")
    if rank == 2:
        pid.write_text(str(os.getpid()))
    model = built()
    step(model)
    if rank == 0:
        os.kill(int(pid.read_text()), signal.SIGSTOP)
    try:
        while True:
            step(model)
    finally:
        if rank == 0:
            time.sleep(4.0)  # also for the other one to end, and to be away for long enough
            os.kill(int(pid.read_text()), signal.SIGCONT)


def test_a_rank_that_was_stopped_says_that_it_was_itself_away():
    first, second, away = run_scripts(3, stopped, POLICY)
    for outcome in (first, second):
        assert "lost: rank 2 is lost" in outcome.stderr, outcome
    assert re.search("lost: rank 2 was itself away for [0-9]+ s", away.stderr), away


def killed_before(rank, world):
    while not lifecycle._lifecycle.watch.reach.hosts():
        time.sleep(0.02)
    fault()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    built()


def raises_before(rank, world):
    fault()
    if rank == 1:
        raise ValueError("no data")
    built()


def ends_its_group_as_it_raises(rank, world):
    try:
        raises_before(rank, world)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("script", [killed_before, raises_before, ends_its_group_as_it_raises])
def test_a_rank_that_ends_before_its_first_fully_shard_is_named_at_once(script):
    other, _ = run_scripts(2, script)
    assert other.error == ("RankLost" if script is killed_before else "RankFailed"), other
    assert "rank 1" in other.text
    assert other.took_s < IN_TIME_S
