"""Laying the unsharded faces of a group's parameters into one buffer."""

from collections.abc import Sequence

import torch

from shardwright.params.buffer import Buffer, ReorderedBuffer
from shardwright.params.param import ShardedParam
from shardwright.schedule.layout import GroupLayout, contiguous_strides

Bound = Sequence[tuple[ShardedParam, torch.dtype]]
"""Parameters, and the dtypes that they have while unsharded."""


def layout_of(bound: Bound) -> GroupLayout:
    """Where they lie, one after another."""
    return GroupLayout(tuple(param.layout for param, _ in bound), tuple(dtype.itemsize for _, dtype in bound))


def own_buffer(bound: Bound, device: torch.device) -> Buffer:
    """A buffer of this rank's own that they lie in, each contiguous, freed."""
    layout = layout_of(bound)
    across = [(param, dtype) for param, dtype in bound if not param.layout.in_order]
    where = layout_of(across)
    wire, places = Buffer(where.nbytes, device), dict(zip(across, where.offsets_nbytes, strict=True))
    buffer = ReorderedBuffer(layout.nbytes, wire, device) if across else Buffer(layout.nbytes, device)
    buffer.alloc()
    for each, offset in zip(bound, layout.offsets_nbytes, strict=True):
        param, dtype = each
        if isinstance(buffer, ReorderedBuffer) and each in places:
            strides = contiguous_strides(param.layout.shape)
            face, filled = (buffer.tensor(dtype, offset, param.layout.shape, strides) for _ in range(2))
            param.bind(wire, places[each], dtype, face)
            gathered = wire.tensor(dtype, places[each], param.layout.shape, param.layout.strides)
            buffer.pairs.append((filled, gathered))  # not the face: filling is no in-place change of a weight
        else:
            param.bind(buffer, offset, dtype)
    buffer.free()
    return buffer
