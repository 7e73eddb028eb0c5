"""What a checkpoint is: the manifest, the pieces it is made of, their checksums, and the proof of coverage.

    step-000123/
        manifest.json             every tensor: shape, dtype, aliases, pieces; the small state; its checksum
        shard-00000.safetensors   the pieces that one writer owned; the safetensors library opens it
        shard-00001.safetensors

A *piece* is a box of one tensor's logical index space (an offset and a shape), stored row-major and
contiguous in one file. Nothing here says how many ranks wrote it, in which groups, or on which device: only
names and indices.

    tensor [7, 3] written by 3 ranks as Shard(0)    read by 2 ranks: each intersects its box with the pieces

        row 0..2  piece 0  (shard-00000)            rank 0 wants rows 0..3: piece 0 whole, piece 1 row 3
        row 3..5  piece 1  (shard-00001)            rank 1 wants rows 4..6: piece 1 rows 4..5, piece 2
        row 6     piece 2  (shard-00002)

CRC-32 was chosen as the checksum because it is *additive*: the checksum of a piece is the XOR of what its
parts contribute, each shifted by the bytes that follow it. So ranks that read different parts of one piece
can verify it together with one integer each, and the same integers verify the live state after the copy, at
any world size. This module is pure: no torch, no devices, no processes.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.checksum import crc32
from shardwright.errors import CheckpointError
from shardwright.files import is_size, json_object, reading

FORMAT = "shardwright-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

# safetensors' names of dtypes, with the bytes of one element. Bits are stored as they are: nothing is
# converted.
ITEM_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A box of a tensor's index space: ``offset[d] <= index[d] < offset[d] + shape[d]`` in every dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or min((*self.offset, *self.shape), default=0) < 0:
            raise CheckpointError(
                f"a piece of a tensor has offset {self.offset} and shape {self.shape}, expected a "
                "number >= 0 for each dim in both; the checkpoint is damaged, take an older one"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The common box, or None where no element is common."""
        offset = tuple(map(max, self.offset, other.offset))
        end = tuple(map(min, self.end, other.end))
        if any(e <= o for o, e in zip(offset, end, strict=True)):
            return None
        return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that pick this box out of an array that holds ``outer``."""
        dims = zip(self.offset, self.shape, outer.offset, strict=True)
        return tuple(slice(o - base, o - base + s) for o, s, base in dims)

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        return Box((0,) * len(shape), tuple(shape))


def chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """``(offset, length)`` of chunk ``index`` as torch.chunk cuts: ceil-sized, the last ones short or
    empty."""
    step = -(-size // num_chunks)
    offset = min(step * index, size)
    return offset, min(step, size - offset)


@dataclass(frozen=True)
class Piece:
    """One box of one tensor, in ``file`` from byte ``start``, row-major.

    ``crc32`` is zlib's, of exactly those bytes; None in formats that have no checksums.
    """

    file: str
    start: int
    nbytes: int
    crc32: int | None
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint: its logical ``shape``, its ``dtype`` (a name of safetensors) and its
    pieces.

    ``aliases`` are further keys of the same tensor (tied weights), stored once. ``sharded`` says that the
    tensor was a distributed one, whatever its layout: state of an optimizer is rebuilt as one.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()
    sharded: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_NBYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says about itself.

    ``tensors`` is keyed ``model/NAME``, ``optimizer/NAME/KEY``, ``extra/PATH``, ``rng/RANK/PATH``;
    ``files`` gives the size of each in bytes; ``state`` is the small state (plain JSON, see ``tree``).
    """

    step: int
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, int]
    state: Mapping[str, Any] = field(default_factory=dict)
    written_by: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def keys_of(self, prefix: str) -> dict[str, str]:
        """Every key and alias under ``prefix``, each mapped to the key that stores it."""
        found = {}
        for key, entry in self.tensors.items():
            for name in (key, *entry.aliases):
                if name.startswith(prefix):
                    found[name] = key
        return found

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def coverage_faults(entry: TensorEntry) -> list[str]:
    """Why the pieces of ``entry`` do not cover each of its elements exactly once; empty where they do.

    In bounds, pairwise disjoint and equal in volume to the whole: together these are the proof.
    """
    faults = []
    whole = Box.whole(entry.shape)
    for piece in entry.pieces:
        ends = zip(piece.box.end, entry.shape, strict=False)
        if len(piece.shape) != len(entry.shape) or any(end > size for end, size in ends):
            faults.append(f"piece {piece.offset}+{piece.shape} in {piece.file} lies outside of {entry.shape}")
        elif piece.nbytes != piece.box.numel * ITEM_NBYTES[entry.dtype]:
            faults.append(f"piece {piece.offset}+{piece.shape} in {piece.file} has {piece.nbytes} bytes")
    if faults:
        return faults
    for a, b in overlaps([piece.box for piece in entry.pieces]):
        first, second = entry.pieces[a], entry.pieces[b]
        faults.append(f"elements {first.offset}.. stored twice: {first.file}, {second.file}")
    covered = sum(piece.box.numel for piece in entry.pieces)
    if covered != whole.numel:
        faults.append(f"{covered} of {whole.numel} elements are stored")
    return faults


def overlaps(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Index pairs of boxes that share an element, at least one pair if there is any. Sorted along the first
    dim in which they differ, so that the usual case (slices along one dim) costs n log n."""
    pairs = []
    order = sorted((i for i in range(len(boxes)) if boxes[i].numel), key=lambda i: boxes[i].offset)
    active: list[int] = []
    dims = range(len(boxes[0].shape)) if boxes else ()
    dim = next((d for d in dims if len({b.offset[d] for b in boxes}) > 1), 0)
    for i in sorted(order, key=lambda i: boxes[i].offset[dim : dim + 1]):
        active = [j for j in active if not boxes[j].shape or boxes[j].end[dim] > boxes[i].offset[dim]]
        pairs += [(j, i) for j in active if boxes[j].intersect(boxes[i])]
        active.append(i)
    return pairs


def prove(manifest: Manifest) -> None:
    """Prove that every element of every tensor is stored exactly once and inside of a listed file.

    Raises:
        CheckpointError: naming every tensor for which that does not hold.
    """
    faults = []
    names: set[str] = set()
    for key, entry in manifest.tensors.items():
        faults += [f"{key}: {fault}" for fault in coverage_faults(entry)]
        for piece in entry.pieces:
            size = manifest.files.get(piece.file)
            if size is None or piece.start + piece.nbytes > size:
                faults.append(
                    f"{key}: bytes {piece.start}+{piece.nbytes} lie outside of {piece.file} ({size} bytes)"
                )
        for name in (key, *entry.aliases):
            if name in names:
                faults.append(f"{name}: named twice")
            names.add(name)
    if faults:
        raise CheckpointError(
            "the checkpoint does not hold every element exactly once:\n  " + "\n  ".join(faults)
        )


def dumps(manifest: Manifest) -> str:
    """The manifest as JSON text. Its first field is the CRC-32 of the rest, so that damage to it is seen."""
    tensors = {k: {**vars(e), "pieces": [vars(p) for p in e.pieces]} for k, e in manifest.tensors.items()}
    text = _canonical({"format": FORMAT, **vars(manifest), "tensors": tensors})
    return f'{{"manifest_crc32":{crc32(text.encode())},{text[1:]}\n'


def loads(text: str, where: str) -> Manifest:
    """Parse what ``dumps`` wrote; ``where`` is named in errors.

    Raises:
        CheckpointError: damaged, of another format, or of a version that this release can't read.
    """
    with reading(where, "a readable manifest"):
        body = json_object(text)
        crc, kind, version = (body.get(name) for name in ("manifest_crc32", "format", "version"))
        if kind != FORMAT:
            raise CheckpointError(f"{where}: format {kind!r}, expected {FORMAT!r}")
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                f"{where}: format version {version}, this release reads up to {VERSION}; upgrade shardwright"
            )
        del body["manifest_crc32"]
        if crc32(_canonical(body).encode()) != crc:
            raise CheckpointError(f"{where}: the manifest is damaged (its checksum does not match)")
        del body["format"]
        _check_fields(body, _FIELDS, "it")
        if not all(map(is_size, (body["step"], *body["files"].values()))):
            raise ValueError("a step or the size of a file is no number >= 0")
        if (line := body["state"].get("line")) is not None:
            _check_fields(line, {"number": int, "after": list}, "its line")
            if not all(type(name) is str for name in line["after"]):
                raise ValueError("what its line comes after is no name")
        tensors = {key: _entry(key, entry) for key, entry in body["tensors"].items()}
        return Manifest(**{**body, "tensors": tensors})


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


_FIELDS = {"version": int, "step": int, "tensors": dict, "files": dict, "state": dict, "written_by": dict}
_FIELDS_OF_ENTRY = {"shape": list, "dtype": str, "pieces": list, "aliases": list, "sharded": bool}
_FIELDS_OF_PIECE = {"file": str, "start": int, "nbytes": int, "crc32": int, "offset": list, "shape": list}


def _check_fields(found: Any, kinds: Mapping[str, type], what: str) -> None:
    if type(found) is not dict or found.keys() != kinds.keys():
        has = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{what} has {str(has)[:200]}, expected {sorted(kinds)}")
    for name, kind in kinds.items():
        if type(found[name]) is not kind or (kind is int and not is_size(found[name])):
            raise ValueError(f"{name} of {what} is {str(found[name])[:40]!r}, expected {kind.__name__}")


def checked_shape(found: Any, what: str) -> tuple[int, ...]:
    """A shape or an offset as a file has it. Raises: ValueError if no tensor can have it."""
    if type(found) is not list or not all(map(is_size, found)) or math.prod(n or 1 for n in found) >= 2**60:
        raise ValueError(f"{what} is {str(found)[:80]}, expected a list of numbers >= 0")
    return tuple(found)


def _entry(key: str, entry: Any) -> TensorEntry:
    what = repr(key)
    _check_fields(entry, _FIELDS_OF_ENTRY, what)
    if entry["dtype"] not in ITEM_NBYTES or not all(type(alias) is str for alias in entry["aliases"]):
        raise ValueError(f"{what} has dtype {entry['dtype']!r} or aliases that this release doesn't know")
    pieces = []
    for p in entry["pieces"]:
        _check_fields(p, _FIELDS_OF_PIECE, f"a piece of {what}")
        box = [checked_shape(p[name], f"{name} of a piece of {what}") for name in ("offset", "shape")]
        pieces.append(Piece(p["file"], p["start"], p["nbytes"], p["crc32"], *box))
        pieces[-1].box  # noqa: B018 (raises if offset and shape don't belong together)
    shape = checked_shape(entry["shape"], f"the shape of {what}")
    return TensorEntry(shape, entry["dtype"], tuple(pieces), tuple(entry["aliases"]), entry["sharded"])


# ---- CRC-32 of a whole from the CRC-32s of its parts: polynomials over GF(2) modulo the CRC-32 polynomial,
# bit-reflected as zlib keeps them (bit 31 is x^0).

_POLY = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    result, square = 0x80000000, 0x40000000
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def crc32_shift(crc: int, nbytes: int) -> int:
    """What a part with checksum ``crc`` contributes to a whole in which ``nbytes`` follow it.

    ``zlib.crc32(a + b) == crc32_shift(zlib.crc32(a), len(b)) ^ zlib.crc32(b)``, for any number of parts.
    """
    return _multiply(_power_of_x(8 * nbytes), crc) if nbytes else crc


def first_of_run(part: Box, piece: Box) -> int | None:
    """Index in ``piece`` of the first element of ``part``, if its elements are one run of the piece's; else
    None."""
    first, stride, full = 0, 1, True
    for d in range(len(piece.shape) - 1, -1, -1):
        if not full and part.shape[d] != 1:
            return None
        first += (part.offset[d] - piece.offset[d]) * stride
        stride *= piece.shape[d]
        full = full and part.shape[d] == piece.shape[d]
    return first


def crc32_in_chunks(part: Box, piece: Box, item_nbytes: int, chunks: Iterable[tuple[Box, np.ndarray]]) -> int:
    """``part_crc32`` of a part that is given chunk by chunk, each with its box, in row-major order."""
    crc, is_run = 0, first_of_run(part, piece) is not None
    for box, bits in chunks:
        crc = crc32(bits.data, crc) if is_run else crc ^ part_crc32(bits, box, piece, item_nbytes)
    return run_crc32(crc, part, piece, item_nbytes) if is_run else crc


def run_crc32(crc: int, part: Box, piece: Box, item_nbytes: int) -> int:
    """``part_crc32`` of a part whose elements are one run of the piece's, and have the CRC-32 ``crc``."""
    first = first_of_run(part, piece)
    assert first is not None
    return crc32_shift(crc, (piece.numel - first - part.numel) * item_nbytes)


def part_crc32(array: np.ndarray, part: Box, piece: Box, item_nbytes: int) -> int:
    """What ``part`` of ``piece`` contributes to the piece's CRC-32; the XOR over parts that tile the piece
    equals it.

    ``array`` holds the part, of any dtype whose items have ``item_nbytes`` bytes, shaped ``part.shape``. A
    part that is cut in an inner dim lies in the piece as many runs with gaps; they are combined by Horner's
    rule.
    """
    rank = len(piece.shape)
    assert array.shape == part.shape, f"{array.shape} is not {part.shape}"
    strides = [math.prod(piece.shape[d + 1 :]) * item_nbytes for d in range(rank)]
    cut = max((d for d in range(rank) if part.shape[d] != piece.shape[d]), default=0)
    starts = np.zeros((1,), np.int64)
    for d in range(min(cut + 1, rank)):
        steps = np.arange(part.shape[d] if d < cut else 1) + part.offset[d] - piece.offset[d]
        starts = (starts[:, None] + steps * strides[d]).reshape(-1)
    runs = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(starts), -1)
    crc, powers = 0, {}
    for start, after, run in zip(starts[:-1].tolist(), starts[1:].tolist(), runs, strict=False):
        if after - start not in powers:
            powers[after - start] = _power_of_x(8 * (after - start))
        crc = _multiply(powers[after - start], crc ^ crc32(run.data))
    crc ^= crc32(runs[-1].data)
    return crc32_shift(crc, piece.numel * item_nbytes - int(starts[-1]) - runs.shape[1])
