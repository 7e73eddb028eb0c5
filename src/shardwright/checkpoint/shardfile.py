"""One shard file: safetensors, written and read in chunks, so that no second copy of a tensor exists on the
host."""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint.background import Pace
from shardwright.checkpoint.folder import storage_of
from shardwright.checkpoint.format import ITEM_NBYTES, Box, Piece, TensorEntry, checked_shape, first_of_run
from shardwright.checkpoint.sink import Cached, Direct, Sink, write_all
from shardwright.checkpoint.url import Location
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, UnreadError
from shardwright.files import is_size, json_object, open_regular, opened, reading
from shardwright.transport.cpu.pages import HUGE_PAGE_NBYTES, advise

CHUNK_NBYTES = 2 << 20  # small enough to stay in the cache between being read and being checksummed
_ALIGN = 64
EXTENT_NBYTES = HUGE_PAGE_NBYTES
_WINDOW_NBYTES = 2 * EXTENT_NBYTES  # what a process has mapped counts as memory that it uses
_MIN_NBYTES = 256 << 10  # what is smaller stays in the cache when it is copied, and mapping it costs as much
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
METADATA = {"format": "pt"}
_MAX_HEADER_NBYTES = 100_000_000  # the safetensors library's

TORCH_DTYPE = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32,
    "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements of ``tensor`` as unsigned integers of their size, same shape; copied only if it has to
    be."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return flat.view(_BITS[tensor.element_size()]).reshape(tensor.shape)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """``bits_of`` as one run of bytes."""
    return bits_of(tensor).reshape(-1).view(np.uint8)


def tensor_of(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """The inverse of ``bits_of``: a tensor over the same memory."""
    return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(TORCH_DTYPE[dtype]).reshape(bits.shape)


def chunks_of(box: Box, item_nbytes: int) -> Iterator[Box]:
    """``box`` cut into boxes of at most ``CHUNK_NBYTES``, in row-major order."""
    if box.numel * item_nbytes <= CHUNK_NBYTES:
        yield box
        return
    dim = next(d for d, size in enumerate(box.shape) if size > 1)
    inner_nbytes = box.numel // box.shape[dim] * item_nbytes
    step = max(1, CHUNK_NBYTES // inner_nbytes)
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, box.shape[dim] - start)
        yield from chunks_of(Box(tuple(offset), tuple(shape)), item_nbytes)


def bits_in_chunks(tensor: torch.Tensor, box: Box) -> Iterator[tuple[Box, np.ndarray]]:
    """``bits_of`` a tensor that holds ``box``, in chunks, each with its box."""
    for chunk in chunks_of(box, tensor.element_size()):
        yield chunk, bits_of(tensor[chunk.slices_in(box)])


@dataclass(frozen=True)
class Item:
    """One piece to write: ``tensor`` is this rank's and fills ``box``; ``number`` counts those of one key."""

    key: str
    tensor: torch.Tensor
    box: Box
    number: int = 0

    @property
    def name(self) -> str:
        """Its name in the file."""
        return f"{self.key}#{self.number}" if self.number else self.key


def write_shard(
    path: Path, items: Sequence[Item], pace: Pace | None = None
) -> tuple[dict[str, list[Piece]], int]:
    """Write ``items`` as one safetensors file and sync it to the disk; returns their pieces by key and the
    file's size.

    pace: that of a save beside training, which also leaves the page cache as it is (see ``Direct``).
    Host memory beyond the tensors themselves: one chunk (2 MiB), beside training 8 MiB.

    Raises:
        CheckpointError: the file can't be written, naming it and the tensor.
    """
    # So that every piece is aligned to its items.
    items = sorted(items, key=lambda item: -item.tensor.element_size())
    text = header_of([(i.name, DTYPE_NAME[i.tensor.dtype], i.box.shape, i.tensor.nbytes) for i in items])
    at = len(text)
    pieces: dict[str, list[Piece]] = {}
    key = "the header"
    try:
        with open(path, "xb", buffering=0) as file:
            sink = Cached(file.fileno()) if pace is None else Direct(file.fileno(), pace)
            sink.write(memoryview(text))
            for item in items:
                key = item.key
                nbytes, crc = _write_tensor(sink, item, at)
                piece = Piece(path.name, at, nbytes, crc, item.box.offset, item.box.shape)
                pieces.setdefault(key, []).append(piece)
                at += nbytes
            key = "the end"
            sink.finish()
            if (size := os.fstat(file.fileno()).st_size) != at:
                raise CheckpointError(f"{path}: has {size} bytes, {at} were written")
    except OSError as error:
        raise CheckpointError(f"{path}: can't write {key}: {error.strerror or error}") from error
    return pieces, at


Described = tuple[str, str, tuple[int, ...], int]
"""A tensor of a file: its name, dtype, shape and number of bytes."""


def by_file(tensors: Iterable[Any], max_nbytes: int) -> dict[str, list[Any]]:
    """Tensors, each with ``nbytes``, in order, by the file that each goes into; transformers' names."""
    files: list[list[Any]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > max_nbytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": each for i, each in enumerate(files, 1)}


def write_whole(
    path: Path,
    described: Sequence[Described],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write whole tensors as one safetensors file, and sync it. ``tensors`` come in the order of
    ``described``, one at a time. Raises: CheckpointError, as ``header_of``."""
    with open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), header_of(described, metadata))
        for tensor in tensors:
            write_all(file.fileno(), bytes_of(tensor).data)
        os.fsync(file.fileno())


def write_index(folder: Path, file_of: Mapping[str, str], nbytes: int) -> None:
    """Where there are several files: write which tensor is in which, and the ``nbytes`` of all tensors."""
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def header_of(tensors: Sequence[Described], metadata: Mapping[str, str] | None = None) -> bytes:
    """The start of a safetensors file that holds ``(name, dtype, shape, nbytes)``, one after the other.

    Raises: CheckpointError for a name that is there twice, or that the format keeps for itself.
    """
    header: dict[str, object] = {"__metadata__": {**METADATA, **(metadata or {})}}
    start = 0
    for name, dtype, shape, nbytes in tensors:
        if name in header:
            raise CheckpointError(f"two tensors would have the name {name!r} in one file; rename one")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """What a safetensors file says of itself: its metadata, and its tensors in their order in the file, each
    in one piece. It is refused wherever the safetensors library refuses it, and where a name is there twice.

    Raises:
        CheckpointError: not such a file, cut off, or a dtype that torch or this release lacks.
    """
    with opened(path, "a readable safetensors file") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER_NBYTES):
            raise ValueError(f"its header would have {length} bytes, the file has {size}")
        header = json_object(file.read(length))
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
            raise ValueError(f"__metadata__ is {str(metadata)[:40]}, expected texts by name")
        entries, at = {}, 8 + length
        for _, name, info in sorted((_offsets(name, info), name, info) for name, info in header.items()):
            entries[name] = entry = _described(path.name, 8 + length, name, info)
            begin = 8 + length + info["data_offsets"][0]
            if begin != at:
                raise ValueError(f"{name!r} begins at byte {begin}, the tensor before it ends at {at}")
            at += entry.nbytes
            if at > size:
                raise ValueError(f"the file is truncated: {name} ends at byte {at} of {size}")
        if at != size:
            raise ValueError(f"its tensors end at byte {at} of {size}")
        return metadata, entries


def _offsets(name: str, info: Any) -> list[int]:
    fields = {"dtype": str, "shape": list, "data_offsets": list}
    if type(info) is not dict or any(type(info.get(field)) is not kind for field, kind in fields.items()):
        raise ValueError(f"{name!r} is {str(info)[:80]}, expected dtype, shape and data_offsets")
    offsets = info["data_offsets"]
    if len(offsets) != 2 or not all(map(is_size, offsets)):
        raise ValueError(f"data_offsets of {name!r} are {str(offsets)[:80]}, expected two numbers >= 0")
    name.encode()  # raises for half a surrogate pair: no other program could name it
    return offsets


def _described(file: str, base: int, name: str, info: dict[str, Any]) -> TensorEntry:
    dtype, (begin, end) = info["dtype"], info["data_offsets"]
    if dtype not in ITEM_NBYTES:
        raise ValueError(f"{name!r} has dtype {dtype!r}, expected one of {', '.join(ITEM_NBYTES)}")
    shape = checked_shape(info["shape"], f"the shape of {name!r}")
    piece = Piece(file, base + begin, end - begin, None, (0,) * len(shape), shape)
    entry = TensorEntry(shape, dtype, (piece,) if math.prod(shape) else ())
    if (found := end - begin) != entry.nbytes:
        raise ValueError(f"{name!r} has {found} bytes, expected {entry.nbytes} of {dtype} {list(shape)}")
    return entry


def _write_tensor(sink: Sink, item: Item, at: int) -> tuple[int, int]:
    """Write it from byte ``at`` of the file on: one extent of the file after the other, which the kernel then
    keeps whole (see ``Window``). Bytes that lie so on the host are taken at once, others in chunks."""
    crc = nbytes = 0
    at_once = item.tensor.device.type == "cpu" and item.tensor.is_contiguous()
    for box in [item.box] if at_once else chunks_of(item.box, item.tensor.element_size()):
        rest = bytes_of(item.tensor[box.slices_in(item.box)])
        while rest.nbytes:
            part, rest = np.split(rest, [EXTENT_NBYTES - (at + nbytes) % EXTENT_NBYTES])
            crc = crc32(part.data, crc)
            sink.write(part.data)
            nbytes += part.nbytes
    return nbytes, crc


class Window:
    """A part of one file, mapped: the kernel's own bytes, without a copy. The part moves along as the file is
    read; the caller closes ``fd``.

    The kernel keeps what was written in pieces as large as the writes, up to huge pages, where these end at
    multiples of ``EXTENT_NBYTES`` in the file. A huge page is mapped at once, and read as fast as memory: per
    GiB 0.05 s of CPU to checksum it and 0.08 to copy it, against 0.14 and 0.16 by reads into memory that is
    there (one core, measured).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begin = 0
        self._bytes = np.empty(0, np.uint8)

    def bytes_at(self, start: int, nbytes: int) -> np.ndarray | None:
        """The bytes of the file from ``start`` on, uint8: ``nbytes``, or an extent at least, and what is
        mapped behind it. To change them doesn't change the file.

        All of them have been read when it returns. (Read on first touch, a bad disk or a file that was cut
        would end the process by SIGBUS; so would a page that is dropped before it is looked at, and gone
        since.) None where there is little to gain, or they can't be mapped; to read them says what is wrong.
        """
        if nbytes < _MIN_NBYTES:
            return None
        try:
            if start < self._begin or start + min(nbytes, EXTENT_NBYTES) > self._begin + self._bytes.nbytes:
                self._move(start, min(nbytes, EXTENT_NBYTES))
        except (OSError, ValueError):
            return None
        at = start - self._begin
        first, stop = at - at % mmap.PAGESIZE, min(at + nbytes, self._bytes.nbytes)
        if not advise(self._bytes.ctypes.data + first, stop - first, _POPULATE_READ):
            return None
        return self._bytes[at:stop]

    def _move(self, start: int, nbytes: int) -> None:
        self._begin, self._bytes = start - start % EXTENT_NBYTES, np.empty(0, np.uint8)
        wanted = max(_WINDOW_NBYTES, start - self._begin + nbytes)
        length = min(wanted, os.fstat(self._fd).st_size - self._begin)
        if length < start - self._begin + nbytes:
            raise ValueError("the file is shorter")
        mapped = mmap.mmap(self._fd, length, mmap.MAP_PRIVATE, offset=self._begin)
        self._bytes = np.frombuffer(mapped, np.uint8)


class Reader:
    """Reads boxes of pieces out of the files of one checkpoint folder. Reads no other bytes than those of
    the boxes (where they are mapped: whole pages); of a URL, the files are copied to this host first, each
    when it is needed. ``nbytes`` counts what was read. Not for several threads."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.nbytes = 0
        self._storage = storage_of(folder)
        self._paths: dict[str, Path] = {}
        self._files: dict[str, int] = {}
        self._window: tuple[str, Window] | None = None  # of the file that is being read
        self._buffer = np.empty(CHUNK_NBYTES, np.uint8)  # fresh memory costs more than the read itself

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for fd in self._files.values():
            with contextlib.suppress(OSError):  # all that was wanted has been read
                os.close(fd)
        self._files.clear()
        self._window = None

    @property
    def copies(self) -> bool:
        """Whether copies on this host are read."""
        return self._storage.copies

    def forget(self) -> None:
        """Remove these copies: what is read from here on is copied anew."""
        self._close()
        self._storage.forget(self.folder)

    def chunks(
        self, key: str, entry: TensorEntry, piece: Piece, part: Box
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """The elements of ``part`` (inside of ``piece``) in chunks, each with its box: unsigned integers,
        shaped as the box, valid until the next.

        Raises:
            CheckpointError: the file is missing, unreadable or too short; names file and tensor ``key``.
        """
        for box in chunks_of(part, ITEM_NBYTES[entry.dtype]):
            yield box, self._bits_of(key, entry, piece, box)

    def _bits_of(self, key: str, entry: TensorEntry, piece: Piece, box: Box) -> np.ndarray:
        kind = _BITS[ITEM_NBYTES[entry.dtype]]
        nbytes = box.numel * ITEM_NBYTES[entry.dtype]
        start = _start_of(entry, piece, box)
        with self._reading(key, piece, nbytes) as (fd, window):
            if start is not None:
                found = None if start % kind().itemsize else window.bytes_at(start, nbytes)
                found = _read_into(self._buffer[:nbytes], fd, start) if found is None else found
                return found.view(kind).reshape(box.shape)
            mapped = np.memmap(self._paths[piece.file], kind, "r", piece.start, piece.shape)
            out = self._buffer[:nbytes].view(kind).reshape(box.shape)
            out[...] = mapped[box.slices_in(piece.box)]
            return out

    def run(self, key: str, entry: TensorEntry, piece: Piece, box: Box) -> Iterator[np.ndarray] | None:
        """The bytes of a box of any size, one part after the other, each valid until the next; None where
        they aren't one run in the file. Raises: as ``chunks``."""
        start = _start_of(entry, piece, box)
        return None if start is None else self._run(key, piece, start, box.numel * ITEM_NBYTES[entry.dtype])

    def _run(self, key: str, piece: Piece, start: int, nbytes: int) -> Iterator[np.ndarray]:
        with self._reading(key, piece, nbytes) as (fd, window):
            at = 0
            while at < nbytes:
                found = window.bytes_at(start + at, nbytes - at)
                if found is None:
                    found = _read_into(self._buffer[: nbytes - at], fd, start + at)
                yield found
                at += found.nbytes

    def header(self, file: str) -> tuple[dict[str, str], dict[str, TensorEntry]]:
        """``read_header`` of one of the folder's files. Raises: CheckpointError."""
        with reading(self.folder / file, "a readable safetensors file"):
            return read_header(self._storage.readable(self.folder / file))

    @contextlib.contextmanager
    def _reading(self, key: str, piece: Piece, nbytes: int) -> Iterator[tuple[int, Window]]:
        path = self.folder / piece.file
        self.nbytes += nbytes
        try:
            if piece.file not in self._files:
                self._paths[piece.file] = self._storage.readable(path)
                self._files[piece.file] = open_regular(self._paths[piece.file])
            fd = self._files[piece.file]
            if self._window is None or self._window[0] != piece.file:
                self._window = piece.file, Window(fd)
            yield fd, self._window[1]
        except OSError as error:
            raise UnreadError(f"{path}: can't read {key}: {error.strerror or error}") from error
        except ValueError as error:  # of numpy, if a file is too short to be mapped
            raise CheckpointError(f"{path}: can't read {key}: {error}") from error


def _start_of(entry: TensorEntry, piece: Piece, box: Box) -> int | None:
    """Where in the file the elements of ``box`` begin; None where they aren't one run."""
    first = first_of_run(box, piece.box)
    return None if first is None else piece.start + first * ITEM_NBYTES[entry.dtype]


def _read_into(out: np.ndarray, fd: int, start: int) -> np.ndarray:
    done = 0
    while done < out.nbytes:
        count = os.preadv(fd, [out.data[done:]], start + done)
        if not count:
            raise ValueError(f"the file is truncated (it ends at byte {start + done})")
        done += count
    return out
