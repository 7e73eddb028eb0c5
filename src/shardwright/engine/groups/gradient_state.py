"""Where the gradients of a group are, from the backward that brings them to ``grad`` of the shards.

    place           what waits there, by parameter                                   it goes on by
    (autograd's)    what this backward has brought, unsharded                         take
    ACCUMULATING    unsharded sums of earlier microbatches, in the reduce dtype       take
    TAKEN           unsharded, to be reduced now                                      fly
    REDUCING        in a reduce-scatter                                               land
    SUMMED          summed over shards; a later backward sums them over copies        land (of that one)
    DUE             summed over shards, to be summed over copies now                  fly
    COPYING         in the all-reduce over copies                                     land
    ASIDE           sums of what this rank had no gradient of                         resolve
    ON_DEVICE       sums that go to the host at the end of a step's last backward     send
    ARRIVING        in memory of the host, which a copy is still filling              arrive
    (the shard's)   divided, in the dtype at rest

Where ranks *participate* in each other's reductions, one that has no gradient of a parameter reduces zeros;
whether anybody had one it learns at the end of the backward, and what it has got lies ASIDE until then. A
parameter that nobody used so keeps ``grad = None``, as in one process.

What waits when its backward ends has a stand-in in ``grad`` of the shard, so that clearing that
(``zero_grad()``, ``p.grad = None``) clears what waits, as in one process, and nothing takes it for none. It
takes no memory. What reads it raises; to clear it in place is all that can be done with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError, StageError
from shardwright.params.param import ShardedParam
from shardwright.torch_private import (
    IN_BACKWARD_OPTIMIZERS,
    foreach_add_,
    foreach_copy_,
    foreach_zero_,
    hooks_of,
    local_of,
    make_wrapper,
    post_accumulate_grad_hooks_of,
    tree_leaves,
    tree_map,
)
from shardwright.transport.base import Reduction

Grads = dict[ShardedParam, torch.Tensor]
_CLEARS = ("aten::zero_", "aten::_foreach_zero_")
_SAME = ("aten::detach", "aten::alias", "aten::detach_", "aten::view")  # as zero_grad() and to_local() do


@dataclass
class Mark:
    """What stands for gradients of a parameter that wait.

    earlier: the gradient of earlier backwards in whose place it stands, or None. cleared: in place, just now.
    zeroed: so that zeros wait. lost: they were dropped, since a backward failed.
    """

    fqn: str
    earlier: torch.Tensor | None = None
    cleared: bool = False
    zeroed: bool = False
    lost: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether nothing but zeros waits."""
        return self.cleared or self.zeroed


class _StandIn(torch.Tensor):
    """The local tensor of such a gradient; those that are detached from it share its mark."""

    mark: Mark

    @staticmethod
    def make(shard: torch.Tensor, mark: Mark) -> "_StandIn":
        """A stand-in like the local shard, without memory."""
        made: Any = make_wrapper(
            _StandIn, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=shard.device
        )
        made.mark = mark
        return made

    def __repr__(self, **_: Any) -> str:
        return f"<gradients of {self.mark.fqn!r} that aren't reduced yet>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        name = func._schema.name
        if name in _SAME:
            return cls.make(marked[0], marked[0].mark)
        if name in _CLEARS or (name == "aten::fill_" and args[1] == 0):
            for each in marked:
                each.mark.cleared = True
            if name != "aten::_foreach_zero_":
                return args[0]
            if others := [each for each in args[0] if not isinstance(each, cls)]:
                foreach_zero_(others)
            return None
        waiting = [each.mark.fqn for each in marked if not each.mark.is_zero]
        if waiting:
            raise StageError(f"{name.removeprefix('aten::')} reads the gradient of {waiting[0]!r}, {_WHY}")
        args, kwargs = tree_map(lambda leaf: _zeros(leaf) if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **(kwargs or {}))


_WHY = (
    "which isn't reduced yet: the last backward was one of set_requires_gradient_sync(False), no_sync() or "
    "set_requires_all_reduce(False). Read gradients, and step, after a backward that synchronises, or drop "
    "them with zero_grad()"
)
_LOST = "were lost in a backward that failed: call zero_grad() after it, and begin the step again"
_SET = "; set that of a sharded parameter to a DTensor like the parameter, or to None"


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def mark_of(grad: torch.Tensor | None) -> Mark | None:
    """The mark of a gradient that waits; None of one that is there."""
    local = local_of(grad) if isinstance(grad, DTensor) else None
    return local.mark if isinstance(local, _StandIn) else None


def _clears(marks: dict[ShardedParam, Mark]) -> list[tuple[ShardedParam, Mark, bool]]:
    """By parameter its mark, and whether the caller has dropped its gradient.

    What another rank owns no optimizer of this one holds that could clear it: it is cleared with the rest.
    """
    dropped = {param for param, mark in marks.items() if mark_of(param.sharded.grad) is not mark}
    cleared = any(mark.cleared for mark in marks.values())
    for param, mark in marks.items() if dropped or cleared else ():
        if param.split.sizes is not None and not param.local.numel():
            mark.cleared |= not dropped
            dropped |= {param} if dropped else set()
    return [(param, mark, param in dropped) for param, mark in marks.items()]


class GradPlace(StrEnum):
    """Where a gradient waits (see the table above)."""

    ACCUMULATING = "accumulating"
    TAKEN = "taken"
    REDUCING = "reducing"
    SUMMED = "summed over shards"
    DUE = "due"
    COPYING = "copying"
    ASIDE = "aside"
    ON_DEVICE = "on the device"
    ARRIVING = "arriving"


_OUTLAST_FAILURE = (GradPlace.ACCUMULATING, GradPlace.SUMMED)


class GradientState:
    """The gradients of one group.

    at: by place what waits there: a parameter's tensor, or None where the collective in flight has it. A
        place is absent where nothing waits.
    flying: the collectives of ``REDUCING`` and ``COPYING``, each with the parameters whose sums it brings. Of
        these some may no longer be ``at`` its place: nobody wants what it brings of them any more.
    brought: the parameters that this rank has had a gradient of, since the last ``resolve``.
    """

    def __init__(self) -> None:
        self.at: dict[GradPlace, dict[ShardedParam, Any]] = {}
        self.flying: dict[GradPlace, tuple[Reduction, list[ShardedParam]]] = {}
        self.brought: set[ShardedParam] = set()
        self._marks: dict[ShardedParam, Mark] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no gradient waits and no collective is in flight."""
        self.follow_clears()
        return not self.flying and not any(self.at.values())

    def of(self, place: GradPlace) -> Grads:
        """What waits there, and wasn't cleared meanwhile."""
        self.follow_clears()
        return self.at.get(place, {})

    def put(self, place: GradPlace, grads: Grads) -> None:
        """Have these wait there: added to what waits there of the same parameters."""
        there = self.at.get(place, {})
        again = [(there[param], grad) for param, grad in grads.items() if param in there]
        if again:
            foreach_add_([earlier for earlier, _ in again], [later for _, later in again])
        self.at[place] = there | {param: grad for param, grad in grads.items() if param not in there}

    # ---- what the caller clears

    def outlive(self, *places: GradPlace) -> None:
        """A backward ends, or has come so far that it may fail without losing what waits at ``places`` (all,
        where none are named): who clears gradients from here on clears that."""
        self.follow_clears()
        for place in places or self.at:
            # A mark that is there stands for all that waits of its parameter, wherever it lies.
            for param in self.at[place].keys() & self._marks.keys():
                self._marks[param].zeroed = False
            for param in self.at[place].keys() - self._marks.keys():
                grad = param.sharded.grad
                mark = self._marks[param] = Mark(param.fqn, grad if mark_of(grad) is None else None)
                param.sharded.grad = param.dtensor(_StandIn.make(param.local, mark))

    def follow_clears(self) -> None:
        """What the caller has cleared since it was marked waits no more; in place: zeros wait."""
        for param, mark, is_dropped in _clears(self._marks) if self._marks else ():
            if not (mark.cleared or is_dropped):
                continue
            keeping = [at for place, at in self.at.items() if place in _OUTLAST_FAILURE and param in at]
            if keeping and not is_dropped:
                # A rank that ran other layers has nothing to clear. By the next reduction all have zeros, as
                # one process has; else an optimizer would step the parameter on some ranks only.
                earlier = [] if mark.earlier is None else [local_of(mark.earlier)]  # type: ignore[arg-type]
                foreach_zero_([*earlier, *[at[param] for at in keeping]])
                mark.cleared, mark.zeroed, mark.lost = False, True, False
                continue
            for waiting in self.at.values():
                waiting.pop(param, None)
            del self._marks[param]

    def forget(self) -> None:
        """Drop all that waits, and show the gradients in whose place its marks stand."""
        self.follow_clears()
        for param, mark in self._marks.items():
            param.sharded.grad = mark.earlier
        self._marks.clear()
        self.at.clear()

    def drop(self, reduces: bool = True) -> None:
        """A backward failed: what it had come to is lost, and what is in flight ends unseen; where it
        ``reduces`` nothing, only what it was adding to. The rest of earlier microbatches stays."""
        self.follow_clears()
        lost = set(GradPlace).difference(_OUTLAST_FAILURE) if reduces else {GradPlace.TAKEN}
        for place in lost & self.at.keys():
            for param in self.at[place].keys() & self._marks.keys():
                self._marks[param].lost = True  # told where its next sum comes: the step is incomplete
            del self.at[place]
        if reduces:
            self.brought.clear()

    # ---- from autograd into a collective

    def take(self, params: Sequence[ShardedParam]) -> Grads:
        """What autograd has brought of ``params`` and earlier microbatches have left of them, to be put
        somewhere: neither holds it any more."""
        # At once, so that a failure finds it at one of the two, and can tell that it is lost.
        earlier = self.at[GradPlace.TAKEN] = self.at.pop(GradPlace.ACCUMULATING, {})
        found: Grads = {}
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param in params:
            grad = None
            if param.bound is not None:
                grad, param.bound.param.grad = param.bound.param.grad, None
            if isinstance(grad, DTensor):
                grad = param.place.local_grad(grad)
            if grad is not None and grad.layout is not torch.strided:
                grad = grad.to_dense()  # nn.Embedding(sparse=True)
            if grad is not None and param in earlier:
                again.append((earlier[param], grad))
            grad = earlier.get(param, grad)
            if grad is not None:
                found[param] = grad
        if again:
            foreach_add_([sums for sums, _ in again], [grad for _, grad in again])
        return found

    def accumulate(self, taken: Grads) -> None:
        """Keep what was taken, unsharded, for a later backward that reduces."""
        self.at[GradPlace.ACCUMULATING], self.at[GradPlace.TAKEN] = taken, {}
        self.outlive(GradPlace.ACCUMULATING)

    def fly(self, source: GradPlace, place: GradPlace, reduction: Reduction) -> None:
        """What waits at ``source`` is now in this collective."""
        params = list(self.at.pop(source, {}))
        self.flying[place] = reduction, params
        self.at[place] = dict.fromkeys(params)

    def land(self, place: GradPlace) -> Grads:
        """Wait for the collective there; the sums that it brings of what wasn't cleared or dropped since."""
        if place not in self.flying:
            return {}
        reduction, params = self.flying.pop(place)  # first: where it fails nobody waits for it again
        totals = reduction.wait()
        self.follow_clears()
        wanted = self.at.pop(place, {})
        return {param: total for param, total in zip(params, totals, strict=True) if param in wanted}

    # ---- from sums to the shards' gradients

    def give(self, sums: Grads) -> None:
        """Add sums over all ranks to the gradients of the shards, or have them wait until that can be.

        Raises: StageError for a parameter that torch's ``_apply_optimizer_in_backward`` should step; what
            ``_add`` raises.
        """
        # Whether other ranks had a gradient of the rest is told at the end of the backward.
        used: Grads = {}
        for param, total in sums.items():
            if hasattr(param.sharded, IN_BACKWARD_OPTIMIZERS):
                raise StageError(
                    f"{param.fqn!r} was given to torch's _apply_optimizer_in_backward, whose hook never "
                    "fires for a sharded parameter, so nothing would step it: use "
                    "shardwright.StepInBackward instead"
                )
            if param in self.brought:
                used[param] = total
        if len(used) < len(sums):
            self.put(GradPlace.ASIDE, {param: total for param, total in sums.items() if param not in used})
        if used:
            self._pass_on(used)

    def resolve(self, brought: set[ShardedParam]) -> None:
        """Some rank had a gradient of each of ``brought``: their sums count. Drop the others put aside."""
        aside = self.of(GradPlace.ASIDE)
        self.at.pop(GradPlace.ASIDE, None)
        used = {param: total for param, total in aside.items() if param in brought}
        if used:
            self._pass_on(used)
        for param in aside.keys() & self._marks.keys() - used.keys():  # a backward before the last marked it
            if not any(param in waiting for waiting in self.at.values()):
                param.sharded.grad = self._marks.pop(param).earlier
        if GradPlace.SUMMED not in self.at:  # else what this rank has had is still on its way
            self.brought.clear()

    def _pass_on(self, sums: Grads) -> None:
        totals = cast(list(sums.values()), [param.sharded.dtype for param in sums])
        sums = dict(zip(sums, totals, strict=True))
        split = next(iter(sums)).split
        if not split.on_host or split.offload_streams is None:
            self._add(sums)
        elif split.grads_on_host:
            self._send(sums)
        else:
            self.put(GradPlace.ON_DEVICE, sums)

    def send(self) -> None:
        """Copy what has stayed on the device to the host."""
        sums = self.of(GradPlace.ON_DEVICE)
        self.at.pop(GradPlace.ON_DEVICE, None)
        if sums:
            self._send(sums)

    def _send(self, sums: Grads) -> None:
        from shardwright.params.offload import empty_on_host  # noqa: PLC0415 offloaded gradients

        if self.at.get(GradPlace.ARRIVING, {}).keys() & sums.keys():
            self.arrive()  # a group that is reduced twice in one backward: its first sums are added first
        streams = next(iter(sums)).split.offload_streams
        assert streams is not None
        totals = list(sums.values())
        with streams.offloading(totals):
            places = empty_on_host(totals)
            foreach_copy_(places, totals, non_blocking=True)
        self.put(GradPlace.ARRIVING, dict(zip(sums, places, strict=True)))

    def arrive(self) -> None:
        """The host waits for what was copied to it, and adds it."""
        sums = self.of(GradPlace.ARRIVING)
        self.at.pop(GradPlace.ARRIVING, None)
        # One wait for all copies: each would stop the host until the device has caught up.
        for streams in {param.split.offload_streams for param in sums}:
            if streams is not None:
                streams.arrive()
        self._add(sums)

    def _add(self, sums: Grads) -> None:
        """Add sums, 1-D and in the dtypes at rest, to ``sharded.grad``, as the hooks of ``register_hook``
        change them; then call those that wait for them. Raises: InputError for a gradient that the caller has
        set to something else; StageError where a part of it was lost."""
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param, total in sums.items():
            sharded = param.sharded
            shard, grad = local_of(sharded), sharded.grad
            # Not a copy: the sum is memory that nobody else has, and becomes the gradient.
            local = total.view(shard.shape).to(shard.device)
            if hooks_of(sharded):
                local = _hooked(param, local)
            mark = mark_of(grad)
            if mark is not None:
                grad = None if mark.cleared else mark.earlier
            if mark is not None and mark.lost and not mark.cleared:
                raise StageError(f"gradients of earlier microbatches of {param.fqn!r} {_LOST}")
            if grad is None:
                sharded.grad = param.dtensor(local)
            elif isinstance(grad, DTensor):
                if mark is not None:
                    sharded.grad = grad
                again.append((local_of(grad), local))
            else:
                raise InputError(f"the gradient of {param.fqn!r} is a {type(grad).__name__}{_SET}")
            self._marks.pop(param, None)  # what it stood for has come, and wasn't cleared
        if again:
            foreach_add_([earlier for earlier, _ in again], [later for _, later in again])
        # Once all gradients of the group are there: an optimizer in such a hook may step several of them.
        for param in sums:
            for hook in tuple((post_accumulate_grad_hooks_of(param.sharded) or {}).values()):
                hook(param.sharded)


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
