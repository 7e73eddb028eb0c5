"""What is checked of modules before they are sharded: an error leaves all as it was.

Of other data parallelism around or inside of ours: two would own the same parameters, and reduce the same
gradients; what comes of it is an error from the depths of one of them, or other numbers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.engine.unit import OurRegistry, is_sharded
from shardwright.errors import InputError, MisuseError
from shardwright.policy import DataParallelMeshDims
from shardwright.torch_private import REGISTRY_KEY, concatenated
from shardwright.transport.mesh import Axis

_WRAPPER = ".fsdp.fully_sharded_data_parallel"  # the end of its module's name


def has_no_forward(module: nn.Module) -> bool:
    """Whether its class has no forward of its own."""
    return type(module).forward is nn.Module.forward


def check_modules(modules: Sequence[Any]) -> Sequence[nn.Module]:
    """The modules to shard, each fit to be. Raises: InputError."""
    if not modules:
        raise InputError("fully_shard got an empty list; pass at least one module")
    for m in modules:
        kind = type(m).__name__
        if not isinstance(m, nn.Module):
            raise InputError(f"fully_shard takes an nn.Module or a list of them, got {kind}")
        if is_sharded(m):
            raise MisuseError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard "
                f"has already been applied to the following module: {kind}. Call it once on each, inner first"
            )
    for m in modules:
        for other in modules:
            if other is not m and any(child is other for child in m.modules()):
                raise InputError(
                    f"the list has a {type(other).__name__} that is inside another of its modules, a "
                    f"{type(m).__name__}; list only modules that lie beside each other"
                )
    return modules


def check_foreign(modules: Iterable[nn.Module], ignored: set[int]) -> None:
    """Raises: MisuseError for a module in a tree that something else keeps equal on all ranks, or shards,
    unless all its parameters are ignored."""
    for root in modules:
        for path, module in root.named_modules():
            found = _applied_to(module)
            if found and any(id(param) not in ignored for param in module.parameters()):
                raise MisuseError(
                    f"{path!r}, a {type(module).__name__}, {found} already; shardwright.fully_shard would "
                    "shard and reduce the same parameters again: call shardwright's fully_shard or "
                    "FullyShardedDataParallel on the plain modules instead, or pass its parameters as ignored"
                )


def _applied_to(module: nn.Module) -> str:
    """What torch's data parallelism has done with a module; "" where none has."""
    registry = module.__dict__.get(REGISTRY_KEY, ())
    for name in ("fully_shard", "replicate"):
        if not isinstance(registry, OurRegistry) and name in registry:
            return (
                f"was given to torch.distributed.{'fsdp' if name == 'fully_shard' else '_composable'}.{name}"
            )
    if isinstance(module, DataParallel | DistributedDataParallel):
        return f"is wrapped in {type(module).__name__}"
    if any(cls.__module__.endswith(_WRAPPER) for cls in type(module).__mro__):
        return "is wrapped in torch.distributed.fsdp.FullyShardedDataParallel"
    return ""


# ---- parameters that are DTensors already


def check_composes(fqn: str, param: nn.Parameter, axis: Axis, dims: DataParallelMeshDims | None) -> None:
    """Raises: InputError for a DTensor whose mesh and the data-parallel one don't go together."""
    if not isinstance(param, DTensor):
        if dims is not None:
            raise InputError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. "
                f"via distribute_module). Got plain tensor for parameter {fqn!r}; else leave it out (types "
                "of spmd_types aren't read: choose another parallelism.spmd_backend in torchtitan)"
            )
        return
    mesh, names = param.device_mesh, param.device_mesh.mesh_dim_names or ()
    if dims is None:
        try:
            concatenated([axis.mesh, mesh])
        except (RuntimeError, TypeError) as error:  # the second where an axis has no name
            raise InputError(
                f"parameter {fqn!r} is a DTensor already ({param.placements} on {mesh}), on a mesh that "
                f"doesn't go with {axis.mesh}: {error}. Take both from one init_device_mesh with named axes"
            ) from error
    for name in (*dims.shard_names, *dims.replicate_names) if dims is not None else ():
        if name not in names or param.placements[names.index(name)] != Replicate():
            raise InputError(
                f"Expected Replicate() on the data-parallel axis {name!r} of parameter {fqn!r}, but it is "
                f"placed {param.placements} on {mesh}"
            )
