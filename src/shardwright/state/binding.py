"""Laying the unsharded faces of a group's parameters into one buffer."""

from collections.abc import Sequence

import torch

from shardwright.plan.layout import GroupLayout
from shardwright.state.buffer import Buffer
from shardwright.state.param import ShardedParam

Bound = Sequence[tuple[ShardedParam, torch.dtype]]
"""Parameters, and the dtypes that they have while unsharded."""


def layout_of(bound: Bound) -> GroupLayout:
    """Where they lie, one after another."""
    return GroupLayout(tuple(param.layout for param, _ in bound), tuple(dtype.itemsize for _, dtype in bound))


def own_buffer(bound: Bound, device: torch.device) -> Buffer:
    """A buffer of this rank's own that they lie in, freed."""
    layout = layout_of(bound)
    buffer = Buffer(layout.nbytes, device)
    buffer.alloc()
    for (param, dtype), offset in zip(bound, layout.offsets_nbytes, strict=True):
        param.bind(buffer, offset, dtype)
    buffer.free()
    return buffer
