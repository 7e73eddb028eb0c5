"""One parameter and its two faces: the shard at rest (a DTensor), and the whole tensor while unsharded.

    stage       module attribute                        bytes held
    at rest     ``sharded``: Parameter(DTensor)         this rank's rows
    unsharded   ``unsharded``: Parameter (plain)        a region of the group's buffer

Both are Parameter objects that live as long as the model (the optimizer holds the first, autograd the
second); sharding swaps which of them the module shows, never their identity.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwright.comm.base import Piece
from shardwright.comm.mesh import Axis
from shardwright.errors import InputError, StageError
from shardwright.plan.layout import ParamLayout
from shardwright.policy import MixedPrecisionPolicy
from shardwright.state.buffer import Buffer


@dataclass(frozen=True)
class Slot:
    """A place in the module tree that shows the parameter: ``module.name``."""

    module: nn.Module
    name: str


@dataclass
class _Unsharded:
    """The unsharded face, bound to a buffer: the parameter that modules see, and the region it lies in."""

    param: nn.Parameter
    region: torch.Tensor  # 1-D, padded to ``world`` equal spans
    own: torch.Tensor  # this rank's part of the region, in the shape of the local shard


class ShardedParam:
    """A parameter split over an axis. ``fqn`` is its name in the module that ``fully_shard`` was called on.

    slots: every place that shows it (more than one where modules share it).
    accumulated: unsharded gradient of earlier microbatches in the reduce dtype, or None.
    """

    def __init__(self, fqn: str, slots: list[Slot], param: nn.Parameter, axis: Axis) -> None:
        self.fqn = fqn
        self.slots = slots
        self.axis = axis
        self.layout = ParamLayout(tuple(param.shape), axis.world, dim=0 if param.ndim else None)
        self.accumulated: torch.Tensor | None = None
        self._unsharded: _Unsharded | None = None
        self.sharded = self._shard(param)
        self.show(self.sharded)

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
        if not (
            isinstance(shown, DTensor)
            and tuple(shown.shape) == self.layout.shape
            and shown.placements == (self._placement(),)
        ):
            got = "nothing" if shown is None else f"{type(shown).__name__} of shape {list(shown.shape)}"
            raise StageError(
                f"parameter {self.fqn!r} was replaced by {got}; a sharded parameter must stay a DTensor of "
                f"shape {list(self.layout.shape)} placed {self._placement()}: copy into it, or load it with "
                "load_state_dict or shardwright.checkpoint.load"
            )
        self.sharded = shown  # type: ignore[assignment]
        self.show(self.sharded)

    def show(self, param: nn.Parameter) -> None:
        """Make every slot show ``param``. Past ``nn.Module.__setattr__``, which costs 5 us a parameter."""
        for slot in self.slots:
            slot.module._parameters[slot.name] = param

    def _placement(self) -> Placement:
        return Replicate() if self.layout.dim is None else Shard(self.layout.dim)

    def _shard(self, param: nn.Parameter) -> nn.Parameter:
        start, stop = self.layout.row_range(self.axis.rank)
        whole = param.detach().to(self.axis.device) if param.device.type != "meta" else param.detach()
        rows = whole if self.layout.dim is None else whole.narrow(self.layout.dim, start, stop - start)
        if self.axis.world > 1 or not rows.is_contiguous():
            # A copy, so that the whole parameter's memory can go.
            rows = rows.clone(memory_format=torch.contiguous_format)
        dtensor = DTensor.from_local(
            rows,
            self.axis.mesh,
            [self._placement()],
            run_check=False,
            shape=torch.Size(self.layout.shape),
            stride=torch.empty(self.layout.shape, device="meta").stride(),
        )
        return nn.Parameter(dtensor, requires_grad=param.requires_grad)

    # ---- dtypes

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype while unsharded. Integer parameters (packed weights) are never cast."""
        dtype = self.sharded.dtype
        return policy.param_dtype if policy.param_dtype is not None and dtype.is_floating_point else dtype

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
        self._unsharded = _Unsharded(nn.Parameter(whole, requires_grad=self.trainable), region, own)

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of the buffer, in the shape of the local shard."""
        assert self._unsharded is not None, "bind() first"
        return self._unsharded.own

    def gather_piece(self) -> Piece:
        """Its part in the group's all-gather."""
        assert self._unsharded is not None, "bind() first"
        return Piece(self._unsharded.region, self.layout.spans)

    # ---- gradients

    def take_grad(self) -> torch.Tensor | None:
        """The unsharded gradient so far, earlier microbatches included; the parameter forgets it."""
        grad, self.unsharded.grad = self.unsharded.grad, None
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()  # nn.Embedding(sparse=True)
        if self.accumulated is not None:
            grad = self.accumulated if grad is None else self.accumulated.add_(grad)
            self.accumulated = None
        return grad

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
        shape = layout.shard_shape(self.axis.rank)
        local = total.to(self.sharded.dtype).as_strided(shape, layout.strides)
        grad = self.sharded.grad
        if grad is None:
            # Straight to the constructor: from_local() costs 30 us and checks what is true by construction.
            self.sharded.grad = DTensor(local, self.sharded._spec, requires_grad=False)  # type: ignore[attr-defined]
        elif isinstance(grad, DTensor):
            grad._local_tensor.add_(local)
        else:
            raise InputError(
                f"the gradient of sharded parameter {self.fqn!r} was set to a {type(grad).__name__}; "
                "set it to a DTensor like the parameter, or to None"
            )
