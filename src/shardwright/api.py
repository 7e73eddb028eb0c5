"""``fully_shard``: the door shaped like ``torch.distributed.fsdp.fully_shard``, onto our own runtime."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.comm.mesh import Axis, resolve
from shardwright.errors import InputError
from shardwright.motion.hooks import ModuleHooks, guard_optimizers
from shardwright.motion.runtime import Runtime, Stats
from shardwright.motion.unit import (
    Unit,
    is_sharded,
    mark,
    owner_of,
    remember_replaced,
    sharded_from,
    unit_of,
    units_in,
)
from shardwright.observe.trace import Trace
from shardwright.plan.schedule import Phase, Schedule
from shardwright.policy import DEFAULT_PRECISION, MixedPrecisionPolicy, SchedulePolicy
from shardwright.state.full import stream_full
from shardwright.state.group import ParamGroup
from shardwright.state.param import ShardedParam, Slot

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
) -> M: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
) -> list[nn.Module]: ...
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
) -> Any:
    """Shard the parameters of a module (or of several, as one group) over the ranks of a mesh.

    Call it bottom-up: on each block, then on the whole model; every rank of the mesh must make the same
    calls in the same order. Parameters that a nested call has taken are left out; where none are left, the
    call makes no group. Build the optimizer afterwards. In place: the module keeps its identity and names,
    and its class becomes a subclass that is also an ``FSDPModule``.

    At rest each parameter is a DTensor of its logical shape, of which this rank stores the rows that
    ``torch.chunk`` gives it (scalars are kept whole). The original parameter's memory is freed. Around a
    module's forward and backward its group's parameters are plain tensors, unsharded in ``param_dtype``.
    Gradients are averaged over ranks.

    module: a module with a forward of its own, or a list of modules that become one group.
    mesh: a 1-D DeviceMesh; None: all ranks. Parameters and buffers are moved to its device.
    reshard_after_forward: free the unsharded parameters after forward and gather them again for backward;
        False keeps them in between; None means True for nested modules and False for the root.
    mp_policy: see ``MixedPrecisionPolicy``.
    Returns the argument.
    Raises: InputError for a container without forward, a module that is sharded already, a mesh that isn't
        1-D or lacks this rank, or parameters that are DTensors already. Nothing is changed then.
    """
    modules = _check_modules(module)
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise InputError(f"mp_policy must be a MixedPrecisionPolicy, got {type(mp_policy).__name__}")
    if reshard_after_forward not in (None, True, False):
        raise InputError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}")
    found = _find_params(modules)
    axis = resolve(mesh)
    runtime = Runtime()
    nested = list(dict.fromkeys(unit for m in modules for unit in units_in(m)))
    name = _name(modules)
    unit = Unit(name, tuple(modules), None, (), reshard_after_forward, mp_policy, runtime)
    _move_buffers(modules, axis)
    params, lenders = _shard_params(found, axis, unit)
    unit.lenders = tuple(lenders)
    for inner in (*nested, *lenders):
        if inner.runtime is not runtime:
            runtime.absorb(inner.runtime)
    if params:
        unit.group = runtime.root = ParamGroup(name, params, axis, mp_policy)
        runtime.add(unit.group, reshard_after_forward)
    mark(unit)
    _name_by_path(modules)
    ModuleHooks(unit)
    for m in modules:
        _become_fsdp_module(m)
    guard_optimizers()
    return module


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


def stats(model: nn.Module) -> Stats:
    """Bytes and seconds of a sharded model on this rank; no communication.

    Raises: InputError for a module that isn't sharded.
    """
    return unit_of(model).runtime.stats()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model as plain CPU tensors: every entry of ``model.state_dict()`` on rank 0, {} elsewhere.

    Every rank of the model's mesh calls it, between steps. Parameters are collected one at a time, in the
    dtype at rest; device memory: one whole parameter on rank 0. Names that share a parameter share a tensor.
    Raises: InputError for a model without a sharded module.
    """
    units = units_in(model)
    if not units:
        raise InputError(f"{type(model).__name__} has no sharded module; its own state_dict() is whole")
    for unit in units:
        unit.runtime.rest()
    params = {id(p.sharded): p for unit in units if unit.group is not None for p in unit.group.params}
    is_destination = all(p.axis.rank == 0 for p in params.values())
    whole = dict(stream_full(model.state_dict(keep_vars=True), params))
    return whole if is_destination else {}


def communication_s(model: nn.Module) -> float:
    """Seconds that one step's all-gathers and reduce-scatters take alone, one after another.

    Every rank of the model's mesh calls it, between steps; no compute runs beside them, so this is what a
    step would wait without overlap. Gradients and parameters are left as they are.
    Raises: InputError for a module that isn't sharded; StageError inside a step.
    """
    return unit_of(model).runtime.communication_s()


# ---- what fully_shard is made of


def _check_modules(module: Any) -> list[nn.Module]:
    """The modules to shard, each fit to be. Raises: InputError."""
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise InputError("fully_shard got an empty list; pass at least one module")
    for m in modules:
        kind = type(m).__name__
        if not isinstance(m, nn.Module):
            raise InputError(f"fully_shard takes an nn.Module or a list of them, got {kind}")
        if is_sharded(m):
            raise InputError(f"this {kind} is sharded already; call fully_shard once on each, children first")
        if type(m).forward is nn.Module.forward or isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            raise InputError(
                f"{kind} has no forward of its own, so there is no moment to gather its parameters at; "
                f"call fully_shard on each of its children instead: for child in module: fully_shard(child)"
            )
    for m in modules:
        for other in modules:
            if other is not m and any(child is other for child in m.modules()):
                raise InputError(
                    f"the list has a {type(other).__name__} that is inside another of its modules, a "
                    f"{type(m).__name__}; list only modules that lie beside each other"
                )
    return modules


def _name(modules: Sequence[nn.Module]) -> str:
    return "+".join(type(m).__name__ for m in modules)


def _name_by_path(modules: Sequence[nn.Module]) -> None:
    """Name nested groups by where they are in the outermost module sharded so far, for messages."""
    for root in modules:
        paths: dict[Unit, list[str]] = {}
        for path, m in root.named_modules():
            if path and is_sharded(m):
                paths.setdefault(unit_of(m), []).append(path)
        for nested, found in paths.items():
            if nested.group is not None:
                nested.group.name = nested.name = "+".join(found)


def _named_slots(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Slot, nn.Parameter]]:
    """Every place in the trees that shows a parameter, tied ones each time, with its name in the tree."""
    seen: set[tuple[int, str]] = set()
    for root in modules:
        for prefix, m in root.named_modules():
            for name, param in m._parameters.items():
                if param is not None and (id(m), name) not in seen:
                    seen.add((id(m), name))
                    yield f"{prefix}.{name}" if prefix else name, Slot(m, name), param


def _find_params(modules: Sequence[nn.Module]) -> dict[nn.Parameter, tuple[str, list[Slot]]]:
    """Parameters that no nested call has taken, with the places that show them. Raises: InputError."""
    taken = {
        id(param.sharded)
        for m in modules
        for unit in units_in(m)
        if unit.group is not None
        for param in unit.group.params
    }
    found: dict[nn.Parameter, tuple[str, list[Slot]]] = {}
    for fqn, slot, param in _named_slots(modules):
        if id(param) in taken:
            continue
        if isinstance(param, DTensor):
            raise InputError(
                f"parameter {fqn!r} is a DTensor already ({param.placements} on {param.device_mesh}); this "
                "version shards plain parameters only, not ones that tensor parallelism has split"
            )
        found.setdefault(param, (fqn, []))[1].append(slot)
    return found


def _shard_params(
    found: dict[nn.Parameter, tuple[str, list[Slot]]], axis: Axis, unit: Unit
) -> tuple[list[ShardedParam], list[Unit]]:
    """Shard what is found. Parameters that another unit has sharded (tied weights) are shown, not taken."""
    params: list[ShardedParam] = []
    lenders: dict[Unit, None] = {}
    for param, (fqn, slots) in found.items():
        owner, sharded = owner_of(param), sharded_from(param)
        if owner is not None and sharded is not None:
            sharded.slots.extend(slots)
            sharded.show(sharded.sharded)
            lenders[owner] = None
            continue
        sharded = ShardedParam(fqn, slots, param, axis)
        remember_replaced(param, unit, sharded)
        params.append(sharded)
    return params, list(lenders)


def _move_buffers(modules: Sequence[nn.Module], axis: Axis) -> None:
    for m in modules:
        for child in m.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.device not in (axis.device, torch.device("meta")):
                    child._buffers[name] = buffer.to(axis.device)


_classes: dict[type, type] = {}


def _become_fsdp_module(module: nn.Module) -> None:
    """Swap the module's class for a subclass of it and FSDPModule, one for each class."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module.__class__ = _classes[cls]
