"""How two ranks of a mesh axis come to have a TCP connection: one listens, the other calls.

Each rank listens at an address of its own, for as long as its transport lives. Of two ranks the higher one
calls, and shows a key. However many strangers call, they change nothing: who has said nothing makes room for
others, and who is known gets an answer.
"""

import hmac
import os
import secrets
import select
import selectors
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from shardwright import clock

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

# All that opens a socket or watches several: a simulation of a network sets other functions here.
addresses_of = socket.getaddrinfo
serve = socket.create_server
connect = socket.create_connection
pair = socket.socketpair
Selector = selectors.DefaultSelector


def sleep_until_read(sock: socket.socket, seconds: float) -> None:
    """Return when there is something to be read, or after ``seconds``."""
    if sock.fileno() >= 0:  # else the event loop has ended, and closed it
        watched = select.poll()
        watched.register(sock, select.POLLIN)
        watched.poll(seconds * 1e3)


GATHERS, REDUCTIONS = 0, 1
KINDS = 2
"""Connections to each peer, opened when first used: for words and all-gathers, and for reduce-scatters."""
# Behind bulk reductions on the same connection a small all-gather waited 248 ms, and 8 ms on its own (Gloo).

_HELLO = struct.Struct("<32sii")  # the key, the caller's rank, the kind of connection
_ANSWER = b"!"
_SIOCGIFADDR = 0x8915
_BACKLOG = 4096  # calls that the kernel holds until they are taken; it has a limit of its own
_CALLERS = 64  # that have not yet said who they are, at most: who says nothing makes room for others
_PAUSE_S = 0.01


class Place(NamedTuple):
    """Where a rank can be called, and what makes the keys of its callers unlike those of others."""

    host: str
    port: int
    nonce: str

    def key(self, secret: bytes, rank: int, kind: int) -> bytes:
        """What the rank ``rank`` must show for a connection of a kind."""
        # Of the secret, which only the ranks of the transport have, and of what the listener has made up: so
        # a stranger who finds the port, or reads the job's store, gets no further.
        return hmac.digest(secret, f"{self.nonce} {rank} {kind}".encode(), "sha256")


class Caller:
    """Who has called, and is still to say with which key, from which rank, for which kind."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = _tuned(sock)
        self.key, self.rank, self.kind = b"", -1, -1
        self._said = b""

    def read(self) -> bool | None:
        """Whether all is said, False where it never will be; None: there is more to come."""
        try:
            got = self.socket.recv(_HELLO.size - len(self._said))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._said += got
        if len(self._said) < _HELLO.size:
            return None if got else False
        self.key, self.rank, self.kind = _HELLO.unpack(self._said)
        return True

    def knows(self, secret: bytes, place: Place) -> bool:
        """Whether it has shown the key of who listens at ``place``."""
        # It takes as long for any key: by its time nobody finds one byte after byte.
        return hmac.compare_digest(self.key, place.key(secret, self.rank, self.kind))

    def answer(self) -> bool:
        """Tell it that it is known. Returns whether it is still there."""
        try:
            return self.socket.send(_ANSWER) > 0
        except OSError:
            return False


class Lobby:
    """Takes calls at a listener, and hears who calls, beside whatever else ``selector`` watches.

    known: told of each caller that has said all; it answers and keeps the socket, or closes it.
    """

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, known: Callable[[Caller], None]
    ) -> None:
        listener.setblocking(False)
        self._listener, self._selector, self._known = listener, selector, known
        self._callers: list[Caller] = []
        selector.register(listener, selectors.EVENT_READ, self)

    def take(self) -> None:
        """Accept those who call now."""
        for _ in range(_CALLERS):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # who called has given up, or this process may open no more
                clock.sleep(_PAUSE_S)
                return
            caller = Caller(sock)
            self._callers.append(caller)
            self._selector.register(sock, selectors.EVENT_READ, caller)
            self.hear(caller)
            if len(self._callers) > _CALLERS:  # the longest silent one goes; a rank among them calls again
                self._leave(self._callers[0]).close()

    def hear(self, caller: Caller) -> None:
        """Read more of what a caller says."""
        if caller not in self._callers:  # it was closed after the selector saw it
            return
        said_all = caller.read()
        if said_all is not None:
            self._leave(caller)
            if said_all:
                self._known(caller)
            else:
                caller.socket.close()

    def close(self) -> None:
        """Take no more calls. The selector's owner closes that."""
        for sock in (self._listener, *(caller.socket for caller in self._callers)):
            sock.close()

    def _leave(self, caller: Caller) -> socket.socket:
        self._selector.unregister(caller.socket)
        self._callers.remove(caller)
        return caller.socket


def listen() -> tuple[socket.socket, Place] | str:
    """A socket that listens, and where it can be called; else why there is none."""
    if not hasattr(socket.socket, "sendmsg"):
        return "Python has no sendmsg here"
    for host in own_hosts():
        try:
            return listen_at(host)
        except OSError:  # a name of another machine, or one that nobody knows
            continue
    return "it has no address of its own to listen at"


def listen_at(host: str) -> tuple[socket.socket, Place]:
    """A socket that listens at a name or address of this host. Raises: OSError where there is none."""
    family = addresses_of(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = serve((host, 0), family=family, backlog=_BACKLOG)
    address, port = listener.getsockname()[:2]
    return listener, Place(address, port, secrets.token_hex(16))


def own_hosts() -> list[str]:
    """Addresses to listen at, the best first; chosen as Gloo does, so that one variable steers both."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names or fcntl is None:
        return [socket.gethostname(), "127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel's names of interfaces have up to 15 bytes and a zero (IFNAMSIZ).
            asked = struct.pack("256s", names.split(",")[0].encode()[:15])
            return [socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24])]
        except OSError:  # no such interface, or it has no IPv4 address
            return []


def call(
    place: Place, secret: bytes, rank: int, kind: int, patience_s: float, answer_s: float | None = None
) -> socket.socket:
    """A connection to who listens there, and has answered. rank: who calls.

    patience_s: to reach the host. answer_s: for the answer, as long by default.
    Raises: OSError for one that can't be reached, or doesn't answer.
    """
    answer_s = patience_s if answer_s is None else answer_s
    deadline = clock.monotonic() + answer_s
    while True:
        sock = connect((place.host, place.port), patience_s)
        try:
            sock.settimeout(max(deadline - clock.monotonic(), _PAUSE_S))
            sock.sendall(_HELLO.pack(place.key(secret, rank, kind), rank, kind))
            if sock.recv(len(_ANSWER)):
                return _tuned(sock)
        except ConnectionError:
            pass
        except OSError:
            sock.close()
            raise
        sock.close()  # others called meanwhile, and it made room for them
        if clock.monotonic() > deadline:
            raise ConnectionResetError("it hangs up")
        clock.sleep(_PAUSE_S)


def _tuned(sock: socket.socket) -> socket.socket:
    # Words are small messages, of which Nagle's algorithm would hold one back until the peer has acknowledged
    # the one before.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed
    sock.setblocking(False)
    return sock
