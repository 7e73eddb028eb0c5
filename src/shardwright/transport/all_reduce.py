"""The all-reduce over an axis that holds copies: a reduce-scatter and an all-gather of the same elements.

Each rank sends ``2 (W - 1) / W`` of the bytes, and every rank receives the sum that one rank made, in rank
order: the copies stay equal bit for bit, whatever the transport.
"""

from collections.abc import Sequence

import torch

from shardwright.schedule.layout import ParamLayout
from shardwright.torch_private import foreach_copy_
from shardwright.transport.base import Comm, Segment


class AllReduce:
    """An all-reduce in flight. Its first half runs beside whatever follows; ``wait`` runs the second."""

    def __init__(self, comm: Comm, values: Sequence[torch.Tensor], key: str) -> None:
        """values: 1-D tensors of the same sizes on every rank; they are kept until ``wait`` returns."""
        self._comm = comm
        self._key = key
        self._values = list(values)
        self._layouts = [ParamLayout((value.numel(),), comm.world) for value in values]
        segments = [Segment(v, layout.spans) for v, layout in zip(self._values, self._layouts, strict=True)]
        self._reduction = comm.reduce_scatter(segments, [v.dtype for v in self._values], f"reduce {key}")

    def wait(self) -> list[torch.Tensor]:
        """The sums over the axis, 1-D, one per value."""
        segments, parts = [], self._reduction.wait()
        for layout, own in zip(self._layouts, parts, strict=True):
            segments.append(Segment(own.new_empty(layout.padded_numel), layout.spans))
        places = [segment.part(self._comm.rank) for segment in segments]
        foreach_copy_(places, parts)
        self._comm.all_gather(segments, f"spread {self._key}").wait()
        self._values.clear()
        return [segment.flat[: layout.numel] for segment, layout in zip(segments, self._layouts, strict=True)]
