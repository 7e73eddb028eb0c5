"""Files of ``torch.save``, read by byte ranges: their structure is loaded without the data, and says where
each tensor lies in the file."""

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.format import Piece, TensorEntry
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.errors import CheckpointError
from shardwright.files import opened, reading
from shardwright.torch_private import FakeTensorMode, file_offset_of


def torch_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, those in dicts inside of dicts with dots between.

    Raises:
        CheckpointError: not readable without running code, no tensors, or one of several ranks' files.
    """
    loaded = structure_of(path)
    if isinstance(loaded, Mapping) and "shard_metadata" in loaded:
        raise CheckpointError(
            f"{path}: holds one rank's part; give the folder of the files of all ranks, or a pattern of them"
        )
    found = dict[str, torch.Tensor]()
    with reading(path, "a state dict"):
        _collect(loaded, "", found)
    if not found:
        raise CheckpointError(f"{path}: holds no tensors ({type(loaded).__name__})")
    return {name: entry_of(path, name, tensor, 0) for name, tensor in found.items()}


def structure_of(path: Path) -> Any:
    """``fake_load`` of a whole file. Raises: CheckpointError, also where there is none."""
    with opened(path, "a file of torch.save") as file:
        return fake_load(file, str(path))


def fake_load(file: Any, where: str) -> Any:
    """The structure of a torch.save file, its tensors without their data.

    Raises:
        CheckpointError: it can't be read without running code, or its data is packed or in another order of
            bytes.
    """
    with reading(where, "a file that torch.load reads with weights_only=True"):
        _check_zip(file)
        with FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=True)


def _check_zip(file: Any) -> None:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no zip file, as torch.save has written since torch 1.6; save it again")
    with zipfile.ZipFile(file) as packed:
        infos = packed.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):  # nothing is read of it
            raise ValueError("its data is compressed; save it again with torch.save")
        orders = {packed.read(info) for info in infos if info.filename.endswith("/byteorder")}
        pickles = [packed.read(info) for info in infos if info.filename.endswith("/data.pkl")]
    # torch 2.15 looks into the indices that it loads, which have no data here (data-dependent, it says).
    if any(b"_rebuild_sparse" in each for each in pickles):
        raise ValueError("it holds sparse tensors, of which no ranges can be read; save tensor.to_dense()")
    if orders - {sys.byteorder.encode()}:
        raise ValueError(f"its bytes are in the order {orders}, this host's are {sys.byteorder}-endian")
    file.seek(0)


def _collect(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    """The tensors in dicts inside of dicts, by their keys with dots between."""
    if isinstance(value, torch.Tensor):
        if name in found:
            raise ValueError(f"it holds two tensors that are called {name!r}")
        found[name] = value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, f"{name}.{key}" if name else str(key), found)


def entry_of(path: Path, name: str, tensor: torch.Tensor, base: int) -> TensorEntry:
    """A whole tensor, as ``fake_load`` gave it; ``base`` is where its file begins in ``path``."""
    piece = piece_of(path, name, tensor, base, (0,) * getattr(tensor, "ndim", 0))
    return TensorEntry(piece.shape, DTYPE_NAME[tensor.dtype], (piece,) if piece.nbytes else ())


def piece_of(path: Path, name: str, tensor: torch.Tensor, base: int, offset: tuple[int, ...]) -> Piece:
    """Where a tensor lies that ``fake_load`` gave, as a piece at ``offset``.

    Raises:
        CheckpointError: no tensor, without data, stored with gaps, to be conjugated or negated when it is
            read, or in a dtype that safetensors lacks.
    """
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: {name} is a {type(tensor).__name__}, expected a tensor")
    plain = tensor.layout is torch.strided and tensor.is_contiguous() and tensor.dtype in DTYPE_NAME
    if not plain or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(
            f"{path}: {name} is stored with stride {tensor.stride()} as {tensor.dtype}; only contiguous "
            "plain dtypes can be read in ranges: save it again with "
            "tensor.resolve_conj().resolve_neg().contiguous()"
        )
    storage = tensor.untyped_storage()  # under FakeTensorMode torch.load notes where the data lies
    at, first = file_offset_of(storage), tensor.storage_offset() * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    if at is None or first + nbytes > storage.nbytes():
        raise CheckpointError(
            f"{path}: the file has {0 if at is None else storage.nbytes()} bytes of data of {name}, expected "
            f"{first + nbytes}"
        )
    return Piece(path.name, base + at + first, nbytes, None, offset, tuple(tensor.shape))
