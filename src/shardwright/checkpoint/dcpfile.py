"""Folders of ``torch.distributed.checkpoint``: the pickle ``.metadata``, and items in ``*.distcp`` files.

The pickle runs nothing. Each class that it may name is replaced by one of our own, made for this pickle
alone, whose instances keep what is said of them: so a pickle that sets attributes of a class, or of a module,
has nothing to set them of.
"""

import io
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata

from shardwright.checkpoint.format import Piece, TensorEntry, checked_shape
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.checkpoint.torchfile import fake_load, piece_of
from shardwright.errors import CheckpointError
from shardwright.files import is_size, open_regular, opened, reading
from shardwright.torch_private import DCP_CLASSES, DCP_LAYOUT, DCP_PLACE

METADATA = ".metadata"
_WHAT = "metadata of torch.distributed.checkpoint"
_MODULES = {metadata.__name__, filesystem.__name__, "pathlib", "pathlib._local"}
_CLASSES = {
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
    "MetadataIndex", "StorageMeta", *DCP_CLASSES, "PosixPath", "WindowsPath", "PurePosixPath",
}  # fmt: skip


class _Record:
    """An instance of a class that describes tensors: what the pickle says of it, and none of its code."""

    state: Any = None

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _member(kind: Any, name: Any) -> _Record:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 pickles it: ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, _Record) and type(name) is str):
        raise CheckpointError(f".metadata asks for {name!r} of {kind!r}, which is no enumeration; refused")
    return kind(name)


class _Unpickler(pickle.Unpickler):
    """Reads descriptions of tensors, and nothing that could run."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._kinds: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module in _MODULES and name in _CLASSES) or (module, name) == DCP_LAYOUT:
            return self._kinds.setdefault(name, type(name, (_Record,), {}))
        if module == "torch" and name == "Size":
            return tuple
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise CheckpointError(f".metadata names {module}.{name}, which does not describe a tensor; refused")


def _fields(record: Any, kind: str, **kinds: type) -> list[Any]:
    """Values of a record of the class ``kind``. Raises: ValueError if it is another, or a value is."""
    state = record.state if isinstance(record, _Record) and type(record).__name__ == kind else None
    if type(state) is not dict:
        raise ValueError(f"it has a {type(record).__name__} where a {kind} is expected")
    for name, expected in kinds.items():
        if type(state.get(name)) is not expected:
            found = type(state.get(name)).__name__
            raise ValueError(f"{name} of a {kind} is a {found}, expected a {expected.__name__}")
    return [state[name] for name in kinds]


def dcp_items(path: Path) -> dict[str, list[tuple[int, int, str]]]:
    """What lies in each file of the folder ``path``, objects beside the tensors, too: the first byte, the
    number of bytes, and the name. Raises: CheckpointError for what is no such metadata."""
    items: dict[str, list[tuple[int, int, str]]] = {}
    with opened(path / METADATA, _WHAT) as file:
        for index, info in _loaded(file)[1].items():
            (name,) = _fields(index, "MetadataIndex", fqn=str)
            place, start, length = _place(name, info)
            items.setdefault(place, []).append((start, length, name))
    return items


def dcp_entries(path: Path, prefix_of: Callable[[Collection[str]], str]) -> dict[str, TensorEntry]:
    """The tensors of the folder ``path`` whose names begin with what ``prefix_of`` gives for all names.

    Raises:
        CheckpointError: not readable, or a file or an item of one is missing or of another kind.
    """
    with opened(path / METADATA, _WHAT) as file:
        tensors, stored = _loaded(file)
        named = {str(key): value for key, value in tensors.items()}
        shapes = {k: _described(k, v) for k, v in named.items() if type(v).__name__ != "BytesStorageMetadata"}
        prefix = prefix_of(shapes)
        wanted = {key: described for key, described in shapes.items() if key.startswith(prefix)}
        pieces: dict[str, list[Piece]] = {key: [] for key in wanted}
        for index, info in stored.items():
            (name,) = _fields(index, "MetadataIndex", fqn=str)
            if name in wanted and 0 not in wanted[name][0]:
                offset = index.state.get("offset") or (0,) * len(wanted[name][0])
                at = checked_shape(list(offset), f"the offset of a piece of {name!r}")
                pieces[name].append(_piece(path, name, wanted[name][1], at, info))
    return {key: TensorEntry(*wanted[key], tuple(found)) for key, found in pieces.items()}


def _loaded(file: BinaryIO) -> list[Any]:
    """What is said of each name, and where each of its parts is stored."""
    return _fields(_Unpickler(file).load(), "Metadata", state_dict_metadata=dict, storage_data=dict)


def _described(key: str, value: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype."""
    (size,) = _fields(value, "TensorStorageMetadata", size=tuple)
    properties = value.state.get("properties")
    if type(properties).__name__ != "TensorProperties" or type(properties.state) is not tuple:
        raise ValueError(f"{key!r} has no properties")
    dtype = (*properties.state, None)[0]
    if dtype not in DTYPE_NAME:
        raise ValueError(f"{key!r} has dtype {dtype}, expected one that safetensors has, too")
    return checked_shape(list(size), f"the shape of {key!r}"), DTYPE_NAME[dtype]


def _piece(path: Path, key: str, dtype: str, offset: tuple[int, ...], info: Any) -> Piece:
    name, start, length = _place(key, info)
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"{path}: {key} is stored compressed; save it without stream extensions")
    file_path = path / name
    with reading(f"{file_path}: {key}", "readable"), open(open_regular(file_path), "rb") as file:
        tensor = fake_load(_Slice(file, start, length), f"{file_path}: {key}")
        piece = piece_of(file_path, key, tensor, start, offset)
    if (found := DTYPE_NAME[tensor.dtype]) != dtype:
        raise CheckpointError(f"{file_path}: {key} is {found}, by {METADATA} it is {dtype}")
    return piece


def _place(key: str, info: Any) -> tuple[str, int, int]:
    """The file, and which of its bytes."""
    name, start, length = _fields(info, DCP_PLACE, relative_path=str, offset=int, length=int)
    if not is_size(start) or not is_size(length) or Path(name).name != name:
        raise ValueError(f"{key!r} is at {start}+{length} of {name!r}, expected bytes of a file beside it")
    return name, start, length


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
