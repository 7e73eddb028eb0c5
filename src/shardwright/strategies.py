"""What the strategies of Lightning's Fabric and of its Trainer share."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import nn

from shardwright.api import fully_shard
from shardwright.grouped import choices
from shardwright.module import FSDPModule
from shardwright.policy import DEFAULT_PRECISION, Grouping, MixedPrecisionPolicy


def strategies_of(package: str) -> Any:
    """Its ``strategies``, or None where it isn't installed."""
    try:
        return import_module(f"{package}.strategies")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise
        return None


class ShardsModules:
    """How a strategy shards what it is given: before the framework's ``DDPStrategy`` among the bases."""

    def __init__(
        self,
        groups: Any = "auto",
        shard: Callable[[nn.Module], object] | None = None,
        mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._groups = groups
        self._shard = shard
        self._mp_policy = mp_policy

    def _shard_whole(self, module: nn.Module) -> None:
        """Shard a module that isn't sharded yet, in place; every rank calls it."""
        if self._shard is not None:
            self._shard(module)
            return
        nested = any(isinstance(part, FSDPModule) for part in module.modules())
        groups = None if nested else _groups_for(self._groups, module)
        fully_shard(module, groups=groups, mp_policy=self._mp_policy)


def _groups_for(groups: Any, module: nn.Module) -> Any:
    """The same, or None, with a warning, where they are "auto" and nothing in the module says how."""
    if groups != "auto" or choices(module, Grouping()):
        return groups
    warnings.warn(
        f"nothing in {type(module).__name__} says how to group it, so all of it is gathered at once; "
        "give the strategy groups=, lists of names or a Grouping, or None if that's meant",
        stacklevel=4,
    )
    return None


@contextmanager
def unreduced(module: Any) -> Iterator[None]:
    """A context in which a module's gradients are accumulated, and not reduced."""
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
