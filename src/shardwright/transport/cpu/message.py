"""A message of a collective, as it travels over a socket: a head, and the parts one after another.

Where much of the parts is zeros (``sockets.filled_runs``), a table of runs follows the head, and of the parts
only these. A coded message (``transport/cpu/coder.py``) has the code in place of the parts. The head has the
CRC-32 of all that follows, and its own: TCP's sum of 16 bits lets one of 65,536 damaged packets through, and
is made after a host's memory has been read.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.checksum import crc32, isal_zlib
from shardwright.policy import CHECKSUMS
from shardwright.transport.cpu.views import RUN, crc32_of, cut
from shardwright.transport.process import Launch

FAILURE = -1
"""In place of a number: the message is text, of a failure from the collective in place of runs on."""
WHOLE = -1  # in place of a number of runs: all of the parts are sent
CODED = -2
NOT_SUMMED = -1
_KEY_NBYTES = 96
_HEAD = struct.Struct(f"<qqqqq{_KEY_NBYTES}s")
_CRC = struct.Struct("<I")
_NUMBER = struct.Struct("<q")
HEAD_NBYTES = _HEAD.size + _CRC.size
_CRC_AT, _KEY_AT = 4 * 8, 5 * 8
_SUMS = CHECKSUMS in ("messages", "all") or (CHECKSUMS == "" and isal_zlib is not None)
"""Whether messages carry their CRC-32; by ``zlib`` that takes 6% of a core at 1 Gbit/s."""


class Head(NamedTuple):
    """Number of the collective, bytes of the parts, number of runs, bytes that are sent after the table of
    runs, CRC-32 of all that follows the head, key."""

    number: int
    nbytes: int
    num_runs: int
    sent_nbytes: int
    crc: int
    key: bytes


def read_head(data: bytearray) -> Head | None:
    """The head of a message; None where it isn't what was sent, by its own CRC-32."""
    whole = crc32(memoryview(data)[: _HEAD.size]) == _CRC.unpack_from(data, _HEAD.size)[0]
    return Head(*_HEAD.unpack_from(data)) if whole else None


def text_of(key: str) -> bytes:
    """A collective's key, as it travels."""
    return key.encode()[:_KEY_NBYTES]


def message_of(
    launch: Launch, parts: Sequence[memoryview], runs: Sequence[tuple[int, int]] | None = None
) -> list[memoryview]:
    """That of ``parts`` in a collective. runs: ``(start, stop)`` bytes of all parts together that are sent,
    in order, the rest being zeros; for connections that take memory."""
    nbytes = sum(map(len, parts))
    if runs is None:
        return _message(launch.number, nbytes, WHOLE, parts, text_of(launch.key))
    table = b"".join(itertools.starmap(RUN.pack, runs))
    return _message(launch.number, nbytes, len(runs), list(cut(parts, runs)), text_of(launch.key), table)


def resembles(message: bytes, other: bytes) -> bool:
    """Whether a message is whole, arrived as it was sent, and has the head of ``other`` but for sums."""
    seen, own, of_head = memoryview(message), memoryview(other), _HEAD.size
    return (
        len(message) == len(other)
        and seen[:_CRC_AT] == own[:_CRC_AT]
        and seen[_KEY_AT:of_head] == own[_KEY_AT:of_head]
        and crc32(seen[:of_head]) == _CRC.unpack_from(seen, of_head)[0]
        and _NUMBER.unpack_from(seen, _CRC_AT)[0] in (NOT_SUMMED, crc32(seen[HEAD_NBYTES:]))
    )


def coded_message(launch: Launch, code: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """That of parts of so many bytes, which are coded."""
    return _message(launch.number, nbytes, CODED, code, text_of(launch.key))


def failure_message(number: int, text: bytes) -> list[memoryview]:
    """Word that the collective ``number`` of the axis, and those after it, can't end."""
    return _message(FAILURE, len(text), number, [memoryview(text)])


def _message(
    number: int, nbytes: int, runs: int, sent: Sequence[memoryview], key: bytes = b"", table: bytes = b""
) -> list[memoryview]:
    sent_nbytes = sum(map(len, sent))
    crc = crc32_of(sent, sent_nbytes, crc32(table)) if _SUMS else NOT_SUMMED
    head = _HEAD.pack(number, nbytes, runs, sent_nbytes, crc, key)
    return [memoryview(head + _CRC.pack(crc32(head)) + table), *sent]
