"""Files of ``torch.save``, read by byte ranges: their structure is loaded without the data, and says where
each tensor lies in the file."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.format import Piece, TensorEntry
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.errors import CheckpointError
from shardwright.torch_private import FakeTensorMode, file_offset_of


def torch_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, those in dicts inside of dicts with dots between.

    Raises:
        CheckpointError: not readable without running code, no tensors, or one of several ranks' files.
    """
    with open(path, "rb") as file:
        loaded = fake_load(file, str(path))
    if isinstance(loaded, Mapping) and "shard_metadata" in loaded:
        raise CheckpointError(
            f"{path}: holds one rank's part; give the folder of the files of all ranks, or a pattern of them"
        )
    tensors = _tensors_in(loaded)
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensors ({type(loaded).__name__})")
    return {name: entry_of(path, name, tensor, 0) for name, tensor in tensors.items()}


def fake_load(file: Any, where: str) -> Any:
    """The structure of a torch.save file, its tensors without their data."""
    try:
        with FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{where}: torch.load can't read it with weights_only=True ({error})"
        ) from error


def _tensors_in(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix[:-1]: value}
    if not isinstance(value, Mapping):
        return {}
    return {name: t for k, v in value.items() for name, t in _tensors_in(v, f"{prefix}{k}.").items()}


def entry_of(path: Path, name: str, tensor: torch.Tensor, base: int) -> TensorEntry:
    """A whole tensor, as ``fake_load`` gave it; ``base`` is where its file begins in ``path``."""
    shape = tuple(tensor.shape)
    piece = piece_of(path, name, tensor, base, (0,) * len(shape))
    return TensorEntry(shape, DTYPE_NAME[tensor.dtype], (piece,) if tensor.numel() else ())


def piece_of(path: Path, name: str, tensor: torch.Tensor, base: int, offset: tuple[int, ...]) -> Piece:
    """Where a tensor lies that ``fake_load`` gave, as a piece at ``offset``.

    Raises:
        CheckpointError: stored with gaps, or in a dtype that safetensors lacks.
    """
    if not tensor.is_contiguous() or tensor.dtype not in DTYPE_NAME:
        raise CheckpointError(
            f"{path}: {name} is stored with stride {tensor.stride()} as {tensor.dtype}; only contiguous "
            "plain dtypes can be read in ranges: save it again with tensor.contiguous()"
        )
    storage = tensor.untyped_storage()  # under FakeTensorMode torch.load notes where the data lies
    start = base + file_offset_of(storage) + tensor.storage_offset() * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    return Piece(path.name, start, nbytes, None, offset, tuple(tensor.shape))
