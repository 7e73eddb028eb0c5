"""Tensors as bytes that a system call fills or sends: lists of views, which shrink as it goes on."""

import ctypes
import functools
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from shardwright.checksum import crc32

RUN = struct.Struct("<qq")
"""First and last byte (exclusive) of a part of a message; a table of them says what is sent of it."""


def view_of(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, which the caller keeps alive."""
    # Not by ``.numpy()``, which would mark the storage as one that can't be freed.
    return memoryview(_bytes_type(flat.numel() * flat.element_size()).from_address(flat.data_ptr())).cast("B")


# Made anew such a type takes 10 us, and a step of a small model needs hundreds.
@functools.lru_cache(maxsize=4096)
def _bytes_type(nbytes: int) -> Any:
    return ctypes.c_ubyte * nbytes


def views_of(flats: Iterable[torch.Tensor]) -> deque[memoryview]:
    """``view_of`` each that isn't empty."""
    return deque(view_of(flat) for flat in flats if flat.numel())


def skip(views: deque[memoryview], nbytes: int) -> None:
    """Drop the first ``nbytes`` bytes of ``views``."""
    while nbytes:
        first = views[0]
        if nbytes < len(first):
            views[0] = first[nbytes:]
            return
        nbytes -= len(first)
        views.popleft()


def crc32_of(views: Iterable[memoryview], nbytes: int, crc: int = 0) -> int:
    """The CRC-32 of the first ``nbytes`` bytes of ``views``, where ``crc`` is that of what comes before."""
    for view in views:
        crc = crc32(view[:nbytes], crc)
        nbytes -= len(view)
        if nbytes <= 0:
            break
    return crc


def cut(parts: Iterable[memoryview], runs: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """The runs, each inside of one part."""
    left = deque(runs)
    begin = 0
    for part in parts:
        while left and left[0][1] <= begin + len(part):
            start, stop = left.popleft()
            yield part[start - begin : stop - begin]
        begin += len(part)
