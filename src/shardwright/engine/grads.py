"""A parameter's gradient on its way: unsharded, as a segment of a reduce-scatter, added to the shard's."""

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import equal_spans
from shardwright.torch_private import local_of, post_accumulate_grad_hooks_of
from shardwright.transport.base import Segment


def take_grad(param: ShardedParam) -> torch.Tensor | None:
    """The unsharded gradient so far, earlier microbatches included; the parameter forgets it."""
    grad, param.unsharded.grad = param.unsharded.grad, None
    if isinstance(grad, DTensor):
        grad = param.place.local_grad(grad)
    if grad is not None and grad.layout is not torch.strided:
        grad = grad.to_dense()  # nn.Embedding(sparse=True)
    if param.accumulated is not None:
        grad = param.accumulated if grad is None else param.accumulated.add_(grad)
        param.accumulated = None
    return grad


def zero_grad(param: ShardedParam, policy: MixedPrecisionPolicy) -> torch.Tensor:
    """A gradient of zeros, for a rank that has none."""
    return torch.zeros(param.layout.shape, dtype=param.compute_dtype(policy), device=param.axis.device)


def accumulate_grad(param: ShardedParam, policy: MixedPrecisionPolicy) -> None:
    """Keep this microbatch's gradient unsharded, in the reduce dtype, for a later reduction."""
    grad = take_grad(param)
    if grad is not None:
        param.accumulated = grad.to(param.reduce_dtype(policy))


def predivisor(divisor: float) -> float:
    """The part of ``divisor`` that float16 gradients are divided by before they are summed, so that the sum
    doesn't overflow: the least power of two that isn't below the divisor's square root. It is exact, except
    for numbers so small that float16 has fewer bits for them."""
    power = 1.0
    while power * power < divisor:
        power *= 2
    return power


def reduce_segment(
    param: ShardedParam, grad: torch.Tensor, policy: MixedPrecisionPolicy, divided: float
) -> Segment:
    """The gradient's part in the group's reduce-scatter; ``divided``: what it is divided by where it is
    summed in float16 (``predivisor``).

    It travels in the narrower of its own dtype and the reduce dtype: widening on arrival gives the same
    sum as widening before, for half the bytes.
    """
    reduce_dtype = param.reduce_dtype(policy)
    if reduce_dtype is torch.float16 and divided != 1:
        grad = grad / divided
    if torch.promote_types(grad.dtype, reduce_dtype) != reduce_dtype:
        grad = grad.to(reduce_dtype)
    layout = param.layout
    if layout.dim is None:
        # Kept whole: every rank's span is a copy, so the reduce-scatter gives every rank the sum.
        flat = grad.reshape(-1).repeat(layout.world)
        return Segment(flat, equal_spans(layout.numel, layout.world))
    return Segment(grad.movedim(layout.dim, 0).contiguous().view(-1), layout.spans)


def add_sharded_grad(param: ShardedParam, total: torch.Tensor) -> None:
    """Add a reduced gradient, 1-D in storage order, to ``sharded.grad`` (in the dtype at rest)."""
    layout = param.layout
    local = total.to(param.sharded.dtype).as_strided(layout.shard_shape(param.axis.rank), layout.strides)
    local = local.contiguous().to(param.local.device)
    grad = param.sharded.grad
    if grad is None:
        param.sharded.grad = param.dtensor(local)
    elif isinstance(grad, DTensor):
        local_of(grad).add_(local)
    else:
        raise InputError(
            f"the gradient of sharded parameter {param.fqn!r} was set to a {type(grad).__name__}; "
            "set it to a DTensor like the parameter, or to None"
        )
    for hook in tuple((post_accumulate_grad_hooks_of(param.sharded) or {}).values()):
        hook(param.sharded)
