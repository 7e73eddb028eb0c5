"""What becomes of a group's gradients: unsharded on this rank -> reduced over ranks -> added to the shards'.

    hold()     take what a backward has brought      (or keep it unsharded, while accumulating)
    reduce()   issue the reduce-scatter of that
    land()     wait for it; what it brought is all-reduced over copies, where the mesh has them
    finalize() wait for that; divide, and add to the gradients of the shards
    resolve()  add what was reduced for others, or drop it
               (offloaded ones are copied to the host, and added at its end: ``Unresolved.arrive``)

Between ``land`` and ``finalize`` the all-reduce runs beside the rest of the backward. On an accelerator it is
issued with the reduce-scatter, and follows it there: neither host nor compute waits in between. Where ranks
*participate* in each other's reductions, one that has no gradient of a parameter reduces zeros; whether
anybody had one it learns at the end of the backward, and what it has got for the parameter is put aside
until then. A parameter that nobody used so keeps ``grad = None``, as in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.engine.groups.gatherer import Gatherer
from shardwright.engine.groups.grads import (
    Grads,
    add_sharded_grads,
    cast,
    predivisor,
    reduce_segments,
    separated,
    take_grads,
    zero_grads,
)
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy, ReductionPolicy
from shardwright.torch_fsdp import SUMS_AT_REST
from shardwright.torch_private import (
    IN_BACKWARD_OPTIMIZERS,
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    num_dispatch_modes,
    post_accumulate_grad_hooks_of,
)
from shardwright.transport.base import Comm, Followed, Reduction, Segment
from shardwright.transport.mesh import Axis
from shardwright.transport.streams import Streams
from shardwright.transport.watched import Collective, notify_modes


class PendingReduction:
    """``params``: none where nobody wants what it brings any more."""

    def __init__(self, reduction: Reduction, params: Sequence[ShardedParam]) -> None:
        self.reduction = reduction
        self.params = list(params)
        self._outlives = False

    def outlive(self) -> None:
        """The backward ends that has issued it: who clears gradients from here on clears what it brings."""
        for param in self.params:
            param.waiting.begin(param.sharded)
        self._outlives = True

    def land(self) -> tuple[list[torch.Tensor], list[ShardedParam]]:
        """Wait for it: what it brings of the parameters whose gradients weren't cleared meanwhile."""
        totals = self.reduction.wait()
        if not (self._outlives and self.params):
            return totals, self.params
        pairs = zip(totals, self.params, strict=True)
        kept = [(total, p) for total, p in pairs if not p.waiting.is_cleared(p.sharded)]
        return [total for total, _ in kept], [param for _, param in kept]

    def drop(self) -> None:
        """Its backward failed: it ends unseen, and what waited for it is lost."""
        for param in self.params:
            param.waiting.lose(param.sharded)
        self.params = []


Hook = Callable[[torch.Tensor], None]


class Unresolved:
    """What a reducer has got for parameters that this rank had no gradient of.

    Whether some rank had one is known at the end of the backward; until then what was reduced is put aside.
    brought: the parameters that this rank has had a gradient of, since the last ``resolve``.
    keeps: gradients of earlier microbatches are kept on this rank, unsharded.
    kept, arriving: parameters and their gradients, on the device until a step's last backward has ended; and
        in memory of the host that a copy is still filling.
    """

    def __init__(self) -> None:
        self.brought: set[ShardedParam] = set()
        self.keeps = False
        self._aside: dict[ShardedParam, torch.Tensor] = {}
        self.arriving: list[tuple[Sequence[ShardedParam], list[torch.Tensor]]] = []
        self.kept: list[tuple[Sequence[ShardedParam], list[torch.Tensor]]] = []

    def add(self, params: Sequence[ShardedParam], totals: Sequence[torch.Tensor]) -> None:
        """Add reduced gradients to the shards', or put them aside (see ``add_sharded_grads``).

        Raises: StageError for a parameter that torch's ``_apply_optimizer_in_backward`` should step.
        """
        used: Grads = []
        for param, total in zip(params, totals, strict=True):
            if hasattr(param.sharded, IN_BACKWARD_OPTIMIZERS):
                raise StageError(
                    f"{param.fqn!r} was given to torch's _apply_optimizer_in_backward, whose hook never "
                    "fires for a sharded parameter, so nothing would step it: use "
                    "shardwright.StepInBackward instead"
                )
            if param in self.brought:
                used.append((param, total))
            else:
                earlier = self._aside.get(param)
                self._aside[param] = total if earlier is None else earlier.add_(total)
        self._add([param for param, _ in used], [total for _, total in used])

    def _add(self, params: Sequence[ShardedParam], totals: Sequence[torch.Tensor]) -> None:
        """Add them now; or have them copied to the host, to be added when they ``arrive``."""
        split = params[0].split if params else None
        if split is None or not split.on_host or split.offload_streams is None:
            add_sharded_grads(params, totals)
            return
        totals = cast(totals, [param.sharded.dtype for param in params])
        if not split.grads_on_host:
            self.kept.append((params, totals))
            self._add_up()
            return
        self._send(params, totals, split.offload_streams)

    def _add_up(self) -> None:
        """Of gradients that stay on the device: one tensor for each parameter."""
        found: dict[ShardedParam, torch.Tensor] = {}
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for params, totals in self.kept:
            for param, total in zip(params, totals, strict=True):
                if found.setdefault(param, total) is not total:
                    again.append((found[param], total))
        if again:
            foreach_add_([earlier for earlier, _ in again], [later for _, later in again])
        self.kept = [(list(found), list(found.values()))]

    def _send(self, params: Sequence[ShardedParam], totals: list[torch.Tensor], streams: Streams) -> None:
        from shardwright.params.offload import empty_on_host  # noqa: PLC0415 offloaded gradients

        with streams.offloading(totals):
            places = empty_on_host(totals)
            foreach_copy_(places, totals, non_blocking=True)
        self.arriving.append((params, places))

    def send_kept(self) -> None:
        """Copy what has stayed on the device to the host."""
        sent, self.kept = self.kept, []
        for params, totals in sent:
            streams = params[0].split.offload_streams
            assert streams is not None
            self._send(params, totals, streams)

    def arrive(self) -> None:
        """The host waits for what was copied to it, and adds it. No-op where nothing was."""
        self.send_kept()
        arrived, self.arriving = self.arriving, []
        for params, totals in arrived:
            streams = params[0].split.offload_streams
            if streams is not None:
                streams.arrive()
            add_sharded_grads(params, totals)

    def resolve(self, brought: set[ShardedParam], again: bool) -> None:
        """Add what was put aside of the parameters that some rank had a gradient of, and drop the rest.

        brought: these parameters. again: gradients of this rank are still on their way.
        """
        aside, self._aside = self._aside, {}
        used = [param for param in aside if param in brought]
        self._add(used, [aside[param] for param in used])
        if not again:
            self.brought.clear()

    def drop(self) -> None:
        """Forget a backward that failed."""
        self._aside = {}
        self.arriving = []
        self.kept = []
        self.brought.clear()
        self.keeps = False


class Reducer:
    """The gradients of one group.

    params: the group's. policy: replaced as a whole by setters. gatherer: the group's, by whose transport
        gradients go, and whole or by rows.
    hook: called with the group's reduced gradients, one flat tensor for each dtype, before they are added to
        the shards'; stream: where it runs (CUDA).
    done: whether this backward has reduced them. unresolved: what is reduced for other ranks' sake.
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
        self.done = False
        self.unresolved = Unresolved()
        self.name = name
        self.params = params
        self._axis = axis
        self._precision = precision
        self._held: Grads | None = None
        self._reduction: PendingReduction | None = None
        self._all_reduce: PendingReduction | None = None
        self._partial: dict[ShardedParam, torch.Tensor] = {}
        self._predivisor = 1.0

    @property
    def _ranks(self) -> int:
        """How many ranks' gradients are summed, over shards and copies."""
        return self._axis.world * self._axis.num_copies

    # ---- the reduce-scatter

    @property
    def holds(self) -> bool:
        """Whether gradients were taken by ``hold`` and not reduced since."""
        return self._held is not None

    @property
    def is_idle(self) -> bool:
        """Whether no gradient is kept or in flight."""
        return not (self._held or self._reduction or self._all_reduce or self._partial)

    @property
    def keeps_partial(self) -> bool:
        """Whether gradients are summed over shards that this backward is to sum over copies."""
        waits = any(not param.waiting.is_cleared(param.sharded) for param in self._partial)
        return waits and not self.done and self.policy.all_reduce

    @property
    def held(self) -> tuple[list[Any], list[Any]]:
        """What has tensors of gradients now, besides the parameters: what is kept, and what is in flight."""
        return [self._held, self._partial, vars(self.unresolved)], [self._reduction, self._all_reduce]

    def hold(self, participates: bool = False, promote: bool = False) -> None:
        """Take the gradients that this backward has brought, for ``release``.

        While accumulating they stay here, unsharded, to be reduced with later ones.
        participates: other ranks may have gradients where this one has none: those are zeros here.
        promote: they travel in the reduce dtype, as those of earlier microbatches do, which another rank may
        have.
        """
        assert self._held is None, f"{self.name}: gradients are held already"
        assert self._reduction is None and self._all_reduce is None, f"{self.name}: wait and finalize first"
        # Before others wait for the same parameters, in whose place nothing was cleared yet.
        self._partial = {
            param: total
            for param, total in self._partial.items()
            if not param.waiting.is_cleared(param.sharded)
        }
        keeps_partial = self.keeps_partial
        if self.done and participates:
            _refuse_optimizer_inside(self.name, self.params)
        self.done = True
        self._held = []
        if not self._partial:  # what is added up must have been divided by the same number
            self._predivisor = predivisor(self.policy.divisor(self._ranks))
        self.unresolved.keeps = not self.policy.reduce
        trained = []
        for param in self.params:
            if param.sharded.requires_grad or param.accumulated is not None or param in self._partial:
                trained.append(param)
            if not param.sharded.requires_grad and param.bound is not None:
                param.bound.param.grad = None  # frozen since the forward: as in one process it brings none
        taken = take_grads(trained)
        grads: Grads = [(p, grad) for p, grad in zip(trained, taken, strict=True) if grad is not None]
        if not self.unresolved.keeps:
            if keeps_partial:  # zeros bring what waits along, where this backward has none of it
                found = dict(grads)
                lacking = [p for p in trained if p in self._partial and p not in found]
                grads += zip(lacking, zero_grads(lacking, self._precision), strict=True)
                grads.sort(key=lambda pair: self.params.index(pair[0]))
            self.unresolved.brought.update(trained if self.policy.unused_params else [p for p, _ in grads])
            if len(grads) < len(trained) and (participates or self.policy.unused_params):
                missing = [param for param, grad in zip(trained, taken, strict=True) if grad is None]
                zeros = dict(zip(missing, zero_grads(missing, self._precision), strict=True))
                found = dict(grads) | zeros
                grads = [(param, found[param]) for param in trained]
        if self.unresolved.keeps:
            self._keep(grads)
        else:
            self._held = self._widened(grads) if promote else grads

    def _keep(self, grads: Grads) -> None:
        for param, grad in self._widened(grads):
            param.accumulated = grad

    def _widened(self, grads: Grads) -> Grads:
        params = [param for param, _ in grads]
        return list(zip(params, cast([grad for _, grad in grads], self._reduce_dtypes(params)), strict=True))

    def _reduce_dtypes(self, params: Sequence[ShardedParam]) -> list[torch.dtype]:
        """In which their gradients are summed over ranks and over microbatches."""
        precision = self._precision
        if precision.reduce_dtype is not None:
            return [precision.reduce_dtype] * len(params)
        if precision.param_dtype is None or SUMS_AT_REST:
            return [param.sharded.dtype for param in params]
        return [param.compute_dtype(precision) for param in params]

    def release(self) -> Grads:
        """What is held; the caller reduces it. Empty where this backward has brought none."""
        held, self._held = self._held, None
        return held or []

    def inputs(self, grads: Grads) -> tuple[list[Segment], list[torch.dtype], list[list[int]]]:
        """What a reduce-scatter of ``grads`` takes; and which of them share a segment, for ``separated``."""
        dtypes = self._reduce_dtypes([param for param, _ in grads])
        segments, together = reduce_segments(grads, dtypes, self._predivisor)
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

    def send(self, reduction: Reduction, params: list[ShardedParam]) -> None:
        """From here on the gradients of ``params`` are in flight."""
        if num_dispatch_modes():
            notify_modes(self.gatherer.comm, Collective.REDUCE_SCATTER)
        self._reduction = PendingReduction(reduction, params)

    def outlive(self) -> None:
        """The backward ends that has issued what is in flight."""
        for out in (self._reduction, self._all_reduce):
            if out is not None:
                out.outlive()

    def land(self) -> dict[ShardedParam, torch.Tensor]:
        """Wait for the reduce-scatter; what is to be all-reduced over copies now, if anything."""
        if self._reduction is None:
            return {}
        reduction, self._reduction = self._reduction, None
        totals, params = reduction.land()
        if not params:
            return {}
        if not self.has_copies:
            self._finish(totals, params)
            return {}
        again = [(self._partial[p], t) for p, t in zip(params, totals, strict=True) if p in self._partial]
        if again:
            foreach_add_([earlier for earlier, _ in again], [total for _, total in again])
        self._partial |= {p: t for p, t in zip(params, totals, strict=True) if p not in self._partial}
        if not self.policy.all_reduce:
            for param in params:
                param.waiting.begin(param.sharded)
            return {}
        partial, self._partial = self._partial, {}
        return partial

    # ---- the all-reduce over copies

    @property
    def has_copies(self) -> bool:
        """Whether other ranks hold the same shards."""
        return self._axis.replicate is not None

    @property
    def copies(self) -> Comm:
        """The transport among the ranks that hold the same shards; only where there are such."""
        assert self._axis.replicate is not None
        return self._axis.replicate

    @property
    def follows_on(self) -> Streams | None:
        """Where its all-reduce follows the reduce-scatter that is in flight; None where the host waits first,
        as it moves the bytes, or has to know how many rows were brought."""
        waits = self.gatherer.comm.streams is None or self.gatherer.rows is not None
        return self.copies.streams if self.has_copies and self.policy.all_reduce and not waits else None

    def follow(self) -> dict[ShardedParam, torch.Tensor]:
        """As ``land``, but the current stream waits, which isn't compute; compute does at ``land``."""
        streams = self.follows_on
        assert self._reduction is not None and streams is not None
        reduction = self._reduction.reduction
        partial = self.land()
        self._reduction = PendingReduction(Followed(reduction, streams), [])
        return partial

    def send_copies(self, all_reduce: Reduction, params: list[ShardedParam]) -> None:
        """From here on the sums of ``params`` are in flight over the copies."""
        if num_dispatch_modes():
            notify_modes(self.copies, Collective.ALL_REDUCE)
        self._all_reduce = PendingReduction(all_reduce, params)

    def finalize(self) -> None:
        """Wait for the all-reduce, and add to the shards' gradients. No-op where none is out."""
        if self._all_reduce is not None:
            all_reduce, self._all_reduce = self._all_reduce, None
            totals, params = all_reduce.land()
            if params:
                self._finish(totals, params)

    @property
    def gradient_mask(self) -> int:
        """Bits of the parameters that this rank has had a gradient of, since the last ``resolve``."""
        brought = self.unresolved.brought
        if len(brought) == len(self.params):
            return (1 << len(self.params)) - 1
        return sum((param in brought) << place for place, param in enumerate(self.params))

    def resolve(self, brought: int) -> None:
        """Add or drop what was put aside; ``brought``: bits of the parameters that somebody used."""
        used = {param for place, param in enumerate(self.params) if brought >> place & 1}
        self.unresolved.resolve(used, again=bool(self._partial))

    def ones(self) -> Grads:
        """Gradients of ones, of what is trained, to time the collectives alone: zeros aren't sent."""
        params = [param for param in self.params if param.trainable]
        grads = zero_grads(params, self._precision)
        return [(param, grad.fill_(1)) for param, grad in zip(params, grads, strict=True)]

    def drop(self) -> None:
        """Forget the gradients of a backward that failed; what is in flight ends unseen. Of earlier
        microbatches those stay that it had not come to; those that it had are marked as lost."""
        for param, _ in self._held or ():
            param.waiting.lose(param.sharded)
        if not self.policy.reduce:  # as in one process, what has come of it stays
            taken = zip(self.params, take_grads(self.params), strict=True)
            self._keep([(param, grad) for param, grad in taken if grad is not None])
        self._held = None
        self.unresolved.drop()
        self.done = False
        for out in (self._reduction, self._all_reduce):
            if out is not None:
                out.drop()

    def forget_waiting(self) -> None:
        """Forget the gradients of earlier microbatches."""
        self._partial = {}
        for param in self.params:
            param.waiting.drop(param.sharded)

    def _finish(self, totals: list[torch.Tensor], params: Sequence[ShardedParam]) -> None:
        divisor = self.policy.divisor(self._ranks)  # may be another than when the first of them was reduced
        half = [total for total in totals if total.dtype is torch.float16]  # divided in part already
        others = [total for total in totals if total.dtype is not torch.float16] if half else totals
        for sums, rest in ((half, divisor / self._predivisor), (others, divisor)):
            if sums and rest != 1:
                foreach_div_(sums, rest)
        if self.hook is not None:
            self._call(self.hook, totals)
        self.unresolved.add(params, totals)

    def _call(self, hook: Hook, totals: list[torch.Tensor]) -> None:
        """Show the caller's hook one flat tensor of each dtype, and take over what it makes of it."""
        streams = self._axis.comm.streams
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
