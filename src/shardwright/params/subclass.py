"""Parameters of a tensor subclass that says itself what is gathered: the methods torch's fully_shard calls.

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (unsharded, tensors to be freed)
    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> whether ``outputs`` go then (optional)

at rest      the subclass, this rank's rows (``torch.chunk``'s)
gathering    ``arrival``: what the first method gave, of all ranks
unsharded    what the second method made of it; later calls fill that very tensor, ``out``

A class that packs a weight (8 bits and their scales, say) and has none of the methods is taken apart by
``__tensor_flatten__``: its tensors are sharded and gathered as bytes, each by its dim 0, and make the very
weight again, whatever the class means by them. One of which dim 0 can't be cut is whole on every rank.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError, StageError
from shardwright.params.binding import POST, PRE, RELEASE, Buffer, is_extended, packs
from shardwright.params.param import ParamSite, ShardedParam, Unsharded, give
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import ParamLayout, Spans
from shardwright.torch_private import is_traceable_wrapper_subclass
from shardwright.transport.base import Segment
from shardwright.transport.mesh import Axis


def copied(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own: of the tensors that a subclass is made of, where it says which they are.
    Its own ``clone`` may decode and encode anew, and so be another weight (torchao's ``NF4Tensor``).

    Raises: InputError for parameter ``fqn`` where its class can't be copied to the bit.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name).clone() for name in names}
    try:
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    except Exception as error:  # a method of the class, of which torch's fully_shard has no need
        copy = tensor.new_zeros(tensor.size())
        copy.copy_(tensor)  # as torch does it
        same = type(copy) is type(tensor) and (
            tensor.is_meta
            or all(torch.equal(_bits(getattr(copy, name)), _bits(part)) for name, part in inner.items())
        )
        if not same:
            raise InputError(
                f"parameter {fqn!r} is a {type(tensor).__name__}, whose __tensor_unflatten__ fails ({error}) "
                "and whose copy_ makes another weight; have the former take its 4 arguments (inner tensors, "
                "context, size, stride)"
            ) from error
        return copy


def _bits_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes of a row]"""
    return (tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)).contiguous().view(torch.uint8)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_Packed = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Of a packed weight: which of its tensors are cut, with their shapes and dtypes when whole."""


def _cut(whole: Any, start: int, stop: int, world: int) -> tuple[torch.Tensor, _Packed]:
    """Rows ``start`` to ``stop`` of such a weight, in its own memory."""
    names, context = whole.__tensor_flatten__()
    inner, rows = {name: getattr(whole, name) for name in names}, len(whole)
    # Blocks of rows that share a scale are cut where all ranks have as many.
    packed = {
        name: (part.shape, part.dtype)
        for name, part in inner.items()
        if part.ndim and (len(part) == rows or (rows % world == 0 and len(part) % world == 0))
    }
    for name, (shape, _) in packed.items():
        inner[name] = inner[name][start * shape[0] // rows : stop * shape[0] // rows]
    size = torch.Size((stop - start, *whole.shape[1:]))
    return type(whole).__tensor_unflatten__(inner, context, size, whole.stride()), packed


def check_packed(fqn: str, whole: torch.Tensor, world: int) -> None:
    """Raises: InputError for a weight that a class without methods packs in a way that has no rows."""
    rows = -(-len(whole) // world)
    cut, packed = _cut(whole, 0, rows, world)
    if cut.shape != (rows, *whole.shape[1:]):
        raise InputError(
            f"parameter {fqn!r} is a {type(whole).__name__} of shape {list(whole.shape)}, packed as "
            f"{ {name: list(shape) for name, (shape, _) in packed.items()} }, which has no such rows to cut; "
            f"have its class define {PRE} and {POST}, or pass it in ignored_params"
        )


@dataclass
class _Arrival:
    """The memory that inputs are gathered in: a buffer for each, since code of such classes may count on an
    output that has a storage of its own. own: this rank's places; outputs: those of all ranks."""

    buffers: list[Buffer]
    kinds: list[tuple[torch.Size, torch.dtype]]
    layouts: list[ParamLayout]
    regions: list[torch.Tensor]
    own: list[torch.Tensor]
    outputs: list[torch.Tensor]


class ExtendedParam(ShardedParam):
    """One such parameter. It has no region in its group's buffer: ``fill``, ``arrive``, ``free``."""

    extended = True
    shows_itself = True  # what it shows is made anew by the first gather
    _arrival: _Arrival | None = None
    _made = False
    _metadata: Any = None
    _inner: tuple[tuple[torch.UntypedStorage, int], ...] = ()
    _packed: _Packed  # by a class without methods

    def _shard(self, whole: torch.Tensor, trainable: bool) -> nn.Parameter:
        if whole.device.type != "meta":
            whole = whole.to("cpu" if self.split.on_host else self.axis.device)
        if not hasattr(whole, PRE) and packs(whole):
            cut, self._packed = _cut(whole, *self.layout.row_range(self.axis.rank), self.axis.world)
            return nn.Parameter(self.dtensor(copied(self.fqn, cut)), requires_grad=trainable)
        # torch.chunk and not narrow: the operation that such classes know, since torch's fully_shard uses it.
        chunks = torch.chunk(whole, self.axis.world)
        rank = self.axis.rank
        rows = (
            copied(self.fqn, chunks[rank])
            if rank < len(chunks)
            else chunks[0].new_zeros((0, *whole.shape[1:]))
        )
        return nn.Parameter(self.dtensor(rows), requires_grad=trainable)

    def twin(self, sites: list[ParamSite]) -> ShardedParam:
        """See ``ShardedParam.twin``."""
        twin = super().twin(sites)
        assert isinstance(twin, ExtendedParam)
        twin.unbind(self.sharded.dtype)
        return twin

    def unbind(self, dtype: torch.dtype) -> None:
        """Forget what arrived and unsharded face; a stand-in of ``dtype`` is there until ``arrive``."""
        self._arrival, self._made, self._metadata, self._inner = None, False, None, ()
        self._expose(nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=self.trainable))

    def _expose(self, param: nn.Parameter) -> None:
        nowhere = torch.empty(0)
        self.bound = Unsharded(give(self.attributes, param), Segment(nowhere, Spans(0, 0, 0)), nowhere)

    # ---- the all-gather

    def fill(
        self, policy: MixedPrecisionPolicy, copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[Segment]:
        """Take the memory that it arrives in; what has to be gathered. copies: gets the places there and this
        rank's inputs for them, for the caller to copy.

        Raises: StageError for inputs of other shapes or dtypes than before; InputError for inputs whose rows
            are neither the shard's nor padded like it where the ranks don't divide the rows.
        """
        inputs, self._metadata = self._call_pre(policy)
        inputs = [part.reshape(1) if part.ndim == 0 else part for part in inputs]
        kinds = [(part.shape, part.dtype) for part in inputs]
        if self._arrival is None:
            self._arrival = self._lay_out(kinds)
        if kinds != self._arrival.kinds:
            raise StageError(
                f"{PRE} of parameter {self.fqn!r} gave {kinds}, and {self._arrival.kinds} before; "
                "shapes and dtypes must stay the same"
            )
        for buffer in self._arrival.buffers:
            buffer.alloc()
        for layout, output in zip(self._arrival.layouts, self._arrival.outputs, strict=True):
            output[layout.rows :].zero_()  # padding, which no rank sends
        for own, part in zip(self._arrival.own, inputs, strict=True):
            copies.append((own, part[: len(own)]))
        pairs = zip(self._arrival.regions, self._arrival.layouts, strict=True)
        return [Segment(region, layout.spans) for region, layout in pairs]

    def arrive(self, policy: MixedPrecisionPolicy) -> None:
        """Make the unsharded parameter of what was gathered."""
        assert self._arrival is not None
        dtype = self.sharded.dtype if self.kept_dtype else policy.param_dtype or self.sharded.dtype
        post = getattr(self.local, POST, self._put_together)
        outputs = tuple(self._arrival.outputs)
        if self._made:
            # The storages that autograd's saved tensors view, as of a plain parameter's buffer: regrown in
            # place before they are filled again.
            for storage, nbytes in self._inner:
                storage.resize_(nbytes)
            post(outputs, self._metadata, dtype, out=self.unsharded)
        else:
            made, inner = post(outputs, self._metadata, dtype)
            if made.shape != self.spec.shape:  # padded like its inputs
                made = torch.as_strided(made, self.spec.shape, self.spec.stride, 0)
            storages = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in inner)}
            for output in outputs:
                # It arrived in a buffer's, which frees it itself.
                storages.pop(output.untyped_storage().data_ptr(), None)
            self._inner = tuple((storage, storage.nbytes()) for storage in storages.values())
            self._expose(nn.Parameter(made, requires_grad=self.trainable))
            self._made = True
        # What was gathered, if the class says that the unsharded parameter doesn't read it.
        asks = getattr(self.local, RELEASE, None)
        if asks is not None and asks():
            self._free_arrival()

    def _free_arrival(self) -> None:
        for buffer in self._arrival.buffers if self._arrival is not None else ():
            buffer.free()

    def free(self) -> None:
        """Give the memory that it arrived in and of the unsharded parameter back."""
        self._free_arrival()
        for storage, _ in self._inner:
            storage.resize_(0)

    @property
    def held_nbytes(self) -> int:
        """Bytes of both, now."""
        buffers = self._arrival.buffers if self._arrival is not None else ()
        arrived = sum(buffer.allocated_nbytes for buffer in buffers)
        return arrived + sum(storage.nbytes() for storage, _ in self._inner)

    def write_back(self) -> None:
        """See ``ShardedParam.write_back``."""
        self.local.copy_(self.rows_of(self.unsharded.detach()))

    def _call_pre(self, policy: MixedPrecisionPolicy) -> tuple[Any, Any]:
        local: Any = self.local.to(self.axis.device, non_blocking=True) if self.split.on_host else self.local
        if not hasattr(local, PRE):
            if self.trainable:
                raise InputError(
                    f"{self.fqn!r} is a {type(local).__name__}, which packs a weight and can't be trained: "
                    "call requires_grad_(False) on it"
                )
            return [_bits_of_rows(getattr(local, name)) for name in self._packed], local.__tensor_flatten__()
        pre, mesh = getattr(local, PRE), _shard_mesh(self.axis)
        # torch's fully_shard takes both: the mesh alone is the older signature.
        takes = inspect.signature(pre)
        if len(takes.parameters) == 1:
            return pre(mesh)
        if len(takes.parameters) != 5:
            raise InputError(
                f"Invalid {PRE}: {takes}\nExpects {PRE}(self, mesh: DeviceMesh, outer_size: torch.Size, "
                "outer_stride: tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        return pre(mesh, self.spec.shape, self.spec.stride, self.sites[0].module, policy)

    def whole(self) -> torch.Tensor:
        """All of the weight, at rest; every rank of its mesh calls it."""
        sharded: Any = self.sharded
        local: Any = self.local
        if hasattr(local, PRE):
            return sharded.full_tensor().detach()
        parts = []
        for name, (shape, _) in self._packed.items():
            rows = _bits_of_rows(getattr(local, name))
            size, stride = torch.Size((shape[0], rows.shape[1])), (rows.shape[1], 1)
            mesh, placements = sharded.device_mesh, sharded.placements
            part = DTensor.from_local(rows, mesh, placements, run_check=False, shape=size, stride=stride)
            parts.append(part.full_tensor())
        return self._put_together(parts, local.__tensor_flatten__(), sharded.dtype)[0]

    def _put_together(self, outputs: Any, metadata: Any, dtype: torch.dtype, out: Any = None) -> Any:
        """The second method of a class that has none: its tensors are views of what arrived."""
        if out is not None:
            return None
        (names, context), local = metadata, self.local
        inner = {name: getattr(local, name) for name in names}
        for (name, (shape, kind)), output in zip(self._packed.items(), outputs, strict=True):
            inner[name] = output[: shape[0]].view(kind).view(shape)
        kind: Any = type(local)
        return kind.__tensor_unflatten__(inner, context, self.spec.shape, self.spec.stride), ()

    def _lay_out(self, kinds: list[tuple[torch.Size, torch.dtype]]) -> _Arrival:
        world, rank = self.axis.world, self.axis.rank
        arrival = _Arrival([], kinds, [self._layout_of(shape) for shape, _ in kinds], [], [], [])
        for layout, (_, dtype) in zip(arrival.layouts, kinds, strict=True):
            start = layout.span(rank)[0] * dtype.itemsize
            shape = (layout.chunk_rows * world, *layout.shape[1:])
            buffer = Buffer(layout.padded_numel * dtype.itemsize, self.axis.device)
            buffer.alloc()
            arrival.buffers.append(buffer)
            arrival.regions.append(buffer.tensor(dtype, 0, (layout.padded_numel,), (1,)))
            arrival.own.append(buffer.tensor(dtype, start, layout.shard_shape(rank), layout.strides))
            arrival.outputs.append(buffer.tensor(dtype, 0, shape, layout.strides))
        return arrival

    def _layout_of(self, shape: torch.Size) -> ParamLayout:
        """How an input lies among the ranks: like the parameter's rows, or in equal parts."""
        rows, world = self.layout.rows, self.axis.world
        if rows % world == 0:
            return ParamLayout((shape[0] * world, *shape[1:]), world)
        if shape[0] not in (self.layout.shard_shape(self.axis.rank)[0], self.layout.chunk_rows):
            raise InputError(
                f"When a parameter is unevenly sharded by FSDP ({self.fqn!r}, {rows} rows over {world} "
                f"ranks), {PRE} must return inputs with the rows of the shard, padded to "
                f"{self.layout.chunk_rows} or not, but got {list(shape)}"
            )
        return ParamLayout((rows, *shape[1:]), world)


def follow_extensions(params: Sequence[ShardedParam]) -> None:
    """Have each of ``params``, at rest, be an ``ExtendedParam`` or not, as its local tensor says now.

    The methods may be set on its local tensor at any time, and a new tensor (``to_empty``) hasn't those that
    were set on the one before. Raises: InputError for a parameter that can't have them.
    """
    changed = [param for param in params if is_extended(param.local) != isinstance(param, ExtendedParam)]
    for param in changed:
        extends = not isinstance(param, ExtendedParam)
        if extends and not hasattr(param.local, PRE):
            raise InputError(
                f"parameter {param.fqn!r} was replaced by a {type(param.local).__name__}, which packs a "
                "weight, after fully_shard: pack it before"
            )
        if extends and (param.layout.dim != 0 or param.inner is not None or param.members):
            raise InputError(not_extensible(param.fqn, param.local))
    each: Any
    for each in changed:
        for name in ("_arrival", "_made", "_metadata", "_inner"):
            vars(each).pop(name, None)
        each.bound = None
        kind: Any = ShardedParam if isinstance(each, ExtendedParam) else ExtendedParam
        each.__class__ = kind


def not_extensible(fqn: str, param: torch.Tensor) -> str:
    """Why a parameter can't have extensions."""
    return (
        f"parameter {fqn!r} is a {type(param).__name__} of shape {list(param.shape)} with extensions of "
        "the all-gather, which are for dim 0 of plain parameters of one dim or more"
    )


def _shard_mesh(axis: Axis) -> DeviceMesh:
    """The 1-D mesh of the sharded axis."""
    names = axis.mesh.mesh_dim_names
    return axis.mesh if axis.mesh.ndim == 1 or not names else axis.mesh[names[axis.shards.index(True)]]
