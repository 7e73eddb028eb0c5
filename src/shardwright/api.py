"""``fully_shard``: the door shaped like ``torch.distributed.fsdp.fully_shard``, onto our own runtime."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.comm.mesh import Axis, resolve
from shardwright.errors import InputError
from shardwright.module import become_fsdp_module
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
from shardwright.policy import DEFAULT_PRECISION, MixedPrecisionPolicy
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
    ModuleHooks(unit)
    for m in modules:
        become_fsdp_module(m)
    guard_optimizers()
    return module


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
