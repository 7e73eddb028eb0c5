"""The gradients of a group's parameters, all at once: taken, cast, as segments of a reduce-scatter, added to
the shards'. What is copied, cast or added is one call for all that have the same dtypes."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import equal_spans, pack
from shardwright.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_div,
    local_of,
    post_accumulate_grad_hooks_of,
)
from shardwright.transport.base import Segment

Grads = list[tuple[ShardedParam, torch.Tensor]]


def take_grads(params: Sequence[ShardedParam]) -> list[torch.Tensor | None]:
    """The unsharded gradients so far, earlier microbatches included; the parameters forget them."""
    taken: list[torch.Tensor | None] = []
    earlier: list[torch.Tensor] = []
    later: list[torch.Tensor] = []
    for param in params:
        grad = None
        if param.bound is not None:
            grad, param.bound.param.grad = param.bound.param.grad, None
        if isinstance(grad, DTensor):
            grad = param.place.local_grad(grad)
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()  # nn.Embedding(sparse=True)
        if param.accumulated is not None:
            if grad is not None:
                earlier.append(param.accumulated)
                later.append(grad)
            grad, param.accumulated = param.accumulated, None
        taken.append(grad)
    if earlier:
        foreach_add_(earlier, later)
    return taken


def zero_grads(params: Sequence[ShardedParam], policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
    """Gradients of zeros, for a rank that has none: parts of one tensor for each dtype."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, param in enumerate(params):
        kinds.setdefault((param.compute_dtype(policy), param.axis.device), []).append(index)
    zeros: dict[int, torch.Tensor] = {}
    for (dtype, device), members in kinds.items():
        layouts = [params[index].layout for index in members]
        offsets, nbytes = pack([layout.numel * dtype.itemsize for layout in layouts])
        whole = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        for index, layout, offset in zip(members, layouts, offsets, strict=True):
            start = offset // dtype.itemsize
            zeros[index] = whole[start : start + layout.numel].view(layout.shape)
    return [zeros[index] for index in range(len(params))]


def cast(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Each tensor in its dtype: itself where it has that."""
    found = list(tensors)
    copies: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for index, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.dtype != dtype:
            found[index] = torch.empty_like(tensor, dtype=dtype)
            places, sources = copies.setdefault((tensor.dtype, dtype, tensor.device), ([], []))
            places.append(found[index])
            sources.append(tensor)
    for places, sources in copies.values():
        foreach_copy_(places, sources)
    return found


def predivisor(divisor: float) -> float:
    """The part of ``divisor`` that float16 gradients are divided by before they are summed, so that the sum
    doesn't overflow: the least power of two that isn't below the divisor's square root. It is exact, except
    for numbers so small that float16 has fewer bits for them."""
    power = 1.0
    while power * power < divisor:
        power *= 2
    return power


def reduce_segments(grads: Grads, dtypes: Sequence[torch.dtype], divided: float) -> list[Segment]:
    """The gradients as parts of a reduce-scatter in ``dtypes``, in their storage order.

    They travel in their own dtypes where that loses nothing, so that the cast costs no copy on this side.
    divided: what float16 sums are divided by beforehand.
    """
    tensors = [grad for _, grad in grads]
    half = [index for index, dtype in enumerate(dtypes) if dtype is torch.float16]
    if half and divided != 1:
        for index, part in zip(half, foreach_div([tensors[i] for i in half], divided), strict=True):
            tensors[index] = part
    wide = [torch.promote_types(t.dtype, dtype) != dtype for t, dtype in zip(tensors, dtypes, strict=True)]
    if True in wide:
        targets = [d if w else t.dtype for t, d, w in zip(tensors, dtypes, wide, strict=True)]
        tensors = cast(tensors, targets)
    segments = []
    for (param, _), tensor in zip(grads, tensors, strict=True):
        layout = param.place.layout
        if layout.dim is None:
            # Kept whole: every rank's span is a copy, so the reduce-scatter gives every rank the sum.
            flat = tensor.reshape(-1).repeat(layout.world)
            segments.append(Segment(flat, equal_spans(layout.numel, layout.world)))
        else:
            flat = tensor.movedim(layout.dim, 0).contiguous().view(-1)
            segments.append(Segment(flat, layout.spans))
    return segments


def add_sharded_grads(params: Sequence[ShardedParam], totals: Sequence[torch.Tensor]) -> None:
    """Add reduced gradients, 1-D in storage order, to ``sharded.grad`` (in the dtypes at rest), then call the
    hooks that wait for them. Raises: InputError for a gradient that the caller has set to something else."""
    earlier: list[torch.Tensor] = []
    later: list[torch.Tensor] = []
    for param, total in zip(params, cast(totals, [param.sharded.dtype for param in params]), strict=True):
        sharded = param.sharded
        shard, grad = local_of(sharded), sharded.grad
        local = total.as_strided(shard.shape, param.place.layout.strides).contiguous().to(shard.device)
        if grad is None:
            sharded.grad = param.dtensor(local)
        elif isinstance(grad, DTensor):
            earlier.append(local_of(grad))
            later.append(local)
        else:
            raise InputError(
                f"the gradient of sharded parameter {param.fqn!r} was set to a {type(grad).__name__}; "
                "set it to a DTensor like the parameter, or to None"
            )
    if earlier:
        foreach_add_(earlier, later)
    for param in params:
        for hook in tuple((post_accumulate_grad_hooks_of(param.sharded) or {}).values()):
            hook(param.sharded)
