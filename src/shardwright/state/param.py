"""One parameter and its two faces: the shard at rest (a DTensor), and the whole tensor while unsharded.

    stage       module attribute                        bytes held
    at rest     ``sharded``: Parameter(DTensor)         this rank's rows
    unsharded   ``unsharded``: Parameter (plain)        a region of the group's buffer

Both are Parameter objects that live as long as the model (the optimizer holds the first, autograd the
second); sharding swaps which of them the module shows, never their identity.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.comm.base import Piece
from shardwright.comm.mesh import Axis
from shardwright.errors import InputError, StageError
from shardwright.plan.layout import ParamLayout
from shardwright.policy import (
    DEFAULT_OFFLOAD,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwright.state.buffer import Buffer
from shardwright.state.rows import Rows


@dataclass(frozen=True)
class Slot:
    """A place in the module tree that shows the parameter: ``module.name``."""

    module: nn.Module
    name: str


@dataclass
class Unsharded:
    """The unsharded face, bound to a buffer: the parameter that modules see, and the region it lies in."""

    param: nn.Parameter
    region: torch.Tensor  # 1-D, padded to ``world`` equal spans
    own: torch.Tensor  # this rank's part of the region, in the shape of the local shard


@dataclass(frozen=True)
class Split:
    """How a parameter is to be sharded.

    dim: the dim that is cut (None: kept whole). offload: where its shard lies.
    dims: the data-parallel axes, where the parameter is a DTensor on a mesh that has them already.
    """

    axis: Axis
    dim: int | None
    offload: OffloadPolicy = DEFAULT_OFFLOAD
    dims: DataParallelMeshDims | None = None

    @property
    def on_host(self) -> bool:
        """Whether shard and gradient lie on the host."""
        return isinstance(self.offload, CPUOffloadPolicy)


class ShardedParam:
    """A parameter split over an axis. ``fqn`` is its name in the module that ``fully_shard`` was called on.

    slots: every place that shows it (more than one where modules share it).
    inner: the placement that tensor parallelism has given it, or None; what is split here is then this
        rank's local tensor.
    accumulated: unsharded gradient of earlier microbatches in the reduce dtype, or None.
    kept_dtype: it is never cast (codes, scales). rows: ranks move only those in use (a lookup's), or None.
    """

    def __init__(self, fqn: str, slots: list[Slot], param: nn.Parameter, split: Split) -> None:
        """Split ``param``, or take it over where it is a DTensor that was split like that before."""
        self.fqn = fqn
        self.slots = slots
        self.split = split
        self.inner = param._spec if isinstance(param, DTensor) else None
        whole = param._local_tensor if isinstance(param, DTensor) else param
        self.layout = ParamLayout(tuple(whole.shape), split.axis.world, split.dim)
        self.spec = self._spec(param)
        self.accumulated: torch.Tensor | None = None
        self.kept_dtype = False
        self.rows: Rows | None = None
        self._unsharded: Unsharded | None = None
        self.sharded = self._shard(whole.detach(), param.requires_grad)
        self.show(self.sharded)

    def twin(self, *places: list[Slot]) -> "ShardedParam":
        """Another parameter split alike, whose shard is what ``places`` show now: a plain parameter."""
        twin = copy.copy(self)
        twin.slots = slots = places[0]
        twin.accumulated = None
        twin._unsharded = twin.rows = None
        shard: Any = slots[0].module._parameters[slots[0].name]
        twin.sharded = nn.Parameter(self.dtensor(shard.detach()), requires_grad=shard.requires_grad)
        twin.show(twin.sharded)
        return twin

    def become(self, shape: tuple[int, ...], rows: torch.Tensor) -> None:
        """From now on be a frozen parameter of the local shape ``shape``, never cast; at rest.

        rows: this rank's shard of it, on the device of the shards. Cut on the same dim over the same ranks.
        """
        self.layout = ParamLayout(shape, self.axis.world, self.layout.dim)
        self.spec = self._spec(torch.empty(shape, dtype=rows.dtype, device="meta"))
        self.accumulated = self._unsharded = None
        self.kept_dtype = True
        self.sharded = nn.Parameter(self.dtensor(rows), requires_grad=False)
        self.show(self.sharded)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: what ``twin`` needs; the shard itself is pickled with the module that shows it."""
        if self.inner is not None:
            raise InputError(
                f"parameter {self.fqn!r} is split by tensor parallelism too, which a pickle can't restore; "
                "save the model's state_dict() with a checkpoint instead"
            )
        state = dict.fromkeys(("accumulated", "rows", "_unsharded", "sharded"))
        meta = self.spec.tensor_meta
        return {**self.__dict__, **state, "slots": [], "spec": (self.spec.placements, meta)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.spec = DTensorSpec(self.axis.mesh, *state["spec"])

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks that hold a part of it."""
        return not any(self.spec.mesh.get_coordinate() or ())

    @property
    def axis(self) -> Axis:
        """The axis that it is split over."""
        return self.split.axis

    # ---- at rest

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, a plain tensor: ``layout.shard_shape(rank)`` in the dtype at rest."""
        return self.sharded._local_tensor  # type: ignore[attr-defined]

    @property
    def trainable(self) -> bool:
        """Whether the parameter asks for a gradient now (it may be frozen and unfrozen at any time)."""
        return self.sharded.requires_grad

    def adopt(self) -> None:
        """Take over what the module shows at rest, where someone replaced it.

        ``to_empty``, ``load_state_dict(assign=True)`` and parametrisation code set new Parameter objects.
        Raises: StageError where the new one isn't a DTensor of this parameter's shape and placement.
        """
        slot = self.slots[0]
        shown = slot.module._parameters.get(slot.name)
        if shown is self.sharded:
            return
        shape = self.spec.shape
        if not (
            isinstance(shown, DTensor)
            and shown.shape == shape
            and shown.placements == self.spec.placements
            and shown.device_mesh == self.spec.mesh
        ):
            got = "nothing" if shown is None else f"{type(shown).__name__} of shape {list(shown.shape)}"
            raise StageError(
                f"parameter {self.fqn!r} was replaced by {got}; a sharded parameter must stay a DTensor of "
                f"shape {list(shape)} placed {self.spec.placements}: copy into it, or load it with "
                "load_state_dict or shardwright.checkpoint.load"
            )
        self.sharded = shown  # type: ignore[assignment]
        self.show(self.sharded)

    def show(self, param: nn.Parameter) -> None:
        """Make every slot show ``param``. Past ``nn.Module.__setattr__``, which costs 5 us a parameter."""
        for slot in self.slots:
            slot.module._parameters[slot.name] = param

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """A DTensor placed like this parameter over ``local``, which has the shape of the local shard.

        Straight to the constructor: from_local() costs 30 us and checks what is true by construction.
        """
        spec = self.spec
        if local.dtype != self.spec.tensor_meta.dtype:  # type: ignore[union-attr]
            meta = spec.tensor_meta._replace(dtype=local.dtype)  # type: ignore[union-attr]
            spec = DTensorSpec(spec.mesh, spec.placements, meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole parameter (of the local one, under tensor parallelism): a view."""
        start, stop = self.layout.row_range(self.axis.rank)
        return whole if self.layout.dim is None else whole.narrow(self.layout.dim, start, stop - start)

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a plain tensor of the logical shape: a view."""
        for mesh, sharding in self._other_axes():
            if isinstance(sharding, Shard):
                layout = ParamLayout(tuple(whole.shape), mesh.size(), sharding.dim)
                start, stop = layout.row_range(mesh.get_local_rank())
                whole = whole.narrow(sharding.dim, start, stop - start)
        return self.rows_of(whole)

    def _spec(self, param: torch.Tensor) -> DTensorSpec:
        """Where the shards lie. Tensor parallelism that cuts the same dim has cut it first (strided)."""
        axis, dim = self.axis, self.layout.dim
        meta = TensorMeta(param.shape, torch.empty(param.shape, device="meta").stride(), param.dtype)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        others = self._other_axes()
        cuts = [mesh.size() for mesh, sharding in others if sharding.is_shard(dim)]
        if cuts and dim is not None:
            placement = _StridedShard(dim, split_factor=math.prod(cuts))
        mesh = axis.mesh
        if others:
            mesh = DeviceMesh._concatenate([mesh, *(other for other, _ in others)])
        return DTensorSpec(mesh, (*axis.placements(placement), *(p for _, p in others)), meta)

    def _other_axes(self) -> list[tuple[DeviceMesh, Placement]]:
        """The axes that aren't data parallel, on which the parameter was a DTensor before."""
        if self.inner is None:
            return []
        mesh, dims = self.inner.mesh, self.split.dims
        if mesh.ndim == 1 and dims is None:
            return [(mesh, self.inner.placements[0])]
        ours = () if dims is None else (*dims.shard_names, *dims.replicate_names)
        placed = zip(mesh.mesh_dim_names or (), self.inner.placements, strict=True)
        return [(mesh[name], placement) for name, placement in placed if name not in ours]

    def _local_grad(self, grad: DTensor) -> torch.Tensor:
        """This rank's part of an unsharded gradient: placed like the parameter on all but the data-parallel
        axes, over which it is reduced later."""
        assert self.inner is not None
        dims, names = self.split.dims, self.inner.mesh.mesh_dim_names or ()
        ours = () if dims is None else (*dims.shard_names, *dims.replicate_names)
        wanted = tuple(
            grad.placements[place] if names[place : place + 1] and names[place] in ours else placement
            for place, placement in enumerate(self.inner.placements)
        )
        return grad.redistribute(placements=wanted).to_local()

    def _shard(self, whole: torch.Tensor, trainable: bool) -> nn.Parameter:
        if whole.device.type != "meta":
            whole = whole.to("cpu" if self.split.on_host else self.axis.device)
        rows = self.rows_of(whole)
        if self.axis.world > 1 or not rows.is_contiguous():
            # A copy, so that the whole parameter's memory can go.
            rows = rows.clone(memory_format=torch.contiguous_format)
        offload = self.split.offload
        if isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self.axis.device.type != "cpu":
            rows = rows.pin_memory()
        return nn.Parameter(self.dtensor(rows), requires_grad=trainable)

    # ---- dtypes

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype while unsharded. Integer parameters (packed weights) and their scales are never cast."""
        dtype = self.sharded.dtype
        casts = policy.param_dtype is not None and dtype.is_floating_point and not self.kept_dtype
        return policy.param_dtype or dtype if casts else dtype

    def reduce_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype in which the gradient is summed over ranks and over microbatches."""
        return policy.reduce_dtype or self.compute_dtype(policy)

    # ---- unsharded

    @property
    def unsharded(self) -> nn.Parameter:
        """The parameter that modules see while unsharded; at rest its memory may be freed."""
        assert self._unsharded is not None, "bind() first"
        return self._unsharded.param

    def bind(self, buffer: Buffer, offset_nbytes: int, dtype: torch.dtype) -> None:
        """Lay the unsharded face at ``offset_nbytes`` of ``buffer`` (which must hold its memory)."""
        layout = self.layout
        region = buffer.tensor(dtype, offset_nbytes, (layout.padded_numel,), (1,))
        start, _ = layout.span(self.axis.rank)
        own = buffer.tensor(
            dtype,
            offset_nbytes + start * dtype.itemsize,
            layout.shard_shape(self.axis.rank),
            layout.strides,
        )
        whole = buffer.tensor(dtype, offset_nbytes, layout.shape, layout.strides)
        if self.inner is not None:
            meta = TensorMeta(self.spec.shape, self.spec.stride, dtype)
            spec = DTensorSpec(self.inner.mesh, self.inner.placements, meta)
            whole = DTensor(whole, spec, requires_grad=False)  # type: ignore[call-arg]
        self._unsharded = Unsharded(nn.Parameter(whole, requires_grad=self.trainable), region, own)

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of the buffer, in the shape of the local shard."""
        assert self._unsharded is not None, "bind() first"
        return self._unsharded.own

    def gather_piece(self, layout: ParamLayout | None = None) -> Piece:
        """Its part in the group's all-gather; ``layout``: over another world, at most as large."""
        assert self._unsharded is not None, "bind() first"
        layout = layout or self.layout
        return Piece(self._unsharded.region[: layout.padded_numel], layout.spans)

    # ---- gradients

    def take_grad(self) -> torch.Tensor | None:
        """The unsharded gradient so far, earlier microbatches included; the parameter forgets it."""
        grad, self.unsharded.grad = self.unsharded.grad, None
        if isinstance(grad, DTensor):
            grad = self._local_grad(grad)
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()  # nn.Embedding(sparse=True)
        if self.accumulated is not None:
            grad = self.accumulated if grad is None else self.accumulated.add_(grad)
            self.accumulated = None
        return grad

    def zero_grad(self, policy: MixedPrecisionPolicy) -> torch.Tensor:
        """A gradient of zeros, for a rank that has none."""
        return torch.zeros(self.layout.shape, dtype=self.compute_dtype(policy), device=self.axis.device)

    def accumulate_grad(self, policy: MixedPrecisionPolicy) -> None:
        """Keep this microbatch's gradient unsharded, in the reduce dtype, for a later reduction."""
        grad = self.take_grad()
        if grad is not None:
            self.accumulated = grad.to(self.reduce_dtype(policy))

    def reduce_piece(self, grad: torch.Tensor, policy: MixedPrecisionPolicy) -> Piece:
        """The gradient's part in the group's reduce-scatter.

        It travels in the narrower of its own dtype and the reduce dtype: widening on arrival gives the same
        sum as widening before, for half the bytes.
        """
        reduce_dtype = self.reduce_dtype(policy)
        if torch.promote_types(grad.dtype, reduce_dtype) != reduce_dtype:
            grad = grad.to(reduce_dtype)
        layout = self.layout
        if layout.dim is None:
            # Kept whole: every rank's span is a copy, so the reduce-scatter gives every rank the sum.
            flat = grad.reshape(-1).repeat(layout.world)
            numel = layout.numel
            return Piece(flat, tuple((r * numel, (r + 1) * numel) for r in range(layout.world)))
        return Piece(grad.movedim(layout.dim, 0).contiguous().view(-1), layout.spans)

    def add_sharded_grad(self, total: torch.Tensor) -> None:
        """Add a reduced gradient, 1-D in storage order, to ``sharded.grad`` (in the dtype at rest)."""
        layout = self.layout
        local = total.to(self.sharded.dtype).as_strided(layout.shard_shape(self.axis.rank), layout.strides)
        local = local.contiguous().to(self.local.device)
        grad = self.sharded.grad
        if grad is None:
            self.sharded.grad = self.dtensor(local)
        elif isinstance(grad, DTensor):
            grad._local_tensor.add_(local)
        else:
            raise InputError(
                f"the gradient of sharded parameter {self.fqn!r} was set to a {type(grad).__name__}; "
                "set it to a DTensor like the parameter, or to None"
            )
        for hook in tuple((getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(self.sharded)
