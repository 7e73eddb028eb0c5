"""Checkpoints that others wrote, as manifests: the same byte ranges, so that loading them is the same code.

    Hugging Face     a folder of *.safetensors (with or without an index), or one such file; a folder of
                     pytorch_model*.bin
    torch DCP        a folder with .metadata and *.distcp files
    torch.save       one file with a state dict, or with one inside of it (``torchfile``)
    per-rank files   of fairscale and XlaFullyShardedDataParallel, by their metadata (``rankfiles``)

Only weights are taken. They have no checksums, so the first read makes them; the live state is proved against
these. Nothing is unpickled freely: torch's restricted loader reads state dicts, and ``.metadata`` may name
only the few classes that describe tensors.
"""

import io
import json
import pathlib
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from shardwright.checkpoint.folder import find, read_manifest, step_folders
from shardwright.checkpoint.format import MANIFEST, Manifest, Piece, TensorEntry, prove
from shardwright.checkpoint.rankfiles import rank_entries, rank_files
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.checkpoint.torchfile import fake_load, piece_of, torch_entries
from shardwright.errors import CheckpointError
from shardwright.storage import Location, RemotePath
from shardwright.torch_private import DCP_CLASSES, DCP_LAYOUT

_DCP = ".metadata"


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: where its files are, what is in them, and which newer ones were passed over."""

    folder: Location
    manifest: Manifest
    skipped: tuple[str, ...] = ()


def locate(path: Location) -> tuple[Location, tuple[str, ...]]:
    """The checkpoint that ``path`` means, and why newer ones were skipped: itself, or the newest complete
    one in it. Our own come before files of others that lie beside them: those hold weights only, and aren't
    looked for under a URL.

    Raises:
        CheckpointError: there is none.
    """
    if isinstance(path, RemotePath):
        folder, skipped = find(path)
        return folder, tuple(skipped)
    if path.is_dir() and step_folders(path):
        folder, skipped = find(path)
        return folder, tuple(skipped)
    if path.is_file() or (path / _DCP).is_file() or _weight_files(path) or rank_files(path):
        return path, ()
    folder, skipped = find(path)
    return folder, tuple(skipped)


def open_source(path: Location, names: Collection[str] = ()) -> Source:
    """Open what ``locate`` found. ``names`` are the live names, by which a prefix in a foreign one is
    recognised.

    Raises:
        CheckpointError: damaged or incomplete, or a format that can't be read.
    """
    if isinstance(path, RemotePath) or (path / MANIFEST).is_file():
        manifest = read_manifest(path)
    elif path.is_file() and path.suffix == ".safetensors":
        path, manifest = path.parent, _manifest(_safetensors_entries(path), names)
    elif path.is_file():
        path, manifest = path.parent, _manifest(torch_entries(path), names)
    elif (path / _DCP).is_file():
        manifest = _manifest(_dcp_entries(path, names), names)
    elif files := _weight_files(path):
        entries: dict[str, TensorEntry] = {}
        for file in files:
            safe = file.suffix == ".safetensors"
            entries.update(_safetensors_entries(file) if safe else torch_entries(file))
        manifest = _manifest(entries, names)
    elif files := rank_files(path):
        path, manifest = files[0].parent, _manifest(rank_entries(files, str(path)), names)
    else:
        manifest = read_manifest(path)  # raises, naming what is missing
    prove(manifest)
    return Source(path, manifest)


def _manifest(entries: Mapping[str, TensorEntry], names: Collection[str]) -> Manifest:
    prefix = _prefix(entries, names)
    tensors = {f"model/{k.removeprefix(prefix)}": e for k, e in entries.items() if k.startswith(prefix)}
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        for piece in entry.pieces:
            sizes[piece.file] = max(sizes.get(piece.file, 0), piece.start + piece.nbytes)
    return Manifest(0, tensors, sizes)


def _prefix(found: Collection[str], names: Collection[str]) -> str:
    """What stands before the live names in the found ones (``model.``, ``module.``, ...); empty if some are
    equal."""
    if not names or any(name in found for name in names):
        return ""
    counts: dict[str, int] = {}
    for name in names:
        for other in found:
            if other.endswith("." + name):
                prefix = other.removesuffix(name)
                counts[prefix] = counts.get(prefix, 0) + 1
    return max(counts, key=counts.__getitem__, default="")


# ---- Hugging Face


def _weight_files(path: Path) -> list[Path]:
    """The files of a folder in a layout of Hugging Face's; those that its index names, if it has one."""
    if not path.is_dir():
        return []
    if not (indexes := sorted(path.glob("*.safetensors.index.json"))):
        if (path / MANIFEST).exists():
            return []
        if files := sorted(path.glob("*.safetensors")):
            return files
        if not (indexes := sorted(path.glob("pytorch_model*.bin.index.json"))):
            return sorted(path.glob("pytorch_model.bin"))
    files = [path / name for name in sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{indexes[0]} names {len(missing)} files that are missing: {missing[:5]}")
    return files


def _safetensors_entries(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        base = 8 + length
        entries = {}
        for name, info in header.items():
            begin, end = info["data_offsets"]
            if base + end > size:
                raise CheckpointError(
                    f"{path}: the file is truncated: {name} ends at byte {base + end} of {size}"
                )
            shape = tuple(info["shape"])
            piece = Piece(path.name, base + begin, end - begin, None, (0,) * len(shape), shape)
            entries[name] = TensorEntry(shape, info["dtype"], (piece,) if end > begin else ())
        return entries
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error


# ---- torch.distributed.checkpoint


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``: descriptions of tensors, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            metadata.__name__: metadata,
            filesystem.__name__: filesystem,
            "pathlib": pathlib,
            "pathlib._local": pathlib,
        }
        if module in allowed and name in _METADATA_CLASSES:
            return getattr(allowed[module], name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == DCP_LAYOUT:
            return {str(torch.strided): torch.strided}.__getitem__
        raise CheckpointError(f".metadata names {module}.{name}, which does not describe a tensor; refused")


_METADATA_CLASSES = {
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
    "MetadataIndex", "StorageMeta", *DCP_CLASSES, "PosixPath", "WindowsPath",
    "PurePosixPath",
}  # fmt: skip


def _dcp_entries(path: Path, names: Collection[str]) -> dict[str, TensorEntry]:
    try:
        with open(path / _DCP, "rb") as file:
            described = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / _DCP}: not readable ({type(error).__name__}: {error})") from error
    tensors = {k: m for k, m in described.state_dict_metadata.items() if hasattr(m, "chunks")}
    prefix = _prefix(tensors, names)
    pieces: dict[str, list[Piece]] = {key: [] for key in tensors if key.startswith(prefix)}
    for index, info in described.storage_data.items():
        if index.fqn in pieces and tensors[index.fqn].size.numel():
            pieces[index.fqn].append(_dcp_piece(path, index, info))
    return {
        key: TensorEntry(tuple(tensors[key].size), DTYPE_NAME[tensors[key].properties.dtype], tuple(found))
        for key, found in pieces.items()
    }


def _dcp_piece(path: Path, index: Any, info: Any) -> Piece:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{path}: {index.fqn} is stored compressed; save it without stream extensions")
    file_path = path / info.relative_path
    try:
        with open(file_path, "rb") as file:
            tensor = fake_load(_Slice(file, info.offset, info.length), f"{file_path}: {index.fqn}")
    except OSError as error:
        raise CheckpointError(f"{file_path}: can't read {index.fqn}: {error.strerror}") from error
    return piece_of(file_path, index.fqn, tensor, info.offset, tuple(index.offset))


class _Slice(io.RawIOBase):
    """A part of a file as a file; each item of a ``.distcp`` file is what torch.save writes."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count
