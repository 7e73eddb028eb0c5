"""Loading: every rank reads its own part of every tensor, whatever the checkpoint's world size, and proves the result.

    plan     names, shapes and dtypes against the live state; all that doesn't fit, in one list
    check    read this rank's byte ranges and verify the checksums                     (the live state is untouched)
    fill     read again (from the page cache) into the live tensors
    prove    checksum the live state itself against the manifest

A failure in the first two leaves model and optimizer as they were. The third and fourth can only fail if a file
changes or the memory is bad between two reads, and say so.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint import background
from shardwright.checkpoint.agree import Ranks, ranks
from shardwright.checkpoint.folder import find, read_manifest
from shardwright.checkpoint.format import ITEM_NBYTES, Box, Manifest, Piece, TensorEntry, part_crc32, prove
from shardwright.checkpoint.live import set_rng_state
from shardwright.checkpoint.shardfile import TORCH_DTYPE, Reader, bits_of, chunks_of, tensor_of
from shardwright.checkpoint.target import Plan, Target, install, plan
from shardwright.checkpoint.tree import decode
from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class Restored:
    """What ``load`` restored, and from where.

    ``path`` is the checkpoint, ``step`` its number of optimizer steps, ``extra`` what was given to ``save`` (tensors
    on the host, whole). ``num_tensors`` and ``nbytes`` count all tensors of the model and the optimizer, verified
    bit by bit; ``read_nbytes`` is what this rank read. ``skipped`` says why newer checkpoints were passed over, ``cast`` names tensors
    whose dtype was converted.
    """

    path: Path
    step: int
    extra: Any
    num_tensors: int
    nbytes: int
    read_nbytes: int
    skipped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    rng: Any = None

    def restore_rng(self) -> bool:
        """Set this process's random state as it was at the save. False, and nothing is done, if the checkpoint has
        none for this world size."""
        if self.rng is None:
            return False
        set_rng_state(self.rng)
        return True


def load(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Restored:
    """Restore ``model`` (and ``optimizer``) from a checkpoint; any world size. Every rank must call it.

    ``path`` is one checkpoint, or a folder of them: then its newest complete one. Each rank reads only the byte ranges
    of its own parts. Live tensors are filled in place; parameters on the meta device, and the optimizer's state if it
    has none yet, are allocated, sharded, without running a step. Every checksum is verified on read, and the live
    state afterwards.

    Args:
        extra: live objects with ``load_state_dict``, by their keys in what was given to ``save``; they are restored.

    Raises:
        CheckpointError: on all ranks: damaged or incomplete (naming file and tensor), or not fitting (listing every
            missing, unexpected and misshapen tensor). Model and optimizer are then as they were.
    """
    background.finish()
    group = ranks()
    path = Path(path)
    group.arrive(f"load({path})")
    what = f"loading {path}"
    folder, skipped = group.together(what, lambda: find(path) if group.rank == 0 else (path, ()))[0]
    what = f"loading {folder}"
    manifests: list[Manifest] = []
    plans: list[Plan] = []

    def prepare() -> None:
        manifests.append(read_manifest(folder))
        prove(manifests[0])
        plans.append(plan(manifests[0], model, optimizer, extra, group.rank))

    group.together(what, prepare)
    manifest, todo = manifests[0], plans[0]
    with Reader(folder) as reader:
        wanted = [(t.key, t.entry, t.box) for t in todo.targets if t.box is not None]
        _verify(
            group,
            what,
            lambda: _checksums(wanted, lambda key, entry, p, box: reader.read(key, p, box, entry.dtype)),
        )
        smalls: list[dict[str, torch.Tensor]] = []
        group.together(what, lambda: smalls.append(_read_whole(reader, manifest, todo.small)))
        small = smalls[0]
        read_nbytes = reader.nbytes
        filled = [t.allocated() for t in todo.targets]
        group.together(what, lambda: _fill(reader, filled))
        live = {t.key: t for t in filled}
        same = [(t.key, t.entry, t.box) for t in filled if t.box is not None and not t.casts]
        _verify(
            group,
            f"{what}: the live state differs from the checkpoint after it was filled; don't train on",
            lambda: _checksums(same, lambda key, entry, p, box: live[key].bits(box)),
        )
    install(todo, {t.key: t for t in filled}, small)
    rng = manifest.state.get("rng", [])
    return Restored(
        path=folder,
        step=manifest.step,
        extra=decode(manifest.state.get("extra"), small.__getitem__),
        num_tensors=len(filled),
        nbytes=sum(t.entry.nbytes for t in filled),
        read_nbytes=read_nbytes,
        skipped=tuple(skipped),
        cast=tuple(t.key for t in filled if t.casts),
        rng=decode(rng[group.rank], small.__getitem__) if len(rng) == group.world else None,
    )


Wanted = tuple[str, TensorEntry, Box]
Source = Callable[[str, TensorEntry, Piece, Box], np.ndarray]


@dataclass(frozen=True)
class _Partial:
    """What this rank's part contributes to the checksum of a piece that several ranks read."""

    key: str
    piece: Piece
    part: Box
    crc32: int


def _parts(wanted: Iterable[Wanted]) -> Iterable[tuple[str, TensorEntry, Piece, Box]]:
    for key, entry, box in wanted:
        for piece in entry.pieces:
            part = piece.box.intersect(box)
            if part is not None:
                yield key, entry, piece, part


def _checksums(wanted: Iterable[Wanted], source: Source) -> list[_Partial]:
    """Checksum this rank's part of every piece; whole pieces are compared here, parts of pieces are returned."""
    partial, faults = [], []
    for key, entry, piece, part in _parts(wanted):
        item_nbytes = ITEM_NBYTES[entry.dtype]
        crc = 0
        for box in chunks_of(part, item_nbytes):
            crc ^= part_crc32(source(key, entry, piece, box), box, piece.box, item_nbytes)
        if part != piece.box:
            partial.append(_Partial(key, piece, part, crc))
        elif crc != piece.crc32:
            faults.append(_damaged(key, piece, crc))
    if faults:
        raise CheckpointError("; ".join(faults))
    return partial


def _damaged(key: str, piece: Piece, crc: int) -> str:
    return (
        f"{piece.file}: {key} is damaged (elements {list(piece.offset)}+{list(piece.shape)}, bytes {piece.start} to "
        f"{piece.start + piece.nbytes}, have checksum {crc:08x}, expected {piece.crc32:08x})"
    )


def _verify(group: Ranks, what: str, work: Callable[[], list[_Partial]]) -> None:
    """Run ``work`` (``_checksums``) on all ranks, then put the parts of each piece together and compare."""
    together: dict[tuple[str, int], list[_Partial]] = {}
    for partials in group.together(what, work):
        for partial in partials:
            together.setdefault((partial.piece.file, partial.piece.start), []).append(partial)
    faults = []
    for partials in together.values():
        piece, crcs = partials[0].piece, {}
        for partial in partials:  # replicas hold the same part: once is enough, and they must agree
            if crcs.setdefault(partial.part, partial.crc32) != partial.crc32:
                faults.append(f"{partial.key}: replicas of {partial.part} differ")
        assert sum(part.numel for part in crcs) == piece.box.numel, (
            f"parts {list(crcs)} don't tile {piece.box}"
        )
        crc = functools.reduce(operator.xor, crcs.values())
        if crc != piece.crc32:
            faults.append(_damaged(partials[0].key, piece, crc))
    if faults:
        raise CheckpointError(f"{what}\n  " + "\n  ".join(faults))


def _read_whole(reader: Reader, manifest: Manifest, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Small tensors, whole, on the host, verified."""
    found = {}
    for key in keys:
        entry = manifest.tensors[key]
        whole = Box.whole(entry.shape)
        tensor = torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype])
        target = Target(key, entry, tensor, whole, True, tensor.device)
        _checksums([(key, entry, whole)], lambda key, entry, p, box: reader.read(key, p, box, entry.dtype))
        _fill(reader, [target])
        found[key] = tensor
    return found


def _fill(reader: Reader, targets: Iterable[Target]) -> None:
    for t in targets:
        if t.box is None:
            continue
        for key, entry, piece, part in _parts([(t.key, t.entry, t.box)]):
            for box in chunks_of(part, ITEM_NBYTES[entry.dtype]):
                source = tensor_of(reader.read(key, piece, box, entry.dtype), entry.dtype)
                into = t.local[box.slices_in(t.box)]
                into.copy_(source)
                # A converted tensor has no checksum in the manifest; it is compared with what was read.
                if t.casts and not np.array_equal(bits_of(into), bits_of(source.to(into.dtype))):
                    raise CheckpointError(
                        f"{key}: the live tensor differs from the checkpoint after it was filled"
                    )
