"""A strategy of Lightning Fabric, registered as "shardwright" when this file is imported.

    import shardwright.clients.fabric
    fabric = Fabric(strategy="shardwright", devices=2)          # or ShardwrightStrategy(groups="auto")
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

This and ``lightning.py``, for Lightning's Trainer, are the only files that import Lightning.
"""

import io
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint import load
from shardwright.checkpoint.live import Stateful
from shardwright.checkpoint.shardfile import Reader
from shardwright.checkpoint.tools import open_checkpoint, read_tensor
from shardwright.checkpoint.tree import decode, encode
from shardwright.checkpoint.url import Location, local_only, location_of
from shardwright.clients.strategies import (
    ShardsModules,
    StateDictType,
    load_whole,
    on_rank_0,
    pickled_on_rank_0,
    publish,
    published_in,
    read_file,
    strategies_of,
    write_file,
)
from shardwright.errors import CheckpointError, InputError
from shardwright.extras import require
from shardwright.module import FSDPModule
from shardwright.ops.clip import clip_grad_norm_
from shardwright.policy import DEFAULT_PRECISION, MixedPrecisionPolicy

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
    optimizer, and other values), or one file as ``DDPStrategy`` writes it, and ``Fabric.load`` restores both
    on any number of ranks. Fabric's ``precision`` is left at "32-true".

    Args:
        groups: as for ``fully_shard``. With "auto", where nothing in the model says how to group it, it is
            one group, with a warning. None: the model is one group.
        shard: in place of ``groups``, a function that shards the model in place.
        mp_policy: as for ``fully_shard``.
        state_dict_type: what ``Fabric.save`` writes: a folder to which each rank writes its shards
            ("sharded"), or one file with whole tensors, which rank 0 holds on its host meanwhile ("full").
        **options: of ``DDPStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        InputError: ``state_dict_type`` is neither.
    """

    def __init__(
        self,
        groups: Any = "auto",
        shard: Callable[[nn.Module], object] | None = None,
        mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
        state_dict_type: StateDictType = "sharded",
        **options: Any,
    ) -> None:
        super().__init__(groups, shard, mp_policy, state_dict_type, **options)
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
        """Save at ``path``; what was saved there before is removed when this is complete. Every rank calls
        it.

        Values other than model and optimizer are those of rank 0. One that is neither JSON, a tensor, nor an
        object with ``state_dict`` (a ``DataLoader``) is pickled, as ``DDPStrategy`` does.

        Args:
            path: the folder, or the file with ``state_dict_type="full"``; rank 0's counts.
            state: one model, at most one optimizer, and other values, by name. A file takes any number.
            storage_options: refused.
            filter: as ``Fabric.save`` has it, for a file; refused for a folder.

        Raises:
            InputError: the state hasn't one model, or a filter or storage options were given.
            CheckpointError: as ``shardwright.checkpoint.save``; or a file is at the folder's place, a folder
                at the file's, or several checkpoints that something else has saved.
            MissingExtra: the package for this kind of URL isn't installed.
        """
        if storage_options is not None or (filter and not self._is_full):
            raise InputError(
                "save: storage_options isn't supported, nor filter for a folder (state_dict_type='sharded'); "
                "leave out what isn't to be saved"
            )
        path = location_of(on_rank_0("save", lambda: path))
        if self._is_full:
            whole = self._convert_stateful_objects_in_state(state, filter=filter or {})
            write_file(local_only(path, "state_dict_type='full' saves to"), whole)
            return
        model, optimizer, rest = _sorted(state)
        step = rest.get("step", 0)
        extra = _extra_of(path, rest, self.root_device)
        publish(path, step if isinstance(step, int) else 0, model=model, optimizer=optimizer, extra=extra)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's entries, its parameters themselves; no communication.

        Args:
            module: sharded, or not.

        Returns:
            Name -> shard, plain tensor, or other state.
        """
        return module.state_dict(keep_vars=True)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill model, optimizer and other objects with ``load_state_dict`` in place, and set the other values
        of a state. Every rank calls it.

        Args:
            path: what ``save_checkpoint`` has written, a checkpoint of ``shardwright.checkpoint.save``, or a
                file of another strategy; rank 0's counts.
            state: a model, or one model, at most one optimizer, and other values, by name.
            strict: whether each of the other values must be in the checkpoint.
            weights_only: of ``torch.load``, for a file and for pickled values; None: as torch has it.

        Returns:
            What the checkpoint has besides.

        Raises:
            InputError: the state hasn't one model.
            CheckpointError: tensors don't fit or, if ``strict``, a value isn't there. With a folder nothing
                is changed then.
            DamagedError: as ``shardwright.checkpoint.load``.
            MissingExtra: the package for this kind of URL isn't installed.
        """
        given = {"model": state} if isinstance(state, nn.Module) else state or {}
        model, optimizer, rest = _sorted(given)
        found: Any = location_of(on_rank_0("load", lambda: path))
        if isinstance(found, Path) and found.is_file() and not isinstance(state, nn.Module):
            return _load_file(found, given, model, strict, weights_only)
        found = on_rank_0(f"loading {found}", lambda: published_in(found))
        source = open_checkpoint(found)
        saved, pickled = dict(source.manifest.state.get("extra") or {}), {}
        if saved.pop(_PICKLED, None) is not None:
            key = f"extra/{_PICKLED}"
            with Reader(source.folder) as reader:
                read = read_tensor(reader, key, source.manifest.tensors[key])
            pickled = torch.load(io.BytesIO(read.numpy().tobytes()), "cpu", weights_only=weights_only)
        _check_names(found, rest, saved.keys() | pickled.keys(), strict)
        live = {name: v for name, v in rest.items() if isinstance(v, Stateful) and name in saved}
        restored = load(found, model=model, optimizer=optimizer, extra=live)
        extra = {name: value for name, value in (restored.extra or {}).items() if name != _PICKLED}
        return _taken(given, rest.keys() - live.keys(), {**extra, **pickled})


class _Reducing:
    """Gradients are reduced in the last backward of a step only."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()


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


_PICKLED = "pickled objects"  # key of the checkpoint, of what it can't hold otherwise


def _extra_of(path: Location, rest: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What a checkpoint has of the values besides model and optimizer: rank 0's, as under DDP; of tensors
    this rank's part."""
    tensors: Any = {}
    trees, others = dict[str, Any](), dict[str, Any]()
    for name, value in rest.items():
        value = value.state_dict() if isinstance(value, Stateful) else value
        try:
            trees[name] = encode(value, name, tensors)
        except CheckpointError:
            others[name] = value

    trees, pickles = on_rank_0(f"saving {path}", lambda: (trees, bool(others)))
    extra = {name: decode(tree, lambda key: tensors.get(key, torch.empty(0))) for name, tree in trees.items()}
    return {**extra, _PICKLED: pickled_on_rank_0(f"saving {path}", others, device)} if pickles else extra


def _load_file(
    path: Path, given: Any, model: nn.Module, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    checkpoint = dict(read_file(path, weights_only))
    _check_names(path, given, checkpoint.keys(), strict)
    for name in [name for name in given if name in checkpoint]:
        value = given[name]
        if isinstance(value, nn.Module):
            value.load_state_dict(checkpoint.pop(name), strict)
        elif isinstance(value, Optimizer):
            load_whole(value, checkpoint.pop(name), model)
    rest = {name for name, value in given.items() if not isinstance(value, (nn.Module, Optimizer))}
    return _taken(given, rest, checkpoint)


def _check_names(path: Location, wanted: Collection[str], saved: Collection[str], strict: bool) -> None:
    missing = sorted(set(wanted) - set(saved))
    if missing and strict:
        raise CheckpointError(f"{path} has no {missing[0]!r}, only {sorted(saved)}; pass strict=False")


def _taken(given: Any, names: Collection[str], saved: dict[str, Any]) -> dict[str, Any]:
    """Give the values of a state what is saved of them; returns what is left."""
    for name in names & saved.keys():
        value = saved.pop(name)
        if isinstance(given[name], Stateful):
            given[name].load_state_dict(value)
        else:
            given[name] = value
    return saved


for _strategies in _STRATEGIES:
    if "shardwright" not in _strategies.STRATEGY_REGISTRY:
        _strategies.STRATEGY_REGISTRY.register(
            "shardwright", ShardwrightStrategy, "fully sharded by Shardwright"
        )
