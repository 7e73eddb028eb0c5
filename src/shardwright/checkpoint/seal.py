"""The seal of a folder that others wrote: the checksums of its files, in one file beside them.

    model/                          of torch.distributed.checkpoint, or any other folder of files
        .metadata                   says which tensor's each byte of the other files is
        __0_0.distcp                pieces of 2 MiB at most, each of one tensor
        shardwright-seal.json       a manifest of bytes: U8, under the tensors' names

Loaders (torch's, transformers', ours) look for files by name, and pass it by. It lies in the folder, since
that is copied and moved as a whole.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from shardwright.checkpoint.dcpfile import METADATA, dcp_items
from shardwright.checkpoint.folder import file_faults, published, storage_of
from shardwright.checkpoint.format import MANIFEST, Manifest, Piece, TensorEntry, dumps, loads, prove
from shardwright.checkpoint.shardfile import CHUNK_NBYTES
from shardwright.checkpoint.sources import Source
from shardwright.checkpoint.storage import TORN
from shardwright.checkpoint.url import Location
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, warn
from shardwright.files import opened, reading

SEAL = "shardwright-seal.json"
UNNAMED = "unnamed data"
"""What bytes are called that are no tensor's."""
Items = Mapping[str, Iterable[tuple[int, int, str]]]


def find_seal(folder: Location) -> tuple[Source, list[str]] | None:
    """What the seal of a folder says of its bytes, and which of its files are missing, of another size, or
    new; None where there is no seal. Raises: CheckpointError for one that is damaged."""
    path = folder / SEAL
    if not os.path.lexists(path):
        return None
    with opened(Path(path), "a readable seal") as file:
        manifest = loads(file.read().decode(), str(path))
    prove(manifest)
    new = sorted(_names(Path(folder)) - manifest.files.keys() - {SEAL})
    added = [f"{folder / name} was added after the folder was sealed" for name in new]
    return Source(folder, manifest), file_faults(manifest, folder) + added


def write_seal(folder: Path, progress: Callable[[int, int], None] | None) -> None:
    """Seal a folder that has no seal. Raises: CheckpointError; then it has none."""
    with reading(folder, "a folder"):
        for left in folder.glob(f"{TORN}{SEAL}-*"):  # of a call that was killed
            left.unlink(missing_ok=True)
    sizes, items, pieces, done = _files_of(folder), _items_of(folder), dict[str, list[Piece]](), 0
    with published(folder / SEAL) as torn:
        for key, piece in _summed(folder, sizes, items):
            pieces.setdefault(key, []).append(piece)
            done += piece.nbytes
            if progress:
                progress(done, sum(sizes.values()))
        if storage_of(folder).sizes(folder) != sizes:
            raise CheckpointError(f"{folder} has changed while it was sealed; seal it once it is written")
        torn.write_text(dumps(Manifest(0, {key: _entry(each) for key, each in pieces.items()}, sizes)))


def _names(folder: Path) -> set[str]:
    with reading(folder, "a folder"):
        return {each.name for each in folder.iterdir()}


def _files_of(folder: Path) -> dict[str, int]:
    """The bytes of each file. Raises: CheckpointError for what a seal would be wrong of: a checkpoint of
    ours, a save that hasn't ended, what is no file."""
    names, sizes = _names(folder), storage_of(folder).sizes(folder)
    if MANIFEST in names:
        raise CheckpointError(f"{folder} has checksums of its own, which shardwright checkpoint verify reads")
    if others := sorted(names - sizes.keys()):
        raise CheckpointError(f"{folder / others[0]} is no file, and a seal is of files alone; move it away")
    if any(name.endswith(".distcp") for name in names) and not any(name.endswith(METADATA) for name in names):
        raise CheckpointError(f"{folder} has no {METADATA}, which is written last: its save didn't end")
    return dict(sizes)


def _items_of(folder: Path) -> Items:
    """What lies where in the files, where that is known."""
    try:
        return dcp_items(folder) if (folder / METADATA).exists() else {}
    except CheckpointError as error:
        warn(f"{error}; the seal names no tensors, only files and bytes")
        return {}


def _summed(folder: Path, sizes: Mapping[str, int], items: Items) -> Iterator[tuple[str, Piece]]:
    """Every byte of the files, in pieces of one name each."""
    ends = dict[str, int]()
    for name in sorted({*sizes, *items}):
        with opened(folder / name, "readable") as file:
            for key, start, end in _spans(name, sizes.get(name, 0), items.get(name, ())):
                for at in range(start, end, CHUNK_NBYTES):
                    data = file.read(min(CHUNK_NBYTES, end - at))
                    begin = ends.get(key, 0)
                    ends[key] = begin + len(data)
                    yield key, Piece(name, at, len(data), crc32(data), (begin,), (len(data),))


def _spans(file: str, size: int, items: Iterable[tuple[int, int, str]]) -> Iterator[tuple[str, int, int]]:
    at = 0
    for start, nbytes, name in sorted(items):
        if start + nbytes > size:
            raise CheckpointError(f"{file} ends at byte {size}, {name} at {start + nbytes} by {METADATA}")
        yield UNNAMED, at, start
        yield name, max(at, start), start + nbytes
        at = max(at, start + nbytes)
    yield UNNAMED, at, size


def _entry(pieces: list[Piece]) -> TensorEntry:
    return TensorEntry((sum(piece.nbytes for piece in pieces),), "U8", tuple(pieces))
