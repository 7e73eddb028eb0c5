"""What signals ask of a rank: SIGUSR1 the table of all ranks; SIGTERM to end, with a last word before.

Python runs a signal's handler in the main thread, between two of its steps: not while that thread waits in a
collective, which is when one asks. Its C half writes the signal's number into a pipe at once, though, and a
thread reads there. A handler or a pipe that the program has set already is left alone.

SIGTERM ends the process as it does without a handler: with its exit code, whatever the main thread is in, and
within 2 s. A handler that is set later takes its place; a forked process has the default.
"""

import _thread
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from shardwright.transport.cpu.pages import LIBC
from shardwright.transport.process import process_state

SIGNAL: Any = getattr(signal, "SIGUSR1", None)
_LAST_WORD_S = 2.0
_CLOSED = 0  # in the pipe: no signal's number


class Requests:
    """Signals that came. wanted: False leaves them alone (a scheduler may send SIGUSR1, and mean something
    else). last_word: called, in a thread of its own, before SIGTERM ends the process.

    taken: the signals that are ours; of others nothing is heard.
    """

    def __init__(self, wanted: bool, last_word: Callable[[], None]) -> None:
        self.taken: tuple[signal.Signals, ...] = ()
        self._last_word = last_word
        self._asked = False
        self._interrupting = False
        self._pipe = (-1, -1)
        self._thread = threading.Thread(target=self._read, name="shardwright-signals", daemon=True)
        if wanted and SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self._take(tuple(filter(_is_free, (SIGNAL, signal.SIGTERM))))

    def _take(self, free: tuple[signal.Signals, ...]) -> None:
        if not free:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._pipe, self.taken = (read, write), free
        self._thread.start()
        for number in free:
            signal.signal(number, self._handle)
        _open.add(self)

    def asked(self) -> bool:
        """Whether somebody has asked for the table since the last time."""
        asked, self._asked = self._asked, False
        return asked

    def interrupt(self) -> None:
        """Have the main thread raise the diagnosis out of whatever Python or system call it is in."""
        self._interrupting = SIGNAL in self.taken
        main = threading.main_thread().ident
        if not hasattr(signal, "pthread_kill"):  # Windows: between two of Python's steps, at the earliest
            _thread.interrupt_main()
        elif main is not None:
            signal.pthread_kill(main, SIGNAL if self._interrupting else signal.SIGINT)

    def close(self) -> None:
        """Give the signals back (from the main thread; another one can't)."""
        if self.taken and threading.current_thread() is threading.main_thread():
            self._give_back(self.taken)
            os.write(self._pipe[1], bytes([_CLOSED]))
            self._thread.join()
            for end in self._pipe:
                os.close(end)

    def _give_back(self, numbers: Iterable[signal.Signals]) -> None:
        self.taken = ()
        _open.discard(self)
        other = signal.set_wakeup_fd(-1)
        if other != self._pipe[1]:
            signal.set_wakeup_fd(other)
        for number in numbers:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)

    def _read(self) -> None:
        while True:
            for number in os.read(self._pipe[0], 4096):
                if number == _CLOSED:
                    return
                self._asked = self._asked or number == SIGNAL
                if number == signal.SIGTERM and signal.getsignal(number) == self._handle:
                    self._end()

    def _end(self) -> None:
        word = threading.Thread(target=self._last_word, daemon=True)
        word.start()
        word.join(_LAST_WORD_S)
        assert LIBC is not None  # Linux: nowhere else a signal counts as free
        # Python's own function for it is for the main thread only.
        LIBC.signal(ctypes.c_int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_DFL))
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == SIGNAL and self._interrupting:
            self._interrupting = False
            process_state.raise_diagnosis()
        elif number == signal.SIGTERM and number in self.taken:
            os.write(self._pipe[1], bytes([number]))  # again: the wake-up pipe may be an event loop's by now
        elif number == signal.SIGTERM:  # closed, and put back by who had taken our place
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_open: set[Requests] = set()


def _before_fork() -> None:
    if _open:  # a SIGTERM that the child has before its own handler would go into the pipe, to this process
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """A forked process has the handlers and the pipe, but not the thread."""
    for requests in tuple(_open):
        requests._give_back([signal.SIGTERM])  # what else is sent to all processes of a job still ends none
    _after_fork()


_masks: dict[int, set[int | signal.Signals]] = {}  # of threads that fork

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def _is_free(number: signal.Signals) -> bool:
    """Whether nobody has set a handler for the signal, in Python or in C (faulthandler does the latter)."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:
        with open("/proc/self/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return not int(caught, 16) >> (number - 1) & 1
