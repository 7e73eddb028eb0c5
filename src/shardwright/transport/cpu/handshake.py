"""How the ranks of a mesh axis come to have TCP connections to each other.

Each rank listens at an address of its own; addresses travel over a process group that is there already. Of
two ranks the higher one calls. A call shows a secret that its listener has made up and told only that group,
so a stranger who finds the port gets no further. Where any rank can't be reached, all are told why, and none
has connections.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.transport.cpu.connection import Connection, Endpoint
from shardwright.transport.cpu.event_loop import EventLoop
from shardwright.transport.launches import LaunchLog

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

KINDS = 2  # connections to each peer: all-gathers, and reduce-scatters
_HELLO = struct.Struct("<16sii")  # the listener's secret, the caller's rank, the kind of connection
_PATIENCE_S = 20.0
_SIOCGIFADDR = 0x8915


class _Listening(NamedTuple):
    """Where a rank can be called, and the secret that a caller must show."""

    address: tuple[str, int]
    secret: bytes


def open_connections(
    group: ProcessGroup, timeout_s: float, log: LaunchLog
) -> tuple[EventLoop, list[dict[int, Connection]]] | str:
    """The event loop and its connections, by kind and peer. Where any rank couldn't reach another, the
    reason, the same on all ranks.

    The second kind takes memory for what arrives (see ``Connection``). Every rank of the group calls it; two
    small exchanges.
    """
    rank, world = group.rank(), group.size()
    listener, own = _listen(world)
    places: list[_Listening | str] = [""] * world
    dist.all_gather_object(places, own, group=group)
    reached = [place for place in places if not isinstance(place, str)]
    if len(reached) < world or listener is None:
        if listener is not None:
            listener.close()
        refusals = [place if isinstance(place, str) else "" for place in places]
        return _first(refusals, log)
    socks = _connect(rank, reached, listener, min(timeout_s, _PATIENCE_S))
    listener.close()
    refusals = [""] * world
    dist.all_gather_object(refusals, socks if isinstance(socks, str) else "", group=group)
    if isinstance(socks, str) or any(refusals):
        _close({} if isinstance(socks, str) else socks)
        return _first(refusals, log)
    endpoint = Endpoint(rank, timeout_s, log)
    connections: list[dict[int, Connection]] = [{} for _ in range(KINDS)]
    for (kind, peer), sock in socks.items():
        connections[kind][peer] = Connection(endpoint, sock, peer, takes_memory=kind == 1)
    return EventLoop(endpoint, (each for by_peer in connections for each in by_peer.values())), connections


def _first(refusals: Sequence[str], log: LaunchLog) -> str:
    return next(f"rank {log.ranks[peer]}: {why}" for peer, why in enumerate(refusals) if why)


def _listen(world: int) -> tuple[socket.socket | None, _Listening | str]:
    if not hasattr(socket.socket, "sendmsg"):
        return None, "Python has no sendmsg here"
    for host in _hosts():
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family, backlog=KINDS * world)
        except OSError:  # a name of another machine, or one that nobody knows
            continue
        return listener, _Listening(listener.getsockname()[:2], secrets.token_bytes(16))
    return None, "it has no address of its own to listen at"


def _hosts() -> list[str]:
    """Addresses to listen at, the best first; chosen as Gloo does, so that one variable steers both."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names or fcntl is None:
        return [socket.gethostname(), "127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", names.split(",")[0].encode()[:15])
            return [socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24])]
        except OSError:  # no such interface, or it has no IPv4 address
            return []


def _connect(
    rank: int, places: Sequence[_Listening], listener: socket.socket, patience_s: float
) -> dict[tuple[int, int], socket.socket] | str:
    """Call the lower ranks and take the calls of the higher ones; by kind and peer. Else why not."""
    deadline = time.monotonic() + patience_s
    found: dict[tuple[int, int], socket.socket] = {}
    try:
        for peer, place in enumerate(places[:rank]):
            for kind in range(KINDS):
                sock = socket.create_connection(place.address, patience_s)
                found[kind, peer] = sock
                sock.sendall(_HELLO.pack(place.secret, rank, kind))
        while len(found) < KINDS * (len(places) - 1):
            listener.settimeout(max(1e-3, deadline - time.monotonic()))
            sock = listener.accept()[0]
            caller = _caller(sock, places[rank].secret)
            if caller is None or caller in found:
                sock.close()
            else:
                found[caller] = sock
    except OSError as error:  # refused, not routed, or too late
        _close(found)
        return f"not all ranks could be called ({error})"
    for sock in found.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed
    return found


def _caller(sock: socket.socket, secret: bytes) -> tuple[int, int] | None:
    """Kind of connection and rank of who calls; None for a stranger."""
    sock.settimeout(2.0)
    try:
        hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) < _HELLO.size:
        return None
    shown, peer, kind = _HELLO.unpack(hello)
    return (kind, peer) if secrets.compare_digest(shown, secret) else None


def _close(socks: dict[tuple[int, int], socket.socket]) -> None:
    for sock in socks.values():
        sock.close()
