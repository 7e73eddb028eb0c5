"""Coded messages: what has changed since the last one, or numbers by planes of bytes. Nothing is lost.

    message   part, part, ...                    one for each span that isn't empty
    part      PART, length of each chunk, chunk, chunk, ...
    chunk     length 0: as before (of gradients: zeros)
              shorter than the numbers: zstd of the planes of bytes of their differences
              as long: the numbers as they are

A part carries the CRC-32 of its numbers, which is compared with that of what was decoded.
"""

import struct
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from shardwright.checksum import crc32
from shardwright.transport.cpu.views import skip, view_of
from shardwright.transport.differences import Kept, Version

try:
    import zstandard  # pyright: ignore[reportMissingImports]
except ImportError:  # the extra ``wire``: who asks for coded messages without it is told
    zstandard = None

_PART = struct.Struct("<qqIBB")
"""Number of the version that it changes, bytes, their CRC-32, bytes of a word, whether words are floats."""
_NO_VERSION = -1  # in place of a number: none is kept
_CHUNK_NUMEL = 1 << 17  # a plane of bytes is what zstd makes one table for, and all lies in a core's cache


class Damaged(Exception):
    """A message that can't be decoded, with the reason."""


def ordered(words: np.ndarray) -> np.ndarray:
    """Patterns of floats, as signed integers, so that they count as the numbers do; and back again."""
    turned = words >> (8 * words.itemsize - 1)
    turned &= np.iinfo(words.dtype).max
    turned ^= words
    return turned


class Coder:
    """Codes or decodes; of one thread."""

    def __init__(self) -> None:
        if zstandard is not None:
            # What finds few repetitions, since in such numbers they are mostly by chance: weights take 7%
            # fewer bytes than by level 1 as it is, and gradients as many, in half the time.
            chosen = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)
            self._zstd = zstandard.ZstdCompressor(compression_params=chosen)
            self._unzstd = zstandard.ZstdDecompressor()

    def code(self, parts: Sequence[torch.Tensor], kept: Sequence[Kept | None], rank: int) -> list[memoryview]:
        """The message of ``parts`` (1-D, host), of which some keep versions of what ``rank`` sends. Whole
        chunks are views of the parts themselves."""
        pieces = []
        for part, each in zip(parts, kept, strict=True):
            if part.numel():
                pieces += self._part(part, each, rank)
        return pieces

    def _part(self, part: torch.Tensor, kept: Kept | None, rank: int) -> list[memoryview]:
        view, is_float = view_of(part), part.is_floating_point()
        words = _words(view, min(part.element_size(), 8))
        version = None
        if kept is not None and not kept.on:
            kept.versions.pop(rank, None)
        elif kept is not None:
            version = kept.versions.setdefault(rank, Version(np.zeros_like(words)))
        codes = kept is None or kept.codes
        chunks = [
            self._chunk(words[at : at + _CHUNK_NUMEL], _slice(version, at), is_float, codes)
            for at in range(0, len(words), _CHUNK_NUMEL)
        ]
        number, crc = _NO_VERSION, None
        if version is not None:
            number, crc = version.number, version.crc
        # Where no chunk has changed the last CRC holds: this saves a pass over all numbers.
        if crc is None or any(map(len, chunks)):
            crc = crc32(view)
        head = _PART.pack(number, len(view), crc, words.itemsize, is_float)
        table = np.array([len(chunk) for chunk in chunks], "<u4").tobytes()
        if version is not None:
            version.number, version.crc = number + 1, crc
        return [memoryview(head + table), *(chunk for chunk in chunks if len(chunk))]

    def _chunk(self, words: np.ndarray, before: np.ndarray | None, is_float: bool, codes: bool) -> memoryview:
        if not words.any() if before is None else np.array_equal(words, before):
            return memoryview(b"")
        coded = self._coded(words, before, is_float) if codes else None
        if before is not None:
            before[:] = words
        whole = words.data.cast("B")
        # Whole also where both are as long: a receiver tells them apart by their length alone.
        return whole if coded is None or len(coded) >= len(whole) else coded

    def _coded(self, words: np.ndarray, before: np.ndarray | None, is_float: bool) -> memoryview:
        # Read as a signed integer, a float's pattern counts the wrong way below zero, which ``ordered``
        # mends. The difference of two such integers is small where two numbers lie near, and wraps around, so
        # that it is exact.
        change: np.ndarray = ordered(words) if is_float else words.copy()
        if before is not None:
            change -= ordered(before) if is_float else before
        # Signs go to the lowest bit, and the bytes of equal weight lie together: so a fast coder shrinks
        # them.
        signs = change >> (8 * change.itemsize - 1)
        change <<= 1
        change ^= signs
        planes = np.empty((change.itemsize, len(change)), np.uint8)
        for plane in range(change.itemsize):  # shifts are several times as fast as a transposed copy
            planes[plane] = change >> 8 * plane if plane else change
        return memoryview(self._zstd.compress(planes.data))

    def decode(
        self, message: memoryview, places: deque[memoryview], kept: Sequence[Kept | None], rank: int
    ) -> None:
        """Fill the places of all parts of a message of ``rank``, and what is kept of them.

        kept: of each part; beyond its end nothing is. Raises: Damaged.
        """
        at, index = 0, 0
        while at < len(message):
            number, nbytes, crc, itemsize, is_float = _PART.unpack_from(message, at)
            if not places or len(places[0]) < nbytes:
                raise Damaged(f"it has a part of {nbytes} bytes, which has no place")
            into = places[0][:nbytes]
            skip(places, nbytes)
            words = _words(into, itemsize)
            version = _followed(kept[index] if index < len(kept) else None, rank, number, words)
            num_chunks = -(-len(words) // _CHUNK_NUMEL)
            lengths = np.frombuffer(message, "<u4", num_chunks, at + _PART.size).tolist()
            at += _PART.size + 4 * num_chunks
            for chunk, length in enumerate(lengths):
                begin = chunk * _CHUNK_NUMEL
                there, before = words[begin : begin + _CHUNK_NUMEL], _slice(version, begin)
                self._fill(there, before, message[at : at + length], bool(is_float))
                at += length
            # Unchanged numbers needn't be read again: what is kept was compared with this CRC when it came.
            found = None if version is None or any(lengths) else version.crc
            if (crc32(into) if found is None else found) != crc:
                raise Damaged("what was decoded isn't what was sent, by its CRC-32")
            if version is not None:
                version.crc = crc
            index += 1
        if places:
            raise Damaged("it has fewer parts than are expected")

    def _fill(self, words: np.ndarray, before: np.ndarray | None, chunk: memoryview, is_float: bool) -> None:
        if len(chunk) == words.nbytes:
            words[:] = np.frombuffer(chunk, words.dtype)
        elif len(chunk):
            after = self._change(chunk, words)
            if before is not None:
                np.add(after, ordered(before) if is_float else before, out=after)
            words[:] = ordered(after) if is_float else after
        else:
            words[:] = 0 if before is None else before
            return
        if before is not None:
            before[:] = words

    def _change(self, chunk: memoryview, words: np.ndarray) -> np.ndarray:
        """The coded differences, as many as ``words``."""
        if zstandard is None:
            raise Damaged("zstandard is not installed here: pip install 'shardwright[wire]'")
        try:
            planes = np.frombuffer(self._unzstd.decompress(chunk), np.uint8)
            *lower, highest = planes.reshape(words.itemsize, len(words))
        except (ValueError, zstandard.ZstdError) as error:
            raise Damaged(f"a part of it can't be decoded ({error})") from error
        change = highest.astype(f"<u{words.itemsize}")
        for plane in reversed(lower):
            change <<= 8
            change |= plane
        signs = -(change & 1)
        change >>= 1
        change ^= signs
        return change.view(words.dtype)


def _words(view: memoryview, itemsize: int) -> np.ndarray:
    return np.frombuffer(view, f"<i{itemsize}")


def _slice(version: Version | None, begin: int) -> np.ndarray | None:
    return None if version is None else version.words[begin : begin + _CHUNK_NUMEL]


def _followed(kept: Kept | None, rank: int, number: int, words: np.ndarray) -> Version | None:
    """What is kept of the part, which a message of this number changes."""
    if kept is None and number <= 0:
        return None
    if number == _NO_VERSION and kept is not None:
        kept.versions.pop(rank, None)
        return None
    # The first message is a difference from zeros, so that a resume or another dtype is no special case.
    if number == 0 and kept is not None:
        kept.versions[rank] = Version(np.zeros_like(words))
    version = None if kept is None else kept.versions.get(rank)
    if version is None or version.number != number or version.words.shape != words.shape:
        have = "nothing" if version is None else f"number {version.number}"
        raise Damaged(
            f"it says what has changed since number {number} of its part, of which {have} is kept here; give "
            'every rank the same model and the same SchedulePolicy(wire=...), or wire="plain"'
        )
    version.number += 1
    return version
