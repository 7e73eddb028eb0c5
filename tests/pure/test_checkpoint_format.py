"""Pieces tile their tensors, checksums add up over any parts, and a manifest that was touched is refused."""

import itertools
import json
import math
import operator
import random
import zlib
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.checkpoint.flat import boxes_of_range
from shardwright.checkpoint.format import (
    Box,
    Manifest,
    Piece,
    TensorEntry,
    chunk,
    coverage_faults,
    crc32_shift,
    dumps,
    first_of_run,
    loads,
    overlaps,
    part_crc32,
    prove,
)
from shardwright.checkpoint.live import box_at
from shardwright.checkpoint.shardfile import CHUNK_NBYTES, chunks_of
from shardwright.checkpoint.tree import decode, encode, keys_in
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, InputError
from shardwright.schedule.layout import FlatEntry, FlatLayout

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def tilings(draw, shapes=SHAPES):
    """A shape, and boxes that tile it: cut again and again, along any dim."""
    shape = draw(shapes)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, size in enumerate(box.shape) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[d] - 1))
        head, tail = list(box.shape), list(box.shape)
        head[d], tail[d] = at, box.shape[d] - at
        offset = list(box.offset)
        offset[d] += at
        boxes += [Box(box.offset, tuple(head)), Box(tuple(offset), tuple(tail))]
    return shape, boxes


def entry_of(shape, boxes) -> TensorEntry:
    starts = itertools.accumulate((4 * b.numel for b in boxes), initial=0)
    pieces = [Piece("f", at, 4 * b.numel, 0, b.offset, b.shape) for at, b in zip(starts, boxes, strict=False)]
    return TensorEntry(shape, "F32", tuple(pieces))


@given(size=st.integers(1, 40), world=st.integers(1, 9))
def test_chunks_are_those_of_torch(size, world):
    ours = [chunk(size, world, rank) for rank in range(world)]
    theirs = [len(part) for part in torch.chunk(torch.empty(size), world)]
    assert [length for _, length in ours] == theirs + [0] * (world - len(theirs))
    assert [offset for offset, _ in ours] == [sum(theirs[:rank]) for rank in range(world)]


@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_checksums_of_parts_add_up_to_that_of_the_whole(parts):
    after = [sum(map(len, parts[i + 1 :])) for i in range(len(parts))]
    crcs = [crc32_shift(zlib.crc32(part), n) for part, n in zip(parts, after, strict=True)]
    assert reduce(operator.xor, crcs) == zlib.crc32(b"".join(parts))


UNSIGNED = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


@given(tiling=tilings(), dtype=UNSIGNED, seed=st.integers(0, 99))
def test_checksums_add_up_over_boxes_cut_in_any_dims(tiling, dtype, seed):
    shape, boxes = tiling
    whole = Box.whole(shape)
    array = np.random.default_rng(seed).integers(0, 255, shape).astype(dtype).reshape(shape)
    crcs = [part_crc32(array[b.slices_in(whole)], b, whole, array.itemsize) for b in boxes]
    assert reduce(operator.xor, crcs) == zlib.crc32(array.tobytes())


@given(tiling=tilings())
def test_a_tiling_is_proved_and_anything_else_is_not(tiling):
    shape, boxes = tiling
    entry = entry_of(shape, boxes)
    assert coverage_faults(entry) == []
    for i, box in enumerate(boxes):
        assert coverage_faults(entry_of(shape, boxes[:i] + boxes[i + 1 :])), "a dropped piece"
        assert coverage_faults(entry_of(shape, [*boxes, box])), "a piece twice"
        for d in range(len(shape)):
            moved = Box((*box.offset[:d], box.offset[d] + 1, *box.offset[d + 1 :]), box.shape)
            assert coverage_faults(entry_of(shape, [*boxes[:i], moved, *boxes[i + 1 :]])), "a moved piece"


@given(shape=SHAPES, data=st.data())
def test_a_range_of_a_flattened_tensor_is_boxes_that_are_runs_of_it(shape, data):
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(first, numel))
    array = np.arange(numel).reshape(shape)
    boxes = boxes_of_range(shape, first, stop)
    parts = [array[b.slices_in(Box.whole(shape))].reshape(-1) for b in boxes]
    assert np.concatenate([*parts, np.arange(0)]).tolist() == list(range(first, stop))
    assert all(first_of_run(b, Box.whole(shape)) is not None for b in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_flat_layout_says_what_a_range_holds_of_each_tensor():
    layout = FlatLayout.of([("a", (2, 3)), ("b", ()), ("c", (4,))])
    assert layout.numel == 11
    assert [entry.held(4, 9) for entry in layout.entries] == [(4, 6), (0, 1), (0, 2)]
    assert [entry.held(0, 0) for entry in layout.entries] == [(0, 0)] * 3
    with pytest.raises(InputError, match="b begins at element 5 of its flat parameter"):
        FlatLayout((FlatEntry("a", (2, 3), 0), FlatEntry("b", (), 5)))


@given(data=st.data())
def test_overlaps_are_those_of_brute_force(data):
    rank = data.draw(st.integers(0, 3))
    ints = st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple)
    boxes = data.draw(st.lists(st.builds(Box, ints, ints), max_size=6))
    covered = [set(cells(box)) for box in boxes]
    pairs = itertools.combinations(range(len(boxes)), 2)
    brute = {frozenset((a, b)) for a, b in pairs if covered[a] & covered[b]}
    assert {frozenset(pair) for pair in overlaps(boxes)} == brute


def cells(box: Box):
    return itertools.product(*(range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True)))


LONG = st.lists(st.integers(1, 5000), min_size=1, max_size=3).map(tuple)


@given(shape=LONG, nbytes=st.sampled_from([1, 4]))
@settings(max_examples=30)
def test_chunks_tile_a_box_and_are_small(shape, nbytes):
    if math.prod(shape) * nbytes > 40 * CHUNK_NBYTES:
        shape = shape[:1]
    boxes = list(chunks_of(Box.whole(shape), nbytes))
    assert all(box.numel * nbytes <= CHUNK_NBYTES for box in boxes)
    assert sum(box.numel for box in boxes) == math.prod(shape)
    assert not overlaps(boxes)


W = replace(entry_of((3, 2), [Box((0, 0), (2, 2)), Box((2, 0), (1, 2))]), aliases=("model/v",))
STATE = {"extra": {"lr": 0.1, "names": ["a"]}}
MANIFEST = Manifest(step=7, tensors={"model/w": W}, files={"f": 24}, state=STATE)


def test_a_manifest_comes_back_equal():
    assert loads(dumps(MANIFEST), "here") == MANIFEST
    prove(MANIFEST)


def test_any_changed_character_of_a_manifest_is_noticed():
    text = dumps(MANIFEST)
    for i, char in enumerate(text.rstrip()):
        if char.isspace():
            continue
        damaged = text[:i] + ("1" if char != "1" else "2") + text[i + 1 :]
        with pytest.raises(CheckpointError, match="here"):
            loads(damaged, "here")


def test_a_manifest_of_a_later_version_names_the_remedy():
    body = json.loads(dumps(MANIFEST)) | {"version": 99}
    with pytest.raises(CheckpointError, match=r"version 99.*upgrade"):
        loads(json.dumps(body), "here")


@pytest.mark.parametrize(
    "broken",
    [
        replace(MANIFEST, files={}),
        replace(MANIFEST, files={"f": 23}),
        replace(MANIFEST, tensors={**MANIFEST.tensors, "model/v": entry_of((), [Box((), ())])}),
    ],
)
def test_pieces_outside_of_their_file_and_names_twice_are_refused(broken):
    with pytest.raises(CheckpointError, match=r"model/[vw]"):
        prove(broken)


LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEY = st.text() | st.integers()
SMALL = st.recursive(
    LEAF,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEY, inner),
    max_leaves=8,
)


@given(value=SMALL)
def test_small_state_comes_back_with_its_types(value):
    again = decode(json.loads(json.dumps(encode(value, "x", {}), allow_nan=False)), {}.__getitem__)
    assert again == value
    assert repr(again) == repr(value)


def test_tensors_in_small_state_are_kept_apart_by_their_path():
    tensors = {}
    value = {"a": [torch.ones(2), {"b": np.arange(3)}]}
    tree = encode(value, "extra", tensors)
    assert keys_in(tree) == list(tensors) == ["extra/a/0", "extra/a/1/b"]
    again = decode(json.loads(json.dumps(tree)), tensors.__getitem__)
    assert torch.equal(again["a"][0], torch.ones(2))
    assert again["a"][1]["b"].tolist() == [0, 1, 2]


def test_what_would_need_a_pickle_is_refused_by_its_path():
    with pytest.raises(CheckpointError, match=r"extra/a/0: a object .*nothing is pickled"):
        encode({"a": [object()]}, "extra", {})


@pytest.mark.parametrize(("offset", "shape"), [((-1,), (3,)), ((0, 0), (3,)), ((0,), (-3,))])
def test_a_piece_that_is_nowhere_in_its_tensor_is_a_damaged_checkpoint(offset, shape):
    piece = Piece("0.shard", 0, 12, 0, offset, shape)
    with pytest.raises(CheckpointError, match=r"offset .* and shape .* damaged"):
        coverage_faults(TensorEntry((3,), "F32", (piece,), (), False))


@pytest.mark.parametrize("size", [0, 1, 15, 64, 1000, 5000, 70_001])
def test_the_fast_checksum_is_that_of_zlib(size):
    data = bytes(random.Random(size).randbytes(size))
    for begin in (0, 1, 0xFFFFFFFF):
        assert crc32(data, begin) == zlib.crc32(data, begin)
        assert crc32(memoryview(data)[1:], begin) == zlib.crc32(data[1:], begin)


def test_rows_cut_by_tensor_and_by_data_parallelism_are_boxes_that_tile_the_tensor():
    strided = _StridedShard(0, split_factor=2)
    found = [box_at("w", (7, 3), (strided, Shard(0)), (2, 2), (dp, tp)) for tp in range(2) for dp in range(2)]
    rows = [(box.offset[0], box.shape[0]) for box in found]
    assert rows == [(0, 2), (2, 2), (4, 2), (6, 1)]  # tensor parallelism first: rows 0 to 3, and 4 to 6
    for placements in (
        (_StridedShard(0, split_factor=4), Shard(0)),  # not what cut before
        (Shard(0), strided),
        (strided, strided),
        (strided, Replicate()),
    ):
        with pytest.raises(CheckpointError, match=r"w: placement .* can't be saved"):
            box_at("w", (7, 3), placements, (2, 2), (0, 0))
