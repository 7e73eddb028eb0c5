"""The files of a folder, described under the model's names: what is stacked or concatenated on loading is a
tensor of several pieces, so that a rank reads its own slices of it and nothing else.

    file    experts.0.w1 [f, d], experts.0.w3 [f, d], experts.1.w1 ...
    model   experts.gate_up_proj [2, 2f, d]:  piece (0, 0, 0) = 0.w1, piece (0, f, 0) = 0.w3, ...
"""

from collections.abc import Mapping
from dataclasses import replace

from shardwright.checkpoint.format import Manifest, TensorEntry, prove
from shardwright.errors import CheckpointError
from shardwright.hf.library import TensorTarget

_PREFIX = "model/"


def under_model_names(manifest: Manifest, places: Mapping[str, TensorTarget]) -> Manifest:
    """``manifest`` with the tensors of the model that its files make up; ``places``: where each goes."""
    members: dict[str, list[tuple[TensorTarget, TensorEntry]]] = {}
    for name, place in places.items():
        members.setdefault(place.target, []).append((place, manifest.tensors[_PREFIX + name]))
    tensors = {_PREFIX + target: _assemble(target, found) for target, found in members.items()}
    result = replace(manifest, tensors=tensors)
    prove(result)
    return result


def _assemble(target: str, members: list[tuple[TensorTarget, TensorEntry]]) -> TensorEntry:
    if members[0][0].source is None and len(members) == 1:
        return members[0][1]
    by_source: dict[int, list[TensorEntry]] = {}
    for place, entry in members:
        by_source.setdefault(place.order, []).append(entry)
    place = members[0][0]
    if short := [e.shape for _, e in members if len(e.shape) + place.stacked <= place.dim]:
        raise CheckpointError(
            f"{target} is put together from a tensor of shape {list(short[0])}, too few dims"
        )
    parts = [_stack(target, found) if place.stacked else found[0] for _, found in sorted(by_source.items())]
    if len({(p.dtype, _without(p.shape, place.dim)) for p in parts}) > 1:
        shapes = ", ".join(f"{p.dtype} {list(p.shape)}" for p in parts)
        raise CheckpointError(f"{target} is put together from tensors that don't fit: {shapes}")
    pieces, at, dim = [], 0, place.dim
    for part in parts:
        for piece in part.pieces:
            offset = (*piece.offset[:dim], piece.offset[dim] + at, *piece.offset[dim + 1 :])
            pieces.append(replace(piece, offset=offset))
        at += part.shape[dim]
    first = parts[0].shape
    return TensorEntry((*first[:dim], at, *first[dim + 1 :]), parts[0].dtype, tuple(pieces))


def _stack(target: str, entries: list[TensorEntry]) -> TensorEntry:
    if len({(entry.dtype, entry.shape) for entry in entries}) > 1:
        shapes = sorted({f"{entry.dtype} {list(entry.shape)}" for entry in entries})
        raise CheckpointError(f"{target} is stacked from tensors that differ: {', '.join(shapes)}")
    pieces = [
        replace(piece, offset=(row, *piece.offset), shape=(1, *piece.shape))
        for row, entry in enumerate(entries)
        for piece in entry.pieces
    ]
    return TensorEntry((len(entries), *entries[0].shape), entries[0].dtype, tuple(pieces))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
