"""The files of XlaFullyShardedDataParallel (torch_xla 2.9.0): one per rank, ``torch.save`` of

    {"model": state dict, "shard_metadata": {...}, "optimizer": state dict of torch.optim (optional)}

    model            "<unit>._fsdp_shard_FSDP_SHARD_SEPARATOR_<parameter, dots written the same way>": this
                     rank's part, padded; buffers under their own names
    shard_metadata   shard_info   {unit: {shard name: {_orig_size, _orig_name}}}
                     flatten_info {"<unit>..flat_param_0": (names, shapes, numels)}
                     buffer_info  {buffer: {_orig_dtype}}      buffers that were cast when they were wrapped
                     world_size, rank

Names carry the wrappers ``_fsdp_wrapped_module`` and ``_fpw_module``. Parts of all ranks are joined on dim 0
and the padding cut off: by numel where a part is 1-D, by rows else. Only torch is imported here.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwright.errors import CheckpointError
from shardwright.files import opened, reading

__all__ = ["Consolidated", "consolidate", "read"]

SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
SHARD = "_fsdp_shard"
WRAPPED = "_fsdp_wrapped_module"
FLAT = "_fpw_module"
CONSOLIDATED = "_consolidated.pth"
Names = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Consolidated:
    """Whole tensors under the names of the unwrapped model.

    Attributes:
        model: parameters and buffers by name.
        optimizer: by parameter, then by key (as ``exp_avg``); empty if the files have none.
        groups: hyper-parameters of the optimizer, with the names of their parameters.
        paths: the files that were read, one for each rank.
    """

    model: Names
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    paths: tuple[Path, ...] = ()


def consolidate(ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "") -> Path:
    """Join the files of all ranks into one, with whole tensors under the names of the unwrapped model.

    The file has the keys ``model`` and, if the files have it, ``optimizer``: ``{"state": {parameter name:
    {key: tensor}}, "param_groups": [...]}``. One process; host memory: the whole model.

    Args:
        ckpt_prefix: what the paths of the files begin with.
        ckpt_suffix: a pattern for the rest of the paths.
        save_path: where to; empty: ``ckpt_prefix + "_consolidated.pth"``.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: as ``read``, or the file can't be written.
    """
    found = read(ckpt_prefix, ckpt_suffix)
    target = Path(save_path or ckpt_prefix + CONSOLIDATED)
    content: dict[str, Any] = {"model": found.model}
    if found.optimizer:
        content["optimizer"] = {"state": dict(found.optimizer), "param_groups": list(found.groups)}
    torn = target.with_name(f".torn-{target.name}")
    try:
        torn.unlink(missing_ok=True)  # a killed one's; a link there isn't followed
        with open(torn, "xb") as file:
            torch.save(content, file)
        os.replace(torn, target)
    except (OSError, RuntimeError) as error:
        torn.unlink(missing_ok=True)
        raise CheckpointError(f"can't write {target}: {error}") from error
    return target


def read(ckpt_prefix: str, ckpt_suffix: str = "*.pth") -> Consolidated:
    """Whole tensors from the files of all ranks. One process; host memory: the whole model.

    Args:
        ckpt_prefix: what the paths of the files begin with.
        ckpt_suffix: a pattern for the rest of the paths.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: no file matches the pattern, a file isn't such, a rank is missing, there twice or of
            another number of ranks, or tensors don't fit together.
    """
    pattern = ckpt_prefix + ckpt_suffix
    paths = sorted(Path(path) for path in glob(pattern) if not path.endswith(CONSOLIDATED))
    if not paths:
        raise CheckpointError(f"no file matches {pattern} (ckpt_prefix and ckpt_suffix, joined)")
    contents = {path: _load(path) for path in paths}
    with reading(pattern, "the files of all ranks as XlaFullyShardedDataParallel writes them"):
        return _joined([contents[path] for path in in_order(contents, pattern)], tuple(paths))


def _joined(files: Sequence[Mapping[str, Any]], paths: tuple[Path, ...]) -> Consolidated:
    models = [file["model"] for file in files]
    metadata = files[0]["shard_metadata"]
    model: Names = {}
    order: list[list[tuple[str, torch.Size]]] = []
    for key in models[0]:
        joined, pieces = _whole(key, models, metadata)
        model |= joined
        if pieces:
            order.append(pieces)
    optimizers = [file.get("optimizer") for file in files]
    state, groups = _optimizer(optimizers, order, models, metadata) if all(optimizers) else ({}, [])
    return Consolidated(model, state, groups, paths)


def _load(path: Path) -> Mapping[str, Any]:
    with opened(path, "a file that torch.load reads with weights_only=True") as file:
        content = torch.load(file, map_location="cpu", weights_only=True)
    check(path, content)
    return content


def check(path: Path, content: Any) -> None:
    """Raises CheckpointError unless ``content`` is that of a file of one rank."""
    keys = {"model", "shard_metadata"}
    if not isinstance(content, Mapping) or not keys <= content.keys():
        raise CheckpointError(
            f"{path}: not the file of one rank: expected a dict with 'model' and 'shard_metadata' "
            "(model.state_dict() and model.get_shard_metadata())"
        )
    missing = {"shard_info", "flatten_info", "world_size", "rank"} - content["shard_metadata"].keys()
    if missing:
        raise CheckpointError(f"{path}: shard_metadata lacks {', '.join(sorted(missing))}")


def in_order(files: Mapping[Path, Mapping[str, Any]], pattern: str) -> list[Path]:
    """The files by rank. Raises: CheckpointError for files of several runs, ranks missing or there twice."""
    world = {path: file["shard_metadata"]["world_size"] for path, file in files.items()}
    expected = next(iter(world.values()))
    by_rank: dict[int, Path] = {}
    for path, file in files.items():
        rank = file["shard_metadata"]["rank"]
        if world[path] != expected:
            raise CheckpointError(
                f"{path} is of a run of {world[path]} ranks, {next(iter(world))} of one of {expected}; "
                f"{pattern} matches files of several runs"
            )
        if not 0 <= rank < expected:
            raise CheckpointError(f"{path} says it is rank {rank} of {expected}")
        if rank in by_rank:
            raise CheckpointError(
                f"{path} and {by_rank[rank]} are both rank {rank}; {pattern} matches too much"
            )
        by_rank[rank] = path
    missing = sorted(set(range(expected)) - by_rank.keys())
    if missing:
        raise CheckpointError(
            f"{pattern}: the files of ranks {missing} of {expected} are missing (found {sorted(by_rank)})"
        )
    keys = set(files[by_rank[0]]["model"])
    for rank in range(expected):
        other = sorted(keys ^ set(files[by_rank[rank]]["model"]))
        if other:
            raise CheckpointError(f"{by_rank[rank]}: rank {rank} has other tensors than rank 0: {other[:5]}")
    return [by_rank[rank] for rank in range(expected)]


def plain_name(name: str) -> str:
    """A name without the wrappers."""
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, FLAT))


def _split(key: str) -> tuple[str, str] | None:
    """``(unit, shard name)`` of a sharded parameter, None for what isn't one."""
    parts = key.split(".")
    first = next((i for i, part in enumerate(parts) if part.startswith(SHARD)), None)
    return None if first is None else (".".join(parts[:first]), ".".join(parts[first:]))


def _whole(
    key: str, models: Sequence[Names], metadata: Mapping[str, Any]
) -> tuple[Names, list[tuple[str, torch.Size]]]:
    """``(tensors by name, names and shapes of what the parameter holds)``; the latter empty for a buffer."""
    stored = stored_in(key, metadata)
    if stored is None:
        casts = {plain_name(name): info for name, info in metadata.get("buffer_info", {}).items()}
        info = casts.get(plain_name(key))
        buffer = models[0][key]
        return {plain_name(key): buffer.to(info["_orig_dtype"]) if info else buffer}, []
    size, pieces = stored
    joined = join(key, [model[key] for model in models], size)
    flat = joined.reshape(-1).split([prod(shape) for _, shape in pieces])
    return {n: part.reshape(shape).clone() for (n, shape), part in zip(pieces, flat, strict=True)}, pieces


def stored_in(
    key: str, metadata: Mapping[str, Any]
) -> tuple[torch.Size, list[tuple[str, torch.Size]]] | None:
    """Size of the stored parameter ``key``, names and shapes of the parameters in it; None for a buffer.

    Raises: CheckpointError where the metadata doesn't know it.
    """
    where = _split(key)
    if where is None:
        return None
    unit, shard = where
    info = metadata["shard_info"].get(unit, {}).get(shard)
    if info is None:
        raise CheckpointError(f"shard_info says nothing of {key}")
    name, size = ".".join(filter(None, (unit, info["_orig_name"]))), torch.Size(info["_orig_size"])
    return size, _pieces(name, size, metadata)


def _pieces(name: str, size: torch.Size, metadata: Mapping[str, Any]) -> list[tuple[str, torch.Size]]:
    """The parameters in a stored one: itself, or those that were flattened into it."""
    flattened = {plain_name(key): info for key, info in metadata["flatten_info"].items()}
    if not name.rpartition(".")[2].startswith("flat_param_") or plain_name(name) not in flattened:
        return [(plain_name(name), size)]
    names, shapes, numels = flattened[plain_name(name)]
    if sum(numels) != prod(size) or [prod(shape) for shape in shapes] != list(numels):
        raise CheckpointError(f"flatten_info of {name} describes {sum(numels)} numbers, it has {prod(size)}")
    unit = name.rpartition(".")[0]
    return [(plain_name(f"{unit}.{n}"), torch.Size(s)) for n, s in zip(names, shapes, strict=True)]


def stored_in_all(
    files: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, str], dict[str, tuple[list[tuple[str, torch.Size]], list[int]]]]:
    """What the files of all ranks, in order, have in ``model``, by where it lies: ``(buffers, stored)``.

    buffers: key by name. stored: for each key, the names and shapes of the parameters in it, and how many
    elements of each rank's part count. Raises: CheckpointError for parts that don't make up the whole.
    """
    buffers, stored = {}, {}
    for key in files[0]["model"]:
        known = stored_in(key, files[0]["shard_metadata"])
        if known is None:
            buffers[plain_name(key)] = key
            continue
        size, held = known
        parts = [file["model"][key] for file in files]
        check_parts(key, parts, size)
        ends = [min(end, prod(size)) for end in accumulate(part.numel() for part in parts)]
        stored[key] = held, [stop - start for start, stop in pairwise([0, *ends])]
    return buffers, stored


def content_of_rank(
    tensors: Mapping[str, torch.Tensor], rank: int, world: int, buffers: Collection[str]
) -> tuple[Names, dict[str, Any]]:
    """``(model, shard_metadata)`` of a rank's file: one wrapper around the model, nothing flattened.

    ``tensors``: whole ones by name. ``buffers``: names of those that every rank has whole.
    """
    model, info = Names(), {}
    for name, tensor in tensors.items():
        if name in buffers:
            model[f"{WRAPPED}.{name}"] = tensor.clone()
            continue
        original = f"{WRAPPED}.{FLAT}.{name}"
        key = f"{SHARD}.{original}".replace(".", SEPARATOR)
        size = -(-tensor.numel() // world)
        part = tensor.reshape(-1)[rank * size :][:size]
        model[key] = torch.nn.functional.pad(part, (0, size - part.numel())).clone()
        info[key] = {"_orig_size": tensor.shape, "_orig_name": original}
    ranks = {"world_size": world, "rank": rank}
    return model, {"shard_info": {"": info}, "flatten_info": {}, "buffer_info": {}, **ranks}


def join(key: str, parts: Sequence[torch.Tensor], size: torch.Size) -> torch.Tensor:
    """The whole of a tensor of ``size`` from the padded parts of all ranks.

    Raises: CheckpointError for parts of different shapes, or that hold too little.
    """
    check_parts(key, parts, size)
    rows = parts[0].dim() != 1
    joined = torch.cat(list(parts))[: size[0] if rows and size else prod(size)]
    return joined if rows else joined.view(size)


def check_parts(key: str, parts: Sequence[torch.Tensor], size: torch.Size) -> None:
    """Raises CheckpointError unless the padded parts of all ranks make up a tensor of ``size``."""
    shapes = {tuple(part.shape) for part in parts}
    rows = parts[0].dim() != 1
    whole = prod(size) if not rows else (size[0] if size else 0)
    if (
        len(shapes) != 1
        or len(parts) * parts[0].shape[0] < whole
        or (rows and parts[0].shape[1:] != size[1:])
    ):
        raise CheckpointError(
            f"{key}: parts of shape {', '.join(map(str, map(list, sorted(shapes))))} on {len(parts)} ranks "
            f"don't make up a tensor of {list(size)}"
        )


def _optimizer(
    optimizers: Sequence[Any],
    order: Sequence[list[tuple[str, torch.Size]]],
    models: Sequence[Names],
    metadata: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """State by parameter name. torch.optim numbers parameters in the order in which it got them; sharded
    parameters come in the order of the model's state dict."""
    groups = optimizers[0]["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(order):
        raise CheckpointError(
            f"the optimizer has {len(numbers)} parameters, the model {len(order)} sharded ones; they can "
            "only be matched if it was built from model.parameters()"
        )
    keys = [key for key in models[0] if _split(key) is not None]
    found: dict[str, dict[str, Any]] = {}
    for number, key, pieces in zip(sorted(numbers), keys, order, strict=True):
        for name, value in optimizers[0]["state"].get(number, {}).items():
            parts = [{key: optimizer["state"][number][name]} for optimizer in optimizers]
            whole: dict[str, Any] = {piece: value for piece, _ in pieces}
            if isinstance(value, torch.Tensor) and value.shape == models[0][key].shape:
                whole, _ = _whole(key, parts, metadata)
            for piece, each in whole.items():
                found.setdefault(piece, {})[name] = each
    names = dict(zip(sorted(numbers), order, strict=True))
    return found, [
        {**group, "params": [piece for number in group["params"] for piece, _ in names[number]]}
        for group in groups
    ]
