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
    HELD     at, bytes allocated, of states, of what is other       now and then (engine/step/held_memory.py)
    USE      what the kernel counts of the thread, at               see thread_use.py; anywhere between

A record costs below a microsecond (``bench/host.py``), and keeps nothing alive but tuples and names.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from shardwright import clock
from shardwright.transport.thread_use import thread_use

STEPS = 64
"""Steps that are remembered."""
MOST = 100_000
"""Records of all of them: where steps have more, fewer steps are remembered."""
CALL, PHASE, ACTION, LAUNCH, WAIT, DONE, SPAN, LINE, DEVICE, STALL, HELD, USE = range(12)
LOOK_S = 0.008
"""Seconds, at least, between two looks at what the kernel counts."""
_COLLECTION_S = 200e-6  # a collection of garbage that takes less isn't worth a record


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
        use = thread_use()
        self.look_s = inf if use is None else now + LOOK_S
        if use is not None:
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
