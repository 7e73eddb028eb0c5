"""Socket transport: one message per peer and collective, straight between the places of use.

    all-gather       my spans  -> the same spans of every peer's buffer
    reduce-scatter   peer r's spans of my gradients -> memory of rank r, summed there in rank order

Long runs of zeros in a gradient stay here (``filled_runs``); where a group is asked to
(``coder.py``) messages are coded.
"""

import functools
import operator
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from shardwright import clock
from shardwright.errors import CommError
from shardwright.transport.base import Comm, Segment, sum_in_rank_order, whole_place
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.handshake import GATHERS, REDUCTIONS
from shardwright.transport.cpu.message import coded_message, message_of
from shardwright.transport.cpu.peers import Peers, hops
from shardwright.transport.cpu.transfer import CollectiveFailure, Transfer, Worker
from shardwright.transport.cpu.views import views_of
from shardwright.transport.differences import Differences, Kept
from shardwright.transport.process import Launch, process_state
from shardwright.transport.recorder import DONE
from shardwright.transport.streams import Streams

if TYPE_CHECKING:
    from shardwright.transport.cpu.shm import ShmComm

_MOST_AT_ONCE = 4
"""Ranks that send their words to each other directly; more of them pass words on."""

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))
BLOCK_NBYTES = 1024  # a row of 256 floats; finer cuts make more parts than they save bytes
SMALL_NBYTES = 256 << 10
_SAMPLES = 64
_GOLDEN = (5**0.5 - 1) / 2  # its multiples fall evenly, and in step with no stride of rows


class SocketComm(Comm):
    """Collectives of one mesh axis over TCP connections, which ``peers.py`` opens."""

    reads_in_place = True
    over_network = True
    uses_c10d = False
    streams: Streams | None = None

    def __init__(self, peers: Peers, near: "tuple[ShmComm | None, Sequence[int]] | None" = None) -> None:
        """near: see ``open_near``; None: every rank speaks for itself."""
        self.connections = peers
        self.world = peers.world
        self.rank = peers.endpoint.rank
        self.log = peers.endpoint.log
        self.sent_nbytes = self.coded_nbytes = 0
        self.exposed_s: float | None = 0.0
        self.differences = Differences()
        self._loop = peers.loop
        self._coder = Worker("shardwright-coder", peers.endpoint.fail)
        self._by_peer: dict[int, dict[int, Connection]] = {}
        # Peers in an order that gives every rank another partner at each turn.
        self._peers = tuple((self.rank + shift) % self.world for shift in range(1, self.world))
        self._near, speakers = near or (None, range(self.world))
        self._hops = _hops_of(speakers, self.rank)
        if self._near is not None:
            self._near.arena.trouble = lambda: peers.endpoint.why_not(peers.endpoint.log.launched)
        weakref.finalize(self, peers.loop.stop)

    @property
    def why_plain(self) -> str:
        """See ``Comm``."""
        return ""

    def all_gather(self, segments: Sequence[Segment], key: str) -> "_SocketGather":
        """See ``Comm.all_gather``."""
        start = clock.perf_counter()
        with self._beginning():
            transfer = self._transfer(key, [segment.flat for segment in segments])
            connections = self._to_all(GATHERS)
            known = [(segment, self.differences.of(segment)) for segment in segments]
            for peer in self._peers:
                nbytes = sum(segment.part_nbytes(peer) for segment in segments)
                if nbytes:
                    filled = [(segment, kept) for segment, kept in known if segment.part_nbytes(peer)]
                    places = views_of(segment.part(peer) for segment, _ in filled)
                    connections[peer].receive(transfer, nbytes, places, [kept for _, kept in filled])
            own = [(segment, kept) for segment, kept in known if segment.part_nbytes(self.rank)]
            parts, kept = [segment.part(self.rank) for segment, _ in own], [kept for _, kept in own]
            if any(each is not None and each.is_used for each in kept):
                self._send_coded(list(connections.values()), transfer, parts, kept)
            else:
                # One message for all peers, so that its bytes are summed once.
                message = _message(transfer, parts)
                for peer in self._peers:
                    self._send(connections[peer], transfer, message)
        self._loop.go()
        self.spent(start)
        return _SocketGather(self, transfer)

    def reduce_scatter(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], key: str
    ) -> "_SocketReduction":
        """See ``Comm.reduce_scatter``."""
        start = clock.perf_counter()
        # Wider elements first: so every part received begins at a multiple of its own element's size.
        order = sorted(range(len(segments)), key=lambda index: -segments[index].flat.element_size())
        nbytes = sum(segment.part_nbytes(self.rank) for segment in segments)
        with self._beginning():
            transfer = self._transfer(key, [segment.flat for segment in segments])
            connections = self._to_all(REDUCTIONS)
            for peer in self._peers:
                if nbytes:
                    connections[peer].receive(transfer, nbytes, views_of(()))
                parts = [segments[index].part(peer) for index in order if segments[index].part_nbytes(peer)]
                if parts and any(segment.coded for segment in segments):
                    self._send_coded([connections[peer]], transfer, parts, [None] * len(parts))
                else:
                    self._send_filled(connections[peer], transfer, parts)
        self._loop.go()
        self.spent(start)
        return _SocketReduction(self, transfer, [(segments[index], dtypes[index], index) for index in order])

    def gather(self, shard: torch.Tensor, spans: Sequence[tuple[int, int]], dst: int) -> torch.Tensor | None:
        """See ``Comm.gather``."""
        start = clock.perf_counter()
        whole = whole_place(spans, dst, shard) if self.rank == dst else None
        with self._beginning():
            kept = shard.contiguous() if whole is None else whole
            transfer = self._transfer(f"gather {spans[-1][1]} elements on rank {dst}", [kept])
            if whole is None:
                self._send(self.connections.to(GATHERS, dst), transfer, _message(transfer, [kept]))
            for peer in () if whole is None else self._peers:
                place = kept[slice(*spans[peer])]
                if place.numel():
                    connection = self.connections.to(GATHERS, peer)
                    connection.receive(transfer, place.nbytes, views_of([place]))
        self._loop.go()
        transfer.wait_received()
        transfer.wait_sent()
        self.spent(start)
        return whole

    def exchange(self, words: Sequence[int], key: str) -> list[list[int]]:
        """See ``Comm.exchange``. By ``all_reduce_words``, of which others' words are zeros."""
        width, before = len(words), self.rank * len(words)
        table = [*[0] * before, *words, *[0] * (width * (self.world - 1) - before)]
        known = self.all_reduce_words(table, operator.or_, key)
        return [known[at : at + width] for at in range(0, len(known), width)]

    def all_reduce_words(
        self, words: Sequence[int], combine: Callable[[int, int], int], key: str
    ) -> list[int]:
        """See ``Comm.all_reduce_words``. Many ranks pass words on, each time to one that is twice as far: in
        log2(ranks) hops all reach all, with a message of each rank per hop. Of ranks that share memory one
        passes on the words of all. Not counted in ``sent_nbytes``."""
        if self.world == 1:
            return list(words)
        start, beginning = clock.perf_counter(), self._beginning()
        with beginning:
            launch = self.log.launch(key)
        known = self._pass_on(self._in_host(words, combine, launch), combine, launch, beginning)
        known = self._in_host(known, combine, launch)  # one rank has all words now, and others none but these
        process_state.recorder.write((DONE, self.log.name, launch.number, clock.perf_counter(), True))
        self.spent(start)
        return known

    def _in_host(self, words: Sequence[int], combine: Callable[[int, int], int], launch: Launch) -> list[int]:
        """Combined among the ranks that share memory with this one."""
        if self._near is None:
            return list(words)
        try:
            return self._near.all_reduce_words(words, combine, launch.key)
        except CommError as error:  # other hosts wait for this one, and see none of its ranks end
            self._loop.endpoint.spread(CollectiveFailure(launch.number, str(error)))
            raise

    def _pass_on(
        self,
        known: list[int],
        combine: Callable[[int, int], int],
        launch: Launch,
        beginning: AbstractContextManager[None],
    ) -> list[int]:
        """Int64 words, combined at each hop with those that come from others. beginning: around what is sent.
        Raises: as the wait of an all-gather."""
        links = {
            peer: self.connections.to(GATHERS, peer) for hop in self._hops for each in hop for peer in each
        }
        claimed = [links[peer] for _, sources in self._hops for peer in sources]
        try:
            claims = self._loop.claim(claimed)
            for to, sources in self._hops:
                sent = array("q", known)
                message = b"".join(message_of(launch, [memoryview(sent).cast("B")]))
                with beginning:
                    said = [links[peer].say(message) for peer in to]
                    if not all(said):
                        self._loop.go()
                heard = list[bytes | bytearray]()
                with self.log.waiting(launch) as waiting:
                    while claims and len(heard) < len(sources):
                        body = links[sources[len(heard)]].hear(message, waiting)
                        claims = body is not None
                        heard += [] if body is None else [body]
                    if len(heard) < len(sources):  # late, or another message: the event loop's business
                        self._loop.release(claimed)
                        transfer = Transfer(self._loop.endpoint, launch, [])
                        for peer in sources[len(heard) :]:
                            heard.append(bytearray(8 * len(sent)))
                            links[peer].receive(transfer, len(heard[-1]), deque([memoryview(heard[-1])]))
                        self._loop.go()
                        transfer.wait_received(waiting)
                for each in heard:
                    known = list(map(combine, known, memoryview(each).cast("q")))
        finally:
            self._loop.release(claimed)
        return known

    def _transfer(self, key: str, keep: list[torch.Tensor]) -> Transfer:
        return Transfer(self._loop.endpoint, self.log.launch(key), keep)

    def _beginning(self) -> Any:
        return self.log.beginning(self.rank, self._leave)

    def _leave(self, why: str) -> None:
        """Peers may have half of a message, and what is filled here may be freed: nothing moves any more."""
        self._loop.endpoint.spread(CollectiveFailure(self.log.launched, why))
        self._loop.join()

    def _to_all(self, kind: int) -> dict[int, Connection]:
        found = self._by_peer.get(kind)
        if found is None:
            found = self._by_peer[kind] = self.connections.to_all(kind)
        return found

    def spent(self, start: float) -> None:
        """Count the time since ``start`` as exposed."""
        assert self.exposed_s is not None
        self.exposed_s += clock.perf_counter() - start

    def _send(self, connection: Connection, transfer: Transfer, message: Sequence[memoryview]) -> None:
        if message:
            self.sent_nbytes += connection.send(transfer, message)

    def _send_coded(
        self,
        connections: Sequence[Connection],
        transfer: Transfer,
        parts: Sequence[torch.Tensor],
        kept: Sequence[Kept | None],
    ) -> None:
        """The same message to all of them, coded beside the rank's thread. kept: of each part, where only
        what has changed is sent."""
        fills = [connection.send_later(transfer) for connection in connections]

        def code() -> None:
            coded = self._coder.coder.code(parts, kept, self.rank)
            message = coded_message(transfer.launch, coded, sum(part.nbytes for part in parts))
            for fill in fills:
                fill(message)
            self.coded_nbytes += len(fills) * sum(map(len, coded))
            self._loop.go()

        self._coder.do(code)

    def _send_filled(self, connection: Connection, transfer: Transfer, parts: Sequence[torch.Tensor]) -> None:
        """Send ``parts`` as ``_send`` does, but for long runs of zeros."""
        found = [filled_runs(part) for part in parts]
        if all(runs is None for runs in found):
            self._send(connection, transfer, _message(transfer, parts))
            return
        joined, begin = [], 0
        for part, runs in zip(parts, found, strict=True):
            whole = [(0, part.nbytes)] if runs is None else runs
            joined += [(begin + start, begin + stop) for start, stop in whole]
            begin += part.nbytes
        message = message_of(transfer.launch, views_of(parts), joined)
        self.sent_nbytes += connection.send(transfer, message)


def _hops_of(ranks: Sequence[int], own: int) -> list[tuple[list[int], list[int]]]:
    """Of each hop of words among ``ranks``: to whom ``own`` sends its, and from whom others come."""
    world, place = len(ranks), ranks.index(own)
    steps = [range(1, world)] if 1 < world <= _MOST_AT_ONCE else [[hop] for hop in hops(world)]
    return [
        ([ranks[(place + way) % world] for way in step], [ranks[(place - way) % world] for way in step])
        for step in steps
    ]


def _message(transfer: Transfer, parts: Sequence[torch.Tensor]) -> Sequence[memoryview]:
    """Return the message of ``parts``; empty where all of them are."""
    views = views_of(parts)
    return message_of(transfer.launch, views) if views else []


class _SocketGather:
    """An all-gather in flight."""

    def __init__(self, comm: SocketComm, transfer: Transfer) -> None:
        self._comm = comm
        self._transfer = transfer

    def wait(self) -> None:
        """Wait for every span; and for the sends, which read from the buffer, so that it may be freed."""
        start = clock.perf_counter()
        self._transfer.wait_received()
        self._transfer.wait_sent()
        self._comm.spent(start)


class _SocketReduction:
    """A reduce-scatter in flight; sums when it is waited for.

    inputs: segment, reduce dtype and place in the result, in the order of sending.
    """

    def __init__(
        self, comm: SocketComm, transfer: Transfer, inputs: Sequence[tuple[Segment, torch.dtype, int]]
    ) -> None:
        self._comm = comm
        self._transfer = transfer
        self._inputs = inputs

    def wait(self) -> list[torch.Tensor]:
        """Wait for all parts, then sum them in rank order (see ``Reduction.wait``)."""
        start = clock.perf_counter()
        self._transfer.wait_received()
        self._comm.spent(start)
        # Before the sends are waited for, which go on while this thread sums.
        sums: dict[int, torch.Tensor] = {}
        begin = 0
        for segment, dtype, index in self._inputs:
            end = begin + segment.part_nbytes(self._comm.rank)
            sums[index] = self._sum(segment.part(self._comm.rank), dtype, slice(begin, end))
            begin = end
        start = clock.perf_counter()
        self._transfer.wait_sent()
        self._comm.spent(start)
        return [sums[index] for index in range(len(sums))]

    def _sum(self, own: torch.Tensor, dtype: torch.dtype, place: slice) -> torch.Tensor:
        rank, world = self._comm.rank, self._comm.world
        if not own.numel() or world == 1:
            return own.to(dtype, copy=not own.numel())  # an empty view would hold the whole gradient
        received = {peer: each[place].view(own.dtype) for peer, each in self._transfer.received.items()}
        # Into a received part, never into the own one: that is a part of a whole gradient, soon to be freed.
        # Rank by rank, whatever order they came in: the same bits each time.
        parts = [received.get(r, own) for r in range(world)]
        return sum_in_rank_order(parts, dtype, scratch=1 if rank == 0 else 0)


def filled_runs(part: torch.Tensor) -> list[tuple[int, int]] | None:
    """``(start, stop)`` bytes of ``part`` (host, contiguous) outside of which all bits are zero, in order.

    An embedding's gradient has rows for the tokens in use, an expert's that saw no token has none. The
    receiver puts zeros in between, so every sum is the same bit for bit (only +0.0 is left out: -0.0 has a
    bit that is set).

    None where that would save little: for less than 256 KiB, or where more than three quarters are filled.
    """
    if part.nbytes < SMALL_NBYTES:
        return None
    whole = part.nbytes // BLOCK_NBYTES
    begin = part.storage_offset() * part.element_size()
    # A tensor can be viewed in words only where it begins at a multiple of their size in its storage.
    word = next(dtype for nbytes, dtype in _WORDS if begin % nbytes == 0)
    flat = part.view(torch.uint8)
    blocks = flat[: whole * BLOCK_NBYTES].view(word).view(whole, -1)
    # 64 places first, in 10 us: only a part that has zeros there is read as a whole, at 0.08 ms per MiB.
    sample = blocks[_places(whole), 0]
    if 4 * int(sample.count_nonzero()) > 3 * sample.numel():
        return None
    none = torch.zeros(1, dtype=torch.bool)
    filled = torch.cat([none, blocks.any(1), flat[whole * BLOCK_NBYTES :].any()[None], none]).to(torch.int8)
    edges = filled.diff()
    starts, stops = ((edges == step).nonzero().flatten() * BLOCK_NBYTES for step in (1, -1))
    stops = stops.clamp(max=part.nbytes)
    if 4 * int((stops - starts).sum()) > 3 * part.nbytes:
        return None
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


@functools.lru_cache(maxsize=256)
def _places(num_blocks: int) -> torch.Tensor:
    return torch.tensor([int(k * _GOLDEN % 1 * num_blocks) for k in range(_SAMPLES)])
