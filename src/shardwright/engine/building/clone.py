"""Copies of a sharded model: ``copy.deepcopy``.

While a model is copied its modules are what they were before ``fully_shard``: of their own class, without
our hooks, each parameter replaced by this rank's plain shard. The copy is then sharded as the model is;
nothing is communicated.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from shardwright.engine.building.deferred import Deferred
from shardwright.engine.building.torch_state import methods_run_as_forward, run_as_forward
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.step.hooks import ModuleHooks, hooks_of
from shardwright.engine.step.runtime import Runtime
from shardwright.engine.unit import Unit, mark, units_in, unmark
from shardwright.errors import InputError, StageError
from shardwright.params.flat_param import places_of
from shardwright.params.param import ParamSite
from shardwright.torch_private import STATE_KEY, hook_tables_of


def deep_copy(model: nn.Module, memo: dict[int, Any]) -> tuple[nn.Module, list[nn.Module]]:
    """A copy, in a runtime of its own, and its modules that are to be sharded ones.

    Raises: StageError inside of a step; InputError where a group is shared with modules outside of
        ``model``: then copy the module that holds both.
    """
    top = units_in(model)
    if top[0].runtime.running() is not None:
        raise StageError("a sharded model can't be copied inside a forward or backward; do it between steps")
    top[0].runtime.rest()
    names = {id(module): name for name, module in model.named_modules()}
    units = [part for unit in top for part in (unit, *unit.parts)]
    for unit in units:
        if any(id(module) not in names for module in unit.modules) or set(unit.shared_owners) - set(units):
            raise InputError(
                f"group {unit.name!r} is shared with modules outside of this {type(model).__name__}; "
                "copy the module that holds them all"
            )
    with _plain(top):
        twin = copy.deepcopy(model, memo)
    there = dict(twin.named_modules())
    return twin, _shard(units, {each: there[name] for each, name in names.items()})


@contextmanager
def _plain(top: Sequence[Unit]) -> Iterator[None]:
    """The modules as they were before they were sharded, with shards in place of parameters, for a while."""
    with ExitStack() as undo:
        for unit in top:
            for param in unit.params:
                param.show(nn.Parameter(param.local.detach(), requires_grad=param.trainable))
                undo.callback(param.show, param.sharded)
            for module in unit.modules:
                undo.callback(setattr, module, "__class__", type(module))
                undo.callback(module.__dict__.__setitem__, STATE_KEY, module.__dict__[STATE_KEY])
                undo.callback(mark, unit)
                for name in methods_run_as_forward(module):
                    undo.callback(module.__dict__.__setitem__, name, module.__dict__.pop(name))
                unmark(module)
            undo.enter_context(_without(hooks_of(unit.modules[0])))
        for module in (m for unit in top for m in unit.modules):
            # The class that was swapped in has FSDPModule as its first base, and the module's own as its
            # second.
            module.__class__ = type(module).__bases__[1]
        yield


@contextmanager
def _without(hooks: ModuleHooks) -> Iterator[None]:
    """Without these hooks, for a while; afterwards they are where they were among other ones."""
    tables = [table for module in hooks.unit.modules for table in hook_tables_of(module)]
    before = [table.copy() for table in tables]
    for table in tables:
        for key in hooks.ids & table.keys():
            del table[key]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def _shard(units: Sequence[Unit], twins: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Shard copies as the modules of ``units`` are, the first of which is the whole model's.

    twins: the copy of each module, by its id.
    """
    source = units[0].runtime
    runtime = Runtime(source.policy)
    made = {
        unit: Unit(unit.name, tuple(twins[id(m)] for m in unit.modules), None, (), unit.policy, runtime)
        for unit in units
    }
    for unit, twin in made.items():
        twin.parts = tuple(made[part] for part in unit.parts)
        twin.shared_owners = tuple(made[owner] for owner in unit.shared_owners)
    owned = {unit.group: unit for unit in units if unit.group is not None}
    for group in (group for group in source.groups if group in owned):
        unit, facts = owned[group], replace(source.requested(group), steps=False)  # it steps the original
        if len(owned) < len(source.groups):  # the lists name groups by number, which are others in a part
            facts = replace(facts, ahead_in_forward=None, ahead_in_backward=None, part_of=None)
        twin = made[unit]
        twin.group = _copied(group, twin.name, twins)
        twin.deferred = None if unit.deferred is None else Deferred(twin.group.params)
        runtime.add(twin.group, None)
        runtime.change(twin.group, **vars(facts))
    runtime.table.root = tuple(made[units[0]].groups)
    for unit, twin in made.items():
        if twin.modules:
            mark(twin)
            ModuleHooks(twin)
        for module, copied in zip(unit.modules, twin.modules, strict=True):
            for name in methods_run_as_forward(module):
                run_as_forward(copied, name)
    return [module for twin in made.values() for module in twin.modules]


def _copied(group: ParamGroup, name: str, twins: Mapping[int, nn.Module]) -> ParamGroup:
    """Its parameters where the copies of those modules show them that were copied, too."""
    params = []
    for param in group.params:
        places = (
            [ParamSite(twins[id(site.module)], site.name) for site in sites if id(site.module) in twins]
            for sites in places_of(param)
        )
        params.append(param.twin(*places))
    copied = type(group)(name, params, group.axis, group.policy, group.gatherer.options)
    copied.reducer.policy, copied.reducer.hook = group.reducer.policy, group.reducer.hook
    return copied
