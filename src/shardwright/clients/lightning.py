"""A strategy of Lightning's Trainer, registered as "shardwright" when this file is imported.

    import lightning
    import shardwright.clients.lightning
    trainer = lightning.Trainer(strategy="shardwright", devices=8)   # or TrainerStrategy(groups=...)
    trainer.fit(module)

Lightning's Trainer is published as ``lightning`` and as ``pytorch_lightning``, whose classes don't know each
other: the strategy is registered with those that were imported before this file or, if none was, with the
first that is installed. This and ``fabric.py`` are the only files that import Lightning.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint import load
from shardwright.checkpoint.folder import find, read_manifest
from shardwright.checkpoint.live import Whole
from shardwright.clients.strategies import (
    ShardsModules,
    load_whole,
    on_rank_0,
    pickled_on_rank_0,
    publish,
    published_in,
    read_file,
    strategies_of,
    write_file,
)
from shardwright.engine.unit import units_in
from shardwright.errors import InputError
from shardwright.extras import require
from shardwright.module import FSDPModule, register_fsdp_forward_method
from shardwright.transport.collect import take_values_of_rank_0

__all__ = ["TrainerStrategy"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names that the Trainer is published under."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_FIT = "fit"  # of Lightning's TrainerFn
_REST = "trainer"  # key of the checkpoint, of what Lightning keeps besides weights and optimizer

_IN_USE = [package for package in PACKAGES if package in sys.modules] or PACKAGES
_STRATEGIES = [found for found in map(strategies_of, _IN_USE) if found is not None]
if not _STRATEGIES:
    require("lightning", "lightning")
if _IN_USE is PACKAGES:
    del _STRATEGIES[1:]
_DDP: Any = _STRATEGIES[0].DDPStrategy


class _Sharding(ShardsModules):
    """The strategy, of a Trainer of either name: before its ``DDPStrategy`` among the bases."""

    accelerator: Any
    cluster_environment: Any
    lightning_module: Any
    model: Any
    optimizers: Any
    precision_plugin: Any
    root_device: Any

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: ``load_checkpoint`` has restored it."""
        return False

    def setup(self, trainer: Any) -> None:
        """Shard the module, unless that is done, and build its optimizer. The Trainer calls it on every rank.

        Args:
            trainer: the one that this is the strategy of.

        Raises:
            InputError: as ``fully_shard``; or the module has several optimizers.
        """
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == _FIT
        layer_sync = getattr(self, "_layer_sync", None)  # Trainer(sync_batchnorm=True)
        if fits and layer_sync is not None:
            self.model = layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self._shard_module(self.model)
        _rest(self.model)  # after a validation the root's parameters are unsharded, and no optimizer's
        self._reset_optimizers_and_schedulers()  # type: ignore[attr-defined]
        if fits:
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
            if len(self.optimizers) > 1:
                raise InputError(
                    f"{type(self.lightning_module).__name__} has {len(self.optimizers)} optimizers, and a "
                    "checkpoint has one: give one optimizer groups of parameters"
                )
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _shard_module(self, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            return  # of a fit before
        if any(True for _ in _plain(module)):
            take_values_of_rank_0([*_plain(module), *module.buffers()], self.root_device)
            self._shard_whole(module)
        for metric in module.modules():
            if isinstance(metric, _Metric):
                metric.to(self.root_device)
        for name in STEPS:  # which the Trainer calls in place of the forward
            register_fsdp_forward_method(module, name)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context in which gradients are kept on their rank: of microbatches before the last. The Trainer
        enters it on every rank."""
        with ExitStack() as stack:
            for root in _roots(self.lightning_module):
                stack.enter_context(root.no_sync())
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's entries, its parameters themselves; no communication.

        Returns:
            Name -> shard, plain tensor, or other state.
        """
        return self.lightning_module.state_dict(keep_vars=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save at ``filepath``; what was saved there before is removed when this is complete. Every rank
        calls it.

        Each rank writes its own shards, to a folder; or rank 0 whole tensors, to a file. Rank 0's values of
        what Lightning keeps besides (loops, callbacks, schedulers, hyper-parameters) are pickled into it.

        Args:
            checkpoint: as the Trainer makes it.
            filepath: the folder, or the file with ``state_dict_type="full"``.
            storage_options: refused.

        Raises:
            InputError: storage options were given.
            CheckpointError: as ``shardwright.checkpoint.save``; or a file is at the folder's place, a folder
                at the file's, or several checkpoints that something else has saved.
            MissingExtra: the package for this kind of URL isn't installed.
        """
        if storage_options is not None:
            raise InputError("storage_options aren't taken: a checkpoint is in a file system")
        path, step = Path(on_rank_0("save", lambda: os.fspath(filepath))), int(checkpoint["global_step"])
        if self._is_full:
            write_file(path, checkpoint)
            return
        rest = {key: checkpoint[key] for key in checkpoint.keys() - {"state_dict", "optimizer_states"}}
        pickled = pickled_on_rank_0(f"saving {path}", rest, self.root_device)
        has_optimizer = "optimizer_states" in checkpoint and len(self.optimizers) > 0
        publish(
            path,
            step,
            model=Whole(checkpoint["state_dict"]),
            optimizer=_bare(self.optimizers[0]) if has_optimizer else None,
            extra={_REST: pickled},
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the module and, in a fit, its optimizer in place. The Trainer calls it on every rank, after
        ``setup``; any number of ranks.

        Args:
            checkpoint_path: what ``save_checkpoint`` wrote, or a file of another strategy.
            weights_only: of ``torch.load``, for what Lightning keeps besides; None: as torch has it.

        Returns:
            What Lightning keeps besides.

        Raises:
            CheckpointError: as ``shardwright.checkpoint.load``. Where tensors don't fit, nothing is changed.
            DamagedError: as ``shardwright.checkpoint.load``.
            InputError: as ``shardwright.checkpoint.load``.
            MissingExtra: the package for this kind of URL isn't installed.
        """
        path = Path(on_rank_0("load", lambda: os.fspath(checkpoint_path)))
        if path.is_file():
            found = read_file(path, weights_only)
            self.lightning_module.load_state_dict(
                found["state_dict"], strict=self.lightning_module.strict_loading
            )
            for optimizer, state in zip(
                self.optimizers or (), found.get("optimizer_states", ()), strict=False
            ):
                load_whole(_bare(optimizer), state, self.lightning_module)
            return found
        path = on_rank_0(f"loading {path}", lambda: published_in(path))
        live = self.lightning_module_state_dict()
        if not self.lightning_module.strict_loading:
            saved = read_manifest(find(path)[0]).keys_of("model/")
            live = {name: value for name, value in live.items() if f"model/{name}" in saved}
        optimizer = _bare(self.optimizers[0]) if self.optimizers else None
        restored = load(path, model=Whole(live), optimizer=optimizer)
        pickled = io.BytesIO(restored.extra[_REST].numpy().tobytes())
        return torch.load(pickled, map_location="cpu", weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Do nothing: ``load_checkpoint`` has. Local.

        Args:
            checkpoint: without effect.
            strict: without effect.
        """

    def teardown(self) -> None:
        """End the fit: parameters are shards again, and stay on their device. The Trainer calls it on every
        rank."""
        _rest(self.lightning_module)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


class TrainerStrategy(_Sharding, _DDP):
    """Shards the ``LightningModule`` that a Trainer is given; one process for each device.

    What is sharded already (``fully_shard`` or ``hf.load`` in ``configure_model``) stays as it is, and the
    rest of the module is one group. Parameters and buffers are those of rank 0. ``configure_optimizers`` gets
    shards. Accumulation, both kinds of clipping, ``precision``, validation, checkpoints and
    ``fit(ckpt_path=...)``, at another number of ranks too, work as in one process. A checkpoint is a folder,
    or one file.

    Args:
        groups: as for ``fully_shard``. With "auto", where nothing in the module says how to group it, it is
            one group, with a warning. None: the module is one group.
        shard: in place of ``groups``, a function that shards the module in place.
        mp_policy: as for ``fully_shard``; with the Trainer's ``precision`` at "32-true".
        state_dict_type: what a checkpoint is: a folder to which each rank writes its shards ("sharded"), or
            one file with whole tensors, which rank 0 holds on its host meanwhile ("full").
        **options: of ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        InputError: ``state_dict_type`` is neither.
    """


def _rest(module: nn.Module) -> None:
    for unit in units_in(module):
        unit.runtime.rest()


def _plain(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that aren't sharded."""
    return (param for param in module.parameters() if not isinstance(param, DTensor))


def _roots(module: nn.Module) -> Iterator[FSDPModule]:
    """The outermost sharded modules."""
    if isinstance(module, FSDPModule):
        yield module
    else:
        for child in module.children():
            yield from _roots(child)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


_Metric: Any = import_module("torchmetrics").Metric
for _strategies in _STRATEGIES:
    _cls: Any = TrainerStrategy
    if _strategies.DDPStrategy is not _DDP:
        _cls = type("TrainerStrategy", (_Sharding, _strategies.DDPStrategy), {"__module__": __name__})
    if "shardwright" not in _strategies.StrategyRegistry:
        _strategies.StrategyRegistry.register("shardwright", _cls, "fully sharded by Shardwright")
