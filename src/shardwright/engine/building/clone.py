"""Copies of a sharded model: ``copy.deepcopy``.

While a model is copied its modules are what they were before ``fully_shard``: of their own class, without
our hooks, each parameter replaced by this rank's plain shard. A blueprint says how they were sharded, and
the copy is sharded in the same way from it, without communication.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwright.engine.building.deferred import Deferred
from shardwright.engine.groups.gatherer import GatherOptions
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.step.hooks import ModuleHooks, hooks_of, methods_run_as_forward, run_as_forward
from shardwright.engine.step.runtime import Runtime
from shardwright.engine.unit import Unit, mark, unit_of, units_in, unmark
from shardwright.errors import InputError, StageError
from shardwright.params.flat_param import places_of
from shardwright.params.param import ParamSite, ShardedParam
from shardwright.policy import MixedPrecisionPolicy, ReductionPolicy, SchedulePolicy
from shardwright.schedule.schedule import GroupSpec
from shardwright.torch_private import STATE_KEY, hook_tables_of
from shardwright.transport.mesh import Axis


@dataclass(frozen=True)
class GroupPrint:
    """How one group was made. ``places``: for each parameter lists of (name of the module, name in it)."""

    order: int
    params: tuple[ShardedParam, ...]
    places: tuple[tuple[tuple[tuple[str, str], ...], ...], ...]
    axis: Axis
    facts: GroupSpec
    reduction: ReductionPolicy
    hook: Any
    gathered: GatherOptions


@dataclass(frozen=True)
class UnitPrint:
    """How one unit was made; ``modules`` by name, ``parts`` and ``shared_owners`` by place among the units.

    methods: of each module, those that are run like its forward. deferred: whether its group is unsharded
    when it is first read.
    """

    name: str
    modules: tuple[str, ...]
    policy: MixedPrecisionPolicy
    methods: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...]
    shared_owners: tuple[int, ...]
    group: GroupPrint | None
    deferred: bool


@dataclass(frozen=True)
class Blueprint:
    """How a model was sharded. ``root``: which of the units have the root's groups."""

    units: tuple[UnitPrint, ...]
    policy: SchedulePolicy
    root: tuple[int, ...]


@contextmanager
def plain(model: nn.Module) -> Iterator[Blueprint]:
    """The model as it was before it was sharded, with shards in place of parameters; at rest, for a while.

    Raises: StageError inside of a step; InputError where a group is shared with modules outside of
        ``model``: then copy the module that holds both.
    """
    top = units_in(model)
    runtime = top[0].runtime
    if runtime.running() is not None:
        raise StageError("a sharded model can't be copied inside a forward or backward; do it between steps")
    runtime.rest()
    blueprint = _draw(model, runtime)
    with ExitStack() as undo:
        for unit in top:
            for group in unit.groups:
                for param in group.params:
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
            module.__class__ = type(module).__bases__[1]
        yield blueprint


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


def deep_copy(model: nn.Module, memo: dict[int, Any]) -> tuple[nn.Module, Blueprint]:
    """A copy of the plain model, and how to shard it."""
    with plain(model) as blueprint:
        return copy.deepcopy(model, memo), blueprint


def rebuild(model: nn.Module, blueprint: Blueprint) -> list[nn.Module]:
    """Shard a copy of the plain model in the same way, in a runtime of its own; the modules that are sharded
    now."""
    modules = dict(model.named_modules())
    runtime = Runtime(blueprint.policy)
    units = []
    for made in blueprint.units:
        members = tuple(modules[name] for name in made.modules)
        units.append(Unit(made.name, members, None, (), made.policy, runtime))
    for unit, made in zip(units, blueprint.units, strict=True):
        unit.parts = tuple(units[place] for place in made.parts)
        unit.shared_owners = tuple(units[place] for place in made.shared_owners)
    deferred = {unit for unit, made in zip(units, blueprint.units, strict=True) if made.deferred}
    owned = [(u, m.group) for u, m in zip(units, blueprint.units, strict=True) if m.group is not None]
    for unit, made in sorted(owned, key=lambda pair: pair[1].order):
        unit.group = _build_group(unit, made, modules)
        unit.deferred = Deferred(unit.group.params) if unit in deferred else None
        runtime.add(unit.group, None)
        runtime.change(unit.group, **vars(made.facts))
    runtime.table.root = tuple(group for place in blueprint.root for group in units[place].groups[:1])
    for unit in units:
        if unit.modules:
            mark(unit)
            ModuleHooks(unit)
    for unit, made in zip(units, blueprint.units, strict=True):
        for module, methods in zip(unit.modules, made.methods, strict=True):
            for name in methods:
                run_as_forward(module, name)
    return [module for unit in units for module in unit.modules]


def _draw(model: nn.Module, runtime: Runtime) -> Blueprint:
    names = {id(module): name for name, module in model.named_modules()}
    units = [part for unit in units_in(model) for part in (unit, *unit.parts)]
    for unit in units:
        if any(id(module) not in names for module in unit.modules) or set(unit.shared_owners) - set(units):
            raise InputError(
                f"group {unit.name!r} is shared with modules outside of this {type(model).__name__}; "
                "copy the module that holds them all"
            )
    places = {unit: place for place, unit in enumerate(units)}
    whole = len(runtime.groups) == sum(unit.group is not None for unit in units)
    prints = []
    for unit in units:
        prints.append(
            UnitPrint(
                unit.name,
                tuple(names[id(module)] for module in unit.modules),
                unit.policy,
                tuple(tuple(methods_run_as_forward(module)) for module in unit.modules),
                tuple(places[part] for part in unit.parts),
                tuple(places[owner] for owner in unit.shared_owners),
                None if unit.group is None else _draw_group(unit.group, runtime, names, whole),
                unit.deferred is not None,
            )
        )
    top = unit_of(model)
    roots = tuple(places[unit] for unit in (top, *top.parts) if unit.group is not None)
    return Blueprint(tuple(prints), runtime.policy, roots)


def _draw_group(group: ParamGroup, runtime: Runtime, names: dict[int, str], whole: bool) -> GroupPrint:
    facts = replace(runtime.requested(group), steps=False)  # what steps it holds the original
    if not whole:  # the lists name groups by number, which are other ones in a part of the model
        facts = replace(facts, ahead_in_forward=None, ahead_in_backward=None, part_of=None)
    places = tuple(
        tuple(
            tuple((names[id(site.module)], site.name) for site in sites if id(site.module) in names)
            for sites in places_of(param)
        )
        for param in group.params
    )
    return GroupPrint(
        runtime.groups.index(group),
        group.params,
        places,
        group.axis,
        facts,
        group.reducer.policy,
        group.reducer.hook,
        group.gatherer.options,
    )


def _build_group(unit: Unit, made: GroupPrint, modules: dict[str, nn.Module]) -> ParamGroup:
    params = [
        source.twin(*([ParamSite(modules[name], attribute) for name, attribute in sites] for sites in places))
        for source, places in zip(made.params, made.places, strict=True)
    ]
    group = ParamGroup(unit.name, params, made.axis, unit.policy, made.gathered)
    group.reducer.policy = made.reduction
    group.reducer.hook = made.hook
    return group
