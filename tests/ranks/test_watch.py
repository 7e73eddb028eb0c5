"""What the ranks say when one of them doesn't come: each fault of faults.py is named, on all others, in time.

Faults mostly wait, so several run at once; each test then looks at its own.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import WatchPolicy, fully_shard, set_transport, set_watch
from shardwright.checkpoint import StopRequest
from shardwright.errors import RankLost
from shardwright.observe.watch.status_exchange import store_address
from shardwright.observe.watch.watchdog import Watch
from shardwright.transport import liveness
from shardwright.transport.attempt import this_attempt
from shardwright.transport.process import process_state
from tests.ranks.faults import CASES, built, compiles_for, once, step
from tests.ranks.pool import on_ranks, run_ranks_but
from tests.ranks.scripts import Outcome, fault, run_scripts

AT_ONCE = 4  # of two cores: with five a diagnosis may take longer than the ten seconds that are promised


@pytest.fixture(scope="module")
def outcomes(request):
    """The outcomes of all the faults that are asked for, as they come."""
    own = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in own if "name" in _params(item)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[list[Outcome]]] = {}
        for name in names:
            case = CASES[name]
            futures[name] = pool.submit(run_scripts, case.world, case, case.policy, case.store)
        yield futures


def _params(item):
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.error])
def test_every_other_rank_names_the_fault_and_ends_clean(outcomes, name):
    case = CASES[name]
    for rank, outcome in enumerate(outcomes[name].result()):
        if rank in case.culprits:
            assert outcome.code != 0 or "ends" in name
            continue
        assert outcome.error == case.error, (rank, outcome)
        assert outcome.took_s < 10, outcome
        for words in case.says:
            assert words in outcome.text, outcome.text
        assert outcome.code == 1
        assert not outcome.threads


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.error])
def test_ranks_that_only_take_their_time_are_accused_of_nothing(outcomes, name):
    for outcome in outcomes[name].result():
        assert outcome.code == 0, outcome
        assert not outcome.threads


@pytest.mark.slow
def test_thirty_seconds_of_compiling_accuse_nobody():
    for outcome in run_scripts(2, partial(once, partial(compiles_for, 30.0)), limit_s=90.0):
        assert outcome.code == 0, outcome


@pytest.mark.parametrize("name", ["raise in forward"])
def test_the_first_exception_is_told_once_and_without_a_verdict_of_its_own(outcomes, name):
    other, culprit = outcomes[name].result()
    assert culprit.error == "ValueError"
    assert "RankFailed" not in culprit.stderr
    assert other.stderr.count("RankFailed") == 1


@pytest.mark.parametrize("name", ["barrier on rank 1 alone"])
def test_a_rank_that_is_let_go_from_its_own_barrier_is_told_why(outcomes, name):
    culprit = outcomes[name].result()[1]
    assert "diverged:" in culprit.stderr
    assert "torch.distributed.barrier" in culprit.stderr


IN_FLIGHT = ["waits for its own all-reduce alone", "all-reduces on two groups"]


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_rank_that_waits_where_only_torch_s_recorder_sees_it_is_let_go_and_told_why(outcomes, name):
    culprit = outcomes[name].result()[1]
    assert culprit.error == "RuntimeError"
    assert "diverged: ranks wait for each other in different places" in culprit.stderr
    assert "gloo:all_reduce in group" in culprit.stderr
    assert culprit.took_s < 5, culprit


@pytest.mark.parametrize("name", ["comes 3 s late to an all-reduce in flight"])
def test_who_is_late_to_a_collective_in_flight_is_named(outcomes, name):
    assert re.search(
        r"rank \d has waited .* in gloo:all_reduce in group default_pg for rank 1 \(rank 1: .*faults.py:\d+",
        outcomes[name].result()[0].stderr,
    )


@pytest.mark.parametrize("name", ["sleeps 3 s"])
def test_a_slow_rank_is_one_line_of_the_log_with_its_place(outcomes, name):
    lines = [line for line in outcomes[name].result()[0].stderr.splitlines() if "slow: " in line]
    assert 1 <= len(lines) <= 2
    assert re.search(r"rank 0 has waited .* for rank 1 \(rank 1: .* at .*faults.py:\d+ in", lines[0])


@on_ranks(2)
def test_off_starts_nothing():
    set_watch(WatchPolicy(on=False))
    model = built()
    step(model)
    explain = process_state.explain
    has_store = store_address() != ""
    dist.distributed_c10d._get_default_store().check(["x"])
    assert explain is None
    assert has_store


def told_late(rank, world):
    """Rank 0 sits in a barrier, and its watch has no diagnosis before that breaks: the others have
    been told, and end."""
    if rank == 0:
        Watch._deliver = lambda watch, shared: None
        Watch._judge = lambda watch, found: None
    model = built()
    step(model)
    fault()
    if rank == 0:
        dist.barrier()
    step(model)


def test_who_breaks_off_because_the_others_were_told_takes_no_blame():
    late, *others = run_scripts(3, told_late)
    assert [outcome.error for outcome in others] == ["Diverged", "Diverged"]
    assert "RuntimeError" in late.stderr  # what the barrier raised
    assert "diverged: " in late.stderr  # and why


def far_away(rank, world):
    """Nothing is known of processes, as on other hosts: only the connection tells."""
    set_watch(WatchPolicy(suspect_s=0.5, answer_s=0.3))
    liveness.has_ended = lambda identity: False
    set_transport("sockets")
    model = built()
    step(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1 is lost"):
        step(model)
    return True


def test_a_rank_of_another_host_is_lost_once_its_connection_is_closed():
    run_ranks_but(1, 2, far_away, limit_s=20.0)


def silent(rank, world):
    set_watch(WatchPolicy(suspect_s=0.3, answer_s=0.3, lost_s=1.0))
    model = built()
    step(model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # ended by the pool
    with pytest.raises(RankLost, match="has not answered for 1 s"):
        step(model)


@pytest.mark.slow
def test_a_rank_that_is_silent_for_lost_s_is_lost():
    run_ranks_but(1, 2, silent, limit_s=8.0)


def asked(rank, world):
    model = built()
    step(model)
    fault()
    if rank == 1:
        time.sleep(0.3)
        os.kill(int(_pid_of(0)), signal.SIGUSR1)
        subprocess.run(
            [sys.executable, "-m", "shardwright", "top", store_address(), "--once"], check=True, stdout=2
        )
    step(model)


def _pid_of(rank):
    return this_attempt().keys().get(f"met/{rank}").decode().split()[-2]


def test_sigusr1_and_top_show_the_table_of_a_running_job():
    first, second = run_scripts(2, asked, limit_s=40.0)
    for outcome in (first, second):  # the one by the signal, the other by the command
        assert outcome.code == 0, outcome
        assert "TCPStore.cpp" not in outcome.stderr  # nobody asks a store that is gone
        for line in (r"^  0 +waits in agreement on .* in step$", r"^  1 .* in asked$"):
            assert re.search(line, outcome.stderr, re.MULTILINE), outcome.stderr


def with_timeout(rank, world):
    set_watch(WatchPolicy(stall_s=600))
    fully_shard(nn.Linear(2, 2))


def test_a_time_limit_below_stall_s_is_said():
    for outcome in run_scripts(2, with_timeout)[:1]:
        assert "gives up after 60 s" in outcome.stderr
        assert "stall_s" in outcome.stderr


@pytest.mark.slow
@on_ranks(2)
def test_two_models_and_a_late_rank_go_on(rank):
    """Other groups, a second root, and a rank that was slow: nothing is left of the first wait."""
    first, second = built(), built()
    for _ in range(2):
        step(first)
        step(second)
    if rank == 1:
        time.sleep(1.5)
    step(second)
    assert process_state.diagnosis is None and not process_state.waits


def ended_by_a_launcher(rank, world):
    """Rank 1 is killed; then those that are left, and wait for each other in native code, are told to end."""
    step(built())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_told_to_end_after, args=(1,)).start()
    dist.recv(torch.empty(1), src=2 - rank)


def _told_to_end_after(rank):
    while this_attempt().ended([rank]) != [rank]:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_ranks_that_are_told_to_end_say_first_which_one_is_lost():
    outcomes = run_scripts(3, ended_by_a_launcher, store="file")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.code == -signal.SIGTERM, outcome
        assert "ended by SIGTERM: lost: rank 1 is lost" in outcome.stderr, outcome.stderr


def all_told_to_end(rank, world):
    """A scheduler takes the machine back: one rank ends after the other."""
    step(built())
    if rank:
        _told_to_end_after(rank - 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30.0)


def test_ranks_that_are_told_to_end_are_not_called_lost():
    for outcome in run_scripts(3, all_told_to_end, store="file"):
        assert outcome.code == -signal.SIGTERM, outcome
        assert "lost" not in outcome.stderr


def takes_the_signal_itself(rank, world):
    with StopRequest() as before:
        step(built())
        os.kill(os.getpid(), signal.SIGTERM)
        assert before.reason == "SIGTERM"
    set_watch(WatchPolicy(on=False))
    set_watch(WatchPolicy())
    fully_shard(nn.Linear(2, 2))  # a watch anew, which finds the signal free
    for waits_s in [0.0] * 20 + [0.1]:
        child = os.fork()
        if child == 0:
            time.sleep(30.0)
            os._exit(0)
        time.sleep(waits_s)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    with StopRequest() as after:
        os.kill(os.getpid(), signal.SIGTERM)
        assert after.reason == "SIGTERM"
        time.sleep(0.5)  # far more than the watch would take to end this process
        set_watch(WatchPolicy(on=False))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30.0)


def test_sigterm_is_left_to_a_handler_of_the_programs_and_to_forked_processes():
    for outcome in run_scripts(2, takes_the_signal_itself):
        assert outcome.code == -signal.SIGTERM, outcome
