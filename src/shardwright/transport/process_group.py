"""NCCL transport: one coalesced collective per group, straight between the places of use.

What stream is current here, and when memory may be used again, is settled in ``transport/streams.py``.

The same code runs over any backend that has ``all_gather_single`` and ``reduce_scatter_single``. Without
side streams that includes Gloo, one collective per segment: what CPU ranks take that can't open sockets, and
how the layout logic is tested without a GPU.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    AllgatherOptions,  # pyright: ignore[reportPrivateImportUsage]
    AllreduceCoalescedOptions,  # pyright: ignore[reportPrivateImportUsage]
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,  # pyright: ignore[reportPrivateImportUsage]
)

from shardwright import clock
from shardwright.schedule.layout import Spans, pack
from shardwright.torch_private import (
    all_gather_coalesced_of,
    all_gather_of,
    foreach_copy_,
    foreach_zero_,
    reduce_scatter_coalesced_of,
    reduce_scatter_of,
)
from shardwright.transport.base import Comm, Reduction, Segment
from shardwright.transport.collect import collect
from shardwright.transport.process import LaunchLog, close, process_state
from shardwright.transport.recorder import DONE
from shardwright.transport.streams import Due, Streams


class ProcessGroupComm(Comm):
    """Collectives of one mesh axis: on an accelerator over one communicator, in the order in which they are
    launched, which is the same on all ranks. Over Gloo gathers and reductions have a group each, on an
    accelerator where that was asked.

    On CUDA the host never blocks, so ``exposed_s`` is None: what is exposed is seen on the device only. Over
    Gloo the host waits, and its waits are counted.
    """

    reads_in_place = False
    uses_c10d = True

    def __init__(
        self,
        gather_group: ProcessGroup,
        reduce_group: ProcessGroup,
        log: LaunchLog,
        streams: Streams | None,
        host: Comm | None = None,
        make_group: Callable[[LaunchLog], ProcessGroup] | None = None,
    ) -> None:
        """streams: None over Gloo, which coalesces nothing and waits for the current stream by itself.
        host: the transport of the same ranks for what they agree on; None: these groups move host tensors.
        make_group: makes one more group of these ranks, on which what is in that log travels.
        """
        self.world = gather_group.size()
        self.rank = gather_group.rank()
        self.log = log
        self.sent_nbytes = 0
        self.exposed_s: float | None = 0.0 if streams is None else None
        self._gather_group = gather_group
        self._reduce_group = reduce_group
        self.streams = streams
        self.times = None if streams is None or self.world == 1 else streams.times
        self._host = host
        self._make_group = make_group
        self._reduce_log = log

    @property
    def host(self) -> Comm:
        """See ``Comm.host``."""
        return self if self._host is None else self._host

    def separate_reductions(self, enable: bool) -> None:
        """See ``Comm.separate_reductions``. Another log, as a log counts the operations of one group."""
        if self._make_group is not None and enable != (self._reduce_log is not self.log):
            self._reduce_log = LaunchLog(self.log.ranks, "reductions ") if enable else self.log
            self._reduce_group = self._make_group(self._reduce_log) if enable else self._gather_group

    def all_gather(self, segments: Sequence[Segment], key: str) -> "_NcclGather":
        """See ``Comm.all_gather``. In place: each rank's input is its own span of the output."""
        with self._beginning(self.log):
            flight = _Flight(self, self.log, key)
            if self.streams is None:
                self._launch_gather(flight, segments)
                return _NcclGather(flight, None, None)
            with self.streams.gathering([segment.flat for segment in segments]):
                # Before the launch: NCCL runs it on a stream of its own, behind what gather has queued by
                # now.
                due = self.streams.gathered()
                self._launch_gather(flight, segments)
            return _NcclGather(flight, self.streams, due)

    def _beginning(self, log: LaunchLog) -> Any:
        return log.beginning(self.rank, self._close)

    def _close(self, _: str) -> None:
        for group in {*self.log.groups, *self._reduce_log.groups}:
            close(group)

    def _launch_gather(self, flight: "_Flight", segments: Sequence[Segment]) -> None:
        begun = None if self.times is None else self.times.begin()
        # As bytes: NCCL has no int16, complex or float8_e8m0fnu, Gloo no float8. One call moves all dtypes.
        ragged = [each for each in segments if each.spans.is_ragged]
        equal = segments if self.world > 1 else ()
        flats = [each.flat for each in equal if each.flat.numel() and not each.spans.is_ragged]
        outputs = [flat.view(torch.uint8) for flat in flats]
        inputs = [flat.view(self.world, -1)[self.rank] for flat in outputs]
        self.sent_nbytes += sum([shard.nbytes for shard in inputs]) * (self.world - 1)
        if self.streams is not None and outputs:
            options = AllgatherOptions()
            options.asyncOp = True
            flight.add(all_gather_coalesced_of(self._gather_group)(outputs, inputs, options))
        else:
            flight.works.extend(
                all_gather_of(dist)(full, shard, self._gather_group, async_op=True)
                for full, shard in zip(outputs, inputs, strict=True)
            )
        for segment in ragged:
            self._spread_parts(flight, segment)
        if self.times is not None:
            self.times.end(begun, flight.log.name, flight.launch, flight.works)

    def _spread_parts(self, flight: "_Flight", segment: Segment) -> None:
        """All-gather parts of any sizes: a broadcast of each that is not empty. A ring passes each byte on
        once, as in an all-gather; padding to the longest part would send ``world`` times a matrix that one
        rank has whole."""
        for rank in range(self.world):
            part = segment.part_bytes(rank)
            if part.numel():
                options = BroadcastOptions()
                options.rootRank, options.asyncOp = rank, True
                self.sent_nbytes += part.nbytes * (self.world - 1) if rank == self.rank else 0
                flight.launched(self._gather_group.broadcast([part], options))

    def _reduce_parts(self, flight: "_Flight", flat: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Reduce-scatter parts of any sizes: a reduction to the rank of each. Returns the memory of this
        rank's sum, apart from ``flat``."""
        own = flat[slice(*spans[self.rank])].clone()
        for rank, (start, stop) in enumerate(spans):
            if stop > start:
                options = ReduceOptions()
                options.rootRank, options.asyncOp = rank, True
                options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
                part = own if rank == self.rank else flat[start:stop]
                self.sent_nbytes += part.nbytes if rank != self.rank else 0
                flight.launched(self._reduce_group.reduce([_as_reals(part)], options))
        return own

    def reduce_scatter(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], key: str
    ) -> "_NcclReduction":
        """See ``Comm.reduce_scatter``. Sums in NCCL's order: repeatable for one world, not a fixed one."""
        owned = [stop - start for start, stop in [segment.spans[self.rank] for segment in segments]]
        with self._beginning(self._reduce_log):
            flight = _Flight(self, self._reduce_log, key)
            if self.streams is None or self.world == 1:  # alone there is nothing to run beside
                inputs, outputs = self._launch_reduction(flight, segments, dtypes)
                return _NcclReduction(flight, inputs, outputs, owned)
            with self.streams.reducing():
                inputs, outputs = self._launch_reduction(flight, segments, dtypes)
        # Reads on the reduce stream aren't known to the allocator of compute: what is dropped before compute
        # has waited for them would be handed out, and overwritten, at once (rule 4 of streams.py).
        kept = inputs + [segment.flat for segment in segments]
        return _NcclReduction(flight, kept, outputs, owned)

    def _launch_reduction(
        self, flight: "_Flight", segments: Sequence[Segment], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Launch it. Returns what is read, and the memory that the sums will be in."""
        ragged = [index for index, segment in enumerate(segments) if segment.spans.is_ragged]
        if ragged:
            return self._launch_parts(flight, segments, dtypes, ragged)
        inputs = padded(segments, dtypes)
        if self.world == 1:
            return inputs, inputs
        # Memory of the reduce stream, where there is one (rule 4 of streams.py): that of a sum which was
        # dropped is written again only after what compute had queued by then.
        outputs = [flat.new_empty(flat.numel() // self.world) for flat in inputs]
        begun = None if self.times is None else self.times.begin()
        for members in _by_dtype(inputs).values():
            places, terms = ([_as_reals(side[i]) for i in members] for side in (outputs, inputs))
            self.sent_nbytes += sum([place.nbytes for place in places]) * (self.world - 1)
            if self.streams is not None:
                options = ReduceScatterOptions()
                options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
                options.asyncOp = True
                flight.add(reduce_scatter_coalesced_of(self._reduce_group)(places, terms, options))
            else:
                # Gloo's is an all-reduce inside: up to twice the bytes, and sums in an order of its own.
                flight.works.extend(
                    reduce_scatter_of(dist)(place, term, group=self._reduce_group, async_op=True)
                    for place, term in zip(places, terms, strict=True)
                )
        if self.times is not None:
            self.times.end(begun, flight.log.name, flight.launch, flight.works)
        return inputs, outputs

    def _launch_parts(
        self,
        flight: "_Flight",
        segments: Sequence[Segment],
        dtypes: Sequence[torch.dtype],
        ragged: Sequence[int],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """``_launch_reduction`` where the parts of those at ``ragged`` are of different sizes."""
        equal = [index for index in range(len(segments)) if index not in ragged]
        launched = self._launch_reduction(flight, [segments[i] for i in equal], [dtypes[i] for i in equal])
        inputs, sums = launched[0], dict(zip(equal, launched[1], strict=True))
        begun = None if self.times is None else self.times.begin()
        for index in ragged:
            inputs.append(segments[index].flat.to(dtypes[index]))
            sums[index] = self._reduce_parts(flight, inputs[-1], segments[index].spans)
        if self.times is not None:
            self.times.end(begun, flight.log.name, flight.launch, flight.works)
        return inputs, [sums[index] for index in range(len(segments))]

    def all_reduce(self, values: Sequence[torch.Tensor], key: str) -> Reduction:
        """See ``Comm.all_reduce``. On an accelerator one operation of NCCL's for each dtype, in place, after
        what the current stream has queued: there is nothing to cast or pad.

        NCCL sums in an order of its own, but makes each sum once (along a ring or a tree, or in the switch)
        and spreads it: every rank gets the same bits, so copies stay equal.
        """
        if self.streams is None:
            return super().all_reduce(values, key)
        with self._beginning(self._reduce_log):
            flight = _Flight(self, self._reduce_log, key)
            begun = None if self.times is None else self.times.begin()
            for members in _by_dtype(values).values():
                sums = [_as_reals(values[index]) for index in members]
                self.sent_nbytes += sum([each.nbytes for each in sums]) * 2 * (self.world - 1) // self.world
                options = AllreduceCoalescedOptions()
                options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
                options.asyncOp = True
                flight.add(self._reduce_group.allreduce_coalesced(sums, options))
            if self.times is not None:
                self.times.end(begun, flight.log.name, flight.launch, flight.works)
        return _NcclReduction(flight, [], list(values), [each.numel() for each in values])

    def gather_many(
        self, shards: Sequence[torch.Tensor], spans: Sequence[Sequence[tuple[int, int]]], dst: int
    ) -> list[torch.Tensor] | None:
        """See ``Comm.gather_many``. All-gathers of bounded bytes: nothing is opened between two ranks."""
        return collect(self, shards, spans, dst)


class _Flight:
    """A collective in flight. On CUDA ``wait`` makes the current stream wait for it, elsewhere the host."""

    __slots__ = ("comm", "launch", "log", "works")

    def __init__(self, comm: ProcessGroupComm, log: LaunchLog, key: str) -> None:
        self.comm, self.log, self.launch = comm, log, log.launch(key)
        self.works: list[Any] = []

    def stall(self) -> None:
        """The current stream is about to wait for the collective."""
        if self.works and self.comm.times is not None:
            self.comm.times.stall(self.log.name, self.launch)

    def launched(self, work: Any) -> None:
        """One more of several operations that are launched one by one."""
        if self.comm.streams is None:
            self.works.append(work)
        else:
            self.add(work)

    def add(self, work: Any) -> None:
        """An operation of the device's, which are all on the one process group of its log."""
        self.works.append(work)
        self.log.became(self.launch)

    def wait(self) -> None:
        start = clock.perf_counter()
        with self.log.waiting(self.launch):
            for work in self.works:
                work.wait()  # of NCCL's: only makes the current stream wait
        if self.comm.exposed_s is not None:
            self.comm.exposed_s += clock.perf_counter() - start
            process_state.recorder.write(
                (DONE, self.log.name, self.launch.number, clock.perf_counter(), bool(self.works))
            )


class _NcclGather:
    """An all-gather in flight; ``due``: the copy-in before it, where it ran on a side stream."""

    def __init__(self, flight: _Flight, streams: Streams | None, due: Due | None) -> None:
        self._flight = flight
        self._streams = streams
        self._due = due

    def wait(self) -> None:
        """Make the current stream wait for it."""
        self._flight.stall()
        # No collective stands behind parameters that are kept whole, nor behind any in a world of one: for
        # these the copy-in is all that there is to wait for.
        if self._streams is not None and self._due is not None:
            self._streams.land(self._due)
        self._flight.wait()


class _NcclReduction:
    """A reduce-scatter or an all-reduce in flight. It holds what is read and written for as long as it lives:
    its owner drops it once compute waits for it.

    inputs: what is read, also by casts and padding on a side stream. Those come before the collective, so
    who waits for it has waited for them. outputs: sums with padding. owned: elements of each sum.
    """

    def __init__(
        self, flight: _Flight, inputs: list[torch.Tensor], outputs: list[torch.Tensor], owned: list[int]
    ) -> None:
        self._flight = flight
        self._inputs, self._outputs, self._owned = inputs, outputs, owned

    def wait(self) -> list[torch.Tensor]:
        """Make the current stream wait for it; the sums, without padding."""
        self._flight.stall()
        self._flight.wait()
        return [total[:numel] for total, numel in zip(self._outputs, self._owned, strict=True)]


def padded(segments: Sequence[Segment], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The gradients in their reduce dtypes, each rank's span padded to the longest one, with zeros.

    Where they lie where that is so already; else in memory of one tensor for each dtype, filled at once, and
    without gaps between spans.
    """
    inputs = [segment.flat for segment in segments]
    elsewhere: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, (flat, dtype) in enumerate(zip(inputs, dtypes, strict=True)):
        spans = segments[index].spans
        if (spans.is_even or segments[index].has_room) and flat.dtype == dtype:
            inputs[index] = flat[: spans.longest * spans.world]
        else:
            elsewhere[dtype].append(index)
    for dtype, members in elsewhere.items():
        sizes = [segments[i].spans.longest * segments[i].spans.world for i in members]
        offsets, nbytes = pack([numel * dtype.itemsize for numel in sizes])
        whole = inputs[members[0]].new_empty(nbytes // dtype.itemsize, dtype=dtype)
        zeros: list[torch.Tensor] = []
        copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, offset, numel in zip(members, offsets, sizes, strict=True):
            start = offset // dtype.itemsize
            flat, spans, place = inputs[index], segments[index].spans, whole[start : start + numel]
            inputs[index] = place
            places, sources = copies.setdefault(flat.dtype, ([], []))
            if spans.is_chunked:
                end = spans.end
                places.append(place[:end])
                sources.append(flat[:end])
                zeros += [place[end:]] if end < numel else []
            else:
                places.append(place.view(spans.world, spans.longest))
                sources.append(flat.as_strided(places[-1].shape, (spans.longest + spans.gap, 1)))
        if zeros:
            foreach_zero_(zeros)
        for places, sources in copies.values():
            foreach_copy_(places, sources)
    return inputs


def _as_reals(flat: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of reals, which NCCL can sum."""
    return flat.view(flat.dtype.to_real()) if flat.is_complex() else flat


def _by_dtype(flats: Iterable[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Indices by dtype, empty tensors left out: one coalesced call moves one dtype."""
    members: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, flat in enumerate(flats):
        if flat.numel():
            members[flat.dtype].append(index)
    return dict(members)
