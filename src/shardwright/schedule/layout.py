"""Where each element of a parameter lives: shapes + world -> spans, padding, offsets. Pure arithmetic.

Each rank's shard is one contiguous span of what is gathered. A parameter that is sharded on another dim than
the first is gathered with that dim outermost (``ParamLayout.strides``), or together with others, shard after
shard (``ParamLayout.stacked``). Three ranks, a parameter of 7 rows (``torch.chunk``'s split, which is also
DTensor's ``Shard``: every rank holds ``ceil(7 / 3) = 3`` rows until none are left)::

    rows        0  1  2 | 3  4  5 | 6  -  -        - padding, never sent between hosts, never seen
    rank        0       | 1       | 2

The unsharded parameters of a group lie one after another in one buffer, each padded to ``world`` equal
spans and each aligned, so that an all-gather can be received straight into the place of use::

    buffer  [ p0: rank 0 | rank 1 | rank 2 ][ p1: rank 0 | rank 1 | rank 2 ][ ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import ClassVar

from shardwright.errors import InputError

ALIGNMENT_NBYTES = 64  # a cache line; a multiple of every dtype's size and of NCCL's 16-byte vector loads


@dataclass(frozen=True)
class Spans(Sequence[tuple[int, int]]):
    """``(start, stop)`` elements of each rank's part of a flat tensor: a rule, so that none of it grows with
    the world.

    Parts of ``longest`` elements one after another, until nothing is left at ``end``. gap: elements between
    one part and the next; ``-longest``: all parts are the same.
    """

    world: int
    longest: int
    end: int
    gap: int = 0
    is_ragged: ClassVar[bool] = False  # whether parts are of different sizes

    def __len__(self) -> int:
        return self.world

    def __getitem__(self, rank: int) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not -self.world <= rank < self.world:
            raise IndexError(f"rank {rank} of {self.world}")
        start = min(rank % self.world * (self.longest + self.gap), self.end)
        return start, min(start + self.longest, self.end)

    @cached_property
    def is_chunked(self) -> bool:
        """Whether there are no gaps: with padding behind the end each part lies where equal parts would."""
        return self.gap == 0

    @cached_property
    def is_even(self) -> bool:
        """Whether all parts are equal and one after another."""
        return self.gap == 0 and self.end == self.world * self.longest

    def joined(self, count: int) -> "Spans":
        """One part in place of each ``count``, which follow one another."""
        return Spans(self.world // count, self._reach(count), self.end, self.gap)

    def within(self, first: int, count: int) -> "Spans":
        """Those of the ``count`` ranks from rank ``first`` on, in a tensor that begins with its part."""
        start = first * (self.longest + self.gap)
        return Spans(count, self.longest, min(max(self.end - start, 0), self._reach(count)), self.gap)

    def _reach(self, count: int) -> int:
        return count * self.longest + (count - 1) * self.gap


@dataclass(frozen=True)
class RaggedSpans(Spans):
    """Parts of any sizes one after another. bounds: where each begins, and the end."""

    bounds: tuple[int, ...] = ()
    is_ragged: ClassVar[bool] = True

    @staticmethod
    def of(bounds: Sequence[int]) -> Spans:
        """Parts between neighbouring ``bounds``, the first of which is 0."""
        longest = max(stop - start for start, stop in pairwise(bounds))
        if longest * (len(bounds) - 1) == bounds[-1]:
            return equal_spans(longest, len(bounds) - 1)
        return RaggedSpans(len(bounds) - 1, longest, bounds[-1], bounds=tuple(bounds))

    def __getitem__(self, rank: int) -> tuple[int, int]:
        if not -self.world <= rank < self.world:
            raise IndexError(f"rank {rank} of {self.world}")
        rank %= self.world
        return self.bounds[rank], self.bounds[rank + 1]

    @cached_property
    def is_chunked(self) -> bool:
        """See ``Spans``."""
        return False

    def joined(self, count: int) -> Spans:
        """See ``Spans``."""
        return RaggedSpans.of(self.bounds[::count])

    def within(self, first: int, count: int) -> Spans:
        """See ``Spans``."""
        bounds = self.bounds[first : first + count + 1]
        return RaggedSpans.of([bound - bounds[0] for bound in bounds])


def equal_spans(numel: int, world: int) -> Spans:
    """Parts of ``numel`` elements for each of ``world`` ranks, one after another."""
    return Spans(world, numel, numel * world)


@dataclass(frozen=True)
class ParamLayout:
    """How one parameter of logical ``shape`` is split over ``world`` ranks along ``dim``.

    ``dim=None`` keeps the parameter whole on every rank (a scalar can't be split).
    sizes: rows of each rank, where these were chosen (``params/ragged.py``), of dim 0.
    Raises: InputError for a dim that the shape doesn't have.
    """

    shape: tuple[int, ...]
    world: int
    dim: int | None = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.world < 1:
            raise InputError(f"world must be at least 1, got {self.world}")
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise InputError(
                f"can't shard dim {self.dim} of a parameter of shape {list(self.shape)}: "
                f"it has dims 0..{len(self.shape) - 1}"
            )

    @cached_property
    def numel(self) -> int:
        """Elements of the logical parameter."""
        return prod(self.shape)

    @cached_property
    def rows(self) -> int:
        """Size of the sharded dim (1 for a parameter that is kept whole)."""
        return 1 if self.dim is None else self.shape[self.dim]

    @cached_property
    def row_numel(self) -> int:
        """Elements in one slice of the sharded dim."""
        if self.dim is None:
            return self.numel
        return prod(size for dim, size in enumerate(self.shape) if dim != self.dim)

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of every rank but the last ones: ``ceil(rows / world)``."""
        return self.rows if self.dim is None else -(-self.rows // self.world)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the region in the group's buffer: ``world`` equal spans."""
        return self.numel if self.dim is None else self.chunk_rows * self.world * self.row_numel

    def row_range(self, rank: int) -> tuple[int, int]:
        """``(start, stop)`` rows of ``rank``'s shard; empty where the rows don't reach this rank."""
        if self.sizes is not None:
            return self._bounds[rank], self._bounds[rank + 1]
        if self.dim is None:
            return 0, self.rows
        start = min(rank * self.chunk_rows, self.rows)
        return start, min(start + self.chunk_rows, self.rows)

    def span(self, rank: int) -> tuple[int, int]:
        """``(start, stop)`` elements of ``rank``'s shard in the storage order, without padding."""
        start, stop = self.row_range(rank)
        return start * self.row_numel, stop * self.row_numel

    @cached_property
    def spans(self) -> Spans:
        """``span(rank)`` of every rank."""
        if self.sizes is not None:
            return RaggedSpans.of([bound * self.row_numel for bound in self._bounds])
        if self.dim is None:  # the whole of it is every rank's, in the same place
            return Spans(self.world, self.numel, self.numel, -self.numel)
        return Spans(self.world, self.chunk_rows * self.row_numel, self.numel)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes or ()))

    def shard_numel(self, rank: int) -> int:
        """Elements of ``rank``'s shard."""
        start, stop = self.span(rank)
        return stop - start

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of ``rank``'s shard: the logical shape with the sharded dim cut."""
        start, stop = self.row_range(rank)
        return tuple(stop - start if dim == self.dim else size for dim, size in enumerate(self.shape))

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Element strides of the logical parameter in a storage that has the sharded dim first.

        They are the contiguous strides for ``dim`` 0 and ``None``. They also fit a shard of any size along
        the sharded dim, since that dim is outermost.
        """
        first = 0 if self.dim is None else self.dim
        order = [first, *(dim for dim in range(len(self.shape)) if dim != first)] if self.shape else []
        strides = [0] * len(self.shape)
        step = 1
        for dim in reversed(order):
            strides[dim] = step
            # A dim of no elements counts as one, as in torch's contiguous strides.
            step *= max(self.shape[dim], 1)
        return tuple(strides)

    @cached_property
    def outer(self) -> int:
        """Product of the dims left of the sharded one."""
        return prod(self.shape[: self.dim or 0])

    @cached_property
    def in_order(self) -> bool:
        """Whether the storage order is the contiguous parameter's: no larger dim is left of the sharded."""
        return self.outer <= 1

    def like(self, shape: tuple[int, ...]) -> "ParamLayout":
        """The layout of another shape that is cut in the same way: in the same rows, where these are as
        many."""
        sizes = self.sizes if shape[:1] == self.shape[:1] else None
        return ParamLayout(shape, self.world, self.dim, sizes)

    def stacked(self, outer: int) -> "ParamLayout":
        """The layout of ``outer`` slices ``shape[dim:]`` one below the other: of several parameters that
        differ in the dims left of the sharded one only, as one. That has two dims or more, and the second is
        sharded; each rank's part is taken as contiguous, ``[outer, its slice of dim, ...]``."""
        return _cut_on_the_second((outer, *self.shape[self.dim :]), self.world)


@lru_cache
def _cut_on_the_second(shape: tuple[int, ...], world: int) -> ParamLayout:
    return ParamLayout(shape, world, 1)


@dataclass(frozen=True)
class GroupLayout:
    """Where the parameters of a group lie in its buffer.

    params: one layout per parameter. itemsizes: bytes of an element while unsharded, one per parameter.
    """

    params: tuple[ParamLayout, ...]
    itemsizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.params) == len(self.itemsizes)
        assert len({layout.world for layout in self.params}) <= 1, "a group has one world"

    @cached_property
    def offsets_nbytes(self) -> tuple[int, ...]:
        """Byte offset of each parameter's region, aligned to ``ALIGNMENT_NBYTES``."""
        offsets, end = [], 0
        for layout, itemsize in zip(self.params, self.itemsizes, strict=True):
            offsets.append(end)
            end = align(end + layout.padded_numel * itemsize)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, padding and alignment included."""
        if not self.params:
            return 0
        return align(self.offsets_nbytes[-1] + self.params[-1].padded_numel * self.itemsizes[-1])

    def shard_nbytes(self, rank: int) -> int:
        """Bytes of ``rank``'s shards in the unsharded dtype, without padding."""
        return sum(p.shard_numel(rank) * size for p, size in zip(self.params, self.itemsizes, strict=True))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor."""
    return ParamLayout(shape, 1, None).strides


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT_NBYTES``."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def pack(sizes_nbytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Aligned byte offsets of pieces laid one after another, and the bytes of the whole."""
    offsets, end = [], 0
    for nbytes in sizes_nbytes:
        offsets.append(end)
        end += align(nbytes)
    return tuple(offsets), end


@dataclass(frozen=True)
class FlatEntry:
    """One tensor in a flat parameter: ``shape``, and the element ``start`` at which it begins.

    ``name`` is relative to the module that has the flat parameter; ``aliases`` are further names of the same
    tensor (tied weights), relative to it too.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    def held(self, begin: int, end: int) -> tuple[int, int]:
        """``(first, stop)`` elements of the tensor that lie in elements ``begin`` to ``end`` of the flat
        parameter; an empty range where none do."""
        first = min(max(begin - self.start, 0), self.numel)
        return first, max(first, min(end - self.start, self.numel))


@dataclass(frozen=True)
class FlatLayout:
    """The tensors of a flat parameter, each row-major, in order.

        flat    [ up.weight [3, 4] | up.bias [3] | - ]      - padding, which is no tensor's
        index     0             11   12       14   15
        rank      0 .. 7           | 8 .. 15                  rank 1: elements 8..11 of up.weight, and up.bias

    A 1-D parameter that is made of others has a ``flat_layout`` attribute, by which checkpoints (and whatever
    else goes by the names of the model) know its tensors. Raises: InputError where two share an element.
    """

    entries: tuple[FlatEntry, ...]

    def __post_init__(self) -> None:
        end = 0
        for entry in self.entries:
            if entry.start < end:
                raise InputError(
                    f"{entry.name} begins at element {entry.start} of its flat parameter, the tensor before "
                    f"it ends at {end}"
                )
            end = entry.start + entry.numel

    @staticmethod
    def of(tensors: Sequence[tuple[str, Sequence[int]]]) -> "FlatLayout":
        """``(name, shape)`` one after another, without gaps."""
        entries, end = [], 0
        for name, shape in tensors:
            entries.append(FlatEntry(name, tuple(shape), end))
            end += prod(shape)
        return FlatLayout(tuple(entries))

    @property
    def numel(self) -> int:
        """Elements up to the end of the last tensor."""
        return max((entry.start + entry.numel for entry in self.entries), default=0)

    def over(self, world: int, multiple: int = 1) -> ParamLayout:
        """How it is cut over ``world`` ranks: evenly, whatever the borders of its tensors.

        multiple: the part of a rank is a multiple of so many elements, padding included.
        """
        if multiple == 1:
            return ParamLayout((self.numel,), world)
        return ParamLayout((-(-self.numel // multiple), multiple), world)
