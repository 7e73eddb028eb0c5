"""What the kernel counts of a thread: time on a core, time in line for one, pages that were read from disk.

And of its process: the CPU time of its other threads, and how long a CPU quota has kept them all from running
(``cpu.max`` of a cgroup, or ``cpu.cfs_quota_us`` of the first version). A look costs four microseconds.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from shardwright import clock

with suppress(ImportError):  # only Linux has them, and only Linux is asked
    from resource import RUSAGE_THREAD, getrusage

_QUOTA_S = 0.02  # between two readings of the quota's counter, where nothing was in line meanwhile
_QUEUED_S = 0.001  # in line: the quota's counter is read at once


class ThreadUse(NamedTuple):
    """Of ``thread`` since it began: seconds on a core and ready to run but in line for one, and pages that it
    waited for while they were read from disk. others_s: CPU time of the process' other threads. throttled_s:
    in which the process was kept from running by the quota of a cgroup, counted once for each core."""

    thread: int
    ran_s: float
    queued_s: float
    faults: int
    others_s: float
    throttled_s: float


class _Schedstat(threading.local):
    """The calling thread's own file, kept open: ``file`` is None where there is none."""

    def __init__(self) -> None:
        try:
            self.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
        except OSError:  # not Linux, or a kernel that doesn't count
            self.file = None


def waited_for_core() -> tuple[float, float] | None:
    """Seconds of the calling thread on a core, and in line for one; None where nobody counts them."""
    if _own.schedstat.file is None:
        return None
    ran_ns, queued_ns, _ = os.pread(_own.schedstat.file.fileno(), 96, 0).split()
    return int(ran_ns) / 1e9, int(queued_ns) / 1e9


def thread_use() -> ThreadUse | None:
    """Of the calling thread, now; None where nobody counts that."""
    counted = waited_for_core()
    if counted is None:
        return None
    ran_s, queued_s = clock.thread_time(), counted[1]  # the kernel's own count of ran_s is a tick behind
    faults, throttled_s = getrusage(RUSAGE_THREAD).ru_majflt, _own.throttled_s(queued_s)
    others_s = clock.process_time() - ran_s
    return ThreadUse(threading.get_ident(), ran_s, queued_s, faults, others_s, throttled_s)


class _Own:
    """What this process has open, and what the counters of its cgroups came to when they were last read."""

    def __init__(self) -> None:
        self.schedstat = _Schedstat()
        self._files: list[FileIO] | None = None
        self._read_s = self._queued_s = self._throttled_s = 0.0

    def throttled_s(self, queued_s: float) -> float:
        """Seconds throttled; read anew where it is due."""
        if self._files is None:
            self._files = [file.open("rb", buffering=0) for file in _counters()]
        now = clock.monotonic()
        if self._files and (queued_s - self._queued_s > _QUEUED_S or now - self._read_s > _QUOTA_S):
            self._read_s, self._queued_s = now, queued_s
            self._throttled_s = sum(map(_throttled_s, self._files))
        return self._throttled_s


def _counters() -> Iterator[Path]:
    """``cpu.stat`` of the cgroup of this process and of those around it, as far as they are mounted here."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            at = next(
                (path for _, names, path in own if ("cpu" in names.split(",")) == (kind == "cgroup")), "/"
            )
            root = Path(before.split()[4])
            # A container sees its own group as the root of the mount, whatever its path is outside.
            for folder in dict.fromkeys((root / at.lstrip("/"), *(root / at.lstrip("/")).parents)):
                if folder.is_relative_to(root) and _counts(folder / "cpu.stat"):
                    yield folder / "cpu.stat"


def _counts(file: Path) -> bool:
    try:
        return "throttled_" in file.read_text()
    except OSError:
        return False


def _throttled_s(file: FileIO) -> float:
    try:
        for line in os.pread(file.fileno(), 1024, 0).split(b"\n"):
            if line.startswith(b"throttled_"):
                unit = 1e-6 if line.startswith(b"throttled_usec") else 1e-9
                return int(line.split()[1]) * unit
    except OSError:  # the group is gone
        pass
    return 0.0


# Of the real process, whichever rank it plays: not in ``process_state``. A fork opens its own.
_own = _Own()


def _start_afresh() -> None:
    global _own
    _own = _Own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
