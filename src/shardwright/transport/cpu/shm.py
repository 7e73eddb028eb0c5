"""Same-host transport: ranks read each other's parts straight from memory that they share.

    all-gather       my spans -> my shared memory; each peer copies them from there into its buffer
    reduce-scatter   the other ranks' spans of my gradient -> my shared memory; their owners sum there

No socket, no kernel, no helper thread: two copies per byte at memory speed.
"""

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING

import torch

from shardwright import clock
from shardwright.errors import said
from shardwright.schedule.layout import pack
from shardwright.transport.attempt import Meeting
from shardwright.transport.base import Comm, Segment, join, pieces, spread, sums_in_rank_order, whole_place
from shardwright.transport.cpu.arena import RESERVED_NBYTES, Arena, Host, MemorySegment, this_host
from shardwright.transport.process import Launch, process_state
from shardwright.transport.recorder import DONE

if TYPE_CHECKING:
    from shardwright.transport.streams import Streams

_GATHERED_NBYTES = 64 << 20  # at most so many of all ranks together lie in shared memory for a ``gather``


def open_arena(meeting: Meeting) -> Arena | str:
    """Memory segments of all ranks, mapped by all. Where any can't share memory, the reason, the same on all
    ranks: "" where they are on several hosts.

    Every rank of the meeting calls it; ranks of several hosts read the first one's place alone.
    """
    own = _create()
    if isinstance(own, str):
        return meeting.refusal("memory", f"rank {meeting.log.ranks[meeting.rank]}: {own}") or ""
    try:
        return _map_all(meeting, own)
    finally:
        os.close(own.fd)


def _create() -> Host | str:
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return "it takes Linux"
    try:
        # Tried, not only looked up: a sandbox may refuse a system call that Python has a function for.
        os.close(os.pidfd_open(os.getpid()))
        fd = _memory_file(RESERVED_NBYTES)
    except OSError as error:  # an old kernel, a limit on file sizes
        return f"the kernel gives none ({error})"
    try:
        return this_host(fd)
    except OSError as error:
        os.close(fd)
        return f"the kernel tells too little ({error})"


def _memory_file(nbytes: int) -> int:
    """A descriptor of a new anonymous file of ``nbytes``. Raises: OSError, where nothing is left open."""
    fd = os.memfd_create("shardwright")
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def _opened_again(pid: int, fd: int) -> Iterator[int]:
    """Another process' descriptor, as one of this process' own for a while.

    Raises: OSError for a process of another user, or one that has ended.
    """
    # Through /proc, so that no socket has to carry the descriptor from one process to the other.
    ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        yield ours
    finally:
        os.close(ours)


def _map_all(meeting: Meeting, own: Host) -> Arena | str:
    meeting.leave("host", json.dumps(astuple(own)))
    if (refused := meeting.refusal("memory", None)) is not None:
        return refused
    first = Host(*said(meeting.read("host", [0])[0]))
    if (refused := meeting.refusal("one host", None if own.place == first.place else "")) is not None:
        return refused
    if first.machine != "x86_64":  # whose order of stores ``MemorySegment.write_record`` relies on
        return f"it takes an x86_64 processor, this is {first.machine}"
    told = meeting.read("host", range(meeting.world))
    hosts = [Host(*said(told[rank])) for rank in range(meeting.world)]
    segments, why = [], None
    try:
        for host in hosts:
            with _opened_again(host.pid, host.fd) as fd:
                segments.append(MemorySegment(fd, len(hosts)))
    except OSError as error:  # another user, or no room in the address space
        why = f"a rank's memory can't be mapped by another ({error})"
    # From here on nobody needs another rank's descriptor any more.
    if (refused := meeting.refusal("mapped", why)) is not None:
        return refused
    return Arena(meeting.rank, segments, [host.pid for host in hosts], meeting.timeout_s, meeting.log)


class ShmComm(Comm):
    """Collectives of one mesh axis whose ranks share memory.

    sent_nbytes stays 0: nothing leaves the host.
    """

    reads_in_place = True
    uses_c10d = False
    streams: "Streams | None" = None

    def __init__(self, arena: Arena, world: int) -> None:
        self.world = world
        self.rank = arena.rank
        self.sent_nbytes = 0
        self.exposed_s: float | None = 0.0
        self.arena = arena
        self.log = arena.log
        # Every rank reads another one at each turn.
        self.peers = tuple((self.rank + shift) % world for shift in range(1, world))

    @property
    def why_plain(self) -> str:
        """See ``Comm``."""
        return "its ranks share memory"

    def all_gather(self, segments: Sequence[Segment], key: str) -> "_ShmGather":
        """See ``Comm.all_gather``."""
        start = clock.perf_counter()
        launch = self._publish([segment.part_bytes(self.rank) for segment in segments], key)
        self.spent(start)
        return _ShmGather(self, launch, segments)

    def reduce_scatter(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], key: str
    ) -> "_ShmReduction":
        """See ``Comm.reduce_scatter``."""
        start = clock.perf_counter()
        parts = [segment.part_bytes(r) for r in range(self.world) if r != self.rank for segment in segments]
        launch = self._publish(parts, key)
        self.spent(start)
        return _ShmReduction(self, launch, segments, dtypes)

    def gather(self, shard: torch.Tensor, spans: Sequence[tuple[int, int]], dst: int) -> torch.Tensor | None:
        """See ``Comm.gather``. In parts, each when ``dst`` asks for it: nobody runs ahead of who reads."""
        whole = whole_place(spans, dst, shard) if self.rank == dst else None
        part_numel = _GATHERED_NBYTES // self.world // shard.element_size()
        for start in range(0, max(1, max(stop - start for start, stop in spans)), part_numel):
            key = f"gather {spans[-1][1]} elements on rank {dst}, from {start} of each rank's"
            part = shard[:0] if self.rank == dst else shard[start : start + part_numel]
            launch = self._publish([part.contiguous().view(torch.uint8)], key, asks=dst)
            for peer in self.peers:
                read = self.arena.segments[peer].bytes[self.arena.find(peer, launch)]
                if whole is not None:
                    place = whole[slice(*spans[peer])][start : start + part_numel].view(torch.uint8)
                    place.copy_(read[: place.numel()])
                self.arena.own.mark_read(peer, launch.number)
        return whole

    def exchange(self, words: Sequence[int], key: str) -> list[list[int]]:
        """See ``Comm.exchange``. Without tensors, which take longer than the bytes."""
        if not self.peers:
            return [list(words)]
        start, arena, nbytes = clock.perf_counter(), self.arena, 8 * len(words)
        try:
            offset = arena.reserve(nbytes)
            arena.own.view[offset : offset + nbytes] = array("q", words).tobytes()
            launch = self.log.launch(key)
            arena.announce(launch, nbytes)
        except BaseException:
            arena.break_off()
            raise
        rows = [list(words) for _ in range(self.world)]
        for peer in self.peers:
            rows[peer] = arena.segments[peer].view[arena.find(peer, launch)].cast("q").tolist()
            arena.own.mark_read(peer, launch.number)
        self.spent(start)
        process_state.recorder.write((DONE, self.log.name, launch.number, clock.perf_counter(), True))
        return rows

    def spent(self, start: float) -> None:
        """Count the time since ``start`` as exposed: the host thread itself moves the bytes."""
        assert self.exposed_s is not None
        self.exposed_s += clock.perf_counter() - start

    def _publish(self, parts: list[torch.Tensor], key: str, asks: int | None = None) -> Launch:
        """asks: the rank that must have come to this operation before memory is filled for it, or None."""
        if not self.peers:
            return Launch(0, key, "", 0)
        _, total = pack([part.numel() for part in parts])
        try:
            offset = self.arena.reserve(total)
            launch = self.log.launch(key)
            if asks not in (None, self.rank):
                self.arena.find(asks, launch)
            join(parts, self.arena.own.bytes[offset : offset + total])
            self.arena.announce(launch, total)
        except BaseException:
            self.arena.break_off()
            raise
        return launch


class _Reads:
    """The peers' parts of one operation, that this rank is to read, all of them and once.

    A peer waits with its 256th operation from here for that. So an operation that nobody waits for, since its
    model was dropped or an exception came between, gives the parts back as it is dropped itself.
    """

    _unread: frozenset[int] = frozenset()
    _sums: list[torch.Tensor] | None = None

    def __init__(
        self, comm: ShmComm, launch: Launch, segments: Sequence[Segment], dtypes: Sequence[torch.dtype] = ()
    ) -> None:
        self._comm, self._launch = comm, launch
        self._segments: Sequence[Segment] = segments
        self._dtypes = dtypes
        self._unread = frozenset(comm.peers)
        comm.arena.open[launch.number] = self

    def _read(self, peer: int) -> torch.Tensor:
        arena = self._comm.arena
        return arena.segments[peer].bytes[arena.find(peer, self._launch)]

    def _done(self, peer: int) -> None:
        self._unread = self._unread - {peer}  # first: what was given back isn't read again after an interrupt
        self._comm.arena.own.mark_read(peer, self._launch.number)

    def __del__(self) -> None:
        for peer in self._unread:
            self._done(peer)


class _ShmGather(_Reads):
    """An all-gather in flight: the own part is published, the others' are still to be read."""

    def wait(self) -> None:
        """Copy every peer's spans into the buffer."""
        start = clock.perf_counter()
        for peer in self._comm.peers:
            if peer in self._unread:
                spread(self._read(peer), [segment.part_bytes(peer) for segment in self._segments])
                self._done(peer)
        self._comm.spent(start)
        process_state.recorder.write(
            (DONE, self._comm.log.name, self._launch.number, clock.perf_counter(), True)
        )

    complete = wait


class _ShmReduction(_Reads):
    """A reduce-scatter in flight: the peers' spans are published, theirs for this rank still to be summed."""

    def complete(self) -> None:
        """Sum now, for whoever waits later."""
        if self._sums is None:
            self._sums = self._summed()
        for peer in self._unread:
            self._done(peer)
        # The whole gradients may be freed from here on: who waits later needs the sums alone.
        self._segments = ()

    def wait(self) -> list[torch.Tensor]:
        """Sum this rank's spans in rank order (see ``Reduction.wait``)."""
        self.complete()
        sums = self._sums
        assert sums is not None
        self._sums = []
        return sums

    def _summed(self) -> list[torch.Tensor]:
        start = clock.perf_counter()
        comm = self._comm
        sums: list[torch.Tensor] = [segment.part(comm.rank) for segment in self._segments]
        if comm.peers:
            parts = [sums if r == comm.rank else self._received(r) for r in range(comm.world)]
            sums = sums_in_rank_order(parts, self._dtypes)
        else:  # an empty view would hold the whole gradient
            pairs = zip(sums, self._dtypes, strict=True)
            sums = [own.to(dtype, copy=not own.numel()) for own, dtype in pairs]
        comm.spent(start)
        process_state.recorder.write((DONE, comm.log.name, self._launch.number, clock.perf_counter(), True))
        return sums

    def _received(self, peer: int) -> list[torch.Tensor]:
        """The peer's parts for this rank: after those for the ranks before it."""
        joined = self._read(peer)
        ranks = [rank for rank in range(self._comm.world) if rank != peer]
        sizes = [segment.part_bytes(rank).numel() for rank in ranks for segment in self._segments]
        first = ranks.index(self._comm.rank) * len(self._segments)
        parts = pieces(joined, sizes)[first : first + len(self._segments)]
        return [part.view(s.flat.dtype) for part, s in zip(parts, self._segments, strict=True)]
