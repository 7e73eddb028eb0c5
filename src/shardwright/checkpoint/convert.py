"""Weights from one format into another, whole or not at all, compared with the source before they appear.

    safetensors   a folder of plain safetensors (``consolidate``)
    torch         one file that ``torch.load(..., weights_only=True)`` opens
    dcp           a folder of ``torch.distributed.checkpoint``
    fairscale     a folder of per-rank files, as its FullyShardedDataParallel saves them
    xla           the same, as XlaFullyShardedDataParallel does
    shardwright   a folder of checkpoints, with this one in it

One process; host memory: one tensor. What needs all tensors at once gets them as files that are mapped.
"""

import os
import tempfile
import warnings
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardwright.checkpoint.folder import published, step_folder
from shardwright.checkpoint.format import Manifest
from shardwright.checkpoint.live import Whole
from shardwright.checkpoint.rankfiles import write_rank_files
from shardwright.checkpoint.save import save
from shardwright.checkpoint.shardfile import TORCH_DTYPE, Reader, bits_of, bytes_of
from shardwright.checkpoint.sink import write_all
from shardwright.checkpoint.sources import Source, open_source
from shardwright.checkpoint.tools import Progress, consolidate, open_checkpoint, read_tensor
from shardwright.errors import CheckpointError, InputError
from shardwright.storage import local_only


class Format(StrEnum):
    """What ``convert`` writes; see the top of this module."""

    SHARDWRIGHT = "shardwright"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"
    FAIRSCALE = "fairscale"
    XLA = "xla"


PER_RANK = (Format.FAIRSCALE, Format.XLA)


def convert(
    src: str | Path, dst: str | Path, to: Format, *, ranks: int = 1, progress: Progress | None = None
) -> Path:
    """Write a model's weights in another format. One process.

    The result was read again and equals the source bit by bit before it appears. Names and dtypes stay. Tied
    weights are stored once in ``shardwright``, ``safetensors``, ``torch`` and ``fairscale``, and under each
    name in ``dcp`` and ``xla``. Temporary files beside ``dst`` take as much disk as the model.

    Args:
        src: whatever ``load`` takes.
        dst: a folder or file that must not exist yet.
        to: the format.
        ranks: how many files to write in a format where each is one rank's.
        progress: called with the bytes read and the bytes in all.

    Returns:
        What was written.

    Raises:
        CheckpointError: the source is damaged or has no weights, or ``dst`` exists or can't be written.
        InputError: ``ranks`` is below 1, or above 1 in a format that has no files per rank.
        MissingExtra: the package for this kind of URL isn't installed.
    """
    if ranks < 1 or (ranks > 1 and to not in PER_RANK):
        raise InputError(f"ranks is {ranks}, expected 1, or more with {' or '.join(PER_RANK)}")
    dst = local_only(dst, "what is converted is written to")
    if to is Format.SAFETENSORS:
        consolidate(src, dst, progress=progress)
        return dst
    source = open_checkpoint(src)
    with published(dst) as torn, tempfile.TemporaryDirectory(dir=torn.parent, prefix=".torn-") as scratch:
        tensors = _mapped(source, Path(scratch), progress)
        written = torn
        if to is Format.TORCH:
            with open(torn, "xb") as file:
                torch.save(tensors, file)
                os.fsync(file.fileno())
        elif to in PER_RANK:
            torn.mkdir()
            write_rank_files(torn, tensors, str(to), ranks, _buffers(source.manifest, tensors))
        elif to is Format.DCP:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
                save_dcp(tensors, checkpoint_id=torn, no_dist=True)
        else:
            save(torn, model=Whole(tensors), step=source.manifest.step)
            written = step_folder(torn, source.manifest.step)
        _compare(tensors, open_source(written))
    return dst if to is not Format.SHARDWRIGHT else step_folder(dst, source.manifest.step)


def _buffers(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of what is no parameter, as far as a checkpoint tells: integers, what is whole beside shards."""
    stored = {name: manifest.tensors[key] for name, key in manifest.keys_of("model/").items()}
    any_sharded = any(entry.sharded for entry in stored.values())
    whole = {name for name in tensors if any_sharded and not stored[f"model/{name}"].sharded}
    return whole | {name for name, tensor in tensors.items() if not tensor.is_floating_point()}


def _mapped(source: Source, scratch: Path, progress: Progress | None) -> dict[str, torch.Tensor]:
    """The weights by name, tied ones as one tensor, each over a file in ``scratch``."""
    manifest, read = source.manifest, dict[str, torch.Tensor]()
    names = manifest.keys_of("model/")
    if not names:
        raise CheckpointError(f"{source.folder} holds no weights (no key starts with model/)")
    total, done = sum(manifest.tensors[key].nbytes for key in set(names.values())), 0
    with Reader(source.folder) as reader:
        for number, key in enumerate(sorted(set(names.values()))):
            entry = manifest.tensors[key]
            tensor = read_tensor(reader, key, entry)
            if entry.nbytes:
                with open(scratch / str(number), "xb", buffering=0) as file:
                    write_all(file.fileno(), bytes_of(tensor).data)
                flat = torch.from_file(file.name, size=entry.nbytes, dtype=torch.uint8, shared=True)
                tensor = flat.view(TORCH_DTYPE[entry.dtype]).reshape(entry.shape)
            read[key] = tensor
            done += entry.nbytes
            if progress:
                progress(done, total)
    return {name.removeprefix("model/"): read[key] for name, key in names.items()}


def _compare(tensors: dict[str, torch.Tensor], written: Source) -> None:
    found = written.manifest.keys_of("model/")
    expected = {f"model/{name}": tensor for name, tensor in tensors.items()}
    wrong = sorted(found.keys() ^ expected.keys())
    with Reader(written.folder) as reader:
        for name in found.keys() & expected.keys():
            got = read_tensor(reader, found[name], written.manifest.tensors[found[name]])
            tensor = expected[name]
            same = got.dtype == tensor.dtype and np.array_equal(bits_of(got), bits_of(tensor))
            wrong += [] if same else [name]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors differ after they were written: {wrong[:5]}; removed")
