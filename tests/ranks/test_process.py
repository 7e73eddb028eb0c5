"""What the package does to a process, and how it is left alone; and what ``shardwright top`` says."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch

from shardwright import WatchPolicy, set_process
from shardwright.cli import top
from shardwright.errors import CommError, InputError
from shardwright.observe.watch.findings import Answer, Findings, Status, Waits
from shardwright.observe.watch.lifecycle import keep_watch
from shardwright.observe.watch.process_status import frame_of, user_line
from shardwright.observe.watch.status import status
from shardwright.observe.watch.status_exchange import find_exchange, store_address, store_at
from shardwright.train.ranks import RankPlace
from shardwright.transport.cpu.pages import keep_freed_pages
from tests.ranks.faults import built, step
from tests.ranks.pool import free_port, run_ranks
from tests.ranks.scripts import fault, run_scripts


def done_to_the_process() -> set[str]:
    done = set()
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        done.add("signal")
    if sys.excepthook.__module__.startswith("shardwright"):  # torch sets one of its own
        done.add("excepthook")
    if any(thread.name == "shardwright-watch" for thread in threading.enumerate()):
        done.add("thread")
    if keep_freed_pages():
        done.add("malloc")
    return done


def says_what_is_done(rank, world):
    model = built()
    step(model)
    print("done:", *sorted(done_to_the_process()), file=sys.stderr)
    step(model)


def left_alone_by_a_variable(rank, world):
    os.environ["SHARDWRIGHT_PROCESS"] = "off"
    says_what_is_done(rank, world)


def left_alone_by_a_call(rank, world):
    set_process(False)
    says_what_is_done(rank, world)


@pytest.mark.parametrize(
    ("script", "policy", "done"),
    [
        (says_what_is_done, "", "excepthook malloc signal thread"),
        (says_what_is_done, "signal=off", "excepthook malloc thread"),
        (says_what_is_done, "off", "malloc"),
        (left_alone_by_a_variable, "", ""),
        (left_alone_by_a_call, "", ""),
    ],
)
def test_what_is_done_to_a_process(script, policy, done):
    for outcome in run_scripts(2, script, policy):
        assert outcome.code == 0, outcome
        assert f"done: {done}".rstrip() in [line.rstrip() for line in outcome.stderr.splitlines()], outcome


def test_another_value_is_refused(monkeypatch):
    with pytest.raises(InputError, match="expects True or False"):
        set_process("off")
    monkeypatch.setenv("SHARDWRIGHT_PROCESS", "maybe")
    with pytest.raises(InputError, match='must be "on" or "off"'):
        keep_freed_pages.__wrapped__()


def killed_beside_the_step(rank, world):
    """In one of the training loop's own collectives, before any module is sharded."""
    keep_watch()
    place = RankPlace(rank, world, torch.device("cpu"), None)
    place.wait_for_all()
    fault()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    place.total(1.0)


def test_a_rank_killed_in_the_training_loops_own_collective_is_named():
    other, culprit = run_scripts(2, killed_beside_the_step)
    assert culprit.code == -signal.SIGKILL
    assert (other.code, other.error) == (1, "RankLost"), other
    assert "rank 1 is lost" in other.text


def asked_while_it_trains(rank, world):
    model = built()
    for number in range(100):
        step(model)
        time.sleep(0.02)
        if rank == 1 and number == 20:
            threading.Thread(target=ask).start()


def ask():
    exchange = find_exchange(store_at(store_address(), top.CONNECT))
    for _ in range(3):  # other work on the machine may hold a rank up for a second
        print(status(exchange.call(1.0), WatchPolicy()), file=sys.stderr)


def test_a_healthy_run_is_running():
    said = run_scripts(2, asked_while_it_trains)[1].stderr
    pattern = r"^running: pass \d+; memory of the largest rank: [\d.]+ [MG]iB of the host$"
    assert re.search(pattern, said, re.MULTILINE), said


def test_step_loss_tokens_and_memory_are_told_and_a_long_wait_is_not_called_running():
    far = "step 30 of 300, loss 2.104, 5,000 tokens/s"
    answers = {
        rank: Answer(rank, "", "train.py:1 in main", status=Status(far, host_nbytes=3 << 20))
        for rank in (0, 1)
    }
    first = status(Findings(2, answers), WatchPolicy()).splitlines()[0]
    assert first == f"running: {far}; memory of the largest rank: 3.0 MiB of the host"
    waits = Waits("a", 1, "all-gather", 2.0)
    answers[0] = Answer(0, "", "train.py:1 in main", waits=waits)
    assert status(Findings(2, answers), WatchPolicy()).startswith("slow: rank 0 has waited 2.0 s")


@pytest.mark.parametrize("listens", [True, False])
def test_top_gives_up_where_no_store_answers(monkeypatch, listens):
    assert top.CONNECT.total_seconds() == 5.0
    monkeypatch.setattr(top, "CONNECT", top.CONNECT / 10)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes calls, and says nothing
        port = server.getsockname()[1]
        if not listens:
            server.close()
        with pytest.raises(CommError, match=r"no job's store answers at 127\.0\.0\.1:\d+ within 0\.5 s"):
            top.exchange_at(f"127.0.0.1:{port}")


@pytest.mark.parametrize("answers", [True, False])
def test_top_at_a_wrong_address_is_one_sentence(answers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if answers:  # as what speaks another protocol does
            threading.Thread(target=hang_up, args=(server,), daemon=True).start()
        else:
            server.close()
        command = [sys.executable, "-m", "shardwright", "top", f"127.0.0.1:{port}", "--once"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"shardwright: no job's store answers at 127.0.0.1:\d+ within 5 s: .*\n", done.stderr)


def hang_up(server):
    with suppress(OSError):  # closed
        while True:
            server.accept()[0].close()


CALLS = """
def turn(moved, may_move):
    moved.release()
    may_move.acquire()
def small(*locks):
    turn(*locks)
def large(*locks):
"""
CALLS += "".join(f"    v{i} = [{i}]\n" for i in range(400)) + "    turn(*locks)"


def read_while_it_returns(rank, world):
    """The training thread goes on as the first, second ... collection begins in the thread that reads its
    frames: those that come while Python makes the objects of frames are among them."""
    calls: dict = {}
    exec(compile(CALLS, torch.__file__, "exec"), calls)  # frames that are looked through for a user's
    training, ended = threading.get_ident(), []
    moved, may_move = threading.Lock(), threading.Lock()
    moved.acquire()
    may_move.acquire()

    begun = turn = 0

    def move(phase, info):
        nonlocal begun
        if threading.get_ident() != training and phase == "start":
            begun += 1
            if begun == turn:
                may_move.release()
                moved.acquire()

    def read():
        nonlocal begun, turn
        moved.acquire()
        for number in 4 * tuple(range(1, 9)):
            begun, turn = 0, number
            gc.set_threshold(1)
            with frame_of(training) as frame:
                user_line(frame)
            gc.set_threshold(700)
            may_move.release()
            moved.acquire()
        ended.append(gc.isenabled())
        may_move.release()

    reader = threading.Thread(target=read)
    gc.freeze()
    gc.callbacks.append(move)
    reader.start()
    while not ended:
        calls["small"](moved, may_move)
        if not ended:
            calls["large"](moved, may_move)  # where the frames of the first were, and longer
    gc.callbacks.remove(move)
    reader.join()
    return ended


def test_a_thread_may_return_while_the_watch_reads_where_it_is():
    """Before Python 3.12 any allocation may collect, and a finalizer let the other thread return: the watch
    then read and wrote memory of other frames, and the rank died, or found its heap broken later."""
    assert run_ranks(1, read_while_it_returns, limit_s=20.0) == [[True]]


PLAIN_SCRIPT = """
import os, signal, torch, torch.distributed as dist
from shardwright import fully_shard

torch.manual_seed(0)
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 4))
for step in range(1000):
    model(torch.ones(1, 4)).sum().backward()
    if step == 3 and dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_that_imports_fully_shard_alone_is_told_which_rank_was_killed():
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    start = partial(subprocess.Popen, [sys.executable, "-c", PLAIN_SCRIPT], stderr=subprocess.PIPE, text=True)
    first, _ = [start(env={**os.environ, **job, "RANK": rank, "OMP_NUM_THREADS": "1"}) for rank in "01"]
    assert "rank 1 is lost" in first.communicate(timeout=60)[1]
    assert first.returncode == 1
