"""The one thread of a rank that moves what is on its connections to all peers of a mesh axis."""

import atexit
import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Iterable
from weakref import WeakSet

from shardwright.transport.cpu.connection import Connection, Endpoint

_PATIENCE_S = 2.0


class EventLoop:
    """The connections of one rank to its peers on a mesh axis, and the thread that serves them."""

    def __init__(self, endpoint: Endpoint, connections: Iterable[Connection]) -> None:
        """Start the thread. It holds no tensor beyond the messages under way, and ends at ``stop``."""
        self.endpoint = endpoint
        self._connections = list(connections)
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        self._stopped = False
        for connection in self._connections:
            connection.socket.setblocking(False)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        _loops.add(self)
        self._thread = threading.Thread(target=self._run, name="shardwright-event-loop", daemon=True)
        self._thread.start()

    def go(self) -> None:
        """Have the thread look at what was queued."""
        with contextlib.suppress(OSError):  # it has rung often enough, or the thread has ended
            self._waker.send(b"!")

    def stop(self) -> None:
        """End the thread, which closes the connections."""
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
                        self._wakeup.recv(4096)
                        for connection in self._connections:
                            self._attend(connection, selectors.EVENT_WRITE | selectors.EVENT_READ)
                    else:
                        self._attend(key.data, events)
            trouble = f"the connections of {self._own} were closed"
        except BaseException as error:
            trouble = f"the thread that moves the messages of {self._own} failed: {error!r}"
            raise
        finally:
            self.endpoint.fail(trouble)
            self.close()

    @property
    def _own(self) -> str:
        return self.endpoint.name(self.endpoint.rank)

    def _attend(self, connection: Connection, events: int) -> None:
        connection.move(events & connection.events)
        wanted, watched = connection.events, connection.socket in self._selector.get_map()
        if not wanted:
            if watched:
                self._selector.unregister(connection.socket)
        elif not watched:
            self._selector.register(connection.socket, wanted, connection)
        elif self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def close(self) -> None:
        """Close what this process has of the connections."""
        for each in (*(connection.socket for connection in self._connections), self._wakeup, self._waker):
            each.close()


_loops: WeakSet[EventLoop] = WeakSet()


def _close_all() -> None:
    for loop in _loops:
        loop.close()


def _join_all() -> None:
    for loop in list(_loops):
        loop.join()


# A thread that still runs when Python ends is stopped wherever it is.
atexit.register(_join_all)


# A forked process has copies of the connections, which would keep them open after this one has ended.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
