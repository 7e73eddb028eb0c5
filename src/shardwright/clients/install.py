"""``install()``: our names in ``torch.distributed.fsdp``, for frameworks that import theirs from there."""

import sys
from types import ModuleType
from typing import Any

from shardwright import api, module, policy, torch_fsdp, wrapper
from shardwright.engine.building.torch_state import TorchState
from shardwright.errors import warn

_SHARDING = ("fully_shard",)
_HANDLES = ("GradientReductionHandle", "UnshardHandle")
_MODULES = ("FSDPModule", *_HANDLES, "register_fsdp_forward_method", "share_comm_ctx")
_POLICIES = ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy")
_WRAPPER = tuple(name for name in wrapper.__all__ if name not in ("FSDP", "TrainingState"))
_OURS: dict[str, Any] = {
    name: getattr(room, name)
    for room, names in ((api, _SHARDING), (module, _MODULES), (policy, _POLICIES), (wrapper, _WRAPPER))
    for name in names
}
_TORCHS = torch_fsdp.originals(tuple(_OURS))


def install() -> None:
    """Replace torch's names in ``torch.distributed.fsdp`` and its public submodules with ours.

    Use it with frameworks that import these names (accelerate, transformers, Lightning, torchtitan). Call it
    before they are imported, in every process of the job; it applies to this process, until ``uninstall``.
    Both interfaces are replaced: ``fully_shard`` with its policies, and ``FullyShardedDataParallel`` with its
    options and wrapping policies. ``ShardedGradScaler`` stays torch's. A second call does nothing.

    Warns:
        UserWarning: a library was imported before and still uses torch's names; the warning names it.
    """
    early = sorted(_holders())
    if not _replace(_TORCHS, _OURS):
        return
    api.fully_shard.state = TorchState  # type: ignore[attr-defined]  # as torch's has it
    if early:
        warn(
            f"shardwright.install(): {', '.join(early)} imported names of torch.distributed.fsdp before, and "
            "keeps torch's own; call install() before importing it",
        )


def uninstall() -> None:
    """Restore torch's own names, in this process. Libraries that were imported in between keep ours."""
    _replace(_OURS, _TORCHS)


def _replace(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Replace it in each place; return whether any name was there."""
    there = [
        (place, name)
        for place in torch_fsdp.PLACES
        for name in _TORCHS
        if vars(place).get(name) is before[name]
    ]
    for place, name in there:
        setattr(place, name, after[name])
    return bool(there)


def _holders() -> set[str]:
    """Packages that hold one of torch's own objects as a name of one of their modules."""
    originals = {id(theirs) for theirs in _TORCHS.values()}
    found = set()
    for name, loaded in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in ("torch", "shardwright", "__main__") or not isinstance(loaded, ModuleType):
            continue
        if any(id(value) in originals for value in list(vars(loaded).values())):
            found.add(package)
    return found
