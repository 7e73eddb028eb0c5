"""The connections of one rank to the others of its mesh axis, each opened when it is first used.

Words go to ranks 1, 2, 4, ... further and come from as many, so a rank that only agrees with others has
2 log2(ranks) connections. Tensors go to every rank of the axis, over connections that the first all-gather
and the first reduce-scatter open. Both ends know which they use, so nothing is asked for: the higher rank
calls, and the lower one waits for that. Where each can be called is left in the job's store.
"""

import json
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import inf

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from shardwright.errors import CommError, said
from shardwright.transport.attempt import Meeting
from shardwright.transport.cpu.arena import Host
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.event_loop import EventLoop
from shardwright.transport.cpu.handshake import GATHERS, KINDS, REDUCTIONS, Caller, Place, call, listen
from shardwright.transport.cpu.shm import ShmComm, open_arena
from shardwright.transport.cpu.transfer import Endpoint
from shardwright.transport.jobstore import of_ranks
from shardwright.transport.process import LaunchLog, came, start_thread
from shardwright.transport.secret import KeyAgreement

_PATIENCE_S = 20.0
_POLL_S = 0.001
_REMEDY = (
    "ranks listen at any free port of the interface in GLOO_SOCKET_IFNAME, else of their host's name; "
    'where no route leads there, set_transport("collectives") goes over torch\'s groups'
)


def open_connections(meeting: Meeting) -> "Peers | str":
    """This rank's peers. Where any rank couldn't reach a neighbour, the reason, the same on all ranks.

    Every rank of the meeting calls it; a few keys of each in the job's store.
    """
    name = f"rank {meeting.log.ranks[meeting.rank]}"
    agreement = KeyAgreement(meeting)
    there = listen()
    if isinstance(there, str):
        return meeting.refusal("listen", f"{name}: {there}") or ""
    listener, place = there
    # Before all have come (`refusal`): from then on any rank may read it.
    meeting.leave("place", json.dumps(place))
    refused = meeting.refusal("listen", None)
    if refused is not None:
        listener.close()
        return refused
    try:
        secret = agreement.secret()
    except BaseException:
        listener.close()
        raise
    peers = Peers(meeting, listener, place, secret)
    peers.find({(meeting.rank + way * hop) % meeting.world for hop in hops(meeting.world) for way in (1, -1)})
    # At once: whichever rank ends, its neighbours notice, and tell all (``Endpoint.spread``). And where they
    # can't be opened, all ranks are told why before any takes this way.
    neighbours = {(meeting.rank + way) % meeting.world for way in (1, -1)} - {meeting.rank}
    connections = [peers.to(GATHERS, peer) for peer in neighbours]
    with meeting.waiting("call"):
        peers.called(connections)
    troubles = [f"{name}: {connection.trouble}" for connection in connections if connection.trouble]
    refused = meeting.refusal("call", troubles[0] if troubles else None)
    if refused is not None:
        peers.loop.join()
        return refused
    return peers


def open_near(meeting: Meeting) -> tuple[ShmComm | None, list[int]]:
    """A transport among the ranks of this rank's host, None where it is alone or they can't share memory; and
    the places of the ranks that speak for others: the first of each such host, and all that are alone.

    Every rank of the meeting calls it, after ``open_arena``. Who doesn't speak learns of no speaker.
    """
    host = Host(*said(meeting.read("host", [meeting.rank])[meeting.rank]))
    places, near = _alike(meeting, "near", str(host.place)), None
    if len(places) > 1:
        log = LaunchLog([meeting.log.ranks[place] for place in places], "host ")
        store, limit = PrefixStore(f"near/{places[0]}", meeting.store), timedelta(seconds=meeting.timeout_s)
        arena = open_arena(Meeting(store, log, places.index(meeting.rank), limit))
        near = None if isinstance(arena, str) else ShmComm(arena, len(places))
    speaks = near is None or near.rank == 0
    return near, _alike(meeting, "speakers", "" if speaks else str(meeting.rank))


def _alike(meeting: Meeting, what: str, kind: str) -> list[int]:
    """The places of the ranks that say the same ``kind``, ascending; nobody reads of others."""
    name, store = f"{what}/{kind}", meeting.store
    store.set(f"{name}/{store.add(name, 1)}", str(meeting.rank))
    meeting.refusal(what, None)
    return sorted(map(int, of_ranks(store, name, range(1, store.add(name, 0) + 1)).values()))


def hops(world: int) -> list[int]:
    """1, 2, 4, ...: how far words go, one hop after the other, until all ranks have all."""
    return [1 << hop for hop in range((world - 1).bit_length())]


class Peers:
    """See the module. loop: what serves the connections."""

    def __init__(self, meeting: Meeting, listener: socket.socket, place: Place, secret: bytes) -> None:
        self.world = meeting.world
        self.endpoint = Endpoint(meeting.rank, meeting.timeout_s, meeting.log)
        self.loop = EventLoop(self.endpoint, ())
        self._meeting = meeting
        self._own = place
        self._secret = secret
        self._places: dict[int, Place] = {}
        self._made: dict[tuple[int, int], Connection] = {}
        self.loop.listen(listener, self._answer)

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return sum(connection.is_open for connection in tuple(self._made.values()))

    def find(self, peers: Iterable[int]) -> None:
        """Learn where these can be called. Raises: CommError where the job's store is gone."""
        unknown = [peer for peer in peers if peer not in self._places]
        try:
            told = self._meeting.read("place", unknown)
        except RuntimeError as error:
            raise CommError(
                f"the job's store doesn't say where other ranks can be called: {error}"
            ) from error
        self._places |= {peer: Place(*said(data)) for peer, data in told.items()}

    def to(self, kind: int, peer: int) -> Connection:
        """The connection of a kind to a peer; where there was none it is opened now. Called by the rank's
        own thread. One that can't be opened fails who waits on it."""
        with self.endpoint.changed:
            connection = self._made.get((kind, peer))
            if connection is not None:
                return connection
            connection = self._make(kind, peer)
        if peer < self.endpoint.rank:  # both ends know which they use: the higher rank calls, the lower waits
            self.find([peer])
            start_thread("shardwright-call", self._call, connection, kind)
        return connection

    def called(self, connections: Sequence[Connection]) -> None:
        """Return when those that this rank opens are open, or can't be. Raises: what the watch found."""
        calls = [each for each in connections if each.peer < self.endpoint.rank]
        came(lambda: all(each.is_open or each.trouble for each in calls), inf, _POLL_S, _POLL_S)

    def to_all(self, kind: int) -> dict[int, Connection]:
        """The connections of a kind to all peers."""
        others = [peer for peer in range(self.world) if peer != self.endpoint.rank]
        self.find(peer for peer in others if peer < self.endpoint.rank)
        return {peer: self.to(kind, peer) for peer in others}

    def _make(self, kind: int, peer: int) -> Connection:
        connection = self._made[kind, peer] = Connection(self.endpoint, peer, kind == REDUCTIONS)
        self.loop.add(connection)
        return connection

    def _call(self, connection: Connection, kind: int) -> None:
        endpoint, peer = self.endpoint, connection.peer
        place = self._places[peer]
        where = f"{place.host}:{place.port}"
        try:
            patience_s = min(endpoint.timeout_s, _PATIENCE_S)
            sock = call(place, self._secret, endpoint.rank, kind, patience_s, endpoint.timeout_s)
        # A rank listens as long as its transport lives, so nobody there means that it has ended.
        except ConnectionRefusedError:
            endpoint.log.ended.add(peer)
            connection.fail(
                f"{endpoint.name(peer)} has ended, or left the mesh: nobody listens at {where} any more; "
                "its own error says why"
            )
        except OSError as error:  # not routed, or too late
            connection.fail(f"{endpoint.name(peer)} could not be called at {where} ({error}): {_REMEDY}")
        else:
            connection.attach(sock)
            self.loop.go()

    def _answer(self, caller: Caller) -> Connection | None:
        """The connection whose other end this is. Called by the event loop."""
        peer, kind = caller.rank, caller.kind
        if not caller.knows(self._secret, self._own) or not (
            self.endpoint.rank < peer < self.world and 0 <= kind < KINDS
        ):
            return None
        with self.endpoint.changed:
            connection = self._made.get((kind, peer)) or self._make(kind, peer)
        return None if connection.is_open else connection
