"""Runs a function on a few Gloo ranks, each in a process of its own, in tenths of a second.

    test --run_ranks(2, fn, x)--> server (imports once) --fork--> rank 0: fn(0, 2, x)
                                                               --fork--> rank 1: fn(1, 2, x)

Starting Python and importing torch and the package costs seconds per rank, forking a process that already
did costs 10 ms. So every call gets *new* ranks: no process group, cache, memory peak or half-finished
collective of one test can reach another, and a rank that hangs is ended by its pid without harm to the next
call.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

MAX_WORLD = 8
MAX_UNGROUPED = 64
GRACE_S = 5.0
"""How long the other ranks may go on after the first failure, to fail with a traceback of their own."""

_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",  # the peer that several tests compare with
    "torch._dynamo",  # imported by the first optimizer step, 1-2 s
    "torch.utils.checkpoint",
    "numpy",
    "pytest",
    "shardwright.public",  # imports all that a test may use: 0.3 s of processor time in each rank otherwise
    "tests.ranks.models",
]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(_PRELOAD)


def start_server() -> None:
    """Starts the server that ranks are forked from, without waiting for its imports (about 5 s)."""
    from_env = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the server's copy: several ranks share the cores
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if from_env is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = from_env


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 20.0,
    limit_s: float = 60.0,
    grouped: bool = True,
) -> list[Any]:
    """Calls ``fn(rank, world, *args)`` on each rank of a new Gloo process group; returns their results.

    Args:
        world: number of ranks, 1 to 8. The ranks are new processes with one compute thread,
            ``torch.manual_seed(0)`` and an initialised default process group.
        fn: a module-level function (it is sent by name); ``args`` and results are pickled.
        timeout_s: timeout of the process group, in seconds.
        limit_s: a rank still running after so many seconds is reported with its Python stack and ended.
        grouped: False: no process group is made, and there may be more ranks.

    Returns:
        the ranks' results, in rank order.

    Raises:
        AssertionError: some rank raised, hung or died; shows every such rank, the first to fail on top.
        ValueError: ``world`` is not in 1..8.
    """
    __tracebackhide__ = True
    if not 1 <= world <= (MAX_WORLD if grouped else MAX_UNGROUPED):
        raise ValueError(f"world is {world}, expected 1 to {MAX_WORLD} ({MAX_UNGROUPED} without a group)")
    start_server()
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="shardwright-ranks-") as folder:
        ranks = [_Rank.start(_Job(rank, world, folder, timeout_s, payload, grouped)) for rank in range(world)]
        try:
            _collect(ranks, limit_s)
        finally:
            for rank in ranks:
                rank.end()
    failed = sorted((r for r in ranks if r.failed_at is not None), key=lambda r: r.failed_at or 0.0)
    if failed:
        raise AssertionError("\n\n".join(_describe(r, world, failed[0]) for r in failed))
    return [pickle.loads(rank.result) for rank in ranks]


def run_ranks_but(lost: int, world: int, fn: Callable[..., Any], *args: Any, **limits: Any) -> None:
    """``run_ranks`` of a function in which rank ``lost`` dies, or is ended, and no other fails."""
    __tracebackhide__ = True
    with pytest.raises(AssertionError) as error:
        run_ranks(world, fn, *args, **limits)
    assert re.findall(rf"^rank (\d+) of {world} failed", str(error.value), re.MULTILINE) == [str(lost)]


def on_ranks(*worlds: int, **limits: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a test of a function that each rank of a new process group calls (see ``run_ranks``). It is given
    what it names: ``rank``, ``world``, and parameters and fixtures of the test.

    Args:
        worlds: numbers of ranks, a case of the test each; none: the test has a parameter ``world``.
        limits: ``timeout_s`` and ``limit_s``.
    """

    def made(fn: Callable[..., Any]) -> Any:
        asked = [each for each in inspect.signature(fn).parameters.values() if each.default is each.empty]
        names = [each.name for each in asked if each.name not in ("rank", "world")]

        def test(**given: Any) -> None:
            __tracebackhide__ = True
            world = given["world"] if "world" in given else worlds[0]
            run_ranks(world, _Body(fn.__module__, fn.__name__), {n: given[n] for n in names}, **limits)

        functools.update_wrapper(test, fn).on_rank = fn  # type: ignore[attr-defined]
        names_of_test = names if len(worlds) == 1 else ["world", *names]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names_of_test]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test) if len(worlds) > 1 else test

    return made


@dataclass(frozen=True)
class _Body:
    """What each rank does of a test that ``on_ranks`` made, sent by name."""

    module: str
    name: str

    def __call__(self, rank: int, world: int, given: dict[str, Any]) -> Any:
        fn = getattr(importlib.import_module(self.module), self.name).on_rank
        known = {"rank": rank, "world": world, **given}
        return fn(**{name: known[name] for name in inspect.signature(fn).parameters if name in known})


def as_torchrun(rank: int, world: int, port: int) -> None:
    """Called by a rank: from here on it is as torchrun starts one, without a process group.

    port: a free one, alike on all ranks.
    """
    dist.barrier()
    _left.append(dist.group.WORLD)  # kept: ranks that are slower still read from its connections
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}


_left: list[Any] = []


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class _Job:
    """What one rank needs to know."""

    rank: int
    world: int
    folder: str
    timeout_s: float
    payload: bytes
    grouped: bool

    @property
    def stack_file(self) -> Path:
        return Path(self.folder, f"stack{self.rank}")


class _Rank:
    """One rank's process as the test sees it."""

    def __init__(self, job: _Job, process: Any, pipe: connection.Connection) -> None:
        self.job = job
        self.process = process
        self.pipe = pipe
        self.result = b""
        self.failure = ""
        self.failed_at: float | None = None
        self.done = False

    @classmethod
    def start(cls, job: _Job) -> "_Rank":
        ours, theirs = _server.Pipe()
        process = _server.Process(target=_rank_main, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(job, process, ours)

    def receive(self) -> None:
        """Takes the rank's one report: its result, or its traceback and when it was raised."""
        self.done = True
        try:
            self.result, self.failure, self.failed_at = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            self.failed_at = time.monotonic()
            self.failure = f"died without a report (exit code {self.process.exitcode})"

    def give_up(self, reason: str) -> None:
        """Takes the stack of a rank that doesn't end and counts it as failed."""
        with contextlib.suppress(ProcessLookupError):  # killed; its own fork holds the pipe
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        stack = self.job.stack_file.read_text() if self.job.stack_file.exists() else ""
        self.failed_at = time.monotonic()
        self.failure = f"{reason}; its stack:\n{stack or '(none: it was stopped before it could start)'}"

    def end(self) -> None:
        """Ends the process, by pid: at once if it failed, else as soon as it has seen that all are done."""
        self.pipe.close()
        if self.failed_at is None and self.done:
            self.process.join(5)
        self.process.kill()
        self.process.join()


def _collect(ranks: list[_Rank], limit_s: float) -> None:
    begin = time.monotonic()
    deadline = begin + limit_s
    reason = f"still running after {limit_s:g} s"
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            rank.receive()
            if rank.failed_at is not None and time.monotonic() + GRACE_S < deadline:
                deadline = time.monotonic() + GRACE_S
                reason = f"still running {GRACE_S:g} s after the first failure"
    for rank in waiting.values():
        rank.give_up(reason)


def _describe(rank: _Rank, world: int, first: _Rank) -> str:
    later_s = (rank.failed_at or 0.0) - (first.failed_at or 0.0)
    when = "first" if rank is first else f"{later_s:.2f} s later"
    return f"rank {rank.job.rank} of {world} failed {when}: {rank.failure}"


def _rank_main(job: _Job, pipe: connection.Connection) -> None:
    """The life of one rank: set up, call, report, and stay until the test has heard from all."""
    if sys.platform == "linux":  # a test run that is killed takes its ranks along
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test run's to handle
    with open(job.stack_file, "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        try:
            report = (pickle.dumps(_call(job)), "", None)
        except BaseException as error:
            failed_at = time.monotonic()
            report = (b"", "\n" + "".join(traceback.format_exception(error)), failed_at)
        pipe.send_bytes(pickle.dumps(report))
        if report[2] is None:
            # A rank that leaves early closes its sockets, which would look like a failure to a slower one.
            pipe.poll(None)


def _call(job: _Job) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    fn, args = pickle.loads(job.payload)
    torch.set_num_threads(1)
    if job.grouped:
        store = dist.FileStore(str(Path(job.folder, "store")), job.world)
        timeout = timedelta(seconds=job.timeout_s)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=timeout)
    torch.manual_seed(0)
    return fn(job.rank, job.world, *args)
