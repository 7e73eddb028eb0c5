"""Runs a function on a few ranks that live and end as a user's scripts do, and tells how each of them ended.

Unlike the ranks of pool.py they call ``sys.excepthook`` for what nobody catches and ``atexit`` as they end,
and a rank that fails isn't a failure of the test: the test is about what the others say then.
"""

import atexit
import ctypes
import datetime
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.pool import _server, start_server

GROUP_TIMEOUT_S = 60.0
"""Far beyond what any diagnosis takes: a test that needed it fails by ``limit_s``."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: exit code (negative: by that signal; None: it had to be ended), what it wrote to
    stderr, the exception that nobody caught, seconds from the fault to it, threads left at the end."""

    code: int | None
    stderr: str
    error: str = ""
    text: str = ""
    took_s: float = 0.0
    threads: tuple[str, ...] = ()


def run_scripts(
    world: int,
    fn: Callable[..., Any],
    policy: str = "",
    store: str = "tcp",
    limit_s: float = 60.0,
    hosts: Sequence[str] = (),
) -> list[Outcome]:
    """``fn(rank, world)`` on each rank, under the watch policy ``policy``; how each rank ended.

    store: "tcp" of rank 0; "served" by a process of its own, whose id is in the file STORE; a "file". hosts:
    network namespaces of nodes.py, one for each rank.
    """
    start_server()
    with tempfile.TemporaryDirectory(prefix="shardwright-scripts-") as folder:
        payload = pickle.dumps(fn)
        ranks = []
        for rank in range(world):
            arguments = (rank, world, folder, payload, policy, store, hosts)
            process = _server.Process(target=_main, args=arguments, daemon=True)
            process.start()
            ranks.append(process)
        deadline = time.monotonic() + limit_s
        codes = []
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
        for process in ranks:
            process.kill()
            process.join()
        return [_outcome(Path(folder), rank, code) for rank, code in enumerate(codes)]


def fault() -> None:
    """Now comes the fault: what the ranks need from here on is measured."""
    Path(os.environ["SCRIPT_FOLDER"], f"fault{os.environ['RANK']}").write_text(str(time.monotonic()))


def _outcome(folder: Path, rank: int, code: int | None) -> Outcome:
    stderr = (folder / f"stderr{rank}").read_text() if (folder / f"stderr{rank}").exists() else ""
    report = folder / f"report{rank}"
    if not report.exists():
        return Outcome(code, stderr)
    said = json.loads(report.read_text())
    faults = [float(path.read_text()) for path in folder.glob("fault*")]
    at_s = said.pop("at_s")
    took_s = at_s - max(faults) if faults else 0.0
    return Outcome(code, stderr, took_s=took_s, **{**said, "threads": tuple(said["threads"])})


def _main(
    rank: int, world: int, folder: str, payload: bytes, policy: str, store: str, hosts: Sequence[str]
) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with open(Path(folder, f"stderr{rank}"), "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    interface, address = "lo", "127.0.0.1"
    if hosts:
        interface, address = "wire", "10.79.0.1"
        with open(f"/run/netns/{hosts[rank]}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    os.environ.update(
        GLOO_SOCKET_IFNAME=interface, RANK=str(rank), SCRIPT_FOLDER=folder, SHARDWRIGHT_WATCH=policy
    )
    torch.set_num_threads(1)
    code, error = 0, None
    try:
        dist.init_process_group(
            "gloo",
            store=_store(rank, world, folder, store, address),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )
        torch.manual_seed(0)
        pickle.loads(payload)(rank, world)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException as raised:
        code, error = 1, raised
    at_s = time.monotonic()
    if error is not None:
        sys.last_value = error  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    if dist.is_initialized():
        dist.destroy_process_group()
    report = {
        "error": type(error).__name__ if error else "",
        "text": str(error) if error else "",
        "at_s": at_s,
        "threads": [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
    }
    Path(folder, f"part{rank}").write_text(json.dumps(report))
    Path(folder, f"part{rank}").rename(Path(folder, f"report{rank}"))
    sys.stderr.flush()
    os._exit(code)


def _store(rank: int, world: int, folder: str, kind: str, address: str) -> dist.Store:
    if kind == "file":
        return dist.FileStore(str(Path(folder, "store")), world)
    port = Path(folder, "port")
    if rank == 0 and kind == "tcp":
        return _serve(port, address, world)
    if rank == 0 and os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        Path(folder, "STORE").write_text(str(os.getpid()))
        kept = _serve(port, address, world)
        while kept is not None:
            time.sleep(1.0)
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore(address, int(port.read_text()), world, False, wait_for_workers=False)


def _serve(port: Path, address: str, world: int) -> dist.Store:
    store = dist.TCPStore(address, 0, world, True, wait_for_workers=False)
    port.with_suffix(".part").write_text(str(store.port))
    port.with_suffix(".part").rename(port)
    return store
