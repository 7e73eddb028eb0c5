"""What a rank keeps to send what has changed: the last version, and how receivers get there from others.

    kept        version 7, as receivers have it
    messages    5 -> 6, 6 -> 7     coded differences, the newest ones, up to a quarter of a version's bytes
    full        7, whole           made when a receiver asks that has none of these

The coder, and what it takes for the same bits, are those of ``SchedulePolicy(wire="difference")``.
"""

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from shardwright.checkpoint.format import ITEM_NBYTES, TensorEntry
from shardwright.transport.cpu.coder import Coder, Damaged, zstandard
from shardwright.transport.cpu.views import view_of, views_of
from shardwright.transport.differences import Kept, Version

_HISTORY = 4  # a part of a version's bytes: beyond it the whole is soon as short
_ORIGIN = 0  # versions are kept by a rank's number; here each piece has one sender


class Message(NamedTuple):
    """What brings a receiver from ``base`` (0: from nothing) to ``version``: a coded message per piece."""

    version: int
    base: int
    pieces: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(map(len, self.pieces))


class Versions:
    """The versions of this rank's pieces; of one thread, but for ``next_for``."""

    def __init__(self) -> None:
        self.number = 0
        self.messages: dict[int, Message] = {}  # by the version that they start from
        self.full: Message | None = None
        self._kept: list[Kept] = []
        self._coder = Coder()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held now."""
        messages = [*self.messages.values(), self.full or Message(0, 0, ())]
        return sum(kept.nbytes for kept in self._kept) + sum(message.nbytes for message in messages)

    def take(self, number: int, pieces: Sequence[torch.Tensor], wanted: bool) -> None:
        """Keep a version; ``wanted``: somebody has the last one, and gets what has changed since."""
        if not self._kept:
            self._kept = [_kept(np.zeros_like(_words(piece)), 0) for piece in pieces]
        if not wanted:
            self.messages, self.full = {}, None
            for kept, piece in zip(self._kept, pieces, strict=True):
                version = kept.versions[_ORIGIN]
                version.words[:], version.crc = _words(piece), None
            self.number = number
            return
        for kept in self._kept:
            kept.versions[_ORIGIN].number = self.number
        coded = [self._coded(piece, kept) for piece, kept in zip(pieces, self._kept, strict=True)]
        self.messages[self.number] = Message(number, self.number, coded)
        self.number = number
        room = sum(kept.nbytes for kept in self._kept) // _HISTORY
        while len(self.messages) > 1 and sum(each.nbytes for each in self.messages.values()) > room:
            del self.messages[min(self.messages)]
        full = self.full
        if full is not None and full.version not in self.messages:
            self.full = None  # nothing goes on from there

    def make_full(self) -> None:
        """Make the message that brings a receiver here from nothing."""
        pieces = []
        for kept in self._kept:
            words = kept.versions[_ORIGIN].words
            fresh = _kept(np.zeros_like(words), 0, codes=False)
            pieces.append(self._coded(torch.from_numpy(words), fresh))
        self.full = Message(self.number, 0, pieces)

    def _coded(self, piece: torch.Tensor, kept: Kept) -> bytes:
        # A copy: parts of the message may be views of the piece, which is filled anew by the next send.
        return b"".join(self._coder.code([piece.reshape(-1)], [kept], _ORIGIN))

    def next_for(self, have: int, until: int) -> Message | None:
        """What brings a receiver on that has a version; None where that has to be made first."""
        message = self.messages.get(have) if have else None
        if message is not None and (not until or message.version <= until):
            return message
        full = self.full
        return full if full is not None and full.version > have else None


class Copies:
    """What a receiver keeps of one rank's pieces."""

    def __init__(self, described: Sequence[tuple[str, TensorEntry, tuple[int, ...]]]) -> None:
        self.number = 0
        self._described = described
        self._kept = [Kept() for _ in described]
        self._coder = Coder()

    def apply(self, message: Message) -> None:
        """Follow a message. Raises: Damaged, naming the piece; then nothing is held any more."""
        number, self.number = self.number, 0
        if message.base not in (0, number):
            raise Damaged(
                f"version {message.version} is one of changes since {message.base}, of {number} here"
            )
        for (name, entry, shape), kept, piece in zip(
            self._described, self._kept, message.pieces, strict=True
        ):
            if message.base:
                kept.versions[_ORIGIN].number = message.base
            scratch = torch.empty(prod(shape) * ITEM_NBYTES[entry.dtype], dtype=torch.uint8)
            try:
                self._coder.decode(memoryview(piece), views_of([scratch]), [kept], _ORIGIN)
            except (Damaged, ValueError, IndexError, struct.error) as error:
                raise Damaged(f"{name} of version {message.version} is damaged: {error}") from error
        self.number = message.version

    def words(self) -> Iterator[np.ndarray]:
        """The bytes of each piece, which the next message changes."""
        for kept in self._kept:
            yield kept.versions[_ORIGIN].words.view(np.uint8)


def _words(piece: torch.Tensor) -> np.ndarray:
    return np.frombuffer(view_of(piece), f"<i{min(piece.element_size(), 8)}")


def _kept(words: np.ndarray, number: int, codes: bool = True) -> Kept:
    kept = Kept()
    kept.on, kept.codes = True, codes and zstandard is not None
    kept.versions[_ORIGIN] = Version(words, number)
    return kept
