"""Many small reduce-scatters as few large ones, for callers that have process groups and no sharded model.

    reduce_scatter_async(inputs)    small: copied into the bucket of its dtype, device and ranks
                                    large, or no bucketing: issued at once, from where the inputs lie
    a full bucket, flush()          one collective for all that was copied in
    wait() of a handle, flush()     the sums; callbacks run in the order in which inputs were added

A bucket is one row per rank. What is sent to a rank is the filled part of its row, so a bucket that is
half full costs half, and nothing of it has to be zero.
"""

from collections.abc import Callable, Sequence
from math import isfinite, prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.comm.base import Comm, Piece, Reduction
from shardwright.comm.mesh import comm_of
from shardwright.errors import InputError, StageError

Callback = Callable[[torch.Tensor], object]

MAX_IN_FLIGHT = 1
"""Collectives that are left under way between calls: one travels while the next bucket fills. The next is
issued before the oldest is waited for, so the wire is never idle; more would hold memory and hide nothing."""


class ReduceScatterHandle:
    """One input list on its way through ``ReduceScatterBucketer``; made by ``reduce_scatter_async``."""

    def __init__(self, bucket: "_Bucket", shape: torch.Size, offset: int, callback: Callback | None) -> None:
        self._bucket: _Bucket | None = bucket
        self._flight: _Flight | None = None
        self._shape = shape
        self._offset = offset
        self._callback = callback
        self._result: torch.Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether the sum is here (its callback has run, or is about to)."""
        return self._result is not None

    def wait(self) -> torch.Tensor:
        """The sum over ranks of this rank's input, in the inputs' shape and dtype; runs what callbacks came
        with it.

        Where the input still lies in a bucket, the bucket is issued: then every rank must wait here.
        Raises: CommError where a rank is in another collective, ended or never came.
        """
        if self._result is None:
            if self._bucket is not None:
                self._bucket.issue()
            if self._flight is not None:
                self._flight.land()
        if self._result is None:
            raise StageError(
                "this reduce-scatter failed earlier, so it has no result; the error it raised then says why"
            )
        return self._result

    def _issued(self, flight: "_Flight") -> None:
        self._bucket, self._flight = None, flight

    def _failed(self) -> None:
        self._flight = self._callback = None

    def _landed(self, total: torch.Tensor) -> None:
        self._flight = None
        self._result = total[self._offset : self._offset + prod(self._shape)].view(self._shape)

    def _call(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            assert self._result is not None
            callback(self._result)


class ReduceScatterBucketer:
    """Sums lists of tensors over ranks, each rank getting its part, small lists together in one collective.

    bucket_cap_mb: MiB of one rank's inputs that travel together; 0 or less: each list by itself. An input
        that makes more than ``MAX_IN_FLIGHT`` collectives waits for the oldest, whose callbacks run then.

    Ranks call the same methods in the same order with the same shapes. It takes any process group that
    ``torch.distributed`` made, and moves bytes as ``set_transport`` says. Lists with equal dtype, device and
    ranks share a bucket. Memory is held from the first small list until ``teardown``: at most the cap three
    times for each bucket (one fills, one travels, one was just issued), and what is received.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        if not isinstance(bucket_cap_mb, int | float) or not isfinite(bucket_cap_mb):
            raise InputError(f"bucket_cap_mb must be a number of MiB, got {bucket_cap_mb!r}; for example 25")
        self.bucket_cap_mb = bucket_cap_mb
        self._buckets: dict[tuple[tuple[int, ...], torch.dtype, torch.device], _Bucket] = {}
        self._flights: list[_Flight] = []

    def shard_numel(self, dtype: torch.dtype, world: int) -> int:
        """Elements of each tensor of a list that a bucket takes: the cap's bytes over ``world`` ranks,
        rounded down. Longer ones are large; 0 where nothing is bucketed."""
        return max(0, int(self.bucket_cap_mb * 2**20 / dtype.itemsize / world))

    @property
    def num_buckets(self) -> int:
        """Buckets in use: one per dtype, device and set of ranks."""
        return len(self._buckets)

    @property
    def held_nbytes(self) -> int:
        """Bytes that buckets hold now, filled, free for reuse or being sent (without what is received)."""
        return sum(bucket.held_nbytes for bucket in self._buckets.values()) + sum(
            flight.data.nbytes for flight in self._flights if flight.data is not None
        )

    def reduce_scatter_async(
        self,
        input_list: Sequence[torch.Tensor],
        group: ProcessGroup | None = None,
        callback_fn: Callback | None = None,
    ) -> ReduceScatterHandle:
        """Start summing over ``group``: rank r gets the sum of every rank's ``input_list[r]``.

        input_list: as many tensors as the group has ranks, equal in shape, dtype and device. Small ones are
            copied before this returns; large ones must stay unchanged until the handle is done.
        group: None: all ranks. callback_fn: called with this rank's sum, in the inputs' shape; a caller can
            rely on it only after ``flush`` or the handle's ``wait``.

        Every rank of the group calls it; the first call for a group makes two process groups.
        Raises: InputError, before anything was started, for a list of another length, or tensors that differ.
            What a callback raises is raised where it runs, after the other callbacks of its collective.
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
        with torch.no_grad():
            handle = bucket.add(inputs, callback_fn)
        while len(self._flights) > MAX_IN_FLIGHT:
            self._flights[0].land()
        return handle

    def flush(self) -> None:
        """Issue every bucket that has inputs, wait for all collectives, and run all callbacks. No-op where
        nothing is pending. Every rank calls it; again, for the rest, after an error of a callback."""
        while True:
            for bucket in tuple(self._buckets.values()):
                bucket.issue()
            if not self._flights:
                return
            while self._flights:
                self._flights[0].land()

    def teardown(self) -> None:
        """Free the buckets. Sums stay valid, and the bucketer can be used again.

        Raises: StageError where inputs are pending; ``flush`` first.
        """
        pending = sum(len(bucket.handles) for bucket in self._buckets.values())
        pending += sum(len(flight.handles) for flight in self._flights)
        if pending:
            raise StageError(f"teardown() with {pending} reduce-scatters pending; call flush() before it")
        self._buckets.clear()


class _Bucket:
    """Inputs of one dtype, device and set of ranks, until they are issued.

    capacity: elements of a row. flights: the collectives of all buckets that are under way, oldest first.
    """

    def __init__(self, comm: Comm, like: torch.Tensor, capacity: int, flights: "list[_Flight]") -> None:
        self.comm = comm
        self.handles: list[ReduceScatterHandle] = []
        self.flights = flights
        self._capacity = capacity
        self._dtype, self._device = like.dtype, like.device
        self._used = 0
        self._data: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, ...] = ()
        self._free: list[torch.Tensor] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes of the bucket being filled, and of those free for reuse."""
        held = self._free if self._data is None else [*self._free, self._data]
        return sum(data.nbytes for data in held)

    def add(self, inputs: list[torch.Tensor], callback: Callback | None) -> ReduceScatterHandle:
        """Take a checked list: small into the bucket, large on its way at once."""
        shape, numel = inputs[0].shape, inputs[0].numel()
        if numel > self._capacity:
            handle = ReduceScatterHandle(self, shape, 0, callback)
            self._send(self._pieces_of(inputs), [handle], None)
            return handle
        if self._used + numel > self._capacity:
            self.issue()
        if self._data is None:
            self._take()
        start, stop = self._used, self._used + numel
        for row, tensor in zip(self._rows, inputs, strict=True):
            row[start:stop].view(shape).copy_(tensor)
        self._used = stop
        handle = ReduceScatterHandle(self, shape, start, callback)
        self.handles.append(handle)
        return handle

    def issue(self) -> None:
        """One collective for everything in the bucket. No-op where that is nothing."""
        if not self.handles:
            return
        handles, data, used = self.handles, self._data, self._used
        assert data is not None
        self.handles, self._data, self._rows, self._used = [], None, (), 0
        spans = tuple((r * self._capacity, r * self._capacity + used) for r in range(self.comm.world))
        self._send([Piece(data, spans)], handles, data)

    def give_back(self, data: torch.Tensor) -> None:
        """A bucket's memory, sent and read, to be filled again."""
        self._free.append(data)

    def _take(self) -> None:
        """Memory to fill: reused where it can be, since fresh pages are dear."""
        world = self.comm.world
        if self._free:
            self._data = self._free.pop()
        else:
            self._data = torch.empty(world * self._capacity, dtype=self._dtype, device=self._device)
        self._rows = tuple(self._data.view(world, self._capacity))

    def _send(
        self, pieces: list[Piece], handles: list[ReduceScatterHandle], data: torch.Tensor | None
    ) -> None:
        numel = pieces[0].spans[0][1] - pieces[0].spans[0][0]
        what = f"reduce-scatter of {len(handles)} inputs, {numel} x {self._dtype}"
        # Known as issued before anything can raise: a failure leaves no handle waiting in a bucket.
        flight = _Flight(self, handles, data)
        for handle in handles:
            handle._issued(flight)
        with torch.no_grad():
            flight.reduction = self.comm.reduce_scatter(pieces, [self._dtype] * len(pieces), what)
        self.flights.append(flight)

    def _pieces_of(self, inputs: list[torch.Tensor]) -> list[Piece]:
        """Large inputs where they lie: mostly parts of one tensor, else one piece for each rank."""
        world, numel = len(inputs), inputs[0].numel()
        whole = _whole(inputs)
        if whole is None and not self.comm.reads_in_place:
            whole = torch.stack(inputs).view(-1)
        if whole is not None:
            return [Piece(whole, tuple((r * numel, (r + 1) * numel) for r in range(world)))]
        return [
            Piece(tensor.reshape(-1), tuple((0, numel if r == owner else 0) for r in range(world)))
            for owner, tensor in enumerate(inputs)
        ]


class _Flight:
    """A collective under way, and whose inputs it carries."""

    def __init__(
        self, bucket: _Bucket, handles: list[ReduceScatterHandle], data: torch.Tensor | None
    ) -> None:
        self.bucket = bucket
        self.handles = handles
        self.data = data
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
        if self.data is not None:
            self.bucket.give_back(self.data)
            self.data = None
        for handle in self.handles:
            handle._landed(total)
        errors = []
        for handle in self.handles:
            try:
                handle._call()
            except Exception as error:
                errors.append(error)
        self.handles = []
        if errors:
            raise errors[0]


def _ranks_of(group: ProcessGroup | None) -> tuple[int, ...]:
    if not dist.is_initialized():
        raise InputError(
            "reduce_scatter_async needs ranks; call torch.distributed.init_process_group() first"
        )
    if not (group is None or isinstance(group, ProcessGroup)):
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
        if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
            raise InputError(
                f"inputs must be alike: input {rank} is {_describe(tensor)}, input 0 is {_describe(first)}; "
                "pad or convert them before the call"
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
