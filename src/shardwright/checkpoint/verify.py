"""Checksums of what ranks hold in parts, put together and compared with the manifest, on read and
afterwards."""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shardwright.checkpoint.agree import Partial, Ranks
from shardwright.checkpoint.format import (
    ITEM_NBYTES,
    Box,
    Manifest,
    Piece,
    TensorEntry,
    crc32_in_chunks,
    run_crc32,
)
from shardwright.checkpoint.shardfile import METADATA, Reader
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError

Wanted = tuple[str, TensorEntry, Box]
"""A tensor's key, its entry, and the box of it that this rank holds or will hold."""

PartCrc = Callable[[str, TensorEntry, Piece, Box], int]
"""Gives what a box inside of a piece contributes to the piece's CRC-32 (see ``part_crc32``), as it is in a
file, or in a live tensor."""


def crc_in(reader: Reader) -> PartCrc:
    """Of what is in the files."""

    def crc_of(key: str, entry: TensorEntry, piece: Piece, part: Box) -> int:
        run = reader.run(key, entry, piece, part)
        if run is None:
            chunks = reader.chunks(key, entry, piece, part)
            return crc32_in_chunks(part, piece.box, ITEM_NBYTES[entry.dtype], chunks)
        crc = functools.reduce(lambda crc, part: crc32(part.data, crc), run, 0)
        return run_crc32(crc, part, piece.box, ITEM_NBYTES[entry.dtype])

    return crc_of


def parts_of(wanted: Iterable[Wanted]) -> Iterable[tuple[str, TensorEntry, Piece, Box]]:
    """For each wanted box, the pieces it meets, and the part of each that it wants."""
    for key, entry, box in wanted:
        for piece in entry.pieces:
            part = piece.box.intersect(box)
            if part is not None:
                yield key, entry, piece, part


def header_faults(reader: Reader, manifest: Manifest) -> list[str]:
    """How the headers of our files differ from the manifest: loads don't look at them, and other programs
    look at nothing else. Of copies that the manifest doesn't list (of what several ranks have written it
    takes the first), their bytes too."""
    stored: dict[str, dict[int, tuple[str, Piece]]] = {file: {} for file in manifest.files}
    for key, entry in manifest.tensors.items():
        for piece in entry.pieces:
            stored[piece.file][piece.start] = key, piece
    faults = []
    for file, pieces in stored.items():
        try:
            metadata, found = reader.header(file)
            if metadata != METADATA:
                faults.append(f"{file}: the header has metadata {metadata}, expected {METADATA}")
            faults += [f"{file}: {fault}" for fault in _differences(reader, manifest, pieces, found)]
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def _differences(
    reader: Reader,
    manifest: Manifest,
    pieces: dict[int, tuple[str, Piece]],
    found: Mapping[str, TensorEntry],
) -> Iterable[str]:
    numbers = Counter[str]()
    for name, entry in found.items():
        start = entry.pieces[0].start if entry.pieces else -1
        listed = name if name in manifest.tensors else name.rpartition("#")[0]
        key, piece = pieces.pop(start, (listed, None))
        number = numbers[key]
        numbers[key] += 1
        expected = manifest.tensors.get(key)
        if expected is None or name != (f"{key}#{number}" if number else key):
            yield f"the header calls a tensor {name!r}, by the manifest it is {key or 'none of them'!r}"
        elif entry.dtype != expected.dtype or (piece is not None and entry.shape != piece.shape):
            right = f"{expected.dtype} {list(piece.shape if piece is not None else expected.shape)}"
            yield f"{key} is {entry.dtype} {list(entry.shape)} by the header, expected {right}"
        elif piece is None and key not in manifest.state.get("diverged", ()):
            copy = entry.pieces[0] if entry.pieces else None
            crc = copy and crc_in(reader)(key, entry, copy, copy.box)
            if (entry.shape, crc) not in {(p.shape, p.crc32) for p in expected.pieces}:
                yield f"{name} is damaged, or no copy of a piece that the manifest has"
    for key, piece in pieces.values():
        yield f"the header doesn't have {key} (bytes {piece.start} to {piece.start + piece.nbytes})"


class Verifier:
    """Compares pieces with their checksums, together with the other ranks.

    A piece without a checksum (formats of others) gets the one it has when it is first seen; what comes later
    must equal that.
    """

    def __init__(self, group: Ranks) -> None:
        self.group = group
        self._first: dict[tuple[str, int], int] = {}

    def verify(self, what: str, look: Callable[[], list[Partial]]) -> None:
        """Every rank calls it; ``look`` takes the ``checksums`` of its own boxes.

        Raises:
            CheckpointError: on all ranks, naming file and tensor of every piece that differs.
        """
        pieces: dict[tuple[str, int], list[Partial]] = {}
        for partials in self.group.together(what, look):
            for partial in partials:
                pieces.setdefault((partial.piece.file, partial.piece.start), []).append(partial)
        faults = [fault for partials in pieces.values() for fault in self._combine(partials)]
        if faults:
            raise CheckpointError(f"{what}\n  " + "\n  ".join(faults))

    def checksums(self, wanted: Iterable[Wanted], crc_of: PartCrc) -> list[Partial]:
        """Local: whole pieces are compared, and raise; parts of pieces are returned."""
        partials, faults = [], []
        for key, entry, piece, part in parts_of(wanted):
            crc = crc_of(key, entry, piece, part)
            if part != piece.box:
                partials.append(Partial(key, piece, part, crc))
            else:
                faults += self._compare(key, piece, crc)
        if faults:
            raise CheckpointError("; ".join(faults))
        return partials

    def _combine(self, partials: list[Partial]) -> list[str]:
        key, piece = partials[0].key, partials[0].piece
        crcs: dict[Box, int] = {}
        for partial in partials:  # replicas hold the same part: it counts once, and they must agree
            if crcs.setdefault(partial.part, partial.crc32) != partial.crc32:
                return [f"{key}: the replicas of {partial.part} differ"]
        held = sum(part.numel for part in crcs)
        if held != piece.box.numel:
            return [f"{piece.file}: {key}: ranks hold {held} of {piece.box.numel} elements of a piece"]
        return self._compare(key, piece, functools.reduce(operator.xor, crcs.values()))

    def _compare(self, key: str, piece: Piece, crc: int) -> list[str]:
        expected = piece.crc32
        if expected is None:
            expected = self._first.setdefault((piece.file, piece.start), crc)
        if crc == expected:
            return []
        return [
            f"{piece.file}: {key} is damaged (elements {list(piece.offset)}+{list(piece.shape)}, bytes "
            f"{piece.start} to {piece.start + piece.nbytes}, have checksum {crc:08x}, "
            f"expected {expected:08x})"
        ]
