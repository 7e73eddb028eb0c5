"""A caller's own all-gather or reduce-scatter, in the shape that ``set_custom_all_gather`` takes.

Such a callable moves one flat tensor: ``comm.allocate(size, dtype=, device=)`` gives the memory and
``comm(output_tensor=, input_tensor=, group=[, op=], async_op=)`` moves it. Here segments are copied into and
out of it; each rank's part is padded to the longest one.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright import clock
from shardwright.transport.base import Comm, Gather, Reduction, Segment
from shardwright.transport.process import Launch, LaunchLog, process_state
from shardwright.transport.process_group import padded
from shardwright.transport.recorder import DONE
from shardwright.transport.streams import Streams


class CustomComm(Comm):
    """``inner``, with one or both collectives replaced by the caller's."""

    reads_in_place = False
    uses_c10d = True
    streams: Streams | None = None

    def __init__(self, inner: Comm, group: ProcessGroup, all_gather: Any, reduce_scatter: Any) -> None:
        self.inner = inner
        self.group = group
        self.custom_all_gather = all_gather
        self.custom_reduce_scatter = reduce_scatter
        self.world, self.rank, self.log = inner.world, inner.rank, inner.log
        self._own_log = inner.log.of_caller
        # What the caller's collectives send and wait isn't known; the transport inside counts its own.
        self.sent_nbytes = 0
        self.exposed_s: float | None = None

    @property
    def host(self) -> Comm:
        """See ``Comm.host``."""
        return self.inner.host

    def all_gather(self, segments: Sequence[Segment], key: str) -> Gather:
        """See ``Comm.all_gather``. All segments travel in one tensor, as bytes where their dtypes differ."""
        if self.custom_all_gather is None or not segments or _has_ragged(segments):
            return self.inner.all_gather(segments, key)
        dtypes = {segment.flat.dtype for segment in segments}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        # Every segment is padded to equal spans, so each rank's row is one span of each.
        rows = [segment.flat.view(self.world, -1).view(dtype) for segment in segments]
        size, device = sum(row.shape[1] for row in rows), segments[0].flat.device
        comm = self.custom_all_gather
        received = comm.allocate((size * self.world,), dtype=dtype, device=device)
        sent = received.view(self.world, -1)[self.rank]
        torch.cat([row[self.rank] for row in rows], out=sent)
        with self._own_log.beginning(self.rank):
            flight = _CallersFlight(self._own_log, self._own_log.launch(key), device)
            flight.begin(comm, output_tensor=received, input_tensor=sent, group=self.group, async_op=True)
        return _CustomGather(flight, received.view(self.world, -1), rows)

    def reduce_scatter(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], key: str
    ) -> Reduction:
        """See ``Comm.reduce_scatter``. One tensor in the widest reduce dtype."""
        if self.custom_reduce_scatter is None or not segments or _has_ragged(segments):
            return self.inner.reduce_scatter(segments, dtypes, key)
        dtype = reduce(torch.promote_types, dtypes)
        comm, device = self.custom_reduce_scatter, segments[0].flat.device
        longest = [segment.spans.longest for segment in segments]
        sent = comm.allocate((sum(longest) * self.world,), dtype=dtype, device=device)
        received = comm.allocate((sum(longest),), dtype=dtype, device=device)
        rows = [flat.view(self.world, -1) for flat in padded(segments, [dtype] * len(segments))]
        torch.cat(rows, 1, out=sent.view(self.world, -1))
        tensors = {"output_tensor": received, "input_tensor": sent}
        with self._own_log.beginning(self.rank):
            flight = _CallersFlight(self._own_log, self._own_log.launch(key), device)
            flight.begin(comm, **tensors, group=self.group, op=dist.ReduceOp.SUM, async_op=True)
        owned = [stop - start for start, stop in (segment.spans[self.rank] for segment in segments)]
        places = zip(received.split(longest), owned, dtypes, strict=True)
        return _CustomReduction(flight, sent, [(place[:numel], kind) for place, numel, kind in places])

    def gather_many(
        self, shards: Sequence[torch.Tensor], spans: Sequence[Sequence[tuple[int, int]]], dst: int
    ) -> list[torch.Tensor] | None:
        """See ``Comm.gather_many``."""
        return self.inner.gather_many(shards, spans, dst)


class _CallersFlight:
    """A caller's collective, as the watch and the recorder see it: like one of the transport's own.

    On an accelerator ``wait`` makes the current stream wait, so that nothing tells when it ends.
    """

    def __init__(self, log: LaunchLog, launch: Launch, device: torch.device) -> None:
        self._log, self._launch, self._device = log, launch, device
        self._work: Any = None

    def begin(self, comm: Any, **arguments: Any) -> None:
        """Call it; it may block, and return None."""
        with self._log.waiting(self._launch):
            self._work = comm(**arguments)
        if self._work is None:
            self._end()

    def wait(self) -> None:
        """Wait for what it returned."""
        if self._work is not None:
            with self._log.waiting(self._launch):
                self._work.wait()
            self._end()

    def _end(self) -> None:
        if self._device.type == "cpu":
            all_came = len(self._log.ranks) > 1
            process_state.recorder.write(
                (DONE, self._log.name, self._launch.number, clock.perf_counter(), all_came)
            )


def _has_ragged(segments: Sequence[Segment]) -> bool:
    """Whether some rank's part is of a size of its own: padding to the longest would send much of nothing."""
    return any(segment.spans.is_ragged for segment in segments)


class _CustomGather:
    """A caller's all-gather in flight."""

    def __init__(self, flight: _CallersFlight, received: torch.Tensor, rows: list[torch.Tensor]) -> None:
        self._flight = flight
        self._received = received
        self._rows = rows

    def wait(self) -> None:
        """Wait for it, then put every rank's part in its place."""
        self._flight.wait()
        torch.split_with_sizes_copy(self._received, [row.shape[1] for row in self._rows], 1, out=self._rows)


class _CustomReduction:
    """A caller's reduce-scatter in flight."""

    def __init__(
        self, flight: _CallersFlight, sent: torch.Tensor, sums: list[tuple[torch.Tensor, torch.dtype]]
    ) -> None:
        self._flight = flight
        self._sent: torch.Tensor | None = sent
        self._sums = sums

    def wait(self) -> list[torch.Tensor]:
        """Wait for it; the sums in their reduce dtypes."""
        self._flight.wait()
        self._sent = None  # who waits here has waited for all that reads it
        return [total.to(dtype) for total, dtype in self._sums]
