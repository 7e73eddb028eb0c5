"""The unsharded faces of a group's parameters: the memory that they lie in, where each lies there, what
modules show, and what was written into them.

The memory is one storage, freed and regrown in place.
"""

from collections.abc import Container, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError, StageError
from shardwright.params.param import ShardedParam, Versions
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import ALIGNMENT_NBYTES, GroupLayout, ParamLayout, contiguous_strides
from shardwright.torch_private import foreach_copy_, local_of, parameters_of, set_versions, version_of
from shardwright.transport.base import Origin, Segment, copy_together
from shardwright.transport.cpu.pages import HUGE_PAGE_NBYTES, advise_huge, keep_freed_pages


class Buffer:
    """``nbytes`` of device memory, given back and taken again at a stable storage. Starts freed.

    arrival: where some of what lies in it arrives, in another order or dtype. pairs: for that a part of this
        memory, through tensors of its own, and the part of ``arrival`` that it is copied from.
    allocated_nbytes: held now, of both.
    """

    def __init__(self, nbytes: int, device: torch.device, arrival: "Buffer | None" = None) -> None:
        self.nbytes = nbytes
        self.allocated_nbytes = 0
        self.arrival = arrival
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        # The same storage object for the life of the group, since autograd saves tensors that view it: with a
        # parameter's data swapped between pooled buffers the backward of one layer would read the weights of
        # another, without an error.
        self._storage = torch.UntypedStorage(0, device=device)
        # malloc would give this much back to the kernel at each free, and fault it in again at each alloc.
        if self._storage.device.type == "cpu" and nbytes >= HUGE_PAGE_NBYTES:
            keep_freed_pages()

    def alloc(self) -> None:
        """Take the memory (uninitialised). No-op where it is already held."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)
            if self.nbytes >= HUGE_PAGE_NBYTES:
                advise_huge(self._storage)
        self.allocated_nbytes = self.nbytes
        if self.arrival is not None:
            self.arrival.alloc()
            self.allocated_nbytes += self.arrival.nbytes

    def free(self) -> None:
        """Give the memory back; tensors over it may not be read until it is taken and filled again."""
        # This really frees the memory, and every view that autograd has saved reads the regrown one.
        self._storage.resize_(0)
        self.allocated_nbytes = 0
        if self.arrival is not None:
            self.arrival.free()

    def arrive(self, keep_arrival: bool) -> None:
        """Copy what arrived elsewhere to its place of use. keep_arrival: it is still needed while
        unsharded."""
        for place, part in self.pairs:
            place.copy_(part)
        if self.arrival is not None and not keep_arrival:
            self.arrival.free()
            self.allocated_nbytes = self.nbytes

    def tensor(
        self, dtype: torch.dtype, offset_nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor over the memory, which must be held."""
        # Over the storage, and no view of another tensor: so it has a version counter of its own, and filling
        # the buffer doesn't look like an in-place change of a weight.
        empty = torch.empty(0, dtype=dtype, device=self._storage.device)
        return empty.set_(self._storage, offset_nbytes // dtype.itemsize, shape, strides)  # type: ignore[arg-type]


def bind(
    param: ShardedParam,
    buffer: Buffer,
    offset_nbytes: int,
    dtype: torch.dtype,
    face: torch.Tensor | None = None,
) -> None:
    """Lay the region that ``param`` is gathered in at ``offset_nbytes`` of ``buffer`` (which must hold its
    memory), and the unsharded face there too, if that isn't ``face``."""
    layout, rank = param.layout, param.axis.rank
    region = buffer.tensor(dtype, offset_nbytes, (layout.padded_numel,), (1,))
    begin = offset_nbytes + layout.span(rank)[0] * dtype.itemsize
    own = buffer.tensor(dtype, begin, layout.shard_shape(rank), layout.strides)
    whole = buffer.tensor(dtype, offset_nbytes, layout.shape, layout.strides) if face is None else face
    param.bind_to(whole, Segment(region, layout.spans, origin=Origin()), own)


PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"  # torch calls it from 2.15 on
"""Methods by which a parameter's class says itself what is gathered (``subclass.py``)."""


def is_extended(param: torch.Tensor) -> bool:
    """Whether a parameter's class has both methods, or packs a weight without having any. Raises: InputError
    where it has one of them only, or only the third one."""
    local = local_of(param) if isinstance(param, DTensor) else param
    has = [hasattr(local, name) for name in (PRE, POST)]
    if has[0] != has[1]:
        raise InputError(
            f"Both {PRE} and {POST} should be defined if using all-gather extensions; "
            f"{type(local).__name__} has only one of them"
        )
    if hasattr(local, RELEASE) and not has[0]:
        raise InputError(f"{RELEASE} requires {PRE} and {POST}, which {type(local).__name__} doesn't have")
    return has[0] or packs(local)


def packs(local: torch.Tensor) -> bool:
    """Whether a tensor is of a class that packs a weight in other dtypes than its own, as torchao's do."""
    if type(local) in (torch.Tensor, nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
        return False
    made: Any = local
    parts = [getattr(local, name) for name in made.__tensor_flatten__()[0]]  # a DTensor's mesh among them
    return any(isinstance(part, torch.Tensor) and part.dtype != local.dtype for part in parts)


Typed = Sequence[tuple[ShardedParam, torch.dtype, torch.dtype]]
"""Parameters, the dtypes that they have while unsharded, and those in which they are gathered."""


class _Stack(NamedTuple):
    """Parameters that are gathered as one, each below the one before it (``ParamLayout.stacked``).

    starts: the slices of each begin here, so that each is aligned. layout: of all of them. sent: the dtype in
    which they are gathered.
    """

    params: Sequence[ShardedParam]
    dtype: torch.dtype
    sent: torch.dtype
    starts: Sequence[int]
    layout: ParamLayout

    @property
    def lies_elsewhere(self) -> bool:
        """Whether it isn't gathered into its place of use: in another order, or in another dtype."""
        return not self.layout.in_order or self.sent != self.dtype


def _stack(members: Typed) -> _Stack:
    first, dtype, sent = members[0]
    slice_nbytes = prod(first.layout.shape[first.layout.dim :]) * dtype.itemsize
    step = ALIGNMENT_NBYTES // gcd(ALIGNMENT_NBYTES, slice_nbytes)
    starts, end = [], 0
    for param, *_ in members:
        starts.append(-(-end // step) * step)
        end = starts[-1] + param.layout.outer
    return _Stack([param for param, *_ in members], dtype, sent, starts, first.layout.stacked(end))


def _stacks(bound: Typed, keeps_order: bool) -> list[_Stack]:
    """All of them, alone where they lie in the order in which they are gathered."""
    alike: dict[object, list[tuple[ShardedParam, torch.dtype, torch.dtype]]] = {}
    for number, (param, dtype, sent) in enumerate(bound):
        layout = param.layout
        alone = layout.in_order or keeps_order
        key = number if alone else (layout.shape[layout.dim :], dtype, sent)
        alike.setdefault(key, []).append((param, dtype, sent))
    return [
        _Stack([members[0][0]], *members[0][1:], [0], members[0][0].layout)
        if isinstance(key, int)
        else _stack(members)
        for key, members in alike.items()
    ]


def own_buffer(bound: Typed, device: torch.device, keeps_order: bool = False) -> Buffer:
    """A buffer of this rank's own that they lie in, each contiguous, freed.

    keeps_order: what is gathered is in the storage order of each parameter, whatever the world; else those
    that lie in another order travel as the shards of each rank one after another.
    """
    stacks = _stacks(bound, keeps_order)
    across = [stack for stack in stacks if stack.lies_elsewhere]
    layout = GroupLayout(tuple(s.layout for s in stacks), tuple(s.dtype.itemsize for s in stacks))
    where = GroupLayout(tuple(s.layout for s in across), tuple(s.sent.itemsize for s in across))
    arrival_offsets = iter(where.offsets_nbytes)
    buffer = Buffer(layout.nbytes, device, Buffer(where.nbytes, device) if across else None)
    buffer.alloc()
    for stack, offset in zip(stacks, layout.offsets_nbytes, strict=True):
        if buffer.arrival is None or not stack.lies_elsewhere:
            bind(stack.params[0], buffer, offset, stack.dtype)
        elif keeps_order or stack.layout.in_order:
            _bind_transposed(buffer, buffer.arrival, offset, next(arrival_offsets), stack)
        else:
            _bind_stack(buffer, buffer.arrival, offset, next(arrival_offsets), stack)
    buffer.free()
    return buffer


def _bind_transposed(
    buffer: Buffer, arrival: Buffer, offset: int, arrival_offset: int, stack: _Stack
) -> None:
    param, dtype, layout = stack.params[0], stack.dtype, stack.layout
    strides = contiguous_strides(layout.shape)
    face, filled = (buffer.tensor(dtype, offset, layout.shape, strides) for _ in range(2))
    bind(param, arrival, arrival_offset, stack.sent, face)
    gathered = arrival.tensor(stack.sent, arrival_offset, layout.shape, layout.strides)
    buffer.pairs.append((filled, gathered))  # not the face: filling is no in-place change of a weight


def _bind_stack(buffer: Buffer, arrival: Buffer, offset: int, arrival_offset: int, stack: _Stack) -> None:
    dtype, sent, layout = stack.dtype, stack.sent, stack.layout
    outer, rank = layout.shape[0], stack.params[0].axis.rank
    width, own_width, part = (
        prod(shape[1:]) for shape in (layout.shape, layout.shard_shape(rank), layout.shard_shape(0))
    )
    region = arrival.tensor(sent, arrival_offset, (layout.padded_numel,), (1,))
    segment = Segment(region, layout.spans, origin=Origin())
    filled = buffer.tensor(dtype, offset, (outer, width), (width, 1))
    num_equal = width // part if part else 0  # one copy, whatever the world
    first = filled[:, : num_equal * part].unflatten(1, (num_equal, part))
    equal, rest = segment.flat[: layout.numel].split([first.numel(), layout.numel - first.numel()])
    buffer.pairs.append((first, equal.view(num_equal, outer, part).transpose(0, 1)))
    if rest.numel():  # one more for the rank that has fewer
        buffer.pairs.append((filled[:, num_equal * part :], rest.view(outer, -1)))
    own_offset = arrival_offset + layout.span(rank)[0] * sent.itemsize
    for param, start in zip(stack.params, stack.starts, strict=True):
        shape, own_shape = param.layout.shape, param.layout.shard_shape(rank)
        begin, own_begin = start * width * dtype.itemsize, start * own_width * sent.itemsize
        face = buffer.tensor(dtype, offset + begin, shape, contiguous_strides(shape))
        own = arrival.tensor(sent, own_offset + own_begin, own_shape, contiguous_strides(own_shape))
        param.bind_to(face, segment, own)


class Bound:
    """A group's parameters as they were found before a gather, in lists that are ready to be read: what is
    copied, what is gathered, what modules show. It holds until a parameter is replaced, cast or regrouped.

    policy: the dtypes it was made for. segments: of the group's buffers, for its all-gather.
    """

    def __init__(
        self, params: Sequence[ShardedParam], policy: MixedPrecisionPolicy, decoded: Container[ShardedParam]
    ) -> None:
        """decoded: those that modules don't show while unsharded: what is decoded from them is shown."""
        self.policy = policy
        self._params = params
        self._found: list[tuple[ShardedParam, dict[str, nn.Parameter | None], str, int]] = []
        self._shards: list[tuple[nn.Parameter, torch.Tensor, torch.dtype, torch.device]] = []
        self._sites: tuple[list[_Shown], list[_Shown]] = [], []
        self._show_themselves: list[tuple[ShardedParam, bool]] = []
        self._copies: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._other_copies: list[ShardedParam] = []
        self._on_device: list[ShardedParam] = []
        segments: dict[int, Segment] = {}
        for param in params:
            first, sharded, local = param.sites[0], param.sharded, param.local
            self._found.append((param, parameters_of(first.module), first.name, len(param.sites)))
            self._shards.append((sharded, local, sharded.dtype, local.device))
            self._list_sites(param, param in decoded)
            if not param.extended:
                self._list_copy(param, local)
                if param.layout.dim is not None:
                    segment = param.gather_segment()
                    segments[id(segment)] = segment  # which parameters may share
        self.segments = list(segments.values())

    def _list_sites(self, param: ShardedParam, decoded: bool) -> None:
        if param.shows_itself:
            self._show_themselves.append((param, decoded))
            return
        for site in param.sites:
            self._sites[0].append((parameters_of(site.module), site.name, param.sharded))
            if not decoded:
                self._sites[1].append((parameters_of(site.module), site.name, param.unsharded))

    def _list_copy(self, param: ShardedParam, local: torch.Tensor) -> None:
        own = param.own
        if param.has_device_copy:
            self._on_device.append(param)
        elif type(local) is not torch.Tensor:
            self._other_copies.append(param)
        elif own.numel():
            # One kernel copies lists of tensors only where pairs have the same strides, and sides one dtype.
            maps = param.split.on_host and param.split.offload_streams is not None and not local.is_pinned()
            key = own.dtype, local.dtype, local.device, own.stride() == local.stride(), maps
            places, sources = self._copies.setdefault(key, ([], []))
            places.append(own)
            sources.append(local)

    def is_current(self) -> bool:
        """Whether every parameter is the one that was found, with its memory, dtype, sites and extension."""
        for (param, shown, name, num_sites), was in zip(self._found, self._shards, strict=True):
            sharded, local, dtype, device = was
            if param.sharded is not sharded or shown.get(name) is not sharded:
                return False
            if local_of(sharded) is not local or sharded.dtype != dtype or local.device != device:
                return False
            if len(param.sites) != num_sites:
                return False
            # Both methods of a subclass may be set on its tensor at any time.
            has = [hasattr(local, name) for name in (PRE, POST)]
            if has != [param.extended] * 2 and not (param.extended and not any(has) and packs(local)):
                return False
        return True

    def follow_freezing(self) -> int:
        """Unsharded faces ask for a gradient where the shards do; bits of those that do."""
        trainable = 0
        for place, param in enumerate(self._params):
            asks = param.sharded.requires_grad
            trainable |= asks << place
            if param.bound is not None and param.bound.param.requires_grad != asks:
                param.bound.param.requires_grad_(asks)
        return trainable

    def copy_in(self) -> None:
        """Copy the shards to this rank's part of the buffers; under ``no_grad``."""
        for (*_, maps), (places, sources) in self._copies.items():
            if maps:
                from shardwright.params.offload import pinned  # noqa: PLC0415 mapped files

                sources = [pinned(each) for each in sources]
            foreach_copy_(places, sources, non_blocking=True)
        for param in self._other_copies:
            param.own.copy_(param.local, non_blocking=True)
        if self._on_device:
            copy_together([p.own for p in self._on_device], [p.device_copy for p in self._on_device])

    def show(self, unsharded: bool) -> None:
        """Modules show the shards, or the unsharded parameters that are not decoded."""
        # Past ``nn.Module.__setattr__``, which costs 5 us a parameter.
        for shown, name, param in self._sites[unsharded]:
            shown[name] = param
        for param, decoded in self._show_themselves:
            if not (unsharded and decoded):
                param.show(param.unsharded if unsharded else param.sharded)

    def shows_any(self, faces: Sequence[torch.Tensor]) -> bool:
        """Whether a module shows one of them, or may do."""
        found = set(map(id, faces))
        return bool(self._show_themselves) or any(id(shown.get(n)) in found for shown, n, _ in self._sites[0])


_Shown = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]


class FaceVersions:
    """The version counters of a group's unsharded parameters: by them autograd sees whether a backward reads
    what its forward has saved, and a group sees what was edited.

    Autograd saves with a tensor how often it was changed in place, and raises where that is another number in
    the backward. So a counter here goes up by what was written into either face of its parameter, the shard
    by an optimizer or a load, the unsharded one by an edit; and while the memory isn't whole, it is one
    higher than any that a forward can have saved.

    is_whole: whether their memory is filled. gathered: versions of the shards that it was filled from; ()
    where they may have been written without a mark since.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.gathered: Versions = ()
        self._faces: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()  # of each face, as of the last call
        self._shards: Versions = ()  # that they stand for

    def follow(self, faces: tuple[torch.Tensor, ...], shards: Versions) -> None:
        """The memory of ``faces`` holds the shards, which have the versions ``shards``, one for each face."""
        before = zip(self._faces, self._versions, self._shards, strict=True)
        known = {id(face): (version, shard) for face, version, shard in before}
        versions = []
        for face, shard in zip(faces, shards, strict=True):
            version, counted = known.get(id(face), (version_of(face), shard))
            version = version_of(face) if self.is_whole else version
            # An optimizer or a load has written the shards: what a forward saved before is gone, as it would
            # be after an in-place change of a plain parameter, and its backward raises as there.
            versions.append(version if shard == counted else version + 1)
        self._faces, self._shards = faces, shards
        self._set(versions)
        self.is_whole = True

    def edited(self) -> list[bool]:
        """Of each face whether it was edited since its memory was filled."""
        pairs = zip(self._faces, self._versions, strict=True)
        return [self.is_whole and version_of(face) != version for face, version in pairs]

    def count(self, shards: Versions) -> None:
        """The edits are in the shards now, which have the versions ``shards``."""
        self.gathered = self._shards = shards
        self._set(list(map(version_of, self._faces)))

    def hide(self) -> None:
        """Called when the memory is given back: until it is filled again no saved tensor may be read."""
        if self.is_whole:
            versions = list(map(version_of, self._faces))  # also those of edits that were dropped
            # One more than any forward can have saved: a backward that came to read this memory would raise
            # autograd's error of a tensor that was changed in place, and not read what isn't there.
            self._set([version + 1 for version in versions])
            self._versions, self.is_whole = tuple(versions), False

    def _set(self, versions: Sequence[int]) -> None:
        self._versions = tuple(versions)
        set_versions(self._faces, self._versions)
        # Of a DTensor (tensor parallelism) also the local tensor's, which ``to_local()`` shares.
        pairs = zip(self._faces, versions, strict=True)
        inner = [(local_of(face), version) for face, version in pairs if isinstance(face, DTensor)]
        if inner:
            set_versions(tuple(face for face, _ in inner), tuple(version for _, version in inner))


def moved_memory(params: Sequence[ShardedParam], faces: Sequence[torch.Tensor]) -> StageError | None:
    """What to raise where one of ``faces``, whose memory was given back, has other memory."""
    for param, face in zip(params, faces, strict=True):
        plain = local_of(face) if isinstance(face, DTensor) else face
        # The storage that was freed has no bytes: what has some is another one.
        if not param.extended and plain.untyped_storage().nbytes():
            return StageError(
                f"parameter {param.fqn!r} was given other memory while it was unsharded (`.to()`, "
                "`param.data = ...`), which its shards don't follow. Edit it in place, inside of "
                "`with model.unsharded():`, or convert the model between steps, after model.reshard()"
            )
    return None
