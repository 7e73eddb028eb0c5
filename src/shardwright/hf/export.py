"""A sharded model as the folder that ``save_pretrained`` would write: one whole tensor at a time."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoint.agree import ranks
from shardwright.checkpoint.folder import published
from shardwright.checkpoint.shardfile import DTYPE_NAME, by_file, write_index, write_whole
from shardwright.engine.gather_full import stream_full
from shardwright.engine.unit import units_in
from shardwright.errors import CheckpointError, InputError
from shardwright.hf import library
from shardwright.module import original_class

MAX_FILE_NBYTES = 5 * 10**9
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)


@dataclass(frozen=True)
class _Stored:
    """A tensor as the files have it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _ExportedTensor:
    """A tensor of the model, and what the files make of it."""

    name: str
    live: torch.Tensor
    stored: tuple[_Stored, ...]

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored)


Collect = Callable[[Sequence[_ExportedTensor]], Iterator[torch.Tensor | None]]
"""Each of some tensors whole, in their order; None on a rank that doesn't write."""


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer_from: str | Path | None = None,
    max_file_nbytes: int = MAX_FILE_NBYTES,
) -> None:
    """Write a sharded model of transformers so that ``from_pretrained`` loads it without us.

    Every rank of the model's mesh calls it, between steps; rank 0 writes safetensors (with an index where
    they are several), ``config.json`` and ``generation_config.json``, in the names and layout of the model's
    own files, tied weights once. Host memory: one whole tensor, on rank 0.

    Args:
        model: a model with at least one sharded module.
        folder: must not exist yet, and appears when it is complete.
        tokenizer_from: a folder whose tokenizer files are copied; None: none are.
        max_file_nbytes: bytes; the next file is begun where a tensor would exceed it.

    Raises:
        InputError: the model isn't sharded.
        CheckpointError: ``folder`` exists or can't be written; raised on every rank, and nothing is left
            there.
    """
    units = units_in(model)
    if not units:
        raise InputError(f"{type(model).__name__} has no sharded module; it has its own save_pretrained()")
    path, group = Path(folder), ranks()
    what = f"saving {path}"
    group.arrive(what)
    for unit in units:
        unit.runtime.rest()
    sources = _plan(model)
    torn = path.with_name(f".torn-{path.name}")

    def begin() -> None:
        if group.rank == 0:
            if path.exists():
                raise CheckpointError(f"{path} exists already; nothing was written: give another folder")
            shutil.rmtree(torn, ignore_errors=True)
            torn.mkdir(parents=True)

    group.together(what, begin)
    files = by_file(sources, max_file_nbytes)
    fault = _write_weights(model, files, torn, lambda members: _wholes(model, members), group.rank == 0)

    def finish() -> None:
        if group.rank:
            return
        try:
            if fault:
                raise CheckpointError(fault)
            library.save_config(model, original_class(type(model)), torn, _dtype(sources))
            copy_tokenizer(tokenizer_from, torn)
            os.rename(torn, path)
        finally:
            shutil.rmtree(torn, ignore_errors=True)

    group.together(what, finish)


def _plan(model: nn.Module) -> list[_ExportedTensor]:
    """Every tensor to be written, in the order of the model's state dict; the same on every rank."""
    tied = library.tied_names(model)
    sources = []
    for name, live in model.state_dict(keep_vars=True).items():
        if name in tied or not isinstance(live, torch.Tensor):
            continue
        whole = torch.empty(live.shape, dtype=live.dtype, device="meta")
        converted = library.in_file_names(model, {name: whole})
        stored = tuple(_Stored(key, tuple(t.shape), t.dtype) for key, t in converted.items())
        sources.append(_ExportedTensor(name, live, stored))
    return sources


def write_pretrained(
    model: nn.Module,
    folder: str | Path,
    read: Callable[[str], torch.Tensor],
    tokenizer_from: str | Path,
) -> None:
    """What ``save_pretrained`` writes, of a model without weights and with each tensor from elsewhere; one
    process.

    model: of transformers, its parameters may be on the meta device; their shapes and dtypes are those of the
        files. read: the tensor of that name in the model, asked for once each. Host memory: one of them.
    Raises: CheckpointError where ``folder`` exists or can't be written, or from ``read``; nothing is left
        there then.
    """
    sources = _plan(model)
    files = by_file(sources, MAX_FILE_NBYTES)
    with published(Path(folder)) as torn:
        torn.mkdir()
        fault = _write_weights(model, files, torn, lambda members: (read(m.name) for m in members), True)
        if fault:
            raise CheckpointError(fault)
        library.save_config(model, type(model), torn, _dtype(sources))
        copy_tokenizer(tokenizer_from, torn)


def _write_weights(
    model: nn.Module,
    files: Mapping[str, Sequence[_ExportedTensor]],
    folder: Path,
    collect: Collect,
    writes: bool,
) -> str:
    """Collect every tensor and, on the rank that ``writes``, write it. Returns why that failed, or "".

    After a failure the others are collected all the same, so that no rank waits for one that gave up.
    """
    fault = ""
    for name, members in files.items():
        wholes = collect(members)
        if writes and not fault:
            try:
                _write_file(model, folder / name, members, wholes)
            except OSError as error:
                fault = f"can't write {folder / name}: {error.strerror or error}"
        for _ in wholes:  # the collectives that are left
            pass
    if writes and not fault:
        file_of = {s.name: file for file, members in files.items() for each in members for s in each.stored}
        write_index(folder, file_of, sum(each.nbytes for members in files.values() for each in members))
    return fault


def _wholes(model: nn.Module, members: Sequence[_ExportedTensor]) -> Iterator[torch.Tensor | None]:
    """Each tensor whole, on rank 0 alone; one call of ``stream_full`` each, which keeps what it yields."""
    params = {id(p.sharded): p for unit in units_in(model) for group in unit.groups for p in group.params}
    for source in members:
        yield dict(stream_full({source.name: source.live}, params)).get(source.name)


def _write_file(
    model: nn.Module, path: Path, members: Sequence[_ExportedTensor], wholes: Iterator[torch.Tensor | None]
) -> None:
    stored = [(s.name, DTYPE_NAME[s.dtype], s.shape, s.nbytes) for source in members for s in source.stored]

    def converted() -> Iterator[torch.Tensor]:
        for source, whole in zip(members, wholes, strict=True):
            assert whole is not None, "rank 0 collects every tensor"
            yield from library.in_file_names(model, {source.name: whole}).values()

    write_whole(path, stored, converted())


def _dtype(sources: Sequence[_ExportedTensor]) -> torch.dtype:
    """The dtype of most of the weights."""
    numels: dict[torch.dtype, int] = {}
    for source in sources:
        if source.live.is_floating_point():
            numels[source.live.dtype] = numels.get(source.live.dtype, 0) + source.live.numel()
    return max(numels, key=numels.__getitem__)


def copy_tokenizer(origin: str | Path | None, folder: Path) -> None:
    """Copy the tokenizer's files from the one folder to the other."""
    if origin is None:
        return
    for pattern in _TOKENIZER:
        for file in Path(origin).glob(pattern):
            if file.is_file():
                shutil.copy2(file, folder / file.name)
