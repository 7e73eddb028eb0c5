"""``FSDPModule``: what a module can do once ``fully_shard`` was called on it.

Each setter only replaces a frozen policy, or asks the runtime; what they mean is written where it is done.
"""

from typing import Any, cast

from torch import nn

from shardwright.motion.unit import Unit, unit_of, units_in
from shardwright.observe.trace import Trace
from shardwright.plan.schedule import Phase, Schedule
from shardwright.policy import SchedulePolicy


class FSDPModule:
    """What a module is besides its own class once ``fully_shard`` was called on it."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over ranks. False keeps them unsharded and adds them up.

        For gradient accumulation: False for all microbatches but the last. ``recurse=False``: only this
        module's own group. Gradients that are kept take the memory of the unsharded parameters.
        """
        for unit in self._units(recurse):
            if unit.group is not None:
                unit.group.requires_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether groups are resharded between forward and backward, from the next step on."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            if unit.group is not None:
                unit.runtime.set_reshard_after_forward(unit.group, reshard_after_forward)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """All-gather these modules' groups when this one's forward begins, in order, instead of the next.

        An empty list goes back to the next ones in the recorded order.
        """
        self._set_ahead(Phase.FORWARD, modules)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """The same for this module's backward."""
        self._set_ahead(Phase.BACKWARD, modules)

    def _set_ahead(self, phase: Phase, modules: list["FSDPModule"]) -> None:
        unit = self._unit()
        groups = [unit_of(cast(nn.Module, module)).group for module in modules]
        if unit.group is not None:
            unit.runtime.set_ahead(unit.group, phase, [g for g in groups if g is not None] or None)

    def set_schedule_policy(self, policy: SchedulePolicy) -> None:
        """How far ahead collectives are issued, for the whole model, from the next forward or backward on."""
        self._unit().runtime.set_policy(policy)

    def trace(self) -> Trace:
        """What did happen in the last forward, evaluation and backward, with times of the host."""
        return self._unit().runtime.trace

    def schedule(self) -> Schedule:
        """The schedule planned from the last recorded step: print it, compare it. Empty before one."""
        return self._unit().runtime.schedule

    def _unit(self) -> Unit:
        return unit_of(cast(nn.Module, self))

    def _units(self, recurse: bool) -> list[Unit]:
        return units_in(cast(nn.Module, self)) if recurse else [self._unit()]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double(), .to_empty(): they act on the shards, so the shards must be what modules show.
        self._unit().runtime.rest()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]


_classes: dict[type, type] = {}


def become_fsdp_module(module: nn.Module) -> None:
    """Swap the module's class for a subclass of it and FSDPModule, one for each class."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module.__class__ = _classes[cls]
