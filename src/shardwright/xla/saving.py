"""Our checkpoints from and to models of the XLA backend: the same files, so a run can change its backend.

The first process writes, whole tensors; every process reads all and places its own shards. Host memory: the
model and its optimizer's state.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shardwright.checkpoint.folder import step_folder
from shardwright.checkpoint.live import Whole
from shardwright.checkpoint.load import Restored, load
from shardwright.checkpoint.save import save
from shardwright.checkpoint.sources import locate, open_source
from shardwright.checkpoint.url import Location, location_of
from shardwright.checkpoint.writer import Keep
from shardwright.errors import CheckpointError
from shardwright.xla.checkpoint import named_state, optimizer_state, option_groups
from shardwright.xla.processes import is_first_process, together
from shardwright.xla.spmd_model import spmd_model_of
from shardwright.xla.state import full_state_dict, load_full_state_dict, random_state, set_random_state
from shardwright.xla.step import TrainStep


def save_xla(
    path: str | PurePath,
    *,
    model: nn.Module,
    train_step: TrainStep | None = None,
    extra: Mapping[str, Any] | None = None,
    step: int,
    keep: int | Keep | None = None,
) -> Location:
    """Publish an XLA model as ``path/step-000123``. Every process must call it; the first one writes.

    Args:
        path: the folder of checkpoints.
        model: a model of ``xla.fully_shard``.
        train_step: save its optimizer's state too, under the names of ``torch.optim``, so that an eager run
            can go on from it.
        extra: as ``shardwright.checkpoint.save``; its key ``xla`` is taken.
        step: as ``shardwright.checkpoint.save``.
        keep: as ``shardwright.checkpoint.save``.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: raised on every process; the previous checkpoint stays the latest.
        InputError: the model isn't sharded, or the optimizer isn't ``xla.SGD`` or ``xla.AdamW``.
        StageError: the model has no values yet.
        MissingExtra: the package for this kind of URL isn't installed.
    """
    whole = Whole(full_state_dict(model))
    optimizer = None if train_step is None else _torch_optimizer(train_step, whole)
    extra = {**(extra or {}), "xla": {"key": random_state(model)}}

    def write() -> None:
        if is_first_process():
            save(path, model=whole, optimizer=optimizer, extra=extra, step=step, keep=keep)

    together(f"save_xla(step={step})", write)
    return step_folder(location_of(path), step)


def load_xla(path: str | PurePath, *, model: nn.Module, train_step: TrainStep | None = None) -> Restored:
    """Restore an XLA model, on any number of devices, from all that ``load`` reads. Every process must call
    it.

    Every checksum is verified. The random key is restored if an XLA run saved it.

    Args:
        path: as ``shardwright.checkpoint.load``.
        model: a model of ``xla.fully_shard``.
        train_step: restore its optimizer's state, without its hyper-parameters.

    Returns:
        What was restored, with the step and ``extra``.

    Raises:
        CheckpointError: it is damaged, or doesn't fit; what doesn't fit is listed. Every process raises if
            one does, and the model is then as it was.
        InputError: as ``save_xla``.
        MissingExtra: the package for this kind of URL isn't installed.
    """
    spmd = spmd_model_of(model)
    expected = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    made = {id(v): torch.empty(v.shape, dtype=v.dtype) for v in expected.values()}
    whole = Whole({name: made[id(v)] for name, v in expected.items()})

    def read() -> tuple[Optimizer | None, Restored]:
        optimizer = None if train_step is None else _like_saved(path, train_step, whole)
        return optimizer, load(path, model=whole, optimizer=optimizer)

    optimizer, restored = together(f"load_xla({path})", read)
    state = None
    if optimizer is not None and train_step is not None:
        names = {id(tensor): name for name, tensor in reversed(whole.tensors.items())}
        named = {names[id(p)]: value for p, value in optimizer.state.items()}
        state = optimizer_state(train_step, _under_all_names(spmd.names.values(), named), restored.step)
    load_full_state_dict(model, whole.tensors)
    if train_step is not None:
        train_step.state = state
    key = (restored.extra or {}).get("xla", {}).get("key")
    if key is not None:
        set_random_state(model, key)
    return restored


def _under_all_names(groups: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: named[known] for names in groups for known in names if known in named for name in names}


def _torch_optimizer(train_step: TrainStep, whole: Whole) -> Optimizer:
    """A ``torch.optim`` optimizer of whole tensors with the state of the step, in its groups."""
    parameters: dict[str, nn.Parameter] = {}
    groups = []
    for members, options in option_groups(train_step):
        names = [train_step.spmd.names[leaf] for stored in members for leaf in stored.leaves]
        made = [nn.Parameter(whole.tensors[same[0]], requires_grad=False) for same in names]
        for same, parameter in zip(names, made, strict=True):
            parameters |= dict.fromkeys(same, parameter)
        groups.append({"params": made, **options})
    whole.tensors |= parameters
    optimizer = {"SGD": SGD, "AdamW": AdamW}[type(train_step.optimizer).__name__](groups)
    for name, key, value in named_state(train_step):
        optimizer.state[parameters[name]][key] = value
    return optimizer


def _like_saved(path: str | PurePath, train_step: TrainStep, whole: Whole) -> Optimizer:
    """An optimizer without state, with the saved groups of parameters."""
    folder, _ = locate(location_of(path))
    manifest = open_source(folder, set(whole.tensors)).manifest
    saved = manifest.state.get("optimizer")
    kind, (_, options) = type(train_step.optimizer).__name__, option_groups(train_step)[0]
    if saved is None or saved["kind"] != kind:
        found = "no optimizer state" if saved is None else f"state of {saved['kind']}"
        raise CheckpointError(
            f"{folder}: holds {found}, the step uses {kind}; load without train_step to begin its state anew"
        )
    unknown = [name for group in saved["groups"] for name in group["params"] if name not in whole.tensors]
    if unknown:
        raise CheckpointError(f"{folder}: the optimizer has parameters that the model lacks: {unknown[:5]}")
    groups = [{"params": [whole.tensors[name] for name in group["params"]]} for group in saved["groups"]]
    return {"SGD": SGD, "AdamW": AdamW}[kind](groups, **options)
