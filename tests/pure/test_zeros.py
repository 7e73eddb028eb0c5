"""Blocks of zeros in a gradient are found, and nothing else is taken for one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.transport.cpu.sockets import SMALL_NBYTES, filled_runs

ROWS, WIDTH = 1000, 257  # no multiple of a block


def rebuilt(part, runs):
    """What a receiver of the runs has."""
    sent = part.view(torch.uint8)
    place = torch.zeros_like(sent)
    for start, stop in runs:
        assert 0 <= start < stop <= sent.numel()
        place[start:stop] = sent[start:stop]
    return place.view(part.dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, ROWS - 1), max_size=300),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
    st.integers(0, 3),
)
def test_rows_in_use_are_sent_and_the_rest_is_zeros(used, dtype, offset):
    whole = torch.zeros(ROWS, WIDTH, dtype=dtype)
    whole[used] = torch.randn(len(used), WIDTH).to(dtype)
    part = whole.flatten()[offset * WIDTH :]  # of any alignment
    runs = filled_runs(part)
    if runs is not None:
        assert torch.equal(rebuilt(part, runs), part)
        assert [run for pair in runs for run in pair] == sorted({run for pair in runs for run in pair})


def test_only_what_is_in_use_is_left():
    gradient = torch.zeros(8192, 512)
    used = torch.arange(0, 8192, 16)
    gradient[used] = 1.0
    runs = filled_runs(gradient.view(-1))
    assert runs == [(row * 2048, (row + 1) * 2048) for row in used.tolist()]
    assert filled_runs(torch.zeros(8192 * 512)) == []


@pytest.mark.parametrize("value", [-0.0, float("nan"), 1e-45, float("-inf")])
def test_any_bit_counts(value):
    gradient = torch.zeros(SMALL_NBYTES)
    gradient[-1] = gradient[777] = value
    found = rebuilt(gradient, filled_runs(gradient))
    assert torch.equal(found.view(torch.int32), gradient.view(torch.int32))


def test_a_full_or_a_small_gradient_is_sent_as_it_is():
    assert filled_runs(torch.randn(SMALL_NBYTES)) is None
    assert filled_runs(torch.zeros(SMALL_NBYTES // 4 - 1)) is None
    mostly = torch.ones(SMALL_NBYTES)
    mostly.view(-1, 256)[::8] = 0.0
    assert filled_runs(mostly) is None
