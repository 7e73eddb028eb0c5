"""Gradients of a group's parameters as a reduce-scatter takes them: cast, and as segments. What is copied or
cast is one call for all that have the same dtypes."""

from collections.abc import Sequence
from math import frexp

import torch

from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import ParamLayout, equal_spans, pack
from shardwright.torch_private import foreach_copy_, foreach_div
from shardwright.transport.base import Reduction, Segment

Grads = dict[ShardedParam, torch.Tensor]


def zero_grads(params: Sequence[ShardedParam], policy: MixedPrecisionPolicy) -> Grads:
    """Gradients of zeros, for a rank that has none: parts of one tensor for each dtype."""
    kinds: dict[tuple[torch.dtype, torch.device], list[ShardedParam]] = {}
    for param in params:
        kinds.setdefault((param.compute_dtype(policy), param.axis.device), []).append(param)
    zeros: Grads = {}
    for (dtype, device), members in kinds.items():
        layouts = [param.layout for param in members]
        offsets, nbytes = pack([layout.numel * dtype.itemsize for layout in layouts])
        # One fill for all of them: a rank that skips a layer would launch one for each parameter.
        whole = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        for param, layout, offset in zip(members, layouts, offsets, strict=True):
            start = offset // dtype.itemsize
            zeros[param] = whole[start : start + layout.numel].view(layout.shape)
    return zeros


def cast(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Each tensor in its dtype: itself where it has that."""
    found = list(tensors)
    copies: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for index, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if tensor.dtype != dtype:
            found[index] = torch.empty_like(tensor, dtype=dtype)
            # One kernel takes a list of tensors only where all pairs have the same two dtypes.
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
    tensors = list(grads.values())
    # The sum over ranks would overflow before it was divided, so that a part of the divisor comes first.
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
    layouts = [param.place.layout for param in grads]
    kinds = [(each.shape[each.dim :], t.dtype) for each, t in zip(layouts, tensors, strict=True)]
    # One copy brings all of a kind into the order of the ranks, and autograd's own tensor is the segment
    # of the others.
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
    return _Separated(reduction, together, [p.layout.shard_numel(p.axis.rank) for p in grads])
