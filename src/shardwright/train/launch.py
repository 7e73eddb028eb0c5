"""Starts one process per rank on this machine, watches them, and leaves none behind.

    shardwright train R.toml -+- rank 0: shardwright train R.toml   RANK=0 WORLD_SIZE=2 ...
                              `- rank 1: the same, with RANK=1

- A rank that fails: the one that failed first is named, its traceback is shown, once; the others get SIGTERM,
after
  a grace period SIGKILL; :class:`LaunchError`. (torch's elastic launcher orders failures by whole seconds,
  prints each traceback several times, and turns Ctrl-C into an error of its own; hence this one.)
- SIGINT or SIGTERM to the launcher is passed on once: ranks save and leave. A second one ends them at once.
- The launcher dies (SIGKILL): the pipe that is each rank's stdin closes, and the rank saves and leaves.

Ranks meet through a file, so that no port has to be free, and talk over the loopback interface.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardwright import clock
from shardwright.errors import ConfigError, LaunchError
from shardwright.extras import require

STORE_VARIABLE = "SHARDWRIGHT_STORE"
"""Set for ranks that this launcher starts: the file through which they meet."""
FAILURE_VARIABLE = "SHARDWRIGHT_FAILURE"
"""Set for ranks that this launcher starts: where a rank that fails writes its :class:`Failure`."""

CLOSED_PIPE = 128 + 13
"""Exit code of a process that nobody reads any more: what a shell reports of one that SIGPIPE has ended."""

CPU_RANKS = 2
"""Ranks of ``launch.ranks = auto`` on a machine without accelerators."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.05
_GRACE_S = 5.0


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: when (Unix seconds), in one line, and the traceback if it had the time to write one.

    ``wrong_input``: a mistake of the user's, told by ``message`` alone.
    """

    rank: int
    at_s: float
    message: str
    traceback: str = ""
    wrong_input: bool = False

    def write(self, path: Path) -> None:
        """Leave this for the launcher at ``path``, all or nothing."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.__dict__), encoding="utf-8")
        part.replace(path)


def xla_environment(ranks: int) -> dict[str, str]:
    """Variables for one process that is to have ``ranks`` CPU devices, which XLA reads when it starts.

    0 means ``CPU_RANKS``. What the user has set wins; of other kinds there are as many as there are.

    Raises: MissingExtra.
    """
    require("xla", "jax", "optax", "torchax")
    # XLA's CPU compiler drops barriers and then merges the all-gather of the backward with the forward's.
    devices = f"--xla_force_host_platform_device_count={ranks or CPU_RANKS}"
    flags = f"{devices} --xla_disable_hlo_passes=cse_barrier_expander"
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS", flags)}


def launch(arguments: Sequence[str], ranks: int, variables: Mapping[str, str] | None = None) -> None:
    """Run ``python -m shardwright <arguments>`` as ``ranks`` local ranks; return when all have ended well.

    variables: of the ranks' environment, over those of this process.

    Raises:
        LaunchError: a rank failed; the message holds its traceback. No rank is left running.
        BrokenPipeError: a rank ended because nobody reads its output, which is this process's.
    """
    processes: list[subprocess.Popen[bytes]] = []
    previous = [signal.getsignal(number) for number in STOP_SIGNALS]
    with tempfile.TemporaryDirectory(prefix="shardwright-") as scratch:
        # Blocked while ranks start: they inherit the mask and lift it once they can save and leave, so that a
        # Ctrl-C during the seconds of importing torch is neither lost nor answered with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for rank in range(ranks):
                processes.append(_start(arguments, (rank, ranks), Path(scratch), variables or {}))
                _stop_if_asked(rank, ranks)
            for number in STOP_SIGNALS:
                signal.signal(number, _PassOn(processes))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            _watch(processes, Path(scratch))
        finally:
            _end(processes)
            for number, handler in zip(STOP_SIGNALS, previous, strict=True):
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _stop_if_asked(rank: int, ranks: int) -> None:
    """Raises: LaunchError where a signal has come, which is blocked."""
    if signal.sigpending() & {*STOP_SIGNALS}:
        name = signal.Signals(signal.sigwait(STOP_SIGNALS)).name
        raise LaunchError(
            f"{name} came when {rank + 1} of {ranks} ranks were started; all of them have ended"
        )


class _PassOn:
    """A signal handler: the first signal goes to every rank, a second one ends them at once."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._seen = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number if self._seen == 1 else signal.SIGKILL)


def _start(
    arguments: Sequence[str], place: tuple[int, int], scratch: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    rank, ranks = place
    environment = {
        # Kept if set: threads beyond a rank's cores, or another interface, are a choice that one may make.
        "OMP_NUM_THREADS": str(max(1, _cores() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        **variables,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        STORE_VARIABLE: str(scratch / "store"),
        FAILURE_VARIABLE: str(scratch / f"failure-{rank}.json"),
    }
    command = [sys.executable, "-m", "shardwright", *arguments]
    # Its own process group: a Ctrl-C at the terminal reaches the launcher alone, which passes it on once.
    try:
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, process_group=0)
    except OSError as error:
        raise LaunchError(
            f"rank {rank} of {ranks} can't be started: {error.strerror}; start fewer (--launch.ranks), or "
            "raise this machine's limits (ulimit -a); all ranks have ended"
        ) from error


def check_ranks(ranks: int, per_core: int) -> None:
    """Raise ConfigError for more local ranks than there should be on the cores of this process."""
    if ranks > per_core * _cores():
        raise ConfigError(
            f"launch.ranks = {ranks}, and this process has {_cores()} core(s): expected at most {per_core} "
            f"ranks on each, {per_core * _cores()}; start fewer, or set launch.ranks_per_core to more"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _watch(processes: Sequence[subprocess.Popen[bytes]], scratch: Path) -> None:
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):  # neither running (None) nor well (0)
            ended = {rank: code for rank, code in enumerate(codes) if code}
            _end(processes)
            if CLOSED_PIPE in ended.values():
                raise BrokenPipeError
            raise LaunchError(_tell(_failures(ended, scratch), len(processes)))
        if all(code == 0 for code in codes):
            return
        clock.sleep(_POLL_S)


def _failures(ended: dict[int, int], scratch: Path) -> list[Failure]:
    """The failures, the first cause first.

    By the time that each rank wrote down, because a rank often notices its neighbour's death, and ends,
    before we look again. A rank that something else killed had no time to write; what the others report then
    follows from it.
    """
    failures = []
    for path in scratch.glob("failure-*.json"):
        failures.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    written = {failure.rank for failure in failures}
    for rank, code in ended.items():
        if rank not in written:
            killed = code < 0 and -code != signal.SIGABRT
            failures.append(Failure(rank, 0.0 if killed else clock.time(), _how(code)))
    return sorted(failures, key=lambda failure: failure.at_s)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by signal {-code} ({signal.Signals(-code).name}){hint}"


def _tell(failures: list[Failure], ranks: int) -> str:
    first, others = failures[0], failures[1:]
    if first.wrong_input:
        return first.message  # the ranks are as they should be, and the others say the same
    told = f"\n{first.traceback.rstrip()}" if first.traceback else f" {first.message}"
    lines = [f"rank {first.rank} of {ranks} failed:{told}"]
    lines += [f"then rank {other.rank}: {other.message.splitlines()[0][:160]}" for other in others]
    return "\n".join([*lines, "all ranks have ended"])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to what still runs, SIGKILL after the grace period, and wait until all are gone."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = clock.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - clock.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin:
            process.stdin.close()
