"""Coded messages give back every bit of every dtype, or say why they can't."""

from collections import deque

import numpy as np
import pytest
import torch

from shardwright.transport.cpu import coder
from shardwright.transport.cpu.coder import Coder, Damaged, ordered
from shardwright.transport.cpu.views import view_of
from shardwright.transport.differences import Kept

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.complex128,
]


def bits_of(tensor):
    return bytes(view_of(tensor))


def values_of(dtype, numel=300_001, seed=0):
    """Numbers of any pattern: also infinities, numbers that are none, and zeros below zero."""
    patterns = torch.randint(0, 256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return patterns.to(torch.uint8).view(dtype)


def kept(codes=True):
    made = Kept()
    made.on, made.codes = True, codes
    return made


def passed(sender, receiver, parts, of_sender, of_receiver):
    """What is received, and the message."""
    message = b"".join(sender.code(parts, of_sender, rank=1))
    places = [torch.empty_like(part) for part in parts if part.numel()]
    code = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    receiver.decode(view_of(code), deque(map(view_of, places)), of_receiver, 1)
    return places, message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [True, False])
def test_every_bit_of_every_dtype_comes_back_whatever_changes(dtype, codes):
    sender, receiver, ours, theirs = Coder(), Coder(), kept(codes), kept(codes)
    near = values_of(dtype)
    near.view(torch.uint8)[7::1000] += 1
    for values in (values_of(dtype), near, near, values_of(dtype, seed=1), torch.zeros_like(near)):
        empty = values[:0]
        (received,), message = passed(sender, receiver, [empty, values], [None, ours], [theirs])
        assert bits_of(received) == bits_of(values)
        assert ours.versions[1].words.tobytes() == theirs.versions[1].words.tobytes()
        if values is not near:
            continue
        if not codes:
            assert len(message) < 100 or len(message) > len(bits_of(near))
    (received,), message = passed(sender, receiver, [torch.zeros_like(near)], [ours], [theirs])
    assert len(message) < 100  # nothing has changed


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_without_a_version_come_back_too(dtype):
    parts = [values_of(dtype, 1000), torch.zeros(500_000, dtype=dtype), values_of(dtype, 3, seed=2)]
    received, message = passed(Coder(), Coder(), parts, [None] * 3, ())
    assert list(map(bits_of, received)) == list(map(bits_of, parts))
    assert len(message) < 1100 * dtype.itemsize + 200  # of zeros only the lengths of chunks


def test_floats_are_in_the_order_of_their_integers():
    numbers = [-float("inf"), -3.5, -1e-30, -0.0, 0.0, 1e-30, 3.5, float("inf")]
    values = torch.tensor(numbers, dtype=torch.bfloat16)
    words = np.frombuffer(bits_of(values), "<i2")
    assert (np.diff(ordered(words)) > 0).all()
    assert (ordered(ordered(words)) == words).all()


def test_small_changes_of_weights_take_a_fraction_of_their_bytes():
    generator = torch.Generator().manual_seed(3)
    masters = torch.randn(1 << 19, generator=generator) * 0.02
    after = masters + 3e-5 * torch.randn(1 << 19, generator=generator)
    sender, receiver, ours, theirs = Coder(), Coder(), kept(), kept()
    passed(sender, receiver, [masters.bfloat16()], [ours], [theirs])
    _, message = passed(sender, receiver, [after.bfloat16()], [ours], [theirs])
    assert len(message) < 0.25 * 2 * len(masters)
    gradient = (1e-4 * torch.randn(1 << 19, generator=generator)).bfloat16()
    _, message = passed(sender, receiver, [gradient], [None], ())
    assert len(message) < 0.75 * gradient.nbytes


def test_a_change_of_what_a_rank_has_not_kept_is_refused_with_the_remedy():
    sender, values = Coder(), values_of(torch.bfloat16)
    ours = kept()
    sender.code([values], [ours], rank=1)
    for theirs in ([kept()], [None], ()):
        with pytest.raises(Damaged, match=r"since number 1 .* nothing is kept here; .*wire=\"plain\""):
            passed(sender, Coder(), [values], [ours], theirs)
        ours.versions[1].number = 1


def test_a_rank_that_keeps_nothing_any_more_has_the_others_forget():
    sender, receiver, ours, theirs = Coder(), Coder(), kept(), kept()
    values = values_of(torch.float32)
    passed(sender, receiver, [values], [ours], [theirs])
    assert theirs.nbytes == ours.nbytes == values.nbytes
    ours.on = False
    assert ours.is_used
    (received,), _ = passed(sender, receiver, [values], [ours], [theirs])
    assert bits_of(received) == bits_of(values)
    assert theirs.nbytes == ours.nbytes == 0
    assert not ours.is_used


def test_a_damaged_message_is_refused(monkeypatch):
    values = values_of(torch.bfloat16, 1000)
    message = bytearray(b"".join(Coder().code([values], [None], rank=0)))
    place = torch.empty_like(values)

    def decode(message, *places):
        code = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        Coder().decode(view_of(code), deque(map(view_of, places)), (), 0)

    with pytest.raises(Damaged, match="no place"):
        decode(message, place[:999])
    with pytest.raises(Damaged, match="fewer parts"):
        decode(message, place, place)
    message[-1] ^= 1
    with pytest.raises(Damaged, match="CRC-32"):
        decode(message, place)
    coded = b"".join(Coder().code([torch.ones(100_000)], [None], rank=0))
    with pytest.raises(Damaged, match="can't be decoded"):
        decode(coded[:-9] + bytes(9), torch.empty(100_000))
    monkeypatch.setattr(coder, "zstandard", None)
    with pytest.raises(Damaged, match=r"pip install 'shardwright\[wire\]'"):
        decode(coded, torch.empty(100_000))
