"""The groups of a model that is planned: what calls of ``fully_shard`` would make of it, by their numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shardwright.engine.building.deferred import ends, halves, hardly_computes
from shardwright.engine.building.grouping import Groups, Shard, shard_groups
from shardwright.params.param import ParamSite
from shardwright.plan.events import TracedGroup
from shardwright.policy import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwright.schedule.layout import ParamLayout
from shardwright.torch_private import parameters_of


def traced_groups(
    model: nn.Module, groups: Groups, precision: MixedPrecisionPolicy = DEFAULT_PRECISION, cuts: bool = True
) -> list[TracedGroup]:
    """The groups that ``fully_shard(model, groups=groups)`` would make, by its numbers. Changes nothing.

    cuts: large first blocks are two groups, and a large head is gathered late, as ours are
        (``engine/building/deferred.py``).
    """
    return groups_of_calls(model, lambda shard: shard_groups(model, groups, set(), shard), precision, cuts)


def groups_of_calls(
    model: nn.Module, call: Callable[[Shard], None], precision: MixedPrecisionPolicy, cuts: bool = True
) -> list[TracedGroup]:
    """The same, of calls of ``fully_shard`` one by one: ``call`` is given what stands for it, which takes
    modules and ids of parameters to ignore."""
    names = {id(module): name for name, module in model.named_modules()}
    params = _params(model)
    found: list[TracedGroup] = []
    owner: dict[int, _ShardCall] = {}
    units: dict[int, _ShardCall] = {}

    def add(unit: _ShardCall, members: Sequence[_Param], deferred: bool = False) -> int:
        lookup = not deferred and all(isinstance(module, nn.Embedding) for module in unit.modules)
        parts = tuple(names[id(module)] for module in unit.modules)
        found.append(TracedGroup(parts, tuple(each.name for each in members), lookup, deferred))
        unit.numbered.append(len(found) - 1)
        return len(found) - 1

    def cut(unit: _ShardCall, parts: tuple[list[_Param], list[_Param]], into: _ShardCall) -> None:
        first, last = parts
        if cuts and last and unit.group is not None:
            unit.cut = True
            if not first:
                found[unit.group] = replace(found[unit.group], deferred=True)
                return
            found[unit.group] = replace(found[unit.group], parameters=tuple(each.name for each in first))
            unit.own = first
            add(replace(unit, numbered=into.numbered), last, deferred=True)

    def shard(modules: list[nn.Module], ignored: set[int]) -> None:
        shown = dict.fromkeys(id(p) for module in modules for p in module.parameters())
        inner = (units[id(part)] for module in modules for part in module.modules() if id(part) in units)
        nested = list(dict.fromkeys(inner))
        shared = [owner[key] for key in shown if key in owner and owner[key] not in nested]
        unit = _ShardCall(modules)
        for other in (*nested, *shared):
            if other.numbered is not unit.numbered:
                taken = other.numbered
                unit.numbered += taken
                for each in units.values():
                    each.numbered = unit.numbered if each.numbered is taken else each.numbered
        computing = (each for each in nested if each.own and not hardly_computes(each.own, precision))
        first = next(computing, None)
        if first is not None and len(first.modules) == 1 and not any(each.cut for each in nested):
            cut(first, halves(first.own, first.modules[0], precision), unit)
        unit.own = [params[key] for key in shown if key not in owner and key not in ignored]
        owner.update(dict.fromkeys((id(each.param) for each in unit.own), unit))
        units.update({id(module): unit for module in modules})
        if unit.own:
            unit.group = add(unit, unit.own)
            if len(modules) == 1:
                around = (module for each in nested for module in each.modules)
                cut(unit, ends(unit.own, modules[0], around, precision), unit)

    call(shard)
    return [found[group] for group in units[id(model)].numbered]


@dataclass(eq=False)
class _Param:
    """A parameter that a plan shards, as ``engine/building/deferred.py`` asks of it."""

    param: nn.Parameter
    name: str
    sites: tuple[ParamSite, ...]
    extended = False
    members = ()

    @property
    def layout(self) -> ParamLayout:
        """Of it whole."""
        return ParamLayout(tuple(self.param.shape), 1, 0 if self.param.dim() else None)

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype while unsharded."""
        return policy.param_dtype or self.param.dtype if self.param.is_floating_point() else self.param.dtype


@dataclass(eq=False)
class _ShardCall:
    """What one call of ``fully_shard`` makes. own: parameters of its group, which ``group`` numbers. cut: it
    has a second group, or its only one is gathered late. numbered: the groups of the runtime that it is part
    of, in their order."""

    modules: list[nn.Module]
    own: list[_Param] = field(default_factory=list)
    group: int | None = None
    cut: bool = False
    numbered: list[int] = field(default_factory=list)


def _params(model: nn.Module) -> dict[int, _Param]:
    """Return them by the ids of parameters."""
    sites: dict[int, list[ParamSite]] = {}
    for module in model.modules():
        for name, param in parameters_of(module).items():
            sites.setdefault(id(param), []).append(ParamSite(module, name))
    return {id(p): _Param(p, name, tuple(sites[id(p)])) for name, p in model.named_parameters()}
