"""``kill -USR1 PID`` of a rank asks for the table of all ranks.

Python runs a signal's handler in the main thread, between two of its steps: not while that thread waits in a
collective, which is when one asks. Its C half writes the signal's number into a pipe at once, though, and
the watch thread looks there. A handler or a pipe that the program has set already is left alone.
"""

import _thread
import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from shardwright.transport.launches import process_state

SIGNAL: Any = getattr(signal, "SIGUSR1", None)


class Requests:
    """Requests for the table. wanted: False leaves the signal alone (a scheduler may send it, and mean
    something else). ``taken``: whether the signal is ours; else none ever comes."""

    def __init__(self, wanted: bool = True) -> None:
        self.taken = False
        self._interrupting = False
        self._pipe = (-1, -1)
        if wanted and threading.current_thread() is threading.main_thread() and _is_free():
            self._take()

    def _take(self) -> None:
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._pipe = (read, write)
        signal.signal(SIGNAL, self._handle)
        self.taken = True

    def asked(self) -> bool:
        """Whether somebody has asked since the last time."""
        if not self.taken:
            return False
        with contextlib.suppress(BlockingIOError):
            return SIGNAL in os.read(self._pipe[0], 4096)
        return False

    def interrupt(self) -> None:
        """Have the main thread raise the diagnosis out of whatever Python or system call it is in."""
        self._interrupting = self.taken
        main = threading.main_thread().ident
        if not hasattr(signal, "pthread_kill"):  # Windows: between two of Python's steps, at the earliest
            _thread.interrupt_main()
        elif main is not None:
            signal.pthread_kill(main, SIGNAL if self.taken else signal.SIGINT)

    def close(self) -> None:
        """Give the signal back (from the main thread; another one can't)."""
        if self.taken and threading.current_thread() is threading.main_thread():
            self.taken = False
            signal.set_wakeup_fd(-1)
            signal.signal(SIGNAL, signal.SIG_DFL)
            for end in self._pipe:
                os.close(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupting:
            self._interrupting = False
            process_state.raise_diagnosis()


def _is_free() -> bool:
    """Whether nobody has set a handler for the signal, in Python or in C (faulthandler does the latter)."""
    if SIGNAL is None or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return False
    try:
        with open("/proc/self/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return not int(caught, 16) >> (SIGNAL - 1) & 1
