"""A simulated network: TCP connections and datagrams between processes, with what goes wrong on the way.

Bytes of one connection arrive in their order, those of different ones in any. A process that ends closes its
connections: what is still under way may arrive first, or be lost (a reset). Between two hosts that are cut
off nothing arrives until they are joined again.
"""

import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from types import SimpleNamespace
from typing import Any

from tests.storm.sim import Process, Simulation, Task

_ROOM = 1 << 16
"""Bytes that wait in a connection at most, sent and not yet read."""


class Network:
    """Of all processes of a simulation. latency_s, spread: how long bytes are under way, and up to how many
    times as long besides. bytes_per_s: of each connection."""

    def __init__(self, sim: Simulation, latency_s: float, spread: float, bytes_per_s: float) -> None:
        self.sim, self.latency_s, self.spread, self.bytes_per_s = sim, latency_s, spread, bytes_per_s
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.bound: dict[tuple[str, int], Datagram] = {}
        self.cut: set[frozenset[str]] = set()
        self.held: list[tuple[frozenset[str], Any]] = []
        self.nbytes = self.messages = 0
        self.flip_at = inf
        """The byte, counted over all connections, of which a bit is flipped on the way."""
        self.on_flip: Callable[[], None] = lambda: None
        self._ports = iter(range(20_000, 10_000_000))

    # ---- hosts

    def are_cut(self, a: str, b: str) -> bool:
        return a != b and frozenset((a, b)) in self.cut

    def part(self, host: str, hosts: Iterable[str]) -> None:
        """Nothing goes between ``host`` and the others any more."""
        self.sim.note(f"the network between {host} and the others is cut")
        self.cut |= {frozenset((host, other)) for other in hosts if other != host}

    def join(self) -> None:
        """All hosts reach each other again, and what waited for that arrives."""
        self.sim.note("the network is whole again")
        self.cut.clear()
        held, self.held = self.held, []
        for _, send in held:
            send()
        self.sim.look_at_all()

    def delay_s(self, nbytes: int = 0) -> float:
        return self.latency_s * (1 + self.sim.random.random() * self.spread) + nbytes / self.bytes_per_s

    # ---- what ``handshake`` calls

    def addresses_of(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (self.sim.here.host, port))]

    def serve(self, address: tuple[str, int], **_: Any) -> "Listener":
        return Listener(self, self.sim.here)

    def connect(self, address: tuple[str, int], timeout: float) -> "Stream":
        sim, (host, port) = self.sim, address
        own = sim.here
        deadline = sim.now + timeout
        sim.wait(lambda: not self.are_cut(own.host, host), deadline)  # looked at again as they are joined
        if self.are_cut(own.host, host):
            raise TimeoutError("timed out")
        sim.sleep(self.delay_s())
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = Stream(self, own), Stream(self, listener.process)
        ours.peer, theirs.peer = theirs, ours
        ours.blocking_s = timeout
        listener.calls.append(theirs)
        sim.look_at(listener.waiters)
        return ours

    def pair(self) -> tuple["Stream", "Stream"]:
        own = self.sim.here
        first, second = Stream(self, own), Stream(self, own)
        first.peer, second.peer = second, first
        return first, second

    def sleep_until_read(self, stream: "Stream", seconds: float) -> None:
        self.sim.wait(lambda: stream.readable, self.sim.now + seconds, stream.readers)

    def selector(self) -> "Selector":
        return Selector(self.sim)

    def datagram(self) -> tuple["Datagram", str]:
        """As ``reach._bound``."""
        made = Datagram(self, self.sim.here)
        return made, "{} {}".format(*made.address)


class Stream:
    """One end of a TCP connection, as a socket of the process that owns it."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.peer: Stream | None = None
        self.blocking_s: float | None = None
        self.closed = False
        self.lowat = 1
        self._arrived = bytearray()
        self._under_way: deque[tuple[float, bytes | BaseException | None]] = deque()
        self._last_s = 0.0
        self._end: BaseException | str | None = ""
        self.waiters: dict[Task, None] = {}
        self.readers: dict[Task, None] = {}
        process.owned.append(self)

    # ---- the wire

    def _push(self, what: bytes | BaseException | None) -> None:
        """Something is on its way here: bytes, the end (None), or what breaks the connection."""
        network, sim = self.network, self.network.sim
        assert self.peer is not None
        here, there = self.process.host, self.peer.process.host
        if network.are_cut(here, there):
            network.held.append((frozenset((here, there)), lambda: self._push(what)))
            return
        local = self.peer.process is self.process
        nbytes = len(what) if isinstance(what, bytes) else 0
        at = sim.now if local else max(self._last_s, sim.now + network.delay_s(nbytes))
        self._last_s = at
        self._under_way.append((at, what))
        if at > sim.now:
            sim.at(at, self._changed)
        else:
            self._changed()

    def _changed(self) -> None:
        """Something has come here, or was taken: who waits for it at either end may go on."""
        self.network.sim.look_at((*self.waiters, *self.readers))

    def _take(self) -> None:
        now, under_way = self.network.sim.now, self._under_way
        while under_way and under_way[0][0] <= now:
            what = under_way.popleft()[1]
            if isinstance(what, bytes):
                self._arrived += what
            elif self._end == "":
                self._end = what
                if what is not None:
                    self._arrived.clear()

    @property
    def readable(self) -> bool:
        self._take()
        return self._end != "" or len(self._arrived) >= self.lowat

    @property
    def room(self) -> int:
        peer = self.peer
        assert peer is not None
        if peer.closed or self._broken:
            return 1
        waiting = len(peer._arrived) + sum(len(w) for _, w in peer._under_way if isinstance(w, bytes))
        return max(_ROOM - waiting, 0)

    @property
    def writable(self) -> bool:
        return self.room > 0

    @property
    def _broken(self) -> bool:
        self._take()
        return isinstance(self._end, BaseException)

    # ---- as a socket

    def setblocking(self, blocking: bool) -> None:
        self.blocking_s = inf if blocking else None

    def settimeout(self, seconds: float | None) -> None:
        self.blocking_s = inf if seconds is None else seconds or None

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if option == getattr(socket, "SO_RCVLOWAT", -1):
            self.lowat = value

    def sendmsg(self, views: Iterable[Any]) -> int:
        self.process.check()
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        assert self.peer is not None
        if self._broken or self.peer.closed:
            if self.peer.closed and self.process.sim.random.random() < 0.5:
                return sum(len(view) for view in views)  # the kernel takes it, and learns it later
            raise BrokenPipeError(32, "Broken pipe")
        room = self.room
        if not room:
            raise BlockingIOError
        data = b"".join(views)[:room]
        network = self.network
        if self.peer.process is not self.process:
            if network.nbytes <= network.flip_at < network.nbytes + len(data):
                place = int(network.flip_at - network.nbytes)
                network.sim.note(f"a bit flips on the way to {self.peer.process.name}", self.process)
                data = bytearray(data)
                data[place] ^= 1 << network.sim.random.randrange(8)
                network.on_flip()
            network.nbytes, network.messages = network.nbytes + len(data), network.messages + 1
        self.peer._push(bytes(data))
        return len(data)

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendall(self, data: Any) -> None:
        while data:
            until = self.process.sim.now + (self.blocking_s or 0)
            if not self.process.sim.wait(lambda: self.writable, until, self.waiters):
                raise TimeoutError("timed out")
            data = data[self.send(data) :]

    def _await(self) -> None:
        """Raises: BlockingIOError, TimeoutError, and what broke the connection, where nothing is there."""
        sim = self.process.sim
        self.process.check()
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        self._take()
        limit_s = None if self._arrived or self._end != "" else self.blocking_s
        if limit_s is not None and not sim.wait(lambda: self.readable, sim.now + limit_s, self.waiters):
            raise TimeoutError("timed out")
        if not self._arrived:
            if self._end == "":
                raise BlockingIOError
            if self._end is not None:
                raise self._end

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        self._await()
        data = bytes(self._arrived[:nbytes])
        if flags & socket.MSG_PEEK:
            return data
        del self._arrived[: len(data)]
        if self.peer is not None:
            self.peer._changed()
        return data

    def recvmsg_into(self, views: list[memoryview]) -> tuple[int, None]:
        self._await()
        got = 0
        for view in views:
            piece = self._arrived[got : got + len(view)]
            view[: len(piece)] = piece
            got += len(piece)
            if len(piece) < len(view):
                break
        del self._arrived[:got]
        if self.peer is not None:
            self.peer._changed()
        return got, None

    def getsockname(self) -> tuple[str, int]:
        return self.process.host, 0

    def close(self) -> None:
        if not self.closed and self.process.alive:
            self._ended(isinstance(self._end, str) and bool(self._arrived))

    def torn(self) -> None:
        """Its process has ended."""
        if not self.closed:
            self._ended(bool(self._arrived))

    def _ended(self, is_reset: bool) -> None:
        self.closed = True
        self._changed()
        peer = self.peer
        if peer is not None and not peer.closed:
            if is_reset:
                for at, what in list(peer._under_way):  # a reset overtakes what is under way
                    if isinstance(what, bytes) and at > self.network.sim.now:
                        peer._under_way.remove((at, what))
            peer._push(ConnectionResetError(104, "Connection reset by peer") if is_reset else None)


class Listener:
    """A socket that listens."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.address = process.host, next(network._ports)
        self.calls: deque[Stream] = deque()
        self.waiters: dict[Task, None] = {}
        network.listeners[self.address] = self
        process.owned.append(self)

    readable = property(lambda self: bool(self.calls))
    writable = False

    def setblocking(self, _: bool) -> None:
        """It never waits."""

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def accept(self) -> tuple[Stream, None]:
        self.process.check()
        if not self.calls:
            raise BlockingIOError
        return self.calls.popleft(), None

    def close(self) -> None:
        if self.process.alive:
            self.torn()

    def torn(self) -> None:
        self.network.listeners.pop(self.address, None)
        for call in self.calls:
            call.torn()


class Datagram:
    """A socket of datagrams, which may be lost."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.address = process.host, next(network._ports)
        self._inbox: deque[bytes] = deque()
        network.bound[self.address] = self
        process.owned.append(self)

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        self.process.check()
        network, sim = self.network, self.network.sim
        if sim.random.random() < 0.02 or network.are_cut(self.process.host, address[0]):
            return

        def arrive() -> None:
            there = network.bound.get(address)
            if there is not None:
                there._inbox.append(data)

        sim.at(sim.now + network.delay_s(len(data)), arrive)

    def recv(self, _: int) -> bytes:
        self.process.check()
        if not self._inbox:
            raise BlockingIOError
        return self._inbox.popleft()

    def close(self) -> None:
        self.network.bound.pop(self.address, None)

    torn = close


class Selector:
    """As selectors.DefaultSelector."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._keys: dict[Any, SimpleNamespace] = {}
        self._waiters: dict[Task, None] = {}  # shared by all that is watched

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        self._keys[fileobj] = SimpleNamespace(fileobj=fileobj, events=events, data=data)
        fileobj.waiters = self._waiters
        self.sim.look_at(self._waiters)

    modify = register

    def unregister(self, fileobj: Any) -> None:
        del self._keys[fileobj]
        fileobj.waiters = {}

    def get_map(self) -> dict[Any, SimpleNamespace]:
        return self._keys

    def get_key(self, fileobj: Any) -> SimpleNamespace:
        return self._keys[fileobj]

    def _ready(self) -> list[tuple[SimpleNamespace, int]]:
        found = []
        for key in self._keys.values():
            there = key.fileobj
            events = 0
            if key.events & selectors.EVENT_READ and there.readable:
                events |= selectors.EVENT_READ
            if key.events & selectors.EVENT_WRITE and there.writable:
                events |= selectors.EVENT_WRITE
            if events:
                found.append((key, events))
        return found

    def select(self, timeout: float | None = None) -> list[tuple[SimpleNamespace, int]]:
        until = inf if timeout is None else self.sim.now + timeout
        self.sim.wait(lambda: bool(self._ready()), until, self._waiters)
        return self._ready()

    def close(self) -> None:
        self._keys.clear()
