"""Whose turn it is, and whether what began still runs: also after Ctrl-C, which may come before an end is
noted."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from shardwright.errors import StageError
from shardwright.schedule.schedule import EventKind


class CallingFrame:
    """A function that runs, further up in this thread's stack. What ends it without a hook of ours, as Ctrl-C
    does, is seen when it is asked for: ``CallingFrame(1)`` is who calls whoever makes this."""

    __slots__ = ("_frame", "_thread")

    def __init__(self, depth: int) -> None:
        self._frame, self._thread = sys._getframe(depth + 1), threading.get_ident()

    @property
    def is_here(self) -> bool:
        """Whether it is of this thread."""
        return self._thread == threading.get_ident()

    def runs(self) -> bool:
        """Whether it still runs, as far as this thread can tell."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None or not self.is_here


class Turn:
    """The lock of a runtime: one event at a time, with the actions that it leads to.

    holder: the function that has the turn, or that an interrupt ended in it; None: the turn is free.
    inside: the event whose actions are being taken. What is asked for from inside of them by the same thread
    waits in a queue until they are done, or is refused. A turn that Ctrl-C has ended, maybe before or after
    it was noted, is found by the next one of its thread; on_interrupt is called then, or at its end.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self.inside: EventKind | None = None
        self._on_interrupt = on_interrupt
        self._lock = threading.RLock()
        self.holder: CallingFrame | None = None
        self._queue: list[Callable[[], None]] = []

    def queue(self, call: Callable[[], None]) -> bool:
        """Have ``call`` made at the end of this thread's turn; False where it has none."""
        if not self._is_in_turn():
            return False
        self._queue.append(call)
        return True

    def _is_in_turn(self) -> bool:
        holder = self.holder
        return holder is not None and holder.is_here and holder.runs()

    def settle(self) -> None:
        """End this thread's turn, where an interrupt has left it."""
        if self._is_in_turn():
            return
        if self.holder is not None and self.holder.is_here:
            self._queue = []
            self._on_interrupt()
            self.holder = self.inside = None
        with suppress(RuntimeError):  # this thread doesn't hold it any more
            while True:
                self._lock.release()

    def __enter__(self) -> None:
        if self.holder is not None and self.holder.is_here:
            if self._is_in_turn():
                raise StageError(
                    "a hook that runs inside of an action of Shardwright (at event "
                    f"{self.inside or 'begin or end'}: a gradient hook, a communication hook, an optimizer "
                    "in the backward) ran the model itself; call it outside of such hooks"
                )
            self.settle()
        self._lock.acquire()
        self.holder = CallingFrame(1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._on_interrupt()
        queued, self._queue = self._queue, []
        self.holder = self.inside = None
        self._lock.release()
        for call in queued:
            call()
