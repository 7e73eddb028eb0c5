"""The one save that may be running in the background, and its errors, which must not get lost."""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

from shardwright import clock
from shardwright.checkpoint.url import Location
from shardwright.errors import CheckpointError
from shardwright.transport.recorder import waited_for_core

NICE = 14
_RESTS = 40
_BUSY = 0.25


class Pace:
    """How a save beside training leaves the cores to it: where others want them, it rests ``_RESTS`` times as
    long as it has worked; until somebody waits for it.

    A low priority alone isn't enough. Writing 1 GB from 2 ranks took 0.11 s of CPU each, in 2 s at that
    priority, and the two steps beside it 1.13 of one without (two busy cores, measured).
    """

    def __init__(self) -> None:
        self._hurried = threading.Event()
        self._last = _Spent(0.0, 0.0)

    def hurry(self) -> None:
        """Somebody waits for the save."""
        self._hurried.set()

    def begin(self) -> None:
        """The calling thread starts to work; it is the one that will ``rest``."""
        self._last = _spent()

    def rest(self) -> None:
        """Between two parts of the work."""
        now = _spent()
        worked_s, waited_s = now.worked_s - self._last.worked_s, now.waited_s - self._last.waited_s
        if waited_s > _BUSY * worked_s:
            self._hurried.wait(_RESTS * worked_s)
        self._last = _spent()


class _Spent(NamedTuple):
    """Seconds of a thread's life: on a core, and ready to run while others had the cores."""

    worked_s: float
    waited_s: float


def _spent() -> _Spent:
    counted = waited_for_core()
    if counted is None:  # the cores may be busy
        return _Spent(clock.thread_time(), clock.monotonic())
    return _Spent(*counted)


class Pending:
    """A save in the background. Its error is raised by ``wait``, by the next save or load, or shown at
    exit."""

    def __init__(self, work: Callable[[], Location], pace: Pace) -> None:
        self._pace = pace
        self._folder: futures.Future[Location] = futures.Future()
        threading.Thread(target=self._run, args=(work,), name="shardwright-save").start()

    def _run(self, work: Callable[[], Location]) -> None:
        yield_to_training()
        try:
            self._folder.set_result(work())
        except BaseException as error:  # raised again in the thread that waits
            self._folder.set_exception(error)

    def done(self) -> bool:
        """Whether it has ended, well or not; does not block."""
        return self._folder.done()

    def wait(self) -> Location:
        """Block until it has ended; returns the published folder. Not a collective, but every rank's save
        must run.

        Raises:
            CheckpointError: the save failed; nothing was published, the previous checkpoint stays the latest.
        """
        self._pace.hurry()
        futures.wait([self._folder])
        if self in _running:
            _running.remove(self)
        return self._folder.result()


def yield_to_training() -> None:
    """Give this thread, and those that it starts, little more than what training leaves of the processor.

    Linux keeps a priority for each thread; elsewhere it is the process's, which stays as it is. Beside one
    thread of the usual priority that wants the same core, one of ``NICE`` gets 4% of it; a save that
    somebody waits for has a core to itself. (With 19, 1.4%, a save starves on a machine that others use too.)
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


_running: list[Pending] = []  # one at most


def start(work: Callable[[Pace], Location]) -> Pending:
    """Run ``work`` in the background, at the pace that it is given. None may be running (``finish``)."""
    assert not _running, "two saves in the background"
    pace = Pace()
    _running.append(Pending(lambda: work(pace), pace))
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # the last to register, and so the first to run: while the watch is there
    return _running[0]


def finish() -> None:
    """Wait for the save in the background, if there is one, and raise its error."""
    if _running:
        _running[0].wait()


def _at_exit() -> None:
    try:
        finish()
    except CheckpointError as error:
        print(f"shardwright: the last checkpoint was not saved: {error}", file=sys.stderr)
