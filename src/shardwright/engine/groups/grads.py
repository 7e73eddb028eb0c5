"""The gradients of a group's parameters, all at once: taken, cast, as segments of a reduce-scatter, added to
the shards'. What is copied, cast or added is one call for all that have the same dtypes."""

from collections.abc import Sequence
from math import frexp
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError, StageError
from shardwright.params.param import ShardedParam
from shardwright.params.unreduced import mark_of
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import ParamLayout, equal_spans, pack
from shardwright.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_div,
    hooks_of,
    local_of,
    post_accumulate_grad_hooks_of,
)
from shardwright.transport.base import Reduction, Segment

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
    fraction, exponent = frexp(divisor)  # between a half and one, times a power of two
    return 2.0 ** max(0, exponent // 2 if fraction == 0.5 else (exponent + 1) // 2)


def reduce_segments(
    grads: Grads, dtypes: Sequence[torch.dtype], divided: float
) -> tuple[list[Segment], list[list[int]]]:
    """The gradients as parts of a reduce-scatter in ``dtypes``; and by part, which of them it is of.

    They travel in their own dtypes where that loses nothing, so that the cast costs no copy on this side.
    Where the order of one has to be changed, all whose slices of the sharded dim have the same shape share
    its part. divided: what float16 sums are divided by beforehand.
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
    segments: list[Segment] = []
    together: list[list[int]] = []
    shared: dict[object, list[int]] = {}
    layouts = [param.place.layout for param, _ in grads]
    kinds = [(each.shape[each.dim :], t.dtype) for each, t in zip(layouts, tensors, strict=True)]
    across = {kind for kind, layout in zip(kinds, layouts, strict=True) if not layout.in_order}
    for index, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
        if layout.dim is None:
            # Kept whole: every rank's span is a copy, so the reduce-scatter gives every rank the sum.
            flat = tensor.reshape(-1).repeat(layout.world)
            segments.append(Segment(flat, equal_spans(layout.numel, layout.world)))
        elif kinds[index] in across:
            shared.setdefault((kinds[index], dtypes[index]), []).append(index)
            continue
        else:
            segments.append(Segment(tensor.contiguous().view(-1), layout.spans))
        together.append([index])
    for members in shared.values():
        segments.append(_stacked([tensors[index] for index in members], [layouts[i] for i in members]))
    return segments, [*together, *shared.values()]


def _stacked(tensors: Sequence[torch.Tensor], layouts: Sequence[ParamLayout]) -> Segment:
    """Gradients of ``ParamLayout.stacked``, of each rank's part after another, with room for padding."""
    layout = layouts[0].stacked(sum([each.outer for each in layouts]))
    flat = tensors[0].new_empty(layout.padded_numel)
    (outer, size, *_), width = layout.shape, layout.row_numel // layout.shape[0]
    begin = 0
    while begin < size:  # the ranks with equal parts, then the one with a smaller part
        part = min(layout.chunk_rows, size - begin)
        ranks = (size - begin) // part
        start, stop = begin * width, (begin + ranks * part) * width
        place = flat[outer * start : outer * stop].view(ranks, outer, part * width)
        columns = [
            t.reshape(each.outer, size * width)[:, start:stop]
            for t, each in zip(tensors, layouts, strict=True)
        ]
        parts = [each.view(len(each), ranks, part * width).transpose(0, 1) for each in columns]
        torch.cat(parts, 1, out=place)
        begin += ranks * part
    return Segment(flat, layout.spans, has_room=True)


class _Separated:
    """A reduction of gradients of which some share a part (``together``); ``sizes``: of each one's shard."""

    def __init__(self, reduction: Reduction, together: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self._reduction, self._together, self._sizes = reduction, together, sizes

    def wait(self) -> list[torch.Tensor]:
        """See ``Reduction.wait``; the sum of each gradient."""
        found: dict[int, torch.Tensor] = {}
        for total, members in zip(self._reduction.wait(), self._together, strict=True):
            found |= zip(members, total.split([self._sizes[index] for index in members]), strict=True)
        return [found[index] for index in range(len(self._sizes))]


def separated(reduction: Reduction, together: Sequence[Sequence[int]], grads: Grads) -> Reduction:
    """A reduction of the parts that ``reduce_segments`` made, as one of the gradients."""
    if list(together) == [[index] for index in range(len(grads))]:
        return reduction
    return _Separated(reduction, together, [p.layout.shard_numel(p.axis.rank) for p, _ in grads])


def _hooked(param: ShardedParam, local: torch.Tensor) -> torch.Tensor:
    """The local gradient after the caller's hooks, each of which may return another one."""
    grad: Any = param.dtensor(local)
    with torch.no_grad():
        for hook in tuple((hooks_of(param.sharded) or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
    if not isinstance(grad, DTensor) or grad.shape != param.sharded.shape:
        raise InputError(
            f"a hook on the gradient of sharded parameter {param.fqn!r} returned {type(grad).__name__} of "
            f"shape {list(grad.shape)}; return a DTensor like the gradient, or None"
        )
    return local_of(grad)


def add_sharded_grads(params: Sequence[ShardedParam], totals: Sequence[torch.Tensor]) -> None:
    """Add reduced gradients, 1-D, to ``sharded.grad`` (in the dtypes at rest), as the hooks of
    ``register_hook`` change them; then call those that wait for them. Raises: InputError for a gradient that
    the caller has set to something else."""
    earlier: list[torch.Tensor] = []
    later: list[torch.Tensor] = []
    for param, total in zip(params, cast(totals, [param.sharded.dtype for param in params]), strict=True):
        sharded = param.sharded
        shard, grad = local_of(sharded), sharded.grad
        local = total.view(shard.shape).to(shard.device)
        if hooks_of(sharded):
            local = _hooked(param, local)
        mark = mark_of(grad)
        if mark is not None:
            grad = None if mark.cleared else mark.earlier
        if mark is not None and mark.lost and not mark.cleared:
            raise StageError(
                f"gradients of earlier microbatches of {param.fqn!r} were lost in a backward that failed: "
                "call zero_grad() after it, and begin the step again"
            )
        if grad is None:
            sharded.grad = param.dtensor(local)
        elif isinstance(grad, DTensor):
            if mark is not None:
                sharded.grad = grad
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
