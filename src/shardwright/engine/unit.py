"""A unit: what one call of ``fully_shard`` made. Modules that run together, and the groups they need."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.step.runtime import Runtime
from shardwright.errors import InputError, MisuseError
from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.schedule import Phase
from shardwright.torch_private import REGISTRY_KEY, STATE_KEY, tree_flatten

if TYPE_CHECKING:
    from shardwright.engine.building.deferred import Deferred

_ATTRIBUTE = "_shardwright_unit"
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True)
class TensorShape:
    """What is remembered of an input tensor. A value of another kind is remembered by its type's name alone:
    to keep it might keep memory alive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


def shapes_in(args: Any, kwargs: Any) -> Any:
    """What a module is called with, without memory, taken apart by ``tree_flatten``."""
    # Put together where they are read: the constructor of a container may look at its leaves, as that of
    # ``PackedSequence`` does.
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    shapes = [
        TensorShape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else (leaf if isinstance(leaf, _PLAIN) else type(leaf))
        for leaf in leaves
    ]
    return shapes, spec


@dataclass
class Pass:
    """Where the current forward of a unit stands.

    number: of the pass that all this belongs to. running: how deep its modules run. awaited: those that are
    still to run. users: how many running units need the group. calls: of several modules whose backwards end
    together. unseen: a forward gave nothing by which its backward will be seen.
    """

    number: int = -1
    running: int = 0
    users: int = 0
    awaited: set[nn.Module] = field(default_factory=set)
    calls: list[Any] = field(default_factory=list)
    unseen: bool = False


@dataclass(eq=False)
class Unit:
    """``modules`` share ``group`` (None where nested calls have taken every parameter).

    parts: units without modules that hold these modules' other groups, where they are on several axes.
    shared_owners: units that own parameters which these modules show too (tied weights); their groups are
        unsharded and resharded around these modules as well.
    deferred: of a part whose group is unsharded when it is first read, what tells of that; else None.
    home: the runtime that it was made with; ``runtime`` is the one that has taken that in since.
    watched: of the unsharded parameters whose gradients are told of, the first. now: where the current
        forward stands. buffers_compared: the phases before which ranks have compared them.
    """

    name: str
    modules: tuple[nn.Module, ...]
    group: ParamGroup | None
    shared_owners: tuple["Unit", ...]
    policy: MixedPrecisionPolicy
    home: Runtime
    now: Pass = field(default_factory=Pass)
    parts: tuple["Unit", ...] = ()
    deferred: "Deferred | None" = None
    buffers_compared: set[Phase] = field(default_factory=set)
    watched: nn.Parameter | None = None

    @property
    def owners(self) -> tuple["Unit", ...]:
        """The units whose groups these modules need: its own first, if it has a group."""
        others = (*self.parts, *self.shared_owners)
        return others if self.group is None else (self, *others)

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups that this unit made."""
        return [unit.group for unit in (self, *self.parts) if unit.group is not None]

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters of its groups."""
        return [param for group in self.groups for param in group.params]

    def groups_needed(self) -> list[ParamGroup]:
        """The groups that these modules and those inside them need, each once."""
        units = (unit for module in self.modules for unit in units_in(module))
        owners = (owner for unit in units for owner in unit.owners)
        return list(dict.fromkeys(owner.group for owner in owners if owner.group is not None))

    @property
    def runtime(self) -> Runtime:
        """The runtime of the outermost sharded module that this unit is part of."""
        while self.home.successor is not None:
            self.home = self.home.successor
        return self.home

    def enter_pass(self, number: int) -> None:
        """Start the counts anew in a new pass (the last one may have been cut short)."""
        if self.now.number != number:
            self.now = Pass(number)


def unit_of(module: nn.Module) -> Unit:
    """The unit of a sharded module. Raises: InputError for a module that isn't sharded."""
    unit = module.__dict__.get(_ATTRIBUTE)
    if unit is None:
        raise InputError(f"{type(module).__name__} is not sharded; call shardwright.fully_shard on it first")
    return unit


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this very module."""
    return _ATTRIBUTE in module.__dict__


def mark(unit: Unit) -> None:
    """Remember the unit on each of its modules, and show torch that they are sharded."""
    for module in unit.modules:
        module.__dict__[_ATTRIBUTE] = unit
        registry = OurRegistry(module.__dict__.get(REGISTRY_KEY) or {})
        registry.of = type(module).__name__
        module.__dict__[REGISTRY_KEY] = registry


def units_in(module: nn.Module) -> list[Unit]:
    """The units of the sharded modules in a tree, each once, in the order of ``modules()``."""
    found = (m.__dict__[_ATTRIBUTE] for m in module.modules() if is_sharded(m))
    return list(dict.fromkeys(found))


def unmark(module: nn.Module) -> None:
    """Forget the unit of a module; what others have written beside it stays."""
    del module.__dict__[_ATTRIBUTE]
    for key in (REGISTRY_KEY, STATE_KEY):
        others = dict(module.__dict__.pop(key, {}))
        if others:
            module.__dict__[key] = others


# ---- what torch's composable calls read of a sharded module, by which they find each other


class OurRegistry(dict[str, Any]):
    """A module's registry that says that it is sharded, by us. ``of``: the class of the module."""

    of = ""

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate") and _begins_to_shard():
            raise MisuseError(
                "torch's fully_shard, replicate or FullyShardedDataParallel was called on or around a "
                f"{self.of}, which shardwright.fully_shard has sharded, and would shard and reduce the same "
                "parameters again: call shardwright's there instead, or torch's everywhere"
            )
        return name == "fully_shard" or super().__contains__(name)


# Torch's functions that ask as they begin to shard: around ``fully_shard``, in it, in the wrapper class. Only
# their names tell: ``get_model_state_dict``, which is harmless, asks the same question ("replicate" in it?)
# by another function. An ordinary entry would do for calls on the module itself; torch's ``fully_shard``
# around it then fails with "Invariant encountered: value was None when it should not be" (torch 2.13).
_ASKING = ("wrapper", "_is_composable_with_fsdp", "_get_ignored_modules")


def _begins_to_shard() -> bool:
    asking = sys._getframe(2)
    outer = asking.f_back
    return asking.f_code.co_name in _ASKING or (outer is not None and outer.f_code.co_name in _ASKING)


# ---- what modules showed before


# The parameters that modules had before they were sharded. Whoever still holds one (an optimizer built too
# early, a module tied to it) is told, or is given the sharded one. Not an attribute of them: whoever pickles
# such a parameter would pickle the model with it.
_replaced = WeakTensorKeyDictionary()


def remember_replaced(param: nn.Parameter, unit: Unit, sharded: ShardedParam) -> None:
    """``param`` is no longer shown by any module: ``sharded``, of ``unit``'s group, is."""
    _replaced[param] = (unit, sharded)


def take_over(unit: Unit, params: Collection[ShardedParam]) -> None:
    """``unit`` owns what ``fully_shard`` has made for another unit."""
    for replaced, (_, sharded) in list(_replaced.items()):
        if sharded in params:
            remember_replaced(replaced, unit, sharded)


def made_of(param: nn.Parameter) -> tuple[Unit, ShardedParam] | None:
    """What ``fully_shard`` made of a parameter that modules had before, and the unit that owns it; None for
    any other."""
    return _replaced.get(param)
