"""A strategy of Lightning Fabric, registered as "shardwright" when this file is imported.

    import shardwright.fabric
    fabric = Fabric(strategy="shardwright", devices=2)          # or ShardwrightStrategy(groups="auto")
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

The only file that imports Lightning: ``lightning``, ``lightning-fabric`` or both.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.api import fully_shard
from shardwright.checkpoint import load, save
from shardwright.clip import clip_grad_norm_
from shardwright.errors import CheckpointError, InputError
from shardwright.extras import require
from shardwright.grouped import choices
from shardwright.module import FSDPModule
from shardwright.policy import DEFAULT_PRECISION, Grouping, MixedPrecisionPolicy

PACKAGES = ("lightning.fabric", "lightning_fabric")
"""The two names that Fabric is published under; a program may import either, or both."""


def _found(package: str) -> Any:
    """Its ``strategies``, or None where it isn't installed."""
    try:
        return import_module(f"{package}.strategies")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise
        return None


_STRATEGIES = [found for found in map(_found, PACKAGES) if found is not None]
if not _STRATEGIES:
    require("fabric", PACKAGES[-1])
_DDP: Any = [strategies.DDPStrategy for strategies in _STRATEGIES]


class ShardwrightStrategy(*_DDP):
    """Shards what ``Fabric.setup`` is given, unless it is sharded already; one process per device.

    A strategy for the Fabric of ``lightning`` and that of ``lightning_fabric``, whichever are installed.

    groups: as for ``fully_shard``; "auto", and nothing in the model says how to group it: one group, with a
        warning. None: the model is one group. shard: instead, a function that shards the
    model in place. mp_policy: as for ``fully_shard``; Fabric's ``precision`` is left at "32-true".
    options: of ``DDPStrategy``, as ``process_group_backend`` and ``timeout``.

    ``Fabric.save`` writes a checkpoint of Shardwright's (a folder; ``state`` has one model, at most one
    optimizer, and values of any other kind that JSON has, or tensors), ``Fabric.load`` restores it on any
    number of ranks.
    """

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
        self._backward_sync_control = _Reducing()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard it in place; every rank calls. An optimizer is built after this, or given to ``setup``."""
        if not isinstance(module, FSDPModule):
            if self._shard is not None:
                self._shard(module)
            else:
                fully_shard(module, groups=self._groups_of(module), mp_policy=self._mp_policy)
        return module

    def _groups_of(self, module: nn.Module) -> Any:
        if self._groups != "auto" or choices(module, Grouping()):
            return self._groups
        warnings.warn(
            f"nothing in {type(module).__name__} says how to group it, so all of it is gathered at once; "
            "give ShardwrightStrategy(groups=...) lists of names or a Grouping, or None if that's meant",
            stacklevel=2,
        )
        return None

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard the module; the optimizers step its shards from here on. Raises: InputError for an optimizer
        that has stepped, or has parameters that aren't the module's."""
        names = {id(param): name for name, param in module.named_parameters()}
        for optimizer in optimizers:
            given = [param for group in optimizer.param_groups for param in group["params"]]
            if optimizer.state or any(id(param) not in names for param in given):
                raise InputError(
                    f"{type(optimizer).__name__} has stepped already, or has parameters that aren't those of "
                    f"{type(module).__name__}: give setup() a new optimizer over model.parameters()"
                )
        module = self.setup_module(module)
        shards = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [shards[names[id(param)]] for param in group["params"]]
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """See ``clip_grad_norm_``; every rank calls."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Publish ``path/step-N``, where N is ``state["step"]``, or 0; every rank calls.

        Raises: InputError for a state without one model, a filter, or storage options.
        """
        if storage_options is not None or filter:
            raise InputError(
                "save: storage_options and filter aren't supported; leave out what isn't to be saved"
            )
        model, optimizer, rest = _sorted(state)
        step = rest.get("step", 0)
        save(path, model=model, optimizer=optimizer, extra=rest, step=step if isinstance(step, int) else 0)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill model and optimizer of ``state`` in place, and set its other values; every rank calls.

        Returns what the checkpoint has besides. Raises: InputError for a state without one model;
        CheckpointError, nothing changed then, where tensors don't fit or, if ``strict``, a value isn't there.
        """
        given = {"model": state} if isinstance(state, nn.Module) else state or {}
        model, optimizer, rest = _sorted(given)
        restored = load(path, model=model, optimizer=optimizer)
        extra = dict(restored.extra or {})
        missing = sorted(rest.keys() - extra.keys())
        if missing and strict:
            raise CheckpointError(f"{path} has no {missing[0]!r}, only {sorted(extra)}; strict=False")
        for name in rest.keys() & extra.keys():
            given[name] = extra.pop(name)
        return extra


class _Reducing:
    """Gradients are reduced in the last backward of a step only."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return _unreduced(module) if enabled else nullcontext()


@contextmanager
def _unreduced(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _sorted(state: Mapping[str, Any]) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    """The model, the optimizer and what else there is."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise InputError(
            f"a state to save or load has one model and at most one optimizer, this has {len(models)} and "
            f"{len(optimizers)}: {sorted(state)}"
        )
    rest = {name: v for name, v in state.items() if not isinstance(v, (nn.Module, Optimizer))}
    return models[0], optimizers[0] if optimizers else None, rest


for _strategies in _STRATEGIES:
    if "shardwright" not in _strategies.STRATEGY_REGISTRY:
        _strategies.STRATEGY_REGISTRY.register(
            "shardwright", ShardwrightStrategy, "fully sharded by Shardwright"
        )
