"""Tensors that lie in flat parameters, as checkpoints see them: under their own names and shapes, in boxes.

A range of a row-major tensor is a row's end, whole rows, and a row's beginning. Each is a box, and a run of
both the tensor and the range, so flat parameters need nothing of the format that others don't:

    elements 2..9 of a [3, 4]      . . x x       box (0, 2)+[1, 2]
                                   x x x x       box (1, 0)+[1, 4]
                                   x x . .       box (2, 0)+[1, 2]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardwright.checkpoint.format import Box, TensorEntry
from shardwright.schedule.layout import FlatEntry, FlatLayout


def boxes_of_range(shape: Sequence[int], first: int, stop: int) -> tuple[Box, ...]:
    """Boxes that tile elements ``first`` to ``stop`` of a row-major tensor, in order, each one run of it."""
    if first >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    inner = prod(shape[1:])
    (row, head), (last, tail) = divmod(first, inner), divmod(stop, inner)
    if row == last:
        return _in_row(row, boxes_of_range(shape[1:], head, tail))
    begun = _in_row(row, boxes_of_range(shape[1:], head, inner)) if head else ()
    rows = (row + bool(head), last)
    whole = (Box((rows[0], *[0] * (len(shape) - 1)), (rows[1] - rows[0], *shape[1:])),)
    ended = _in_row(last, boxes_of_range(shape[1:], 0, tail))
    return (*begun, *(whole if rows[0] < rows[1] else ()), *ended)


def _in_row(row: int, boxes: Sequence[Box]) -> tuple[Box, ...]:
    return tuple(Box((row, *box.offset), (1, *box.shape)) for box in boxes)


def views_of(local: torch.Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Each box with its part of ``local``, which holds one box in its shape, or one after another in 1-D."""
    at = 0
    for box in boxes:
        if tuple(local.shape) == box.shape:
            yield box, local
        else:
            yield box, local[at : at + box.numel].view(box.shape)
        at += box.numel


@dataclass(frozen=True, eq=False)
class FlatSlice:
    """The tensor ``entry`` in the 1-D ``flat``: a parameter, or an optimizer's state that is like one.

    Has of a tensor what saves and loads ask for.
    """

    flat: torch.Tensor
    entry: FlatEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def is_meta(self) -> bool:
        return self.flat.is_meta

    def held(self, range_of_flat: Box) -> tuple[Box, ...]:
        """Boxes of the tensor in a rank's range of the flat parameter."""
        (begin,), (end,) = range_of_flat.offset, range_of_flat.end
        return boxes_of_range(self.shape, *self.entry.held(begin, end))

    def local(self, flat: torch.Tensor, range_of_flat: Box) -> torch.Tensor:
        """Its elements in a rank's range of the flat parameter, which lies in ``flat``: 1-D, the same
        memory."""
        (begin,), (end,) = range_of_flat.offset, range_of_flat.end
        first, stop = self.entry.held(begin, end)
        at = self.entry.start + first - begin
        return flat[at : at + stop - first] if stop > first else flat[:0]


Saved = torch.Tensor | FlatSlice
"""What a key of a checkpoint is in memory."""


def layout_of(tensor: torch.Tensor) -> FlatLayout | None:
    """The layout of a flat parameter; None for any other tensor."""
    return getattr(tensor, "flat_layout", None)


def base_tensor(tensor: Saved) -> torch.Tensor:
    """The tensor that has the memory: itself, or the flat one that it lies in."""
    return tensor.flat if isinstance(tensor, FlatSlice) else tensor


def is_like(value: object, flat: torch.Tensor) -> bool:
    """Whether a value of the optimizer's state has an element for each of the flat parameter's."""
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def are_like(entries: Sequence[TensorEntry], slices: Sequence[FlatSlice]) -> bool:
    """Whether state has an element for each of its tensors'; of scalars only being sharded tells."""
    same = all(entry.shape == part.shape for entry, part in zip(entries, slices, strict=True))
    return same and (any(part.shape for part in slices) or entries[0].sharded)
