"""The one thread of a rank that moves what is on its lines to all peers of a mesh axis."""

import atexit
import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Iterable
from weakref import WeakSet

from shardwright.transport.cpu.connection import Line, Side

_PATIENCE_S = 2.0


class Wire:
    """The lines of one rank to its peers on a mesh axis, and the thread that serves them."""

    def __init__(self, side: Side, lines: Iterable[Line]) -> None:
        """Start the thread. It holds no tensor beyond the messages under way, and ends at ``stop``."""
        self.side = side
        self._lines = list(lines)
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = socket.socketpair()
        self._stopped = False
        for line in self._lines:
            line.socket.setblocking(False)
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        _wires.add(self)
        self._thread = threading.Thread(target=self._run, name="shardwright-wire", daemon=True)
        self._thread.start()

    def go(self) -> None:
        """Have the thread look at what was queued."""
        with contextlib.suppress(OSError):  # it has rung often enough, or the thread has ended
            self._ring.send(b"!")

    def stop(self) -> None:
        """End the thread, which closes the lines."""
        self._stopped = True
        self.go()

    def join(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        trouble = ""
        try:
            while not self._stopped:
                for key, events in self._selector.select():
                    if key.data is None:
                        self._bell.recv(4096)
                        for line in self._lines:
                            self._attend(line, selectors.EVENT_WRITE | selectors.EVENT_READ)
                    else:
                        self._attend(key.data, events)
            trouble = f"the lines of {self._own} were closed"
        except BaseException as error:
            trouble = f"the thread that moves the messages of {self._own} failed: {error!r}"
            raise
        finally:
            self.side.fail(trouble)
            self.close()

    @property
    def _own(self) -> str:
        return self.side.name(self.side.rank)

    def _attend(self, line: Line, events: int) -> None:
        line.move(events & line.events)
        wanted, watched = line.events, line.socket in self._selector.get_map()
        if not wanted:
            if watched:
                self._selector.unregister(line.socket)
        elif not watched:
            self._selector.register(line.socket, wanted, line)
        elif self._selector.get_key(line.socket).events != wanted:
            self._selector.modify(line.socket, wanted, line)

    def close(self) -> None:
        """Close what this process has of the lines."""
        for each in (*(line.socket for line in self._lines), self._bell, self._ring):
            each.close()


_wires: WeakSet[Wire] = WeakSet()


def _close_all() -> None:
    for wire in _wires:
        wire.close()


def _join_all() -> None:
    for wire in list(_wires):
        wire.join()


# A thread that still runs when Python ends is stopped wherever it is.
atexit.register(_join_all)


# A forked process has copies of the lines, which would keep them open after this one has ended.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
