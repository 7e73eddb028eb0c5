"""Sharded models and their optimizer's state from and to the files of XlaFullyShardedDataParallel."""
# pyright: reportMissingImports=false

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from torch import nn

from shardwright.errors import CheckpointError, InputError
from shardwright.xla.files import FLAT, SEPARATOR, SHARD, WRAPPED, read
from shardwright.xla.optim import Optimizer
from shardwright.xla.processes import together
from shardwright.xla.spmd_model import SpmdModel, spmd_model_of
from shardwright.xla.state import buffers_by_name, load_full_state_dict
from shardwright.xla.step import TrainStep
from shardwright.xla.torch_bridge import from_numpy
from shardwright.xla.unit import Leaf, Stored, XlaUnit

__all__ = ["load_rank_files", "save_rank_files"]


def save_rank_files(ckpt_prefix: str, model: nn.Module, step: TrainStep | None = None) -> list[Path]:
    """Write a file for each sharding device, as a model wrapped in XlaFullyShardedDataParallel would be
    saved.

    Every process must call it; each writes ``<ckpt_prefix>_rank-00000000-of-00000004.pth`` and so on for its
    own devices.

    Args:
        ckpt_prefix: what the paths of the files begin with.
        model: the outermost module given to ``fully_shard``.
        step: saves its optimizer's state too, as ``torch.optim``'s.

    Returns:
        The files that this process wrote.

    Raises:
        InputError: the model isn't sharded, or the optimizer isn't ``xla.SGD`` or ``xla.AdamW``.
        StageError: the model has no values yet.
        CheckpointError: a file can't be written; raised on every process.
    """
    spmd = spmd_model_of(model)
    spmd.require_values()
    spmd.store_buffers()
    return together(f"save_rank_files({ckpt_prefix})", lambda: _write(ckpt_prefix, spmd, step))


def _write(ckpt_prefix: str, spmd: SpmdModel, step: TrainStep | None) -> list[Path]:
    """Write the files of this process's devices, among the sharding devices of the first copy."""
    world, paths = spmd.axes.world, []
    row = enumerate(spmd.axes.mesh.devices.reshape(-1, world)[0])
    for rank, device in [(i, each) for i, each in row if each.process_index == jax.process_index()]:
        path = Path(f"{ckpt_prefix}_rank-{rank:08d}-of-{world:08d}.pth")
        content: dict[str, Any] = {"model": {}, "shard_metadata": _metadata(spmd, rank)}
        for unit in spmd.units:
            for stored, key in zip(unit.stored, _keys(spmd, unit), strict=True):
                content["model"][key] = _shard(stored.array, device)
        content["model"] |= _buffers(spmd)
        if step is not None:
            content["optimizer"] = _optimizer_of_rank(step, device)
        try:
            torch.save(content, path)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"can't write {path}: {error}") from error
        paths.append(path)
    return paths


def load_rank_files(
    ckpt_prefix: str, model: nn.Module, step: TrainStep | None = None, *, ckpt_suffix: str = "*.pth"
) -> None:
    """Load what XlaFullyShardedDataParallel or ``save_rank_files`` saved, from any number of ranks.

    Every process must call it and reads all files; host memory: the whole model.

    Args:
        ckpt_prefix: what the paths of the files begin with.
        model: the outermost module given to ``fully_shard``.
        step: restores its optimizer's state, too.
        ckpt_suffix: a pattern for the rest of the paths.

    Raises:
        CheckpointError: as ``files.read``, or there is no such optimizer state; raised on every process. The
            model is then as it was.
        InputError: the model isn't sharded, or names or shapes differ. The model is then as it was.
    """
    found = together(f"load_rank_files({ckpt_prefix})", lambda: read(ckpt_prefix, ckpt_suffix))
    state = optimizer_state(step, found.optimizer) if step is not None else None
    load_full_state_dict(model, with_shared_names(model, found.model))
    if step is not None:
        step.state = state


def with_shared_names(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state`` with every name of a shared parameter, where it has one of them."""
    full = dict(state)
    for names in spmd_model_of(model).names.values():
        known = next((name for name in names if name in state), None)
        if known is not None:
            full |= dict.fromkeys(names, state[known])
    return full


def named_state(step: TrainStep) -> Iterator[tuple[str, str, torch.Tensor]]:
    """``(parameter, key, value)`` of the optimizer's state, whole and on the host, keys as in torch.
    Every process must consume it.

    Raises: InputError for an optimizer that isn't ``xla.SGD`` or ``xla.AdamW``.
    """
    for stored, tree in zip(step.spmd.trained, step.state or step.initial_state(), strict=True):
        for key, array in _torch_state(step, tree).items():
            values = [np.asarray(array)] * len(stored.leaves) if array.ndim == 0 else stored.values(array)
            for leaf, value in zip(stored.leaves, values, strict=True):
                tensor = from_numpy(value)
                yield step.spmd.names[leaf][0], key, tensor.float() if key == "step" else tensor


def option_groups(step: TrainStep) -> list[tuple[list[Stored], dict[str, Any]]]:
    """The parameter groups of the ``torch.optim`` optimizer that equals the step's: arrays, frozen ones too,
    and their options; of a schedule, its value now.

    Raises: InputError for an optimizer that isn't ``xla.SGD`` or ``xla.AdamW``.
    """
    if not isinstance(step.optimizer, Optimizer):
        raise InputError("only the state of xla.SGD and xla.AdamW can be saved by torch's names")
    options: dict[str, Any] = dict(vars(step.optimizer))
    del options["decayed"]
    if callable(options["lr"]):
        options["lr"] = float(options["lr"](step.count()))  # type: ignore[arg-type]
    groups: dict[bool, list[Stored]] = {}
    for stored in step.spmd.stored:
        groups.setdefault(step.is_decayed(stored), []).append(stored)
    return [
        (members, options if decayed else {**options, "weight_decay": 0.0})
        for decayed, members in groups.items()
    ]


def optimizer_state(
    step: TrainStep, state: Mapping[str, Mapping[str, Any]], num_steps: int | None = None
) -> list[Any]:
    """The optimizer's state of ``step`` from whole tensors by parameter and key: ``named_state`` backwards.

    num_steps: optimizer steps done, from which a schedule of the learning rate goes on where the state itself
        doesn't count them (SGD's).
    Raises: CheckpointError naming parameters without their state.
    """
    spmd, made = step.spmd, []
    for stored, tree in zip(spmd.trained, step.initial_state(), strict=True):
        arrays = {}
        for key, array in _torch_state(step, tree).items():
            found = [_value(spmd, leaf, key, state) for leaf in stored.leaves]
            if array.ndim == 0:
                arrays[key] = spmd.place(np.asarray(float(found[0]), array.dtype))
            else:
                arrays[key] = stored.place([value.to(stored.dtype) for value in found])
        count = int(arrays["step"]) if "step" in arrays else num_steps
        made.append(_with_torch_state(step, tree, arrays, count))
    return made


def _value(spmd: SpmdModel, leaf: Leaf, key: str, state: Mapping[str, Mapping[str, Any]]) -> Any:
    for name in spmd.names[leaf]:
        value = state.get(name, {}).get(key)
        if value is not None:
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != leaf.shape:
                raise CheckpointError(
                    f"{name}: {key} has shape {list(value.shape)}, expected {list(leaf.shape)}"
                )
            return value
    raise CheckpointError(
        f"the checkpoint has no {key} of {spmd.names[leaf][0]}; load without the step to begin its state anew"
    )


def _part(tree: Any) -> Any:
    """The part of an optax state that keeps what torch keeps; None if nothing is kept."""
    kinds = (optax.TraceState, optax.ScaleByAdamState)
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return next((leaf for leaf in leaves if isinstance(leaf, kinds)), None)


def _torch_state(step: TrainStep, tree: Any) -> dict[str, Any]:
    option_groups(step)  # refuses an optimizer that isn't ours
    part = _part(tree)
    if part is None:
        return {}
    return {key: getattr(part, name) for key, name in step.optimizer.state_names.items()}


def _with_torch_state(step: TrainStep, tree: Any, arrays: Mapping[str, Any], count: int | None) -> Any:
    part = _part(tree)

    def swapped(node: Any) -> Any:
        if node is part:
            return node._replace(**{step.optimizer.state_names[key]: array for key, array in arrays.items()})
        if isinstance(node, optax.ScaleByScheduleState) and count is not None:
            return node._replace(count=step.spmd.place(np.asarray(count, np.int32)))
        return node

    return jax.tree.map(swapped, tree, is_leaf=lambda node: hasattr(node, "_replace"))


# ---- what XlaFullyShardedDataParallel calls things


def _path(spmd: SpmdModel, unit: XlaUnit) -> str:
    """Name of the unit's wrapper in the model as it would be wrapped, without the flattening wrappers."""
    if unit is spmd.root:
        return ""
    wrapped = {id(u.module) for u in spmd.units}
    parts, module = [WRAPPED], spmd.root.module
    name = next(n for n, m in module.named_modules() if m is unit.module)
    for part in name.split("."):
        module = module.get_submodule(part)
        parts.append(part)
        if id(module) in wrapped and module is not unit.module:
            parts.append(WRAPPED)
    return ".".join(parts)


def _inside(spmd: SpmdModel, unit: XlaUnit, leaf: Leaf) -> str:
    """Name of a parameter inside of its unit."""
    path = next(n for n, m in spmd.root.module.named_modules() if m is unit.module)
    names = spmd.names[leaf]
    return next(n for n in names if n.startswith(path)).removeprefix(path).lstrip(".")


def _original_names(spmd: SpmdModel, unit: XlaUnit) -> list[str]:
    """``_orig_name`` of each stored array."""
    if unit.options.flatten_parameters:
        return [f"{WRAPPED}.flat_param_{i}" for i in range(len(unit.stored))]
    return [f"{WRAPPED}.{FLAT}.{_inside(spmd, unit, stored.leaves[0])}" for stored in unit.stored]


def _shard_name(original: str) -> str:
    return f"{SHARD}.{original}".replace(".", SEPARATOR)


def _keys(spmd: SpmdModel, unit: XlaUnit) -> list[str]:
    path = _path(spmd, unit)
    return [".".join(filter(None, (path, _shard_name(name)))) for name in _original_names(spmd, unit)]


def _metadata(spmd: SpmdModel, rank: int) -> dict[str, Any]:
    shard_info: dict[str, Any] = {}
    flatten_info: dict[str, Any] = {}
    for unit in spmd.units:
        path = _path(spmd, unit)
        info = shard_info.setdefault(path, {})
        for stored, name in zip(unit.stored, _original_names(spmd, unit), strict=True):
            size = (stored.numel,) if unit.options.flatten_parameters else stored.leaves[0].shape
            info[_shard_name(name)] = {"_orig_size": torch.Size(size), "_orig_name": name}
            if unit.options.flatten_parameters:
                flatten_info[".".join(filter(None, (path, name)))] = (
                    [f"{FLAT}.{_inside(spmd, unit, leaf)}" for leaf in stored.leaves],
                    [torch.Size(leaf.shape) for leaf in stored.leaves],
                    [leaf.numel for leaf in stored.leaves],
                )
    return {
        "shard_info": shard_info,
        "flatten_info": flatten_info,
        "buffer_info": {},  # buffers are saved in their own dtype
        "world_size": spmd.axes.world,
        "rank": rank,
    }


def _buffers(spmd: SpmdModel) -> dict[str, torch.Tensor]:
    model = spmd.root.module
    owners = {id(unit.module) for unit in spmd.units}
    found = {}
    for name, value in buffers_by_name(model).items():
        parts, module = [WRAPPED], model
        for part in name.split(".")[:-1]:
            module = module.get_submodule(part)
            parts += [part, WRAPPED] if id(module) in owners else [part]
        found[".".join([*parts, name.rpartition(".")[2]])] = value
    return found


def _shard(array: Any, device: Any) -> torch.Tensor:
    return from_numpy(np.asarray(next(s.data for s in array.addressable_shards if s.device == device)))


def _optimizer_of_rank(step: TrainStep, device: Any) -> dict[str, Any]:
    states = dict(zip(step.spmd.trained, step.state or step.initial_state(), strict=True))
    found = {}
    numbered = [stored for unit in step.spmd.units for stored in unit.stored]
    for number, stored in enumerate(numbered):
        if stored in states:
            arrays = _torch_state(step, states[stored])
            found[number] = {
                key: from_numpy(np.asarray(a)).float() if a.ndim == 0 else _shard(a, device)
                for key, a in arrays.items()
            }
    number = {id(stored): i for i, stored in enumerate(numbered)}
    groups = [
        {**options, "params": sorted(number[id(stored)] for stored in members)}
        for members, options in option_groups(step)
    ]
    return {"state": found, "param_groups": groups}
