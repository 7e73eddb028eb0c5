"""Per-rank files of other sharded runtimes, joined by their metadata: each a ``torch.save`` of

    {"model": {key: this rank's part, 1-D or rows}, "shard_metadata": {...}}

    fairscale   ``local_state_dict()`` and ``local_metadata_dict()``: per wrapper, which tensors lie in each
                parameter, and how much padding its part ends with. No word says which rank: file names do.
    XLA         ``state_dict()`` and ``get_shard_metadata()`` of XlaFullyShardedDataParallel (xla/files.py)

A part is a range of a row-major tensor, or of several, one after another: boxes of tensors, read like any
other pieces. ``write_rank_files`` makes such files, of one wrapper that flattens nothing.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.flat import boxes_of_range
from shardwright.checkpoint.format import Piece, TensorEntry
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.checkpoint.torchfile import entry_of, piece_of, structure_of
from shardwright.errors import CheckpointError
from shardwright.files import reading
from shardwright.schedule.layout import FlatLayout
from shardwright.xla import files as xla

Content = Mapping[str, Any]


def rank_files(path: Path) -> list[Path]:
    """The per-rank files that a folder, or a pattern such as ``folder/model-rank*.pt``, means, by rank; none
    if there are no such files."""
    if "*" in path.name:
        found = [file for file in path.parent.glob(path.name) if file.is_file()]
    else:
        found = [file for pattern in ("*.pt", "*.pth") for file in path.glob(pattern)]
    found = [file for file in found if not file.name.endswith(xla.CONSOLIDATED)]
    ordered = sorted(found, key=_by_numbers)
    return ordered if ordered and "shard_metadata" in _content(ordered[0]) else []


def _by_numbers(file: Path) -> list[tuple[int, str]]:
    """``rank-2`` before ``rank-10``."""
    return [(int(number or -1), text) for number, text in re.findall(r"(\d*)(\D*)", file.name)]


def _content(file: Path) -> Content:
    loaded = structure_of(file)
    return loaded if isinstance(loaded, Mapping) else {}


@dataclass(frozen=True)
class _Joined:
    """A stored parameter: its ``key``, the tensors in it, and how many elements of each rank's part count."""

    key: str
    layout: FlatLayout
    numels: Sequence[int]


def rank_entries(paths: Sequence[Path], where: str) -> dict[str, TensorEntry]:
    """Whole tensors under the names of the unwrapped model, as pieces in the files of all ranks.

    Raises:
        CheckpointError: a file of another kind, of a rank that is missing, there twice, or of another run.
    """
    contents = {path: _content(path) for path in paths}
    for path, content in contents.items():
        if not {"model", "shard_metadata"} <= content.keys():
            raise CheckpointError(
                f"{path}: not the file of one rank: expected a dict with 'model' and 'shard_metadata'"
            )
    with reading(where, "the files of all ranks as fairscale or XlaFullyShardedDataParallel writes them"):
        if "param_metadata" in contents[paths[0]]["shard_metadata"]:
            found, joined, aliases = _fairscale(contents, where)
        else:
            for path, content in contents.items():
                xla.check(path, content)
            contents = {path: contents[path] for path in xla.in_order(contents, where)}
            found, joined, aliases = _xla(contents)
        for parameter in joined:
            found |= _pieces(parameter, contents)
        return {name: replace(entry, aliases=aliases.get(name, ())) for name, entry in found.items()}


def _pieces(parameter: _Joined, contents: Mapping[Path, Content]) -> dict[str, TensorEntry]:
    pieces: dict[str, list[Piece]] = {entry.name: [] for entry in parameter.layout.entries}
    begins, dtype = [0, *accumulate(parameter.numels)], ""
    for begin, end, (path, content) in zip(begins, begins[1:], contents.items(), strict=False):
        tensor = content["model"][parameter.key]
        stored = piece_of(path, parameter.key, tensor, 0, (0,))
        dtype, item = DTYPE_NAME[tensor.dtype], tensor.element_size()
        for entry in parameter.layout.entries:
            first, stop = entry.held(begin, end)
            at = stored.start + (entry.start + first - begin) * item
            for box in boxes_of_range(entry.shape, first, stop):
                piece = Piece(path.name, at, box.numel * item, None, box.offset, box.shape)
                pieces[entry.name].append(piece)
                at += piece.nbytes
    return {e.name: TensorEntry(e.shape, dtype, tuple(pieces[e.name])) for e in parameter.layout.entries}


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_Found = tuple[dict[str, TensorEntry], list[_Joined], dict[str, tuple[str, ...]]]


def _fairscale(contents: Mapping[Path, Content], where: str) -> _Found:
    first, ranks = next(iter(contents)), list(contents.values())
    described = ranks[0]["shard_metadata"]
    joined, aliases = [], dict[str, tuple[str, ...]]()
    for number, unit in enumerate(described["param_metadata"]):
        path = unit["fsdp_path"]
        for backing, info in unit["params"].items():
            key = _under(path, backing)
            if unit["no_broadcast_optim_state"]:
                raise CheckpointError(
                    f"{where}: {key} is another parameter on each rank (no_broadcast_optim_state), so "
                    "there is no one tensor to load; save such parameters under names of their own"
                )
            try:
                own = [rank["shard_metadata"]["param_metadata"][number]["params"][backing] for rank in ranks]
                numels = [r["model"][key].numel() - o["padding"] for r, o in zip(ranks, own, strict=True)]
            except (KeyError, IndexError) as error:
                raise CheckpointError(
                    f"{where}: {key} is not in the files of all ranks; are they files of one run?"
                ) from error
            named = zip(info["names"], info["shapes"], strict=True)
            layout = FlatLayout.of([(_under(path, name), shape) for name, shape in named])
            if sum(numels) != layout.numel:
                raise CheckpointError(
                    f"{where}: the parts of {key} in {len(ranks)} files have {sum(numels)} elements, "
                    f"expected {layout.numel}: are the files of all ranks there, and no others?"
                )
            joined.append(_Joined(key, layout, numels))
        for source, name in unit["shared_param_info"]:
            source = _under(path, source)
            aliases[source] = (*aliases.get(source, ()), _under(path, name))
    model = ranks[0]["model"]
    names = [name for name in described["buffer_names"] if name in model]
    buffers = {name: entry_of(first, name, model[name], 0) for name in names}
    return buffers, joined, aliases


def _xla(contents: Mapping[Path, Content]) -> _Found:
    (first, content), *_ = contents.items()
    buffers, stored = xla.stored_in_all(list(contents.values()))
    found = {name: entry_of(first, key, content["model"][key], 0) for name, key in buffers.items()}
    return found, [_Joined(key, FlatLayout.of(held), numels) for key, (held, numels) in stored.items()], {}


# ---- writing


def write_rank_files(
    folder: Path, tensors: Mapping[str, torch.Tensor], to: str, world: int, buffers: Collection[str]
) -> None:
    """Write ``model-rank-00000-of-00002.pt`` and so on: one wrapper around the model, nothing flattened.

    ``tensors``: whole ones by name, tied ones as the same object. ``to``: ``fairscale`` or ``xla``.
    ``buffers``: names of those that every rank has whole. Host memory: one rank's parts.
    """
    for rank in range(world):
        content = _as_fairscale if to == "fairscale" else xla.content_of_rank
        model, metadata = content(tensors, rank, world, buffers)
        path = folder / f"model-rank-{rank:05d}-of-{world:05d}.pt"
        with open(path, "xb") as file:
            torch.save({"model": model, "shard_metadata": metadata}, file)
            os.fsync(file.fileno())


def _part(tensor: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, int]:
    """A rank's part of a flattened tensor, all of one size, and the zeros at its end."""
    size = -(-tensor.numel() // world)
    part = tensor.reshape(-1)[rank * size :][:size]
    return nn.functional.pad(part, (0, size - part.numel())).clone(), size - part.numel()


def _as_fairscale(
    tensors: Mapping[str, torch.Tensor], rank: int, world: int, buffers: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model, params, first, tied = dict[str, torch.Tensor](), {}, dict[int, str](), []
    for name, tensor in tensors.items():
        if id(tensor) in first:
            tied.append((first[id(tensor)], name))
            continue
        first[id(tensor)] = name
        if name in buffers:
            model[name] = tensor.clone()
            continue
        model[name], padding = _part(tensor, rank, world)
        described = {"names": [name], "shapes": [tensor.shape], "numels": [tensor.numel()]}
        params[name] = {**described, "padding": padding}
    unit = {"fsdp_path": "", "params": params, "no_broadcast_optim_state": False, "shared_param_info": tied}
    return model, {"param_metadata": [unit], "buffer_names": [name for name in tensors if name in buffers]}
