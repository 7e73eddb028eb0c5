"""How the ranks of a mesh axis come to have TCP lines to each other.

Each rank listens at an address of its own; addresses travel over a process group that is there already. Of
two ranks the higher one calls. A call shows a secret that its listener has made up and told only that group,
so a stranger who finds the port gets no further. Where any rank can't be reached, all are told why, and none
has lines.
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

from shardwright.transport.cpu.connection import Line, Side
from shardwright.transport.cpu.event_loop import Wire
from shardwright.transport.launches import LaunchLog

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

KINDS = 2  # lines to each peer: all-gathers, and reduce-scatters
_HELLO = struct.Struct("<16sii")  # the listener's secret, the caller's rank, the kind of line
_PATIENCE_S = 20.0
_SIOCGIFADDR = 0x8915


class _Listening(NamedTuple):
    """Where a rank can be called, and the secret that a caller must show."""

    address: tuple[str, int]
    secret: bytes


def open_wire(
    group: ProcessGroup, timeout_s: float, log: LaunchLog
) -> tuple[Wire, list[dict[int, Line]]] | str:
    """A wire and its lines by kind and peer; where any rank couldn't reach another, why, alike on all ranks.

    The second kind takes memory for what arrives (see ``Line``). Every rank of the group calls it; two small
    exchanges.
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
    connections = _connect(rank, reached, listener, min(timeout_s, _PATIENCE_S))
    listener.close()
    refusals = [""] * world
    dist.all_gather_object(refusals, connections if isinstance(connections, str) else "", group=group)
    if isinstance(connections, str) or any(refusals):
        _close({} if isinstance(connections, str) else connections)
        return _first(refusals, log)
    side = Side(rank, timeout_s, log)
    lines: list[dict[int, Line]] = [{} for _ in range(KINDS)]
    for (kind, peer), connection in connections.items():
        lines[kind][peer] = Line(side, connection, peer, takes_memory=kind == 1)
    return Wire(side, (line for by_peer in lines for line in by_peer.values())), lines


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
                connection = socket.create_connection(place.address, patience_s)
                found[kind, peer] = connection
                connection.sendall(_HELLO.pack(place.secret, rank, kind))
        while len(found) < KINDS * (len(places) - 1):
            listener.settimeout(max(1e-3, deadline - time.monotonic()))
            connection = listener.accept()[0]
            caller = _caller(connection, places[rank].secret)
            if caller is None or caller in found:
                connection.close()
            else:
                found[caller] = connection
    except OSError as error:  # refused, not routed, or too late
        _close(found)
        return f"not all ranks could be called ({error})"
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed
    return found


def _caller(connection: socket.socket, secret: bytes) -> tuple[int, int] | None:
    """Kind of line and rank of who calls; None for a stranger."""
    connection.settimeout(2.0)
    try:
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) < _HELLO.size:
        return None
    shown, peer, kind = _HELLO.unpack(hello)
    return (kind, peer) if secrets.compare_digest(shown, secret) else None


def _close(connections: dict[tuple[int, int], socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
