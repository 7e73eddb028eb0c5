"""NCCL transport: one coalesced collective per group, straight between the places of use.

NCCL runs collectives on its own side streams: a call made on the compute stream waits, on the device, for
what that stream has queued so far, and ``wait`` makes the compute stream wait for the collective. So
buffers that are allocated and freed on the compute stream are never touched too early or too late, without
``record_stream`` (which would keep freed memory from being reused until the host catches up).

The same code runs over any backend that has ``all_gather_single`` and ``reduce_scatter_single``; without
coalescing (``coalesce=False``) that includes Gloo, which is how its layout logic is tested without a GPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup

from shardwright.comm.base import Piece


class NcclComm:
    """Collectives of one mesh axis over two process groups, so that gathers don't queue behind reductions.

    On CUDA the host never blocks, so ``exposed_s`` is None: what is exposed is seen on the device only.
    """

    reads_in_place = False

    def __init__(self, gather_group: ProcessGroup, reduce_group: ProcessGroup, coalesce: bool = True) -> None:
        self.world = gather_group.size()
        self.rank = gather_group.rank()
        self.sent_nbytes = 0
        self.exposed_s: float | None = None
        self._gather_group = gather_group
        self._reduce_group = reduce_group
        self._coalesce = coalesce

    def all_gather(self, pieces: Sequence[Piece], key: str) -> "_NcclGather":
        """See ``Comm.all_gather``. In place: each rank's input is its own span of the output."""
        works: list[Any] = []
        for members in _by_dtype(pieces).values() if self.world > 1 else ():
            outputs = [pieces[i].flat for i in members]
            inputs = [flat.view(self.world, -1)[self.rank] for flat in outputs]
            self.sent_nbytes += sum(shard.nbytes for shard in inputs) * (self.world - 1)
            if self._coalesce:
                options = AllgatherOptions()
                options.asyncOp = True
                works.append(self._gather_group.all_gather_single_coalesced(outputs, inputs, options))
            else:
                works += [
                    dist.all_gather_single(full, shard, self._gather_group, async_op=True)
                    for full, shard in zip(outputs, inputs, strict=True)
                ]
        return _NcclGather(works)

    def reduce_scatter(
        self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], key: str
    ) -> "_NcclReduction":
        """See ``Comm.reduce_scatter``. Sums in NCCL's order: repeatable for one world, not a fixed one."""
        owned = [stop - start for start, stop in (piece.spans[self.rank] for piece in pieces)]
        inputs = [self._padded(piece, dtype) for piece, dtype in zip(pieces, dtypes, strict=True)]
        if self.world == 1:
            return _NcclReduction([], inputs, inputs, owned)
        outputs = [flat.new_empty(flat.numel() // self.world) for flat in inputs]
        works: list[Any] = []
        for members in _by_dtype(Piece(flat, ()) for flat in inputs).values():
            self.sent_nbytes += sum(outputs[i].nbytes for i in members) * (self.world - 1)
            if self._coalesce:
                options = ReduceScatterOptions()
                options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
                options.asyncOp = True
                works.append(
                    self._reduce_group.reduce_scatter_single_coalesced(
                        [outputs[i] for i in members], [inputs[i] for i in members], options
                    )
                )
            else:
                works += [
                    dist.reduce_scatter_single(outputs[i], inputs[i], group=self._reduce_group, async_op=True)
                    for i in members
                ]
        return _NcclReduction(works, inputs, outputs, owned)

    def gather(self, shard: torch.Tensor, spans: Sequence[tuple[int, int]], dst: int) -> torch.Tensor | None:
        """See ``Comm.gather``."""
        group = self._gather_group
        if self.rank != dst:
            if shard.numel():
                group.send([shard.contiguous()], dst, 0).wait()
            return None
        whole = shard.new_empty(max(stop for _, stop in spans))
        whole[slice(*spans[dst])].copy_(shard)
        for peer, span in enumerate(spans):
            if peer != dst and span[1] > span[0]:
                group.recv([whole[slice(*span)]], peer, 0).wait()
        return whole

    def _padded(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """The gradient in the reduce dtype, each rank's span padded with zeros to the longest one."""
        chunk = max(stop - start for start, stop in piece.spans)
        if piece.spans == tuple((r * chunk, (r + 1) * chunk) for r in range(self.world)):
            return piece.flat[: chunk * self.world].to(dtype)
        padded = piece.flat.new_zeros(chunk * self.world, dtype=dtype)
        for rank, (start, stop) in enumerate(piece.spans):
            padded[rank * chunk : rank * chunk + stop - start].copy_(piece.flat[start:stop])
        return padded


class _NcclGather:
    """An all-gather in flight."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Make the current stream wait for it."""
        for work in self._works:
            work.wait()


class _NcclReduction:
    """A reduce-scatter in flight; holds its inputs until the current stream waits for it."""

    def __init__(
        self, works: list[Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor], owned: list[int]
    ) -> None:
        self._works = works
        self._inputs = inputs
        self._outputs = outputs
        self._owned = owned

    def wait(self) -> list[torch.Tensor]:
        """Make the current stream wait for it; the sums, without padding."""
        for work in self._works:
            work.wait()
        self._inputs = []
        return [total[:numel] for total, numel in zip(self._outputs, self._owned, strict=True)]


def _by_dtype(pieces: Iterable[Piece]) -> dict[torch.dtype, list[int]]:
    """Indices by dtype, empty pieces left out: one coalesced call moves one dtype."""
    members: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        if piece.flat.numel():
            members[piece.flat.dtype].append(index)
    return dict(members)
