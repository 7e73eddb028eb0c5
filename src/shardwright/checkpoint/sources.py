"""Checkpoints that others wrote, as manifests: the same byte ranges, so that loading them is the same code.

    Hugging Face     a folder with model.safetensors, or with model.safetensors.index.json and the files that
                     it names; one file of safetensors; the same of pytorch_model.bin
    torch DCP        a folder with .metadata and *.distcp files
    torch.save       one file with a state dict, or with one inside of it (``torchfile``)
    per-rank files   of fairscale and XlaFullyShardedDataParallel, by their metadata (``rankfiles``)

Only weights are taken. They have no checksums, so the first read makes them; the live state is proved against
these. Nothing is unpickled freely: torch's restricted loader reads state dicts, and ``.metadata`` may name
only the few classes that describe tensors (``dcpfile``).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.dcpfile import METADATA, dcp_entries
from shardwright.checkpoint.folder import find, read_manifest, step_folders
from shardwright.checkpoint.format import MANIFEST, Manifest, TensorEntry, prove
from shardwright.checkpoint.rankfiles import rank_entries, rank_files
from shardwright.checkpoint.shardfile import read_header
from shardwright.checkpoint.torchfile import torch_entries
from shardwright.checkpoint.tree import check_trees
from shardwright.checkpoint.url import Location, RemotePath
from shardwright.errors import CheckpointError
from shardwright.files import json_file, reading


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
    if isinstance(path, RemotePath) or (path.is_dir() and step_folders(path)):
        return find(path)
    is_foreign = path.is_file() or _has(path, METADATA) or _weight_file(path) or rank_files(path)
    return (path, ()) if is_foreign else find(path)


def open_source(path: Location, names: Collection[str] = ()) -> Source:
    """Open what ``locate`` found. ``names`` are the live names, by which a prefix in a foreign one is
    recognised.

    Raises:
        CheckpointError: damaged or incomplete, or a format that can't be read.
    """
    if isinstance(path, RemotePath) or _has(path, MANIFEST):
        manifest = read_manifest(path)
        check_trees(manifest, str(path / MANIFEST))
    elif _has(path, METADATA):
        manifest = _manifest(dcp_entries(path, lambda found: _prefix(found, names)), names)
    elif file := path if path.is_file() else _weight_file(path):
        found = _indexed(file) if file.name.endswith(_INDEX) else _weights_in(file)
        path, manifest = file.parent, _manifest(found, names)
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


def _weights_in(file: Path) -> dict[str, TensorEntry]:
    return read_header(file)[1] if file.suffix == ".safetensors" else torch_entries(file)


# ---- Hugging Face

_INDEX = ".index.json"
_USUAL = tuple(name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", _INDEX))


def _weight_file(path: Path) -> Path | None:
    """A folder's file of weights, or its index, in the order in which transformers looks for them; one of
    another name where there is no other. None for a folder in another layout.

    Raises: CheckpointError for several files of which nothing says which is meant.
    """
    if not path.is_dir() or _has(path, MANIFEST):
        return None
    for name in _USUAL:
        if _has(path, name):
            return path / name
    for pattern in (f"*.safetensors{_INDEX}", "*.safetensors", f"pytorch_model*.bin{_INDEX}"):
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            raise CheckpointError(
                f"{path}: has {', '.join(file.name for file in found)}, and neither {_USUAL[0]} nor "
                f"{_USUAL[1]}, which would say what belongs together; give the file that is meant"
            )
        if found:
            return found[0]
    return None


def _has(path: Path, name: str) -> bool:
    return (path / name).exists() and not (path / name).is_dir()


def _indexed(index: Path) -> dict[str, TensorEntry]:
    """The tensors of the files that an index names, if these hold what it says."""
    with reading(index, "a readable index"):
        said = json_file(index, "a readable index").get("weight_map")
        if type(said) is not dict:
            raise ValueError(f"weight_map is {str(said)[:40]}, expected the file of each tensor")
        if away := [file for file in said.values() if type(file) is not str or Path(file).name != file]:
            raise ValueError(f"it names {str(away[0])!r}, expected the name of a file beside it")
    files = sorted(set(said.values()))
    if missing := [file for file in files if not (index.parent / file).exists()]:
        raise CheckpointError(f"{index} names {len(missing)} files that are missing: {missing[:5]}")
    held = {file: _weights_in(index.parent / file) for file in files}
    wrong = []
    for name in dict.fromkeys([*said, *(name for entries in held.values() for name in entries)]):
        found = [file for file in files if name in held[file]]
        if not found:
            wrong.append(f"{name} is not in {said[name]}, nor in another file")
        elif len(found) > 1:
            wrong.append(f"{name} is in {' and in '.join(found)}")
        elif said.get(name, found[0]) != found[0]:
            wrong.append(f"{name} is not in {said[name]} but in {found[0]}")
    if wrong:
        listed = "\n  ".join(wrong[:10])
        raise CheckpointError(
            f"{index} and the files disagree about {len(wrong)} tensor(s); get the folder anew:\n  {listed}"
        )
    return {name: entry for entries in held.values() for name, entry in entries.items()}
