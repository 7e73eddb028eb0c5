"""Data parallelism that isn't ours: refused inside of our modules, and torch's around them.

Two of them would own the same parameters, and reduce the same gradients; what comes of it is an error from
the depths of one of them, or other numbers. Torch's composable calls find each other by a registry in each
module's ``__dict__``; ours stands in the same place.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.errors import MisuseError
from shardwright.torch_private import REGISTRY_KEY

_WRAPPER = ".fsdp.fully_sharded_data_parallel"  # the end of its module's name
_ASKING = ("wrapper", "_is_composable_with_fsdp", "_get_ignored_modules")
"""Torch's functions that ask as they begin to shard: around ``fully_shard``, in it, in the wrapper class."""


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
        if not isinstance(registry, _Registry) and name in registry:
            return (
                f"was given to torch.distributed.{'fsdp' if name == 'fully_shard' else '_composable'}.{name}"
            )
    if isinstance(module, DataParallel | DistributedDataParallel):
        return f"is wrapped in {type(module).__name__}"
    if any(cls.__module__.endswith(_WRAPPER) for cls in type(module).__mro__):
        return "is wrapped in torch.distributed.fsdp.FullyShardedDataParallel"
    return ""


class _Registry(dict[str, Any]):
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


def _begins_to_shard() -> bool:
    asking = sys._getframe(2)
    outer = asking.f_back
    return asking.f_code.co_name in _ASKING or (outer is not None and outer.f_code.co_name in _ASKING)


def register(module: nn.Module) -> None:
    """Have torch's composable calls know that ``module`` is sharded."""
    before = module.__dict__.get(REGISTRY_KEY)
    registry = _Registry(before or {})
    registry.of = type(module).__name__
    module.__dict__[REGISTRY_KEY] = registry


def unregister(module: nn.Module) -> None:
    """Have them know no more."""
    others = dict(module.__dict__.pop(REGISTRY_KEY, {}))
    if others:
        module.__dict__[REGISTRY_KEY] = others
