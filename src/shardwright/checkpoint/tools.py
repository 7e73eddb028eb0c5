"""Looking at checkpoints, checking, comparing and converting them: one process, no model, one tensor in
memory.

Every function takes what ``load`` takes (a checkpoint, a folder of them, or one that others wrote) and
returns data; ``exit_code`` is for scripts: 0 all is well, 1 it is not. What can't be opened raises
CheckpointError.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardwright.checkpoint.folder import published, step_folder
from shardwright.checkpoint.format import Box, Manifest, Piece, TensorEntry
from shardwright.checkpoint.live import Whole
from shardwright.checkpoint.rankfiles import write_rank_files
from shardwright.checkpoint.save import save
from shardwright.checkpoint.seal import SEAL, UNNAMED, find_seal, write_seal
from shardwright.checkpoint.shardfile import (
    DTYPE_NAME,
    TORCH_DTYPE,
    Reader,
    bits_of,
    by_file,
    bytes_of,
    tensor_of,
    write_index,
    write_whole,
)
from shardwright.checkpoint.sink import write_all
from shardwright.checkpoint.sources import Source, locate, open_source
from shardwright.checkpoint.url import Location, local_only, location_of
from shardwright.checkpoint.verify import crc_in, header_faults
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, InputError

MAX_FILE_NBYTES = 5 * 10**9
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        key: its name, such as "model/weight".
        shape: the logical shape.
        dtype: its name in the file format, such as "BF16".
        nbytes: bytes of the whole tensor.
        num_pieces: how many pieces it is stored in.
        aliases: other names of a tied tensor.
        num_nan: number of NaNs; None where the dtype isn't floating point, or values were not read.
        constant: the one value of all elements as text; empty where they differ.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    num_pieces: int
    aliases: tuple[str, ...]
    num_nan: int | None = None
    constant: str = ""


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint. Opening it has proved that the pieces cover every tensor.

    Attributes:
        path: the checkpoint's folder.
        step: number of optimizer steps done.
        tensors: one entry for each tensor, by name.
        files: name -> bytes.
        written_by: versions and number of ranks of the run that wrote it.
        skipped: why newer checkpoints were passed over.
        suspicious: tensors of the model that have NaNs, and matrices of which all elements are equal.
    """

    path: Location
    step: int
    tensors: tuple[TensorInfo, ...]
    files: Mapping[str, int]
    written_by: Mapping[str, Any]
    skipped: tuple[str, ...]
    suspicious: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """For scripts: 1 where a tensor is suspicious, else 0."""
        return int(bool(self.suspicious))


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        path: the checkpoint's folder.
        num_tensors: how many tensors it has; of a sealed folder, objects beside them count, too.
        nbytes: their bytes; of a sealed folder, of all files.
        num_unchecked: pieces that have no checksum, as in formats of others that aren't sealed.
        faults: every damaged piece, with file, tensor and bytes.
    """

    path: Location
    num_tensors: int
    nbytes: int
    num_unchecked: int
    faults: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """For scripts: 1 where a piece is damaged, else 0."""
        return int(bool(self.faults))


@dataclass(frozen=True)
class Difference:
    """In what two checkpoints differ.

    Attributes:
        only_a: tensors that only the first one has.
        only_b: tensors that only the second one has.
        changed: tensor whose bits differ -> by how much.
        state: small state that differs, by name.
        num_equal: number of tensors with the same bits.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: Mapping[str, str]
    state: tuple[str, ...]
    num_equal: int

    @property
    def exit_code(self) -> int:
        """For scripts: 1 where anything differs, else 0."""
        return int(bool(self.only_a or self.only_b or self.changed or self.state))


def inspect(path: str | Path, *, values: bool = True) -> Inspection:
    """List what is in a checkpoint. One process; host memory: one tensor.

    Args:
        path: whatever ``load`` takes.
        values: read all values, to find NaNs and constant tensors.

    Returns:
        The list, with what is suspicious in it.

    Raises:
        CheckpointError: it can't be opened, its pieces don't cover a tensor, or (with ``values``) a piece is
            damaged.
        InputError: the URL is of an unknown kind.
    """
    source = open_checkpoint(path)
    with Reader(source.folder) as reader:
        tensors = tuple(_info(reader, k, e, values) for k, e in sorted(source.manifest.tensors.items()))
    odd = [
        f"{t.key}: " + (f"{t.num_nan} NaN" if t.num_nan else f"all elements are {t.constant}")
        for t in tensors
        if t.num_nan or (t.constant and t.key.startswith("model/") and len(t.shape) > 1)
    ]
    m = source.manifest
    return Inspection(source.folder, m.step, tensors, m.files, m.written_by, source.skipped, tuple(odd))


def verify(path: str | Path, *, progress: Progress | None = None) -> Verification:
    """Read every byte and compare every checksum, and what the files say of themselves, which other programs
    read; it finds all damage, not only the first. One process.

    Args:
        path: whatever ``load`` takes, or a folder that was sealed. What is under a URL is copied to this host
            anew.
        progress: called with the bytes done and the bytes in all.

    Returns:
        What is damaged.

    Raises:
        CheckpointError: it can't be opened, or its pieces don't cover a tensor.
        InputError: the URL is of an unknown kind.
        MissingExtra: the package for this kind of URL isn't installed.
    """
    source, faults = find_seal(location_of(path)) or (open_checkpoint(path), [])
    manifest, damaged = source.manifest, list[tuple[str, Piece]]()
    num_unchecked = done = 0
    with Reader(source.folder) as reader:
        reader.forget()
        if manifest.written_by:  # of others' files the header is all that there is
            faults += header_faults(reader, manifest)
        crc_of = crc_in(reader)
        for key, entry in sorted(manifest.tensors.items()):
            for piece in entry.pieces:
                if piece.crc32 is None:
                    num_unchecked += 1
                    continue
                try:
                    if crc_of(key, entry, piece, piece.box) != piece.crc32:
                        damaged.append((key, piece))
                except CheckpointError as error:
                    faults.append(str(error))
                done += piece.nbytes
                if progress:
                    progress(done, manifest.nbytes)
    faults = tuple(dict.fromkeys([*faults, *_runs(damaged)]))
    num_tensors = len(manifest.tensors.keys() - {UNNAMED})
    return Verification(source.folder, num_tensors, manifest.nbytes, num_unchecked, faults)


def _runs(damaged: Iterable[tuple[str, Piece]]) -> list[str]:
    """Which bytes of which files are damaged: a line for those of one tensor that lie together."""
    runs: list[tuple[str, str, int, int]] = []
    for key, piece in damaged:
        start, end = piece.start, piece.start + piece.nbytes
        if runs and runs[-1][:2] == (piece.file, key) and runs[-1][3] == start:
            start = runs.pop()[2]
        runs.append((piece.file, key, start, end))
    return [f"{file}: {key} is damaged (bytes {start} to {end})" for file, key, start, end in runs]


def seal(path: str | Path, *, progress: Progress | None = None) -> bool:
    """Store the checksums of a folder that another program wrote, as ``torch.distributed.checkpoint``: from
    then on ``verify`` finds each byte that changes. One process.

    They are in one file, ``shardwright-seal.json``, which loaders pass by; the folder's own files are only
    read. To seal a folder again that was changed on purpose, remove that file.

    Args:
        path: a local folder of files, without folders in it.
        progress: called with the bytes done and the bytes in all.

    Returns:
        Whether it was sealed now: False for a folder that was sealed before and is as it was then.

    Raises:
        CheckpointError: nothing was written: it has changed since it was sealed, can't be read or written,
            is incomplete, holds what is no file, or is a checkpoint with checksums of its own.
        InputError: the path is a URL.

    Examples:
        >>> from torch.distributed.checkpoint import save
        >>> from shardwright.checkpoint.tools import seal, verify
        >>> _ = save({"weight": torch.ones(3)}, checkpoint_id="saved", no_dist=True)
        >>> seal("saved"), seal("saved")
        (True, False)
        >>> verify("saved").faults
        ()
    """
    folder = local_only(path, "a seal is written into")
    if find_seal(folder) is None:
        write_seal(folder, progress)
        return True
    if faults := verify(folder, progress=progress).faults:
        listed = "\n  ".join(faults)
        raise CheckpointError(
            f"{folder} has changed since it was sealed; if that was meant, remove its {SEAL} and seal it "
            f"again:\n  {listed}"
        )
    return False


def diff(a: str | Path, b: str | Path) -> Difference:
    """Compare two checkpoints bit by bit, whatever their pieces; random state is left out. One process; host
    memory: two tensors.

    Args:
        a: whatever ``load`` takes.
        b: the same.

    Returns:
        In what they differ.

    Raises:
        CheckpointError: one can't be opened, or is damaged.
        InputError: the URL is of an unknown kind.
    """
    left, right = open_checkpoint(a), open_checkpoint(b)
    keys = [{k for k in s.manifest.tensors if not k.startswith("rng/")} for s in (left, right)]
    changed, both = {}, sorted(keys[0] & keys[1])
    with Reader(left.folder) as reader_a, Reader(right.folder) as reader_b:
        for key in both:
            entry_a, entry_b = left.manifest.tensors[key], right.manifest.tensors[key]
            if change := _change(key, (reader_a, entry_a), (reader_b, entry_b)):
                changed[key] = change
    states = [_small_state(source.manifest) for source in (left, right)]
    state = sorted(k for k in {*states[0], *states[1]} if states[0].get(k) != states[1].get(k))
    if left.manifest.step != right.manifest.step:
        state.insert(0, f"step ({left.manifest.step}, {right.manifest.step})")
    only_a, only_b = (tuple(sorted(keys[i] - keys[1 - i])) for i in (0, 1))
    return Difference(only_a, only_b, changed, tuple(state), len(both) - len(changed))


def consolidate(
    path: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    tied_copies: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write the model's weights as plain safetensors, in the model's own names. One process; host memory: one
    tensor.

    Tied weights are stored once, with their other names in the file's metadata (as
    ``safetensors.torch.save_model`` does, and ``load_model`` understands). ``out`` appears when it is
    complete.

    Args:
        path: whatever ``load`` takes.
        out: a folder that must not exist yet. It gets ``model.safetensors``, or several files with
            ``model.safetensors.index.json``.
        dtype: convert floating-point weights to it.
        max_file_nbytes: bytes above which there are several files.
        tied_copies: store tied weights under each of their names, for ``load_state_dict`` with
            ``strict=True``.
        progress: called with the bytes done and the bytes in all.

    Returns:
        The files.

    Raises:
        CheckpointError: the checkpoint is damaged or has no weights, ``out`` exists, or it can't be written.
        InputError: ``dtype`` isn't a floating-point one.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(f"dtype is {dtype}, expected a floating one")
    source, out = open_checkpoint(path), local_only(out, "safetensors are written to")
    exports = _exports(source.manifest, dtype, tied_copies)
    files = by_file(exports, max_file_nbytes)
    total, done = sum(x.nbytes for x in exports), 0

    def read(members: list[_Export]) -> Iterator[torch.Tensor]:
        nonlocal done
        for x in members:
            yield read_tensor(reader, x.key, x.entry).to(x.dtype)
            done += x.nbytes
            if progress:
                progress(done, total)

    with published(out) as torn, Reader(source.folder) as reader:
        torn.mkdir()
        for name, members in files.items():
            members.sort(key=lambda x: -x.dtype.itemsize)  # every tensor aligned to its items
            tied = {alias: x.name for x in members for alias in x.tied}
            described = [(x.name, DTYPE_NAME[x.dtype], x.entry.shape, x.nbytes) for x in members]
            write_whole(torn / name, described, read(members), tied)
        write_index(torn, {x.name: name for name, members in files.items() for x in members}, total)
    return tuple(out / name for name in files)


# ---- what they are made of


def read_tensor(reader: Reader, key: str, entry: TensorEntry) -> torch.Tensor:
    """One whole tensor, on the host, with its checksums verified.

    Args:
        reader: reads the checkpoint's files.
        key: the tensor's name.
        entry: what the manifest says of it.

    Returns:
        The tensor, a plain one of the shape and dtype of ``entry``.

    Raises:
        CheckpointError: it is damaged; file and tensor are named.
    """
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype])
    whole = Box.whole(entry.shape)
    for piece in entry.pieces:
        crc = 0
        for box, bits in reader.chunks(key, entry, piece, piece.box):
            crc = crc32(bits.data, crc)
            tensor[box.slices_in(whole)] = tensor_of(bits, entry.dtype)
        if piece.crc32 is not None and crc != piece.crc32:
            raise CheckpointError(f"{piece.file}: {key} is damaged; nothing was written")
    return tensor


def open_checkpoint(path: str | Path) -> Source:
    """Open a checkpoint, and prove that its pieces cover every tensor. One process; no tensor is read.

    Args:
        path: whatever ``load`` takes.

    Returns:
        Its folder and manifest.

    Raises:
        CheckpointError: it can't be opened, or its pieces don't cover a tensor.
        InputError: the URL is of an unknown kind.
    """
    folder, skipped = locate(location_of(path))
    return replace(open_source(folder), skipped=skipped)


def _info(reader: Reader, key: str, entry: TensorEntry, values: bool) -> TensorInfo:
    num_nan, constant = None, ""
    if values and entry.numel:
        tensor = read_tensor(reader, key, entry)
        if tensor.is_floating_point():
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            num_nan = int(wide.isnan().sum())
        bits = bits_of(tensor).reshape(-1)
        if bits.size > 1 and (bits == bits[0]).all():
            constant = str(tensor.reshape(-1)[0].item())
    described = (key, entry.shape, entry.dtype, entry.nbytes, len(entry.pieces), entry.aliases)
    return TensorInfo(*described, num_nan, constant)


def _small_state(manifest: Manifest) -> dict[str, Any]:
    """What training goes on with; not which save of its folder it was."""
    state = {k: v for k, v in manifest.state.items() if k != "line" and isinstance(v, dict)}
    return {f"{kind}/{k}": v for kind, values in state.items() for k, v in values.items()}


def _change(key: str, a: tuple[Reader, TensorEntry], b: tuple[Reader, TensorEntry]) -> str:
    (reader_a, entry_a), (reader_b, entry_b) = a, b
    if (entry_a.shape, entry_a.dtype) != (entry_b.shape, entry_b.dtype):
        return f"{entry_a.dtype} {list(entry_a.shape)}, {entry_b.dtype} {list(entry_b.shape)}"
    sums = [{(p.offset, p.shape): p.crc32 for p in e.pieces} for e in (entry_a, entry_b)]
    if sums[0] == sums[1] and None not in sums[0].values():
        return ""  # equal by their checksums: nothing to read
    x, y = read_tensor(reader_a, key, entry_a), read_tensor(reader_b, key, entry_b)
    if np.array_equal(bits_of(x), bits_of(y)):
        return ""
    num = int((bits_of(x) != bits_of(y)).sum())
    largest = (x.double() - y.double()).abs().max().item() if not x.is_complex() else float("nan")
    return f"{num} of {x.numel()} elements differ, by at most {largest:g}"


@dataclass(frozen=True)
class _Export:
    """A tensor of the checkpoint under the name and in the dtype in which it is exported."""

    name: str
    key: str
    entry: TensorEntry
    dtype: torch.dtype
    tied: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.entry.numel * self.dtype.itemsize


def _exports(manifest: Manifest, dtype: torch.dtype | None, tied_copies: bool) -> list[_Export]:
    exports = []
    for key, entry in sorted(manifest.tensors.items()):
        if not key.startswith("model/"):
            continue
        saved = TORCH_DTYPE[entry.dtype]
        target = dtype if dtype is not None and saved.is_floating_point else saved
        names = [name.removeprefix("model/") for name in (key, *entry.aliases)]
        if tied_copies:
            exports += [_Export(name, key, entry, target, ()) for name in names]
        else:
            exports.append(_Export(names[0], key, entry, target, tuple(names[1:])))
    if not exports:
        raise CheckpointError("the checkpoint holds no weights (no key starts with model/)")
    return exports


# ---- into another format


class Format(StrEnum):
    """What ``convert`` writes.

    safetensors   a folder of plain safetensors (``consolidate``)
    torch         one file that ``torch.load(..., weights_only=True)`` opens
    dcp           a folder of ``torch.distributed.checkpoint``
    fairscale     a folder of per-rank files, as its FullyShardedDataParallel saves them
    xla           the same, as XlaFullyShardedDataParallel does
    shardwright   a folder of checkpoints, with this one in it
    """

    SHARDWRIGHT = "shardwright"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"
    FAIRSCALE = "fairscale"
    XLA = "xla"


PER_RANK = (Format.FAIRSCALE, Format.XLA)


def convert(
    src: str | Path, dst: str | Path, to: Format, *, ranks: int = 1, progress: Progress | None = None
) -> Path:
    """Write a model's weights in another format. One process.

    The result was read again and equals the source bit by bit before it appears. Names and dtypes stay. Tied
    weights are stored once in ``shardwright``, ``safetensors``, ``torch`` and ``fairscale``, and under each
    name in ``dcp`` and ``xla``. Temporary files beside ``dst`` take as much disk as the model.

    Args:
        src: whatever ``load`` takes.
        dst: a folder or file that must not exist yet.
        to: the format.
        ranks: how many files to write in a format where each is one rank's.
        progress: called with the bytes read and the bytes in all.

    Returns:
        What was written.

    Raises:
        CheckpointError: the source is damaged or has no weights, or ``dst`` exists or can't be written.
        InputError: ``ranks`` is below 1, or above 1 in a format that has no files per rank.
        MissingExtra: the package for this kind of URL isn't installed.
    """
    if ranks < 1 or (ranks > 1 and to not in PER_RANK):
        raise InputError(f"ranks is {ranks}, expected 1, or more with {' or '.join(PER_RANK)}")
    dst = local_only(dst, "what is converted is written to")
    if to is Format.SAFETENSORS:
        consolidate(src, dst, progress=progress)
        return dst
    source = open_checkpoint(src)
    with published(dst) as torn, tempfile.TemporaryDirectory(dir=torn.parent, prefix=".torn-") as scratch:
        tensors = _mapped(source, Path(scratch), progress)
        written = torn
        if to is Format.TORCH:
            with open(torn, "xb") as file:
                torch.save(tensors, file)
        elif to in PER_RANK:
            torn.mkdir()
            write_rank_files(torn, tensors, str(to), ranks, _buffers(source.manifest, tensors))
        elif to is Format.DCP:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
                save_dcp(tensors, checkpoint_id=torn, no_dist=True)
        else:
            save(torn, model=Whole(tensors), step=source.manifest.step)
            written = step_folder(torn, source.manifest.step)
        _compare(tensors, open_source(written))
    return dst if to is not Format.SHARDWRIGHT else step_folder(dst, source.manifest.step)


def _buffers(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of what is no parameter, as far as a checkpoint tells: integers, what is whole beside shards."""
    stored = {name: manifest.tensors[key] for name, key in manifest.keys_of("model/").items()}
    any_sharded = any(entry.sharded for entry in stored.values())
    whole = {name for name in tensors if any_sharded and not stored[f"model/{name}"].sharded}
    return whole | {name for name, tensor in tensors.items() if not tensor.is_floating_point()}


def _mapped(source: Source, scratch: Path, progress: Progress | None) -> dict[str, torch.Tensor]:
    """The weights by name, tied ones as one tensor, each over a file in ``scratch``."""
    manifest, read = source.manifest, dict[str, torch.Tensor]()
    names = manifest.keys_of("model/")
    if not names:
        raise CheckpointError(f"{source.folder} holds no weights (no key starts with model/)")
    total, done = sum(manifest.tensors[key].nbytes for key in set(names.values())), 0
    with Reader(source.folder) as reader:
        for number, key in enumerate(sorted(set(names.values()))):
            entry = manifest.tensors[key]
            tensor = read_tensor(reader, key, entry)
            if entry.nbytes:
                with open(scratch / str(number), "xb", buffering=0) as file:
                    write_all(file.fileno(), bytes_of(tensor).data)
                flat = torch.from_file(file.name, size=entry.nbytes, dtype=torch.uint8, shared=True)
                tensor = flat.view(TORCH_DTYPE[entry.dtype]).reshape(entry.shape)
            read[key] = tensor
            done += entry.nbytes
            if progress:
                progress(done, total)
    return {name.removeprefix("model/"): read[key] for name, key in names.items()}


def _compare(tensors: dict[str, torch.Tensor], written: Source) -> None:
    found = written.manifest.keys_of("model/")
    expected = {f"model/{name}": tensor for name, tensor in tensors.items()}
    wrong = sorted(found.keys() ^ expected.keys())
    with Reader(written.folder) as reader:
        for name in found.keys() & expected.keys():
            got = read_tensor(reader, found[name], written.manifest.tensors[found[name]])
            tensor = expected[name]
            same = got.dtype == tensor.dtype and np.array_equal(bits_of(got), bits_of(tensor))
            wrong += [] if same else [name]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors differ after they were written: {wrong[:5]}; removed")
