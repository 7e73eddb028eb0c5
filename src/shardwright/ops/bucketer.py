"""Many small reduce-scatters as few large ones, for callers that have process groups and no sharded model.

    reduce_scatter_async(inputs)    small: copied into the bucket of its dtype, device and ranks
                                    large, or no bucketing: issued at once, from where the inputs lie
    a full bucket, flush()          one collective for all that was copied in
    wait() of a handle, flush()     the sums; callbacks run in the order in which inputs were added

A bucket is one row per rank. What is sent to a rank is the filled part of its row, so a bucket that is
half full costs half, and nothing of it has to be zero. On the host a bucket is full at ``HOST_NBYTES``: a
larger one would save no latency that counts, and leave the wire idle until it is full.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.errors import InputError, StageError
from shardwright.schedule.layout import Spans, equal_spans
from shardwright.schedule.scheduler import fits
from shardwright.transport.base import Comm, Reduction, Segment
from shardwright.transport.channel import check_alike
from shardwright.transport.mesh import comm_of

Callback = Callable[[torch.Tensor], object]

HOST_NBYTES = 2 << 20
"""One rank's inputs that travel together on transports of the host, unless the cap is lower. They take
0.1 ms to issue and 8 ms at 1 Gbit/s."""


class ReduceScatterHandle:
    """The handle of one input list in a ``ReduceScatterBucketer``; ``reduce_scatter_async`` returns it."""

    __slots__ = ("_bucket", "_callback", "_flight", "_offset", "_result", "_shape", "_total")

    def __init__(self, bucket: "_Bucket", shape: torch.Size, offset: int, callback: Callback | None) -> None:
        self._bucket: _Bucket | None = bucket
        self._flight: _BucketInFlight | None = None
        self._shape = shape
        self._offset = offset
        self._callback = callback
        self._total: torch.Tensor | None = None  # the sums of all that came with it
        self._result: torch.Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether the sum has arrived. Its callback has run then, or is about to."""
        return self._total is not None

    def wait(self) -> torch.Tensor:
        """Wait for the sum, and run the callbacks of all inputs that were sent together with it.

        If the input is still in a bucket, the bucket is issued: then every rank must call ``wait``.

        Returns:
            The sum over ranks of this rank's input, in the shape and dtype of the inputs.

        Raises:
            CommError: a rank is in another collective, ended or never came.
            StageError: the collective failed earlier, with an error that was raised then.
        """
        if self._total is None:
            if self._bucket is not None:
                self._bucket.issue()
            if self._flight is not None:
                self._flight.land()
        if self._total is None:
            raise StageError(
                "this reduce-scatter failed earlier, so it has no result; the error it raised then says why"
            )
        if self._result is None:  # views are made for those that are looked at
            self._result = self._total[self._offset : self._offset + prod(self._shape)].view(self._shape)
        return self._result

    def _issued(self, flight: "_BucketInFlight") -> None:
        self._bucket, self._flight = None, flight

    def _failed(self) -> None:
        self._flight = self._callback = None

    def _landed(self, total: torch.Tensor) -> None:
        self._flight, self._total = None, total

    def _call(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self.wait())


class ReduceScatterBucketer:
    """Sums lists of tensors over ranks, and each rank gets its part; small lists share one collective.

    Ranks call the same methods in the same order with the same shapes. It works with any process group of
    ``torch.distributed``, over the transport of ``set_transport``. Lists with equal dtype, device and ranks
    share a bucket. Memory is held from the first small list until ``teardown``: at most three times the cap
    for each bucket (one fills, one is sent, one was just issued), and the received sums.

    Args:
        bucket_cap_mb: MiB of one rank's inputs that are sent together at most; 0 or less sends each list
            separately. If an input brings the bytes in flight above the cap, it waits for the oldest
            collective, whose callbacks run then.

    Raises:
        InputError: ``bucket_cap_mb`` is no finite number.

    Examples:
        >>> bucketer = shardwright.ReduceScatterBucketer()
        >>> handle = bucketer.reduce_scatter_async([torch.ones(3)])  # one tensor for each rank
        >>> bucketer.flush()
        >>> handle.wait()
        tensor([1., 1., 1.])
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        if not isinstance(bucket_cap_mb, int | float) or not isfinite(bucket_cap_mb):
            raise InputError(f"bucket_cap_mb must be a number of MiB, got {bucket_cap_mb!r}; for example 25")
        self.bucket_cap_mb = bucket_cap_mb
        self._buckets: dict[tuple[tuple[int, ...], torch.dtype, torch.device], _Bucket] = {}
        self._flights: list[_BucketInFlight] = []

    def shard_numel(self, dtype: torch.dtype, world: int) -> int:
        """How long the tensors of a list may be for the list to share a bucket. Longer ones are sent
        separately.

        Args:
            dtype: of the tensors.
            world: number of ranks of the group.

        Returns:
            Elements of each tensor, the cap's bytes over ``world`` ranks rounded down; 0 if nothing shares a
                bucket.
        """
        return max(0, int(self._cap_nbytes / dtype.itemsize / world))

    @property
    def _cap_nbytes(self) -> float:
        return self.bucket_cap_mb * 2**20

    @property
    def num_buckets(self) -> int:
        """Number of buckets in use: one for each dtype, device and set of ranks."""
        return len(self._buckets)

    @property
    def held_nbytes(self) -> int:
        """Bytes that buckets hold now (filled, free for reuse or being sent), without the received sums."""
        return sum(bucket.held_nbytes for bucket in self._buckets.values()) + sum(
            flight.rows.nbytes for flight in self._flights if flight.rows is not None
        )

    def reduce_scatter_async(
        self,
        input_list: Sequence[torch.Tensor],
        group: ProcessGroup | None = None,
        callback_fn: Callback | None = None,
    ) -> ReduceScatterHandle:
        """Start summing over the ranks of a group: rank r gets the sum of every rank's ``input_list[r]``.

        Every rank of the group calls it; the first call for a group makes a process group. An exception of a
        callback is raised by the call in which it runs, after the other callbacks of its collective.

        Args:
            input_list: as many tensors as the group has ranks, equal in shape, dtype and device. Small ones
                are copied before this returns; large ones must stay unchanged until the handle is done.
            group: the ranks; None: all.
            callback_fn: called with this rank's sum, in the shape of the inputs and in ``torch.no_grad``. It
                is only guaranteed to have run after ``flush``, or the handle's ``wait``.

        Returns:
            A handle; its ``wait`` gives this rank's sum.

        Raises:
            InputError: the list has another length, its tensors differ, or this rank isn't in the group.
                Nothing was started then.
            CommError: ranks have different sizes or dtypes; raised here, or by waiting for the sum.
        """
        inputs, ranks = list(input_list), _ranks_of(group)
        _check(inputs, len(ranks))
        first = inputs[0]
        key = (ranks, first.dtype, first.device)
        bucket = self._buckets.get(key)
        if bucket is None:
            comm = comm_of(group, first.device.type)
            capacity = self.shard_numel(first.dtype, comm.world)
            bucket = self._buckets[key] = _Bucket(comm, first, capacity, self._flights)
        under_way = len(self._flights)
        handle = bucket.add(inputs, callback_fn)
        if len(self._flights) > under_way:  # wait for the oldest, until no more than the cap are, or one is
            while self._flights[1:] and sum(flight.nbytes for flight in self._flights) > self._cap_nbytes:
                self._flights[0].land()
        return handle

    def flush(self) -> None:
        """Issue every bucket that has inputs, wait for all collectives, and run all callbacks.

        Every rank calls it. After an error of a callback, call it again for the rest. It does nothing if
        nothing is pending.

        Raises:
            CommError: a rank is in another collective, ended or never came.
        """
        while True:
            for bucket in tuple(self._buckets.values()):
                bucket.issue()
            if not self._flights:
                return
            while self._flights:
                self._flights[0].land()

    def teardown(self) -> None:
        """Free the buckets. Sums stay valid, and the bucketer can be used again. Local.

        Raises:
            StageError: inputs are pending; call ``flush`` first.
        """
        pending = sum(len(bucket.handles) for bucket in self._buckets.values())
        pending += sum(len(flight.handles) for flight in self._flights)
        if pending:
            raise StageError(f"teardown() with {pending} reduce-scatters pending; call flush() before it")
        self._buckets.clear()


class _Bucket:
    """Inputs of one dtype, device and set of ranks, until they are issued.

    capacity: elements of a row that an input may have. flights: the collectives of all buckets that are under
    way, oldest first.
    """

    def __init__(
        self, comm: Comm, like: torch.Tensor, capacity: int, flights: "list[_BucketInFlight]"
    ) -> None:
        self.comm = comm
        self.handles: list[ReduceScatterHandle] = []
        self.flights = flights
        self._capacity = capacity
        self._row_numel = capacity
        if comm.reads_in_place:
            self._row_numel = min(capacity, HOST_NBYTES // like.dtype.itemsize // comm.world)
        self._dtype, self._device = like.dtype, like.device
        self._used = 0
        self._rows: torch.Tensor | None = None  # [world, elements], being filled
        self._free: list[torch.Tensor] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes of the bucket being filled, and of those free for reuse."""
        held = self._free if self._rows is None else [*self._free, self._rows]
        return sum(rows.nbytes for rows in held)

    def add(self, inputs: list[torch.Tensor], callback: Callback | None) -> ReduceScatterHandle:
        """Take a checked list: small into the bucket, large on its way at once."""
        if any(tensor.requires_grad for tensor in inputs):  # to enter a grad mode each time takes 4 us
            inputs = [tensor.detach() for tensor in inputs]
        shape, numel = inputs[0].shape, inputs[0].numel()
        if not fits((), numel, self._capacity):
            handle = ReduceScatterHandle(self, shape, 0, callback)
            self._send(self._segments_of(inputs), [handle], None)
            return handle
        if self._rows is not None and not fits((self._used,), numel, self._rows.shape[1]):
            self.issue()
        rows = self._rows = self._take(numel) if self._rows is None else self._rows
        start, self._used = self._used, self._used + numel
        place = rows[:, start : self._used]
        place = place if len(shape) == 1 else place.view(len(inputs), *shape)
        # One call for all ranks' inputs: each costs more than the bytes of a small one.
        torch.stack(inputs, out=place)
        handle = ReduceScatterHandle(self, shape, start, callback)
        self.handles.append(handle)
        return handle

    def issue(self) -> None:
        """One collective for everything in the bucket. No-op where that is nothing."""
        if not self.handles:
            return
        handles, rows, used = self.handles, self._rows, self._used
        assert rows is not None
        self.handles, self._rows, self._used = [], None, 0
        numel = rows.shape[1]
        spans = Spans(self.comm.world, used, rows.numel(), numel - used)
        self._send([Segment(rows.view(-1), spans)], handles, rows)

    def give_back(self, rows: torch.Tensor) -> None:
        """A bucket's memory, sent and read, to be filled again."""
        if rows.shape[1] == self._row_numel:
            self._free.append(rows)

    def _take(self, numel: int) -> torch.Tensor:
        """Memory to fill with ``numel`` elements of a row at least: reused where it can be, since fresh pages
        are dear."""
        if self._free and numel <= self._row_numel:
            return self._free.pop()
        shape = (self.comm.world, max(numel, self._row_numel))
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _send(
        self, segments: list[Segment], handles: list[ReduceScatterHandle], rows: torch.Tensor | None
    ) -> None:
        numel = segments[0].spans.longest
        what = f"reduce-scatter of {len(handles)} inputs, {numel} x {self._dtype}"
        # Known as issued before anything can raise: a failure leaves no handle waiting in a bucket.
        nbytes = numel * self.comm.world * self._dtype.itemsize
        flight = _BucketInFlight(self, handles, rows, nbytes)
        for handle in handles:
            handle._issued(flight)
        check_alike(self.comm, what, "what a bucketer sends next")
        with torch.no_grad():
            flight.reduction = self.comm.reduce_scatter(segments, [self._dtype] * len(segments), what)
        self.flights.append(flight)

    def _segments_of(self, inputs: list[torch.Tensor]) -> list[Segment]:
        """Large inputs where they lie: mostly parts of one tensor, else one segment for each rank."""
        world, numel = len(inputs), inputs[0].numel()
        whole = _whole(inputs)
        if whole is None and not self.comm.reads_in_place:
            whole = torch.stack(inputs).view(-1)
        if whole is not None:
            return [Segment(whole, equal_spans(numel, world))]
        return [
            Segment(tensor.reshape(-1), _OfOne(world, numel, numel, -numel, owner))
            for owner, tensor in enumerate(inputs)
        ]


@dataclass(frozen=True)
class _OfOne(Spans):
    """All of a tensor is one rank's part."""

    owner: int = 0

    def __getitem__(self, rank: int) -> tuple[int, int]:
        return 0, self.longest if rank == self.owner else 0


class _BucketInFlight:
    """A collective under way: whose inputs it carries, how many bytes of this rank's, in which bucket."""

    def __init__(
        self, bucket: _Bucket, handles: list[ReduceScatterHandle], rows: torch.Tensor | None, nbytes: int
    ) -> None:
        self.bucket = bucket
        self.handles = handles
        self.rows = rows
        self.nbytes = nbytes
        self.reduction: Reduction | None = None

    def land(self) -> None:
        """Wait for the sums and hand them out; every callback runs, then the first error of one is raised."""
        reduction, comm = self.reduction, self.bucket.comm
        if reduction is None:
            return
        self.reduction = None
        self.bucket.flights.remove(self)
        try:
            with torch.no_grad():
                totals = reduction.wait()
                total = totals[comm.rank if len(totals) > 1 else 0]
                if comm.world == 1:  # the sum is the input itself, which its owner will write over
                    total = total.clone()
        except BaseException:
            for handle in self.handles:
                handle._failed()
            raise
        if self.rows is not None:
            self.bucket.give_back(self.rows)
            self.rows = None
        for handle in self.handles:
            handle._landed(total)
        errors = []
        with torch.no_grad():
            for handle in self.handles:
                try:
                    handle._call()
                except Exception as error:
                    errors.append(error)
        self.handles = []
        if errors:
            raise errors[0]


def _ranks_of(group: ProcessGroup | None) -> tuple[int, ...]:
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise InputError(
            "reduce_scatter_async needs ranks; call torch.distributed.init_process_group() first"
        )
    if not isinstance(group, ProcessGroup):
        raise InputError(f"group must be a ProcessGroup that has this rank, or None, got {group!r}")
    return tuple(dist.get_process_group_ranks(group))


def _check(inputs: list[torch.Tensor], world: int) -> None:
    """Raises: InputError for anything but ``world`` tensors of one shape, dtype and device."""
    if len(inputs) != world:
        raise InputError(
            f"reduce_scatter received {len(inputs)} inputs, expected group.size() ({world}): one for a rank"
        )
    first = inputs[0]
    for rank, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise InputError(
                f"input {rank} is not a dense tensor but {type(tensor).__name__}: {tensor!r:.80}"
            )
        if tensor is not first and (
            tensor.dtype is not first.dtype or tensor.shape != first.shape or tensor.device != first.device
        ):
            raise InputError(
                f"inputs must have one dtype, shape and device: input {rank} is {_describe(tensor)}, input 0 "
                f"is {_describe(first)}; pad or convert them before the call"
            )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _whole(inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """The 1-D tensor of which ``inputs`` are neighbouring parts, where they are (as ``chunk`` makes them)."""
    first, numel = inputs[0], inputs[0].numel()
    storage = first.untyped_storage().data_ptr()
    for index, tensor in enumerate(inputs):
        apart = tensor.storage_offset() != first.storage_offset() + index * numel
        if apart or not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((numel * len(inputs),), (1,))
