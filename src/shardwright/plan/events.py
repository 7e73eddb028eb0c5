"""The events of a traced step, each at the operation at which the runtime has it.

The same hooks as those of ``engine/step/hooks.py``, on a model that isn't sharded and runs under fake
tensors: so the order of events is the runtime's, and whatever is alive at one of them is alive in the trace
as well.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.engine.building.deferred import Deferred
from shardwright.params.param import ParamSite
from shardwright.schedule.schedule import Event, EventKind
from shardwright.torch_private import (
    current_graph_task,
    parameters_of,
    queue_callback,
    tree_flatten,
    tree_map,
)


@dataclass(frozen=True)
class TracedGroup:
    """Modules whose parameters are one group, by their names in the model. parameters: by theirs. lookup: its
    backward reads no parameters, so that none has to be there. deferred: it is unsharded when one of its
    parameters is first read, most often as the second of two groups of these modules (see ``cut_from``)."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    lookup: bool = False
    deferred: bool = False


def cut_from(groups: Sequence[TracedGroup], index: int) -> int | None:
    """The first group of the modules whose second group this is; None for any other group."""
    if not groups[index].deferred:
        return None
    modules = groups[index].modules
    return next((n for n, each in enumerate(groups) if each.modules == modules and not each.deferred), None)


@dataclass(frozen=True)
class _Sites:
    """Places that show parameters, as ``Deferred`` takes them."""

    sites: tuple[ParamSite, ...]


@dataclass(eq=False)
class _Call:
    """One forward of a module; ``left``: gradients of its inputs that are still to come in the backward.
    read: the groups whose parameters it has read."""

    recomputed: bool
    num_inputs: int = 0
    left: int = 0
    read: tuple[int, ...] = ()


@dataclass(eq=False)
class _Unit:
    """Modules that run together, and the groups that they need: their own first, then what is cut off it,
    then those of parameters that they share with other modules."""

    modules: tuple[nn.Module, ...]
    owners: tuple[int, ...]
    lookup: bool
    running: int = 0
    awaited: set[nn.Module] = field(default_factory=set)
    calls: list[_Call] = field(default_factory=list)
    ended: list[_Call] = field(default_factory=list)
    active: set[_Call] = field(default_factory=set)


class StepEvents:
    """Tells of each event of one forward and backward, while it is entered.

    note: is told of each. dtype: to which floating-point inputs are cast, as the runtime does it (None: to
    none). taken: gradients by group; they stay alive, since when they are freed is the schedule's matter.
    inside: the groups whose modules run, the innermost last.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[TracedGroup],
        params: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        note: Callable[[Event], None],
    ) -> None:
        self.taken: list[tuple[int, Tensor]] = []
        self.inside: list[int] = []
        self._dtype, self._note = dtype, note
        self._units = _units(model, groups)
        self._deferred = {
            number: Deferred([_sites(model, group.parameters)])
            for number, group in enumerate(groups)
            if group.deferred
        }
        self._params = [[params[name] for name in group.parameters] for group in groups]
        self._users: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._in_backward = False
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for unit in self._units:
            for module in unit.modules:
                before, after = partial(self._before, unit), partial(self._after, unit)
                self._handles += [
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                    module.register_forward_hook(after),
                ]
        for group, params in enumerate(self._params):
            for param in params:
                if param.requires_grad:
                    hook = partial(self._gradient, group)
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for deferred in self._deferred.values():
            deferred.leave()

    # ---- forward

    def _before(self, unit: _Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = _Call(recomputed=current_graph_task() != -1)
        unit.calls.append(call)
        if call.recomputed:
            self._begin_backward()
            self._tell(EventKind.RECOMPUTE, unit.owners)
        else:
            unit.running += 1
            if not unit.awaited:
                unit.awaited = set(unit.modules)
                if unit.running == 1:
                    for owner in unit.owners:
                        if owner in self._deferred:
                            self._deferred[owner].wait(partial(self._use, owner))
                        else:
                            self._use(owner)
        self.inside += unit.owners[:1]
        leaves = (args, kwargs)
        if self._dtype is not None:
            leaves = tree_map(self._cast, leaves)
        if not unit.owners or not torch.is_grad_enabled():
            return leaves
        return tree_map(partial(self._watch_input, unit, call), leaves)

    def _use(self, owner: int) -> None:
        self._users[owner] += 1
        self._tell(EventKind.FORWARD_BEGIN, [owner])

    def _cast(self, leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self._dtype) if floating else leaf

    def _watch_input(self, unit: _Unit, call: _Call, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        alias = leaf.view_as(leaf)
        alias.register_hook(lambda _: self._input_done(unit, call))
        call.num_inputs += 1
        return alias

    def _after(self, unit: _Unit, module: nn.Module, args: Any, output: Any) -> None:
        call = unit.calls.pop()
        if unit.owners:
            self.inside.pop()
        if not call.recomputed:
            unit.running -= 1
            unit.awaited.discard(module)
            if not unit.running and not unit.awaited:
                for owner in unit.owners:
                    self._leave(owner)
        if unit.owners and torch.is_grad_enabled():
            unread = {owner for owner, deferred in self._deferred.items() if not deferred.was_read}
            call.read = tuple(each for each in unit.owners if each not in unread)
            hooked = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
            hooked = [leaf for leaf in hooked if leaf.requires_grad and not leaf.is_leaf]
            for leaf in hooked:
                leaf.register_hook(lambda _: self._enter(unit, call))
            if hooked and len(unit.modules) > 1:
                unit.ended.append(call)

    def _leave(self, owner: int) -> None:
        if owner in self._deferred and self._deferred[owner].waits:
            self._deferred[owner].stop()
            return
        self._users[owner] -= 1
        if not self._users[owner]:
            self._tell(EventKind.FORWARD_END, [owner])

    # ---- backward

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            queue_callback(self._end)

    def _enter(self, unit: _Unit, call: _Call) -> None:
        self._begin_backward()
        if call in unit.active:
            return
        together = unit.ended if call in unit.ended else [call]
        for each in together:
            each.left = each.num_inputs
        unit.active.update(together)
        if not unit.lookup:
            read = [owner for owner in unit.owners if any(owner in each.read for each in together)]
            self._tell(EventKind.BACKWARD_BEGIN, read)

    def _input_done(self, unit: _Unit, call: _Call) -> None:
        call.left -= 1
        if call.left or call not in unit.active:
            return
        unit.active.remove(call)
        if unit.active:
            return
        for owner in unit.owners:
            if not any(other.active and owner in other.owners for other in self._units):
                self._ready(owner)
                self._tell(EventKind.BACKWARD_END, [owner])

    def _gradient(self, group: int, _: Tensor) -> None:
        self._begin_backward()
        self._arrived[group] += 1
        if self._arrived[group] >= sum(param.requires_grad for param in self._params[group]):
            self._ready(group)

    def _ready(self, group: int) -> None:
        """Take the gradients of a group, if it has any."""
        found = [param for param in self._params[group] if param.grad is not None]
        for param in found:
            self.taken.append((group, param.grad))  # type: ignore[arg-type]
            param.grad = None
        self._arrived[group] = 0
        if found:
            self._tell(EventKind.GRADS_READY, [group])

    def _end(self) -> None:
        for group in range(len(self._params)):
            self._ready(group)
        self._note(Event(EventKind.STEP_END))

    def _tell(self, kind: EventKind, groups: Sequence[int]) -> None:
        for group in groups:
            self._note(Event(kind, group))


def _units(model: nn.Module, groups: Sequence[TracedGroup]) -> list[_Unit]:
    names = {id(param): name for name, param in model.named_parameters()}
    owner = {name: index for index, group in enumerate(groups) for name in group.parameters}
    units = []
    for index, group in enumerate(groups):
        if cut_from(groups, index) is not None:
            continue
        modules = [model.get_submodule(name) for name in group.modules]
        shown = [names[id(param)] for module in modules for param in module.parameters()]
        inside = {
            other
            for other, each in enumerate(groups)
            if all(any(_is_inside(name, mine) for mine in group.modules) for name in each.modules)
        }
        shared = [owner[name] for name in shown if name in owner and owner[name] not in inside]
        parts = [other for other in range(len(groups)) if cut_from(groups, other) == index]
        units.append(_Unit(tuple(modules), (index, *parts, *dict.fromkeys(shared)), group.lookup))
    if not any("" in group.modules for group in groups):
        units.append(_Unit((model,), (), False))
    return units


def _sites(model: nn.Module, parameters: Sequence[str]) -> _Sites:
    shown = {id(model.get_parameter(name)) for name in parameters}
    tables = (
        (module, name, param) for module in model.modules() for name, param in parameters_of(module).items()
    )
    return _Sites(tuple(ParamSite(module, name) for module, name, param in tables if id(param) in shown))


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or not outer or name.startswith(f"{outer}.")
