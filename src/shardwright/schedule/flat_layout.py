"""What lies in a flat parameter: several tensors, each row-major, one after another. Pure arithmetic.

    flat    [ up.weight [3, 4] | up.bias [3] | - ]      - padding, which is no tensor's
    index     0             11   12       14   15
    rank      0 .. 7           | 8 .. 15                  rank 1: elements 8..11 of up.weight, all of up.bias

A 1-D parameter that is made of others has a ``flat_layout`` attribute, by which checkpoints (and whatever
else goes by the names of the model) know its tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.errors import InputError
from shardwright.schedule.layout import ParamLayout


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
    """The tensors of a flat parameter, in order. Raises: InputError where two share an element."""

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
