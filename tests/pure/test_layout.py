"""The arithmetic of shards: every element has one owner, and it is the one that DTensor expects."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.schedule.layout import (
    ALIGNMENT_NBYTES,
    FlatLayout,
    GroupLayout,
    ParamLayout,
    RaggedSpans,
    Spans,
    align,
    contiguous_strides,
    equal_spans,
    pack,
)
from shardwright.transport.base import Segment, join, spread, sum_in_rank_order, sums_in_rank_order
from shardwright.transport.cpu.pages import SMALL_NBYTES
from shardwright.transport.process_group import padded

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
WORLDS = st.integers(1, 9)


@st.composite
def layouts(draw) -> ParamLayout:
    shape = draw(SHAPES)
    return ParamLayout(shape, draw(WORLDS), draw(st.integers(0, len(shape) - 1)))


@given(layouts())
def test_shards_are_those_of_torch_chunk(layout):
    whole = torch.arange(layout.numel).reshape(layout.shape)
    chunks = list(torch.chunk(whole, layout.world, dim=layout.dim))
    for rank in range(layout.world):
        start, stop = layout.row_range(rank)
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(layout.dim, 0, 0)
        assert layout.shard_shape(rank) == tuple(expected.shape)
        assert torch.equal(whole.narrow(layout.dim, start, stop - start), expected)


@given(layouts())
def test_spans_cover_every_element_once_in_rank_order(layout):
    end = 0
    for start, stop in layout.spans:
        assert start == end <= stop
        end = stop
    assert end == layout.numel <= layout.padded_numel
    assert layout.padded_numel % layout.world == 0


@given(layouts())
def test_a_span_of_the_storage_is_the_shard_whatever_the_dim(layout):
    storage = torch.arange(layout.padded_numel)
    whole = storage.as_strided(layout.shape, layout.strides)
    assert torch.equal(whole.flatten().sort().values, torch.arange(layout.numel))
    for rank in range(layout.world):
        (start, stop), rows = layout.span(rank), layout.row_range(rank)
        shard = whole.narrow(layout.dim, rows[0], rows[1] - rows[0])
        assert torch.equal(shard.flatten().sort().values, storage[start:stop])


@given(layouts())
def test_every_span_fits_its_equal_share_of_the_padded_region(layout):
    share = layout.padded_numel // layout.world
    for rank, (start, stop) in enumerate(layout.spans):
        assert stop - start <= share
        assert start == stop or start == rank * share


@given(st.lists(SHAPES, min_size=1, max_size=6), WORLDS, st.sampled_from([1, 2, 128]))
def test_a_flat_parameter_is_cut_evenly_whatever_the_borders(shapes, world, multiple):
    flat = FlatLayout.of([(str(number), shape) for number, shape in enumerate(shapes)])
    layout = flat.over(world, multiple)
    share = layout.padded_numel // world
    assert share % multiple == 0
    assert flat.numel <= layout.padded_numel < flat.numel + world * multiple + (flat.numel == 0)
    assert multiple > 1 or layout == flat.over(world)
    seen = torch.zeros(flat.numel, dtype=torch.int64)
    for rank in range(world):
        for entry in flat.entries:
            first, stop = entry.held(rank * share, (rank + 1) * share)
            seen[entry.start + first : entry.start + stop] += 1
    assert (seen == 1).all()


@given(st.lists(st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8])), max_size=8), WORLDS)
def test_regions_of_a_group_are_aligned_and_do_not_overlap(params, world):
    layout = GroupLayout(tuple(ParamLayout(s, world) for s, _ in params), tuple(size for _, size in params))
    end = 0
    for param, itemsize, offset in zip(layout.params, layout.itemsizes, layout.offsets_nbytes, strict=True):
        assert offset % ALIGNMENT_NBYTES == 0
        assert offset >= end
        end = offset + param.padded_numel * itemsize
    assert end <= layout.nbytes
    logical = sum(p.numel * size for p, size in zip(layout.params, layout.itemsizes, strict=True))
    assert sum(layout.shard_nbytes(rank) for rank in range(world)) == logical


@given(st.lists(st.integers(0, 1000), max_size=9))
def test_packed_pieces_do_not_overlap(sizes):
    offsets, total = pack(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
    assert not ends or ends[-1] <= total


def test_a_flat_parameter_of_no_tensors_has_no_elements():
    assert FlatLayout(()).numel == 0


def test_a_scalar_is_kept_whole_by_every_rank():
    layout = ParamLayout((), 3, None)
    assert [layout.span(rank) for rank in range(3)] == [(0, 1)] * 3
    assert layout.shard_shape(2) == ()


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_dim_that_the_shape_does_not_have_is_refused(dim):
    with pytest.raises(InputError, match=r"shape \[4, 5\]: it has dims 0..1"):
        ParamLayout((4, 5), 2, dim)


@given(layouts())
def test_spans_know_what_follows_of_them(layout):
    share = layout.padded_numel // layout.world
    assert layout.spans.longest == share and layout.spans.is_chunked
    assert layout.spans.is_even == (layout.numel == layout.padded_numel)
    assert equal_spans(3, layout.world).is_even


def test_spans_with_gaps_are_not_chunks():
    spans = Spans(world=2, longest=2, end=8, gap=2)
    assert list(spans) == [(0, 2), (4, 6)] and spans[-1] == (4, 6)
    assert not spans.is_chunked and not spans.is_even


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("end", [0, 3, 20, 40])
def test_spans_of_neighbours_are_joined_and_those_of_some_ranks_are_within_them(gap, end):
    spans = Spans(world=6, longest=2, end=end, gap=gap)
    assert len(spans) == len(list(spans)) == 6
    for place, (start, stop) in enumerate(spans.joined(3)):
        assert (start, stop) == (spans[3 * place][0], spans[3 * place + 2][1])
    for first in (0, 3):
        begin = first * (2 + gap)
        within = spans.within(first, 3)
        parts = [tuple(max(0, end - begin) for end in spans[first + place]) for place in range(3)]
        assert list(within) == parts and within.end <= 6 + 2 * gap
    with pytest.raises(IndexError):
        spans[6]
    assert spans[-6] == spans[0]
    assert Spans(6, 2, end, gap).within(21, 1).end == 0


def test_spans_of_chosen_sizes_are_joined_and_those_of_some_ranks_are_within_them():
    layout = ParamLayout((6, 2), 4, 0, (0, 3, 1, 2))
    spans = layout.spans
    assert list(spans) == [(0, 0), (0, 6), (6, 8), (8, 12)] == [layout.span(rank) for rank in range(4)]
    assert spans.is_ragged and not spans.is_even and not spans.is_chunked and spans[-1] == (8, 12)
    assert list(spans.joined(2)) == [(0, 6), (6, 12)] and spans.joined(2).is_even
    assert list(spans.within(2, 2)) == [(0, 2), (2, 6)] and list(spans.within(0, 2)) == [(0, 0), (0, 6)]
    assert (spans.world, spans.longest, spans.end) == (4, 6, 12) and spans[-4] == (0, 0)
    assert RaggedSpans.of([0, 2, 4]) == equal_spans(2, 2)
    assert [layout.shard_shape(rank) for rank in range(4)] == [(0, 2), (3, 2), (1, 2), (2, 2)]
    assert layout.like((6, 5)).spans[1] == (0, 15) and layout.like((8,)).sizes is None
    with pytest.raises(IndexError):
        spans[4]


def test_regions_are_aligned_to_a_cache_line_and_to_the_loads_of_nccl():
    assert ALIGNMENT_NBYTES % 64 == 0
    assert align(1) == align(ALIGNMENT_NBYTES) == ALIGNMENT_NBYTES


def test_strides_are_those_of_a_tensor_that_has_the_sharded_dim_first():
    assert contiguous_strides((2, 3, 4)) == torch.empty(2, 3, 4).stride()
    assert ParamLayout((2, 3, 4), 2, 1).strides == torch.empty(3, 2, 4).transpose(0, 1).stride()


@pytest.mark.parametrize(
    ("shape", "dim", "outer"),
    [
        ((4, 6), 0, 1),
        ((4, 6), 1, 4),
        ((2, 6), 1, 2),
        ((1, 6), 1, 1),
        ((4, 6), None, 1),
        ((), None, 1),
        ((2, 3, 4), 2, 6),
    ],
)
def test_the_storage_order_is_that_of_the_parameter_where_no_larger_dim_is_left_of_the_sharded_one(
    shape, dim, outer
):
    layout = ParamLayout(shape, 2, dim)
    assert (layout.outer, layout.in_order) == (outer, outer == 1)
    if dim is not None:
        assert layout.stacked(5) == ParamLayout((5, *shape[dim:]), 2, 1)


def test_a_group_of_no_parameters_has_no_bytes():
    assert GroupLayout((), ()).nbytes == 0


def test_the_spans_of_what_is_kept_whole_are_all_of_it():
    assert list(ParamLayout((3,), 2, None).spans) == [(0, 3), (0, 3)]


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(WORLDS, st.lists(st.tuples(SHAPES, DTYPES, DTYPES), min_size=1, max_size=4), st.booleans())
def test_gradients_are_padded_with_zeros_to_equal_parts_in_their_reduce_dtypes(world, kinds, with_gaps):
    segments = []
    for shape, dtype, _ in kinds:
        spans = ParamLayout(shape, world).spans
        if with_gaps:  # as of rows that a bucket has room for: behind each part something that is no part
            spans = Spans(world, spans.longest, world * (spans.longest + 3), gap=3)
        segments.append(Segment(torch.randn(spans.end + 3).to(dtype), spans))
    inputs = padded(segments, [dtype for _, _, dtype in kinds])
    for flat, segment, (_, _, dtype) in zip(inputs, segments, kinds, strict=True):
        assert flat.dtype == dtype and flat.numel() == world * segment.spans.longest
        for part, (start, stop) in zip(flat.view(world, -1), segment.spans, strict=True):
            assert torch.equal(part[: stop - start], segment.flat[start:stop].to(dtype))
            assert not part[stop - start :].any()


@given(st.lists(st.integers(0, 200), max_size=8))
def test_parts_that_were_joined_come_apart_as_they_were_each_aligned(sizes):
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    offsets, nbytes = pack(sizes)
    place = torch.empty(nbytes, dtype=torch.uint8)
    join(parts, place)
    for part, offset in zip(parts, offsets, strict=True):
        assert torch.equal(place[offset : offset + len(part)], part)
    found = [torch.zeros_like(part) for part in parts]
    spread(place, found)
    assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_sums_have_the_bits_of_each_by_itself(world):
    kinds = [(5, torch.float32, torch.float32), (0, torch.float32, torch.float32)]
    kinds += [(7, torch.bfloat16, torch.float32), (9, torch.bfloat16, torch.bfloat16)]
    kinds.append((SMALL_NBYTES // 4, torch.float32, torch.float32))
    parts = [[torch.randn(numel).to(dtype) for numel, dtype, _ in kinds] for _ in range(world)]
    dtypes = [dtype for *_, dtype in kinds]
    for place, (total, dtype) in enumerate(zip(sums_in_rank_order(parts, dtypes), dtypes, strict=True)):
        assert total.dtype == dtype
        assert torch.equal(total, sum_in_rank_order([part[place] for part in parts], dtype, None))
