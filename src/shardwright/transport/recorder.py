"""The recorder: what this process did in its last steps, and when. Written always, read when somebody looks.

One ring per process, of plain tuples, filled where things happen: the runtime's calls and their actions, the
launches, waits and ends of collectives, and what else the training thread is known to do (``process.span``).
All times are seconds of one clock of this host (``clock.perf_counter``). ``observe/steps/recording.py`` makes
records of them that people and pages read (``Record.link`` is what the last two of WAIT and DONE say, where
they have them); nothing else reads these tuples:

    CALL     labels, event, actions, start, end, unsharded bytes    of the runtime, at an event
    PHASE    labels, phase, begins, nested, start, end              of the runtime, as a phase begins or ends
    ACTION   labels, action, start, end                             inside of a call; None: words of all ranks
    LAUNCH   name of the transport, launch, at
    WAIT     name of the transport, launch, thread, start, end, link, seconds    the thread was blocked
    DONE     name of the transport, number, at, all came, link, seconds    what a launch brings is there
    SPAN     what, note, start, end
    LINE     line of the user's program, at                         where the training thread was seen
    DEVICE   name of the transport, number, start, end              a collective on a device, by this clock
    STALL    name of the transport, number, at                      the compute stream came to wait for it
    HELD     at, bytes allocated, of states, of what is other       now and then (engine/step/executor.py)
    USE      what the kernel counts of the thread, at               see ``ThreadUse``; anywhere between
    CALLED   name, axis, ranks, key, number, phase, issue, start, end, met, link    the thread was blocked in
             a collective, or a message, of no transport of ours (parallel/recorded.py)

A record costs below a microsecond (``bench/host.py``), and keeps nothing alive but tuples and names.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from shardwright import clock

with suppress(ImportError):  # only Linux has them, and only Linux is asked
    from resource import RUSAGE_THREAD, getrusage

STEPS = 64
"""Steps that are remembered."""
MOST = 100_000
"""Records of all of them: where steps have more, fewer steps are remembered."""
CALL, PHASE, ACTION, LAUNCH, WAIT, DONE, SPAN, LINE, DEVICE, STALL, HELD, USE, CALLED = range(13)
LOOK_S = 0.008
"""Seconds, at least, between two looks at what the kernel counts."""
_COLLECTION_S = 200e-6  # a collection of garbage that takes less isn't worth a record
_QUOTA_S = 0.02  # between two readings of the quota's counter, where nothing was in line meanwhile
_QUEUED_S = 0.001  # in line: the quota's counter is read at once

_Written = tuple[int, float, list[tuple[Any, ...]]]  # number and begin of a step, and its records
_NO_STEP: _Written = (0, 0.0, [])


class Label(NamedTuple):
    """A group as records name it: its modules, and bytes of its parameters and gradients as they travel."""

    name: str
    nbytes: int
    grad_nbytes: int


class Recorder:
    """``write`` appends a tuple (above). It is another bound method after each ``turn``.

    A step begins where an optimizer's step ends; where no optimizer of torch's steps, after each backward
    that is the last of its step. The outermost forward that follows turns the ring, so a step's first records
    may stand at the end of the list before: readers go by time.
    """

    write: Callable[[tuple[Any, ...]], None]

    def __init__(self) -> None:
        self.number = 0
        self.optimizers = False
        self.look_s = 0.0
        self._steps = deque([_NO_STEP] * STEPS)  # always so many, so that all steps cost the same
        self._began_s = clock.perf_counter()
        self.ended_s: float | None = self._began_s  # so that the first step begins
        self._collecting_s = 0.0
        self._past = 0  # records of all steps but this one
        self._now: list[tuple[Any, ...]] = []
        self.turn()

    def turn(self) -> None:
        """Begin the next step, where the last one has ended, or has come to be half of the ring."""
        if self.ended_s is None and len(self._now) <= MOST // 2:
            return
        at = clock.perf_counter() if self.ended_s is None else self.ended_s
        self.number += 1
        self._past += len(self._now) - len(self._steps.popleft()[2])
        while self._past > MOST:
            self._past -= len(self._steps.popleft()[2])
        self._now = []
        self._steps.append((self.number, at, self._now))
        self._steps.extendleft([_NO_STEP] * (STEPS - len(self._steps)))
        self.write = self._now.append
        self.ended_s = None

    def look(self, now: float) -> None:
        """Write down what the kernel counts of the calling thread. Called where something long may begin or
        has ended, and ``now`` is past ``look_s``."""
        counted = waited_for_core()
        if counted is None:
            self.look_s = inf  # where the kernel counts nothing it isn't asked again
            return
        self.look_s = now + LOOK_S
        ran_s, queued_s = clock.thread_time(), counted[1]  # the kernel's own count of ran_s is a tick behind
        faults, throttled_s = getrusage(RUSAGE_THREAD).ru_majflt, _own.throttled_s(queued_s)
        others_s = clock.process_time() - ran_s
        use = ThreadUse(threading.get_ident(), ran_s, queued_s, faults, others_s, throttled_s)
        self.write((USE, use, now))

    def steps(self) -> list[_Written]:
        """Number and begin of each step that is remembered, with what was written since: copies."""
        return [(number, at, list(written)) for number, at, written in tuple(self._steps) if number]

    def begin_optimizer(self, *_: Any) -> None:
        """Before the step of an optimizer."""
        self._began_s = clock.perf_counter()
        if self._began_s > self.look_s:
            self.look(self._began_s)

    def end_optimizer(self, *_: Any) -> None:
        """After it: the training step has ended, unless another optimizer follows."""
        if not self.optimizers:  # what seemed to be steps were microbatches of the first one
            before = self.steps()
            self._now[:0] = [each for *_, written in before[:-1] for each in written]
            self._steps = deque([_NO_STEP] * (STEPS - 1) + [(1, before[0][1], self._now)])
            self._past, self.number = 0, 1
        self.ended_s = clock.perf_counter()
        if self.ended_s > self.look_s:
            self.look(self.ended_s)
        self.optimizers = True
        self.write((SPAN, "optimizer", "", self._began_s, self.ended_s))

    def end_backward(self) -> None:
        """The last backward of a step has ended; so has the step, where its optimizer stepped in there."""
        if not self.optimizers or self.ended_s is not None:
            self.ended_s = clock.perf_counter()

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """Python collects garbage (one of ``gc.callbacks``)."""
        if phase == "start":
            self._collecting_s = clock.perf_counter()
        elif (now := clock.perf_counter()) - self._collecting_s > _COLLECTION_S:
            self.write((SPAN, "gc", "", self._collecting_s, now))


# ---- what the kernel counts: of a thread its time on a core and in line for one, and pages read from disk;
# of the process the time of its other threads, and how long a CPU quota has kept them all from running
# (``cpu.max`` of a cgroup, or ``cpu.cfs_quota_us`` of the first version). A look costs four microseconds.


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
