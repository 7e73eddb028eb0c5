"""The one thread of a rank that moves what is on its connections to peers of a mesh axis, and takes calls."""

import atexit
import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Collection, Iterable

from shardwright.transport.cpu import handshake
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.handshake import Caller, Lobby
from shardwright.transport.cpu.transfer import Endpoint
from shardwright.transport.process import process_state, start_thread

_PATIENCE_S = 2.0


class EventLoop:
    """The connections of one rank to its peers on a mesh axis, and the thread that serves them.

    answer: gives the connection that a caller, who has shown the secret, is the other end of; None refuses.
    """

    def __init__(self, endpoint: Endpoint, connections: Iterable[Connection]) -> None:
        """Start the thread. It holds no tensor beyond the messages under way, and ends at ``stop``."""
        self.endpoint = endpoint
        self.answer: Callable[[Caller], Connection | None] = lambda caller: None
        self._connections = list(connections)
        self._listener: socket.socket | None = None
        self._lobby: Lobby | None = None
        self._selector = handshake.Selector()
        self._wakeup, self._waker = handshake.pair()  # by which other threads wake this one
        self._stopped = False
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        endpoint.wake = self.go
        endpoint.links.extend(self._connections)
        process_state.loops.add(self)
        self._thread = start_thread("shardwright-event-loop", self._run)
        self.go()

    def listen(self, listener: socket.socket, answer: Callable[[Caller], Connection | None]) -> None:
        """Take calls from now on."""
        self.answer, self._listener = answer, listener
        self.go()

    def add(self, connection: Connection) -> None:
        """Serve one more, as soon as it is open. Any thread."""
        with self.endpoint.changed:
            self._connections.append(connection)
            self.endpoint.links.append(connection)

    def go(self) -> None:
        """Have the thread look at what was queued."""
        with contextlib.suppress(OSError):  # it has rung often enough, or the thread has ended
            self._waker.send(b"!")

    def attend(self, connection: Connection, events: int) -> None:
        """Move what can be, of ``events``, and watch for the rest. Any thread."""
        with connection.turn:
            if connection.socket is None or self._stopped:
                return
            if events:
                connection.move(events & connection.events)
            wanted, watched = connection.events, connection.watched
            connection.watched = wanted
            # A selector takes no empty set of events, and epoll reports a closed connection whatever it is
            # asked for: watched for nothing, one would keep this thread busy.
            if watched and not wanted:
                self._selector.unregister(connection.socket)
            elif watched != wanted:
                change = self._selector.modify if watched else self._selector.register
                change(connection.socket, wanted, connection)

    def claim(self, connections: Collection[Connection]) -> bool:
        """Read no more from these, until ``release``: the calling thread does, since to be woken by another
        one takes it longer than words are under way. False: one isn't open yet, or a thread has claimed some.
        """
        with self.endpoint.changed:
            if self.endpoint.claimed or not all(connection.is_open for connection in connections):
                return False
            self.endpoint.claimed = connections
        for connection in connections:
            self.attend(connection, 0)
        return True

    def release(self, connections: Collection[Connection]) -> None:
        """Read from them again, where they were claimed."""
        if self.endpoint.claimed is connections:
            self.endpoint.claimed = ()  # first: wherever Ctrl-C comes in here, the next ``go`` does the rest
            for connection in connections:
                self.attend(connection, 0)

    def stop(self) -> None:
        """End the thread, which closes the connections."""
        self._stopped = True  # the thread itself closes the connections: it may be reading from one
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
                    if key.fileobj is self._wakeup:
                        self._wakeup.recv(4096)
                        self._attend_all()
                    elif isinstance(key.data, Lobby):
                        key.data.take()
                    elif isinstance(key.data, Caller):
                        assert self._lobby is not None
                        self._lobby.hear(key.data)
                    else:
                        self.attend(key.data, events)
            for connection in self._connections:  # word of a failure, that others wait for
                with connection.turn:
                    connection.move(selectors.EVENT_WRITE & connection.events)
            trouble = f"the connections of {self._own} were closed"
        except BaseException as error:
            trouble = f"the thread that moves the messages of {self._own} failed: {error!r}"
            raise
        finally:
            self.endpoint.fail(trouble)
            self.close()

    def _attend_all(self) -> None:
        if self._listener is not None and self._lobby is None:
            self._lobby = Lobby(self._listener, self._selector, self._connect)
        for connection in tuple(self._connections):
            self.attend(connection, selectors.EVENT_WRITE | selectors.EVENT_READ)

    def _connect(self, caller: Caller) -> None:
        connection = self.answer(caller)
        if connection is None or not caller.answer():
            caller.socket.close()
            return
        connection.attach(caller.socket)
        self.attend(connection, selectors.EVENT_WRITE | selectors.EVENT_READ)

    @property
    def _own(self) -> str:
        return self.endpoint.name(self.endpoint.rank)

    def close(self) -> None:
        """Close what this process has of the connections."""
        if self._lobby is not None:
            self._lobby.close()
        there = [connection.socket for connection in self._connections]
        for each in (*there, self._listener, self._wakeup, self._waker):
            if each is not None:
                each.close()


def _close_all() -> None:
    for loop in process_state.loops:
        loop.close()


def _join_all() -> None:
    for loop in list(process_state.loops):
        loop.join()


# A thread that still runs when Python ends is stopped wherever it is.
atexit.register(_join_all)


# A forked process has copies of the connections, which would keep them open after this one has ended.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
