"""Whole tensors on the host of one rank, from the shards of all: in batches, by all-gathers alone.

The bytes of all shards are taken as one row per rank, and a window of it after the other is gathered: on
every rank, of which all but one drop what they receive.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardwright.schedule.layout import ALIGNMENT_NBYTES, equal_spans, pack
from shardwright.transport.base import Comm, Segment, whole_place

WINDOW_NBYTES = 128 << 20
"""Bytes of a window, of all ranks together: what a device holds of them at once, and ``dst``'s host too."""


def collect(
    comm: Comm, shards: Sequence[torch.Tensor], spans: Sequence[Sequence[tuple[int, int]]], dst: int
) -> list[torch.Tensor] | None:
    """1-D tensors on the host of rank ``dst``; None elsewhere. Every rank calls it with the same tensors.

    spans: for each the elements of every rank. One all-gather for each ``WINDOW_NBYTES``.
    """
    sizes = [max(stop - start for start, stop in each) for each in spans]
    offsets, row_nbytes = pack([n * shard.element_size() for n, shard in zip(sizes, shards, strict=True)])
    own = [shard.contiguous().view(torch.uint8) for shard in shards]
    wholes = []
    if comm.rank == dst:
        wholes = [whole_place(each, dst, shard) for each, shard in zip(spans, shards, strict=True)]
    step = max(1, WINDOW_NBYTES // comm.world // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    for start in range(0, row_nbytes, step):
        width = min(step, row_nbytes - start)
        flat = torch.empty(comm.world * width, dtype=torch.uint8, device=own[0].device)
        row = flat.view(comm.world, width)[comm.rank]
        for part, offset in zip(own, offsets, strict=True):
            found = _overlap(offset - start, part.numel(), width)
            if found:
                place = offset - start + found.start
                row[place : place + len(found)].copy_(part[found.start : found.stop])
        key = f"collect {row_nbytes} bytes of each rank on rank {dst}, from {start}"
        # Not messages to ``dst``, for which an accelerator opens buffers for each pair of ranks; and not
        # tensor by tensor, of which each would cost a collective.
        comm.all_gather([Segment(flat, equal_spans(width, comm.world))], key).wait()
        if wholes:
            rows = flat.cpu().view(comm.world, width)
            for whole, each, offset in zip(wholes, spans, offsets, strict=True):
                _place(whole, each, rows, offset - start)
    return wholes or None


def take_values_of_rank_0(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values of tensors that aren't sharded yet. Every rank calls it.

    What is drawn at random without a seed differs from rank to rank, and shards would be cut out of
    different tensors. device: the one of the process group; a tensor at a time is there.
    """
    if dist.is_initialized():
        for tensor in tensors:
            value = tensor.detach().to(device)
            dist.broadcast(value, 0)
            tensor.data.copy_(value)


def _overlap(offset: int, nbytes: int, width: int) -> range:
    """Return the bytes of a part in a window, from which it begins ``offset`` bytes away."""
    return range(max(0, -offset), min(nbytes, width - offset))


def _place(whole: torch.Tensor, spans: Sequence[tuple[int, int]], rows: torch.Tensor, offset: int) -> None:
    """Copy what the window has of one tensor, whose shards begin ``offset`` bytes from where it does."""
    place, itemsize = whole.view(torch.uint8), whole.element_size()
    for row, (first, last) in zip(rows, spans, strict=True):
        found = _overlap(offset, (last - first) * itemsize, rows.shape[1])
        if found:
            part = row[offset + found.start : offset + found.stop]
            place[first * itemsize + found.start :][: len(found)].copy_(part)
