"""A strategy of Lightning Fabric, registered as "shardwright" when this file is imported.

    import shardwright.fabric
    fabric = Fabric(strategy="shardwright", devices=2)          # or ShardwrightStrategy(groups="auto")
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

This and ``lightning.py``, for Lightning's Trainer, are the only files that import Lightning.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint import load, save
from shardwright.clip import clip_grad_norm_
from shardwright.errors import CheckpointError, InputError
from shardwright.extras import require
from shardwright.module import FSDPModule
from shardwright.policy import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwright.strategies import ShardsModules, strategies_of, unreduced

__all__ = ["ShardwrightStrategy"]

PACKAGES = ("lightning.fabric", "lightning_fabric")
"""The two names that Fabric is published under; a program may import either, or both."""


_STRATEGIES = [found for found in map(strategies_of, PACKAGES) if found is not None]
if not _STRATEGIES:
    require("fabric", PACKAGES[-1])
_DDP: Any = [strategies.DDPStrategy for strategies in _STRATEGIES]


class ShardwrightStrategy(ShardsModules, *_DDP):
    """Shards what ``Fabric.setup`` is given, unless it is sharded already; one process for each device.

    A strategy for the Fabric of ``lightning`` and that of ``lightning_fabric``, whichever are installed.
    ``Fabric.save`` writes a checkpoint of Shardwright's (a folder; ``state`` has one model, at most one
    optimizer, and values of any other kind that JSON has, or tensors), and ``Fabric.load`` restores it on any
    number of ranks. Fabric's ``precision`` is left at "32-true".

    Args:
        groups: as for ``fully_shard``. With "auto", where nothing in the model says how to group it, it is
            one group, with a warning. None: the model is one group.
        shard: in place of ``groups``, a function that shards the model in place.
        mp_policy: as for ``fully_shard``.
        **options: of ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.
    """

    def __init__(
        self,
        groups: Any = "auto",
        shard: Callable[[nn.Module], object] | None = None,
        mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
        **options: Any,
    ) -> None:
        super().__init__(groups, shard, mp_policy, **options)
        self._backward_sync_control = _Reducing()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place. Every rank calls it; an optimizer is built after this, or given to
        ``setup``.

        Args:
            module: sharded already, or not.

        Returns:
            The argument ``module``.

        Raises:
            InputError: as ``fully_shard``.
        """
        if not isinstance(module, FSDPModule):
            self._shard_whole(module)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a module; the optimizers step its shards from here on. Every rank calls it.

        Args:
            module: sharded already, or not.
            optimizers: new ones over the module's parameters.
            scheduler: returned as it is.

        Returns:
            The module, the optimizers as Fabric wraps them, and the scheduler.

        Raises:
            InputError: an optimizer has stepped, or has parameters that aren't the module's; or as
                ``fully_shard``.
        """
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
        """Clip the gradients of an optimizer's parameters; see ``clip_grad_norm_``. Every rank calls it.

        Args:
            module: without effect.
            optimizer: whose parameters.
            max_norm: the largest norm that is left as it is.
            norm_type: the order of the norm, above 0.
            error_if_nonfinite: raise where the norm is infinite or NaN.

        Returns:
            The norm before clipping, a plain 0-d tensor in the dtype of the gradients, with the same value on
                every rank.

        Raises:
            InputError: ``norm_type`` isn't above 0.
            StageError: as ``clip_grad_norm_``.
            RuntimeError: the norm isn't finite and ``error_if_nonfinite`` is True.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Publish a checkpoint as ``path/step-N``, where N is ``state["step"]``, or 0. Every rank calls it.

        Args:
            path: the folder of checkpoints.
            state: one model, at most one optimizer, and other values, by name.
            storage_options: refused.
            filter: refused.

        Raises:
            InputError: the state hasn't one model, or a filter or storage options were given.
            CheckpointError: as ``shardwright.checkpoint.save``.
            MissingExtra: the package for this kind of URL isn't installed.
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
        """Fill model and optimizer of a state in place, and set its other values. Every rank calls it.

        Args:
            path: a checkpoint, or a folder of them.
            state: a model, or one model, at most one optimizer, and other values, by name.
            strict: whether each of the other values must be in the checkpoint.
            weights_only: without effect; nothing is ever pickled.

        Returns:
            What the checkpoint has besides.

        Raises:
            InputError: the state hasn't one model.
            CheckpointError: tensors don't fit or, if ``strict``, a value isn't there. With tensors that don't
                fit nothing is changed.
            DamagedError: as ``shardwright.checkpoint.load``.
            MissingExtra: the package for this kind of URL isn't installed.
        """
        given = {"model": state} if isinstance(state, nn.Module) else state or {}
        model, optimizer, rest = _sorted(given)
        restored = load(path, model=model, optimizer=optimizer)
        extra = dict(restored.extra or {})
        missing = sorted(rest.keys() - extra.keys())
        if missing and strict:
            raise CheckpointError(f"{path} has no {missing[0]!r}, only {sorted(extra)}; pass strict=False")
        for name in rest.keys() & extra.keys():
            given[name] = extra.pop(name)
        return extra


class _Reducing:
    """Gradients are reduced in the last backward of a step only."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return unreduced(module) if enabled else nullcontext()


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
