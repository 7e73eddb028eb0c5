"""What a group does with its gradients, whose places are a ``GradientState``.

    hold()     take what a backward has brought      (or keep it unsharded, while accumulating)
    reduce()   issue the reduce-scatter of that      (``batches.reduce``)
    land()     wait for it; what it brought is all-reduced over copies, where the mesh has them
    finalize() wait for that; divide, and give the sums to the shards

Between ``land`` and ``finalize`` the all-reduce runs beside the rest of the backward. On an accelerator it is
issued with the reduce-scatter, and follows it there: neither host nor compute waits in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import frexp
from typing import TYPE_CHECKING, Any

import torch

from shardwright.engine.groups.gatherer import Gatherer
from shardwright.engine.groups.gradient_state import GradientState, GradPlace, Grads, cast
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy, ReductionPolicy
from shardwright.schedule.layout import ParamLayout, equal_spans, pack
from shardwright.torch_fsdp import SUMS_AT_REST
from shardwright.torch_private import (
    foreach_div,
    foreach_div_,
    num_dispatch_modes,
    post_accumulate_grad_hooks_of,
)
from shardwright.transport.base import Comm, Followed, Reduction, Segment
from shardwright.transport.mesh import Axis

if TYPE_CHECKING:
    from shardwright.transport.streams import Streams

Hook = Callable[[torch.Tensor], None]


class Reducer:
    """The gradients of one group.

    params: the group's. policy: replaced as a whole by setters. gatherer: the group's, by whose transport
        gradients go, and whole or by rows. gradients: where they are.
    hook: called with the group's reduced gradients, one flat tensor for each dtype, before they are added to
        the shards'; stream: where it runs (CUDA).
    done: whether this backward has taken them. reduces: whether it is to reduce them, or one that failed was.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[ShardedParam],
        axis: Axis,
        precision: MixedPrecisionPolicy,
        gatherer: Gatherer,
    ) -> None:
        self.policy = ReductionPolicy()
        self.gatherer = gatherer
        self.hook: Hook | None = None
        self.stream: Any = None
        self.done = self.reduces = False
        self.gradients = GradientState()
        self.name = name
        self.params = params
        self.has_copies = axis.replicate is not None  # whether other ranks hold the same shards
        self._axis = axis
        # Whose gradients are summed, over shards and copies, or came by an exchange of the model's own.
        self._ranks = params[0].split.num_averaged or axis.world * axis.num_copies
        self._precision = precision
        self._began_by = 1.0  # the divisor when the first of what is summed was reduced

    # ---- the reduce-scatter

    @property
    def keeps_grads(self) -> bool:
        """Whether earlier microbatches have left gradients that a backward which reduces takes along."""
        if not self.gradients.at:
            return False
        return bool(self.gradients.of(GradPlace.ACCUMULATING)) or self._takes_sums_along

    @property
    def _takes_sums_along(self) -> bool:
        """Whether gradients are summed over shards that this backward is to sum over copies."""
        return not self.done and self.policy.all_reduce and bool(self.gradients.of(GradPlace.SUMMED))

    @property
    def left_mask(self) -> int:
        """Bits of the parameters of which earlier microbatches have left gradients here."""
        if not self.gradients.at:
            return 0
        left = {**self.gradients.of(GradPlace.ACCUMULATING), **self.gradients.of(GradPlace.SUMMED)}
        return sum((param in left) << place for place, param in enumerate(self.params))

    def hold(self, participates: bool = False, promote: bool = False, left: int = 0) -> None:
        """Take the gradients that this backward has brought, to be reduced.

        While accumulating they stay here, unsharded, to be reduced with later ones.
        participates: other ranks may have gradients where this one has none: those are zeros here.
        promote: they travel in the reduce dtype, as those of earlier microbatches do, which another rank may
        have. left: ``left_mask`` of all ranks.
        """
        gradients = self.gradients
        assert GradPlace.TAKEN not in gradients.at, f"{self.name}: gradients are held already"
        assert not gradients.flying, f"{self.name}: wait and finalize first"
        kept, summed = gradients.of(GradPlace.ACCUMULATING), gradients.of(GradPlace.SUMMED)
        takes_sums_along = self._takes_sums_along
        # Of a group that is reduced twice in one backward the first sums are no whole gradient.
        if self.done and participates:
            _refuse_optimizer_inside(self.name, self.params)
        self.done = True
        if not summed:  # float16 that is added up must have been divided by the same number beforehand
            self._began_by = self._divisor
        trained = []
        for place, param in enumerate(self.params):
            # Also where it was frozen since earlier microbatches have left some, which count, on any rank.
            if param.sharded.requires_grad or param in kept or param in summed or left >> place & 1:
                trained.append(param)
            if not param.sharded.requires_grad and param.bound is not None:
                param.bound.param.grad = None  # frozen since the forward: as in one process it brings none
        grads = gradients.take(trained)
        if not self.policy.reduce:
            gradients.accumulate(self._widened(grads))
            return
        along = summed if takes_sums_along else {}  # of what this backward has none of, zeros bring it along
        gradients.brought.update(trained if self.policy.unused_params else [*grads, *along])
        everybody = participates or self.policy.unused_params
        lacking = [param for param in trained if param not in grads and (everybody or param in along)]
        if lacking:
            # In the order of the parameters, which is that of the segments on all ranks.
            found = grads | zero_grads(lacking, self._precision)
            grads = {param: found[param] for param in trained if param in found}
        gradients.at[GradPlace.TAKEN] = self._widened(grads) if promote else grads

    def _widened(self, grads: Grads) -> Grads:
        params = list(grads)
        return dict(zip(params, cast(list(grads.values()), self._reduce_dtypes(params)), strict=True))

    def _reduce_dtypes(self, params: Sequence[ShardedParam]) -> list[torch.dtype]:
        """Return the dtypes in which gradients are summed over ranks and over microbatches."""
        precision = self._precision
        if precision.reduce_dtype is not None:
            return [precision.reduce_dtype] * len(params)
        if precision.param_dtype is None or SUMS_AT_REST:
            return [param.sharded.dtype for param in params]
        return [param.compute_dtype(precision) for param in params]

    def inputs(self, grads: Grads) -> tuple[list[Segment], list[torch.dtype], list[list[int]]]:
        """What a reduce-scatter of ``grads`` takes; and which of them share a segment, for ``separated``."""
        dtypes = self._reduce_dtypes(list(grads))
        segments, together = reduce_segments(grads, dtypes, self._began_by)
        if self.gatherer.sends.gradients:
            segments = [replace(segment, coded=True) for segment in segments]
        return segments, [dtypes[members[0]] for members in together], together

    def issue(self, grads: Grads) -> Reduction:
        """Issue a reduce-scatter of ``grads`` alone."""
        (segments, dtypes, together), key = self.inputs(grads), f"reduce-scatter {self.name}"
        rows = self.gatherer.rows
        if rows is None:
            return separated(self.gatherer.comm.reduce_scatter(segments, dtypes, key), together, grads)
        return rows.reduce(self.gatherer.comm, segments[0], dtypes[0], key)

    def send(self, reduction: Reduction) -> None:
        """From here on what was taken is in flight."""
        if num_dispatch_modes():
            from shardwright.transport.watched import Collective, notify_modes  # noqa: PLC0415 entered modes

            notify_modes(self.gatherer.comm, Collective.REDUCE_SCATTER)
        self.gradients.fly(GradPlace.TAKEN, GradPlace.REDUCING, reduction)

    def land(self) -> None:
        """Wait for the reduce-scatter. What it brings goes to the shards, or waits to be all-reduced."""
        sums = self.gradients.land(GradPlace.REDUCING)
        # Sums of earlier microbatches may lie there already: this all-reduce takes them along.
        if sums and self.has_copies:
            self.gradients.put(GradPlace.SUMMED, sums)
            if self.policy.all_reduce:
                self.gradients.at[GradPlace.DUE] = self.gradients.at.pop(GradPlace.SUMMED)
            else:
                self.gradients.outlive(GradPlace.SUMMED)
        elif sums:
            self._finish(sums)

    # ---- the all-reduce over copies

    @property
    def copies(self) -> Comm:
        """The transport among the ranks that hold the same shards; only where there are such."""
        assert self._axis.replicate is not None
        return self._axis.replicate

    @property
    def follows_on(self) -> "Streams | None":
        """Where its all-reduce follows the reduce-scatter that is in flight; None where the host waits first,
        as it moves the bytes, or has to know how many rows were brought."""
        waits = self.gatherer.comm.streams is None or self.gatherer.rows is not None
        return self.copies.streams if self.has_copies and self.policy.all_reduce and not waits else None

    def follow(self) -> None:
        """As ``land``, but the current stream waits, which isn't compute; compute does at ``land``."""
        streams = self.follows_on
        assert streams is not None
        reduction, _ = self.gradients.flying[GradPlace.REDUCING]
        self.land()
        # It brings no sums any more. What it has read is held until compute has waited, too.
        self.gradients.fly(GradPlace.TAKEN, GradPlace.REDUCING, Followed(reduction, streams))

    def send_copies(self, all_reduce: Reduction) -> None:
        """From here on what is DUE is in flight over the copies."""
        if num_dispatch_modes():
            from shardwright.transport.watched import Collective, notify_modes  # noqa: PLC0415 entered modes

            notify_modes(self.copies, Collective.ALL_REDUCE)
        self.gradients.fly(GradPlace.DUE, GradPlace.COPYING, all_reduce)

    def finalize(self) -> None:
        """Wait for the all-reduce, and give its sums to the shards. No-op where none is out."""
        sums = self.gradients.land(GradPlace.COPYING)
        if sums:
            self._finish(sums)

    @property
    def gradient_mask(self) -> int:
        """Bits of the parameters that this rank has had a gradient of (``GradientState.brought``)."""
        brought = self.gradients.brought
        if len(brought) == len(self.params):
            return (1 << len(self.params)) - 1
        return sum((param in brought) << place for place, param in enumerate(self.params))

    def ones(self) -> Grads:
        """Gradients of ones, of what is trained, to time the collectives alone: zeros aren't sent."""
        grads = zero_grads([param for param in self.params if param.trainable], self._precision)
        return {param: grad.fill_(1) for param, grad in grads.items()}

    def drop(self) -> None:
        """Forget the gradients of a backward that failed (see ``GradientState.drop``)."""
        self.gradients.drop(self.reduces)
        if not self.reduces:  # as in one process, what has come of it stays
            self.gradients.accumulate(self._widened(self.gradients.take(self.params)))
            del self.gradients.at[GradPlace.TAKEN]
        for param in self.params:
            if param.bound is not None:
                param.bound.param.grad = None

    @property
    def _divisor(self) -> float:
        """What the sum over ranks is divided by."""
        return 1.0 if self.policy.weighted else self.policy.divide_factor or self._ranks

    def _finish(self, sums: Grads) -> None:
        divisor = self._divisor  # may be another than when the first of them was reduced
        totals = list(sums.values())
        half = [total for total in totals if total.dtype is torch.float16]  # divided in part already
        others = [total for total in totals if total.dtype is not torch.float16] if half else totals
        if half and (rest := divisor / predivisor(self._began_by)) != 1:
            foreach_div_(half, rest)
        if others and divisor != 1:
            foreach_div_(others, divisor)
        if self.hook is not None:
            self._call(self.hook, totals)
        self.gradients.give(sums)

    def _call(self, hook: Hook, totals: list[torch.Tensor]) -> None:
        """Show the caller's hook one flat tensor of each dtype, and take over what it makes of it."""
        streams = self._axis.comm.streams
        # Torch's fully_shard shows such hooks one flat tensor, too.
        for dtype in dict.fromkeys(total.dtype for total in totals):
            members = [total for total in totals if total.dtype == dtype]
            flat = torch.cat(members)
            if self.stream is None or streams is None:
                hook(flat)
            else:
                with streams.beside(self.stream):
                    hook(flat)
            for total, part in zip(members, flat.split([m.numel() for m in members]), strict=True):
                total.copy_(part)


def _refuse_optimizer_inside(name: str, params: Sequence[ShardedParam]) -> None:
    """Raises: StageError where a hook waits for the gradients of a group that is reduced once more."""
    hooked = [param.fqn for param in params if post_accumulate_grad_hooks_of(param.sharded)]
    if hooked:
        raise StageError(
            f"group {name!r} is reduced twice in one backward (ranks ran it in different orders, or it ran "
            f"twice), but {hooked[0]!r} has a hook that takes each gradient for the whole one: an optimizer "
            "inside of the backward; step after the backward instead"
        )


# ---- gradients as a reduce-scatter takes them: cast, and as segments


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


def predivisor(divisor: float) -> float:
    """The part of ``divisor`` that float16 gradients are divided by before they are summed, so that the sum
    doesn't overflow: the least power of two that isn't below the divisor's square root. It is exact, except
    for numbers so small that float16 has fewer bits for them."""
    fraction, exponent = frexp(divisor)  # between a half and one, times a power of two
    return 2.0 ** max(0, exponent // 2 if fraction == 0.5 else (exponent + 1) // 2)


def reduce_segments(
    grads: Grads, dtypes: Sequence[torch.dtype], divisor: float
) -> tuple[list[Segment], list[list[int]]]:
    """The gradients as parts of a reduce-scatter in ``dtypes``; and by part, which of them it is of.

    They travel in their own dtypes where that loses nothing, so that the cast costs no copy on this side.
    Where the order of one has to be changed, all whose slices of the sharded dim have the same shape share
    its part. divisor: what the sums are divided by; float16 by a part of it beforehand.
    """
    tensors = list(grads.values())
    # The sum over ranks would overflow before it was divided, so that a part of the divisor comes first.
    half = [index for index, dtype in enumerate(dtypes) if dtype is torch.float16]
    if half and (divided := predivisor(divisor)) != 1:
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
