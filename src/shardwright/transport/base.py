"""What the rest of the house knows of a transport: the :class:`Comm` protocol and the data it moves."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shardwright.schedule.layout import ParamLayout, Spans, align, equal_spans
from shardwright.torch_private import foreach_add, foreach_add_, foreach_copy_
from shardwright.transport.cpu.pages import SMALL_NBYTES, pages_of_its_own, take_bytes
from shardwright.transport.process import LaunchLog

if TYPE_CHECKING:
    from shardwright.transport.streams import Streams


class Origin:
    """What the same segment of each step is known by, for a transport that keeps something of it."""


@dataclass(frozen=True)
class Segment:
    """One parameter's (or gradient's) part in a collective, or that of several which are gathered as one.

    flat: 1-D contiguous tensor, each rank's shard one after another. For an all-gather it is the padded
        region in the group's buffer, ``world`` equal spans long, with this rank's span already filled.
        For a reduce-scatter it is the whole gradient of this rank, without padding.
    spans: ``(start, stop)`` elements of each rank's shard in ``flat``, without padding.
    has_room: for a reduce-scatter, that ``flat`` is padded all the same, with what may be summed and dropped.
    coded: for a reduce-scatter, that parts are sent coded without loss, where that can be and is shorter.
    origin: for an all-gather, whose part it is, in the same memory or not; None of what is gathered once.
    """

    flat: torch.Tensor
    spans: Spans
    has_room: bool = False
    coded: bool = False
    origin: Origin | None = field(default=None, compare=False)
    _parts: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def part(self, rank: int) -> torch.Tensor:
        """The span of ``rank``, 1-D, in the segment's dtype."""
        start, stop = self.spans[rank]
        return self.flat[start:stop]

    def part_bytes(self, rank: int) -> torch.Tensor:
        """The same as uint8: transports move bytes. Made once, since a group's are read in every step."""
        part = self._parts.get(rank)
        if part is None:
            part = self._parts[rank] = self.part(rank).view(torch.uint8)
        return part

    def part_nbytes(self, rank: int) -> int:
        """Bytes of the span of ``rank``."""
        start, stop = self.spans[rank]
        return (stop - start) * self.flat.element_size()


class Gather(Protocol):
    """An all-gather in flight."""

    def wait(self) -> None:
        """Return when every span of every segment may be read (on CUDA: by the current stream)."""
        ...


class Reduction(Protocol):
    """A reduce-scatter in flight; it keeps its input gradients alive until ``wait`` returns."""

    def wait(self) -> list[torch.Tensor]:
        """The sums over ranks of this rank's spans, 1-D, one per segment, in the reduce dtype."""
        ...


def join(parts: list[torch.Tensor], place: torch.Tensor) -> None:
    """Copy uint8 ``parts`` one after another into ``place`` (``pack`` says how long), each aligned so that it
    can be viewed in its own dtype again."""
    if parts:  # none of a group that is kept whole: a single scalar
        foreach_copy_(pieces(place, [part.numel() for part in parts]), parts)


def spread(joined: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """The reverse of ``join``: copy what was joined elsewhere into ``parts``."""
    if parts:
        foreach_copy_(parts, pieces(joined, [part.numel() for part in parts]))


def copy_together(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its place: one call, and on a device one kernel, for all pairs that have
    the same two dtypes and strides."""
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, source in zip(places, sources, strict=True):
        if place.numel():
            key = place.dtype, source.dtype, source.device, place.stride() == source.stride()
            members = alike.setdefault(key, ([], []))
            members[0].append(place)
            members[1].append(source)
    for members in alike.values():
        foreach_copy_(*members, non_blocking=True)


def pieces(joined: torch.Tensor, sizes_nbytes: Sequence[int]) -> list[torch.Tensor]:
    """Views of uint8 parts that lie one after another (see ``join``), which are all that ``joined`` has."""
    return list(joined.split(_with_gaps(tuple(sizes_nbytes))))[::2]


@lru_cache
def _with_gaps(sizes_nbytes: tuple[int, ...]) -> list[int]:
    """Bytes of each part and of the gap behind it, by turns."""
    return [nbytes for size in sizes_nbytes for nbytes in (size, align(size) - size)]


def whole_place(spans: Sequence[tuple[int, int]], dst: int, shard: torch.Tensor) -> torch.Tensor:
    """Where rank ``dst`` collects 1-D shards on the host, with its own in place."""
    whole = pages_of_its_own(max(stop for _, stop in spans) * shard.element_size()).view(shard.dtype)
    whole[slice(*spans[dst])].copy_(shard)
    return whole


def sum_in_rank_order(parts: Sequence[torch.Tensor], dtype: torch.dtype, scratch: int | None) -> torch.Tensor:
    """``parts[0] + parts[1] + ...`` in ``dtype``, rank by rank, so that the bits don't depend on arrival.

    parts: of two or more ranks, on the host. scratch: 0 or 1: the part that the sum may overwrite (the first
        two commute); None: the sum lies in memory of its own.
    """
    first, second = (parts[1], parts[0]) if scratch == 1 else (parts[0], parts[1])
    if scratch is None:
        place = take_bytes(first.numel() * dtype.itemsize).view(dtype)
        total = torch.add(first.to(dtype), second.to(dtype), out=place)
    else:
        total = first.to(dtype).add_(second)
    for part in parts[2:]:
        total.add_(part)
    return total


def sums_in_rank_order(
    parts: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """``sum_in_rank_order`` of many, in memory of their own. parts: by rank, of two or more."""
    totals: dict[int, torch.Tensor] = {}
    small = [
        index
        for index, (first, dtype) in enumerate(zip(parts[0], dtypes, strict=True))
        if first.dtype == dtype and first.nbytes < SMALL_NBYTES
    ]
    if small:  # in calls for all of them: each by itself costs more than its numbers
        first, second, *others = ([part[index] for index in small] for part in parts)
        summed = foreach_add(first, second)
        for other in others:
            foreach_add_(summed, other)
        totals = dict(zip(small, summed, strict=True))
    for index, dtype in enumerate(dtypes):
        if index not in totals:
            totals[index] = sum_in_rank_order([part[index] for part in parts], dtype, scratch=None)
    return [totals[index] for index in range(len(dtypes))]


class LinkSpeed(NamedTuple):
    """Of the slowest rank, the same on all: seconds for a byte over the link, through coder and decoder, and
    through both where nothing has changed."""

    s: float
    coded_s: float
    unchanged_s: float


class Comm(Protocol):
    """The collectives of one mesh axis. All ranks of the axis issue the same calls in the same order.

    world, rank: number of ranks on the axis, and this rank's place on it.
    sent_nbytes: bytes that this rank has sent since the start, without coded messages. coded_nbytes: of
        these, as they were sent; 0 where the transport has none.
    exposed_s: seconds that this rank's host thread has spent in collectives, issuing them and waiting; None
        where waiting is done by a device stream and the host doesn't know.
    reads_in_place: whether a reduce-scatter reads each rank's part where it lies. Else the backend takes one
        tensor of equal parts, and segments that aren't such a tensor are copied into one.
    over_network: whether its ranks' threads send messages over a network, and not through memory or by a
        device.
    uses_c10d: whether its collectives are operations of c10d. Those are seen by torch's dispatch modes, and
        compare nothing between ranks.
    streams: the side streams that it works on, where it moves device memory; else None.
    log: its last launches. halfway: the last all-reduce, where its second half isn't issued yet.
    num_channels: that have been used on it. link, free_nbytes: see ``link.py``; None until measured.
    loads: what each rank owns of matrices, balanced by ``params/ragged.py``; None until there are any.
    """

    reads_in_place: bool
    over_network: bool = False
    uses_c10d: bool
    streams: "Streams | None"
    coded_nbytes: int = 0
    halfway: "AllReduce | None" = None
    num_channels: int = 0
    loads: Any = None
    link: LinkSpeed | None = None
    free_nbytes: int | None = None
    world: int
    rank: int
    sent_nbytes: int
    exposed_s: float | None
    log: LaunchLog

    @property
    def network(self) -> "Comm":
        """The part of it whose messages may go between hosts."""
        return self

    @property
    def why_plain(self) -> str:
        """Why its all-gathers move whole spans, whatever has changed; "" where they needn't."""
        return "the library that moves its messages must know beforehand how long they are"

    @property
    def host(self) -> "Comm":
        """The transport of host memory among the same ranks, on which words travel: itself or another."""
        return self

    def go_on(self) -> None:
        """Issue what was begun and has more hops: called before this rank waits for words of others, which
        may wait for these. No-op where collectives have one hop."""

    def separate_reductions(self, enable: bool) -> None:
        """Whether a device may run reductions beside all-gathers, as hosts do. Every rank calls it."""

    def all_gather(self, segments: Sequence[Segment], key: str) -> Gather:
        """Fill every rank's span of every segment. ``key`` names group and purpose; it is the same on all
        ranks."""
        ...

    def reduce_scatter(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], key: str
    ) -> Reduction:
        """Sum every segment's spans over ranks, in rank order, in ``dtypes`` (one per segment)."""
        ...

    def all_reduce(self, values: Sequence[torch.Tensor], key: str) -> Reduction:
        """Sum 1-D tensors over ranks: ``values``, as long on every rank, which may be overwritten.

        Every rank gets the same bits: one rank makes each sum, in rank order, and sends it to the others.
        """
        before = self.halfway
        if before is not None:  # issued a group ago, so its sums are most likely there
            before.spread()
        self.halfway = AllReduce(self, values, key)
        return self.halfway

    def gather(self, shard: torch.Tensor, spans: Sequence[tuple[int, int]], dst: int) -> torch.Tensor | None:
        """Collect 1-D shards on rank ``dst`` (a 1-D tensor on the host; None on other ranks)."""
        found = self.gather_many([shard], [spans], dst)
        return None if found is None else found[0]

    def gather_many(
        self, shards: Sequence[torch.Tensor], spans: Sequence[Sequence[tuple[int, int]]], dst: int
    ) -> list[torch.Tensor] | None:
        """``gather`` of several tensors, on all ranks the same ones. A transport has one of the two."""
        found = [self.gather(shard, each, dst) for shard, each in zip(shards, spans, strict=True)]
        return [whole for whole in found if whole is not None] if self.rank == dst else None

    def exchange(self, words: Sequence[int], key: str) -> list[list[int]]:
        """Every rank's ``words`` (int64, as many on each), in rank order. Call it on ``host``.

        Returns when all are there. Not counted in ``sent_nbytes``, which is what parameters and gradients
        cost. Raises: as the wait of an all-gather.
        """
        if self.world == 1:
            return [list(words)]
        sent_nbytes = self.sent_nbytes
        # On the host also where the program has set another default device (`torch.set_default_device`).
        table = torch.zeros(self.world, len(words), dtype=torch.int64, device="cpu")
        table[self.rank] = torch.tensor(words, dtype=torch.int64, device="cpu")
        self.all_gather([Segment(table.view(-1), equal_spans(len(words), self.world))], key).wait()
        self.sent_nbytes = sent_nbytes
        return table.tolist()

    def all_reduce_words(
        self, words: Sequence[int], combine: Callable[[int, int], int], key: str
    ) -> list[int]:
        """The ranks' ``words``, combined one by one; otherwise as ``exchange``. A word may be taken twice:
        ``combine(a, a) == a``, and it is associative and commutative."""
        rows = self.exchange(words, key)
        return [reduce(combine, column) for column in zip(*rows, strict=True)]


class AllReduce:
    """An all-reduce in flight, in two halves: a reduce-scatter and an all-gather of the same elements.

    Each rank sends ``2 (W - 1) / W`` of the bytes. The first half runs beside whatever follows; the second is
    issued with the next all-reduce of the transport, or by ``wait``: the same on all ranks.
    """

    def __init__(self, comm: Comm, values: Sequence[torch.Tensor], key: str) -> None:
        """values: see ``Comm.all_reduce``; they are kept until the first half has ended."""
        self._comm, self._key = comm, key
        self._values = list(values)
        self._layouts = [ParamLayout((value.numel(),), comm.world) for value in values]
        segments = [Segment(v, layout.spans) for v, layout in zip(self._values, self._layouts, strict=True)]
        self._reduction = comm.reduce_scatter(segments, [v.dtype for v in self._values], f"reduce {key}")
        self._segments: list[Segment] = []
        self._gather: Gather | None = None

    def spread(self) -> None:
        """Wait for the first half and issue the second, where that isn't done."""
        if self._gather is not None:
            return
        parts = self._reduction.wait()
        self._values.clear()
        for layout, own in zip(self._layouts, parts, strict=True):
            self._segments.append(Segment(own.new_empty(layout.padded_numel), layout.spans))
        foreach_copy_([segment.part(self._comm.rank) for segment in self._segments], parts)
        self._gather = self._comm.all_gather(self._segments, f"spread {self._key}")
        if self._comm.halfway is self:
            self._comm.halfway = None

    def wait(self) -> list[torch.Tensor]:
        """The sums over the axis, 1-D, one per value."""
        self.spread()
        assert self._gather is not None
        self._gather.wait()
        return [s.flat[: layout.numel] for s, layout in zip(self._segments, self._layouts, strict=True)]


class SharedGather:
    """An all-gather of several groups: the first that waits waits for all of it.

    segments: what it fills, held until then: of some groups nobody else may hold it.
    """

    def __init__(self, gather: Gather, segments: Sequence[Segment]) -> None:
        self._gather: Gather | None = gather
        self._segments = segments

    def wait(self) -> None:
        """See ``Gather.wait``; may be called by every owner."""
        if self._gather is not None:
            self._gather.wait()  # where it fails it stays, to fail for the next one too
            self._gather = None
            self._segments = []


class SharedReduction:
    """One owner's part of a reduction (a reduce-scatter, or an all-reduce) of several owners' tensors.

    totals: all sums, the same list for all owners: empty until the first of them waits. The reduction lives
        as long as an owner has its part.
    """

    def __init__(self, reduction: Reduction, place: slice, totals: list[torch.Tensor]) -> None:
        self._reduction, self._place, self._totals = reduction, place, totals

    def wait(self) -> list[torch.Tensor]:
        """See ``Reduction.wait``."""
        if not self._totals:
            self._totals += self._reduction.wait()
        return self._totals[self._place]


def shared(reduction: Reduction, counts: Sequence[int]) -> list[SharedReduction]:
    """What each owner waits for: the next ``count`` sums."""
    stops = list(itertools.accumulate(counts))
    totals: list[torch.Tensor] = []
    return [
        SharedReduction(reduction, slice(stop - count, stop), totals)
        for count, stop in zip(counts, stops, strict=True)
    ]


class Followed:
    """A reduction whose sums another collective takes on an accelerator: made on the reduce stream, once that
    waits for them. What was read is held until compute has waited for that stream."""

    def __init__(self, reduction: Reduction, streams: "Streams") -> None:
        self._held = [reduction]
        self._streams, self._due = streams, streams.reduced()

    def wait(self) -> list[torch.Tensor]:
        """Make compute wait; nothing is left to give."""
        self._streams.land(self._due)
        self._held = []
        return []
