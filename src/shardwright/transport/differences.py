"""What the ranks of a transport keep of their last all-gathers, so that of the next ones only changes travel.

Parameters know nothing of it: it lies beside the transport (``Differences``), by the source of each segment.
``cpu/coder.py`` makes messages of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from shardwright.transport.base import Comm, Segment, Source


@dataclass(frozen=True)
class Sends:
    """What a group's collectives send over a network.

    changes: an all-gather what has changed since the last one. codes: of it, coded differences; else the
    parts in which anything has changed. gradients: a reduce-scatter coded numbers. why: why nothing of these,
    where it was asked for.
    """

    changes: bool = False
    codes: bool = False
    gradients: bool = False
    why: str = ""


WHOLE = Sends()


@dataclass
class Version:
    """One span as it was sent last. words: its patterns, as signed integers. number: of the messages that it
    has followed. crc: CRC-32 of the words, None before the first message."""

    words: np.ndarray
    number: int = 0
    crc: int | None = None


class Kept:
    """What a rank keeps of a segment's last all-gather, so that of the next one only changes travel.

    The owner of a span compares it with what it has sent last, and every other rank has kept the same: one
    copy of all spans, in host memory, in the dtype of the wire. A number counts the messages that a copy has
    followed. It is in each message, so that a difference is never added to anything but what it was taken
    from.

    Of one segment: the last version of each rank's span. Own ones are written by the thread that codes,
    others' by the one that decodes, each in the order of messages, whether or not anybody waits for them.

    on: this rank sends what has changed; else the whole span, and everybody forgets. codes: changes are sent
    as coded differences; else the parts in which anything has changed are sent whole.
    """

    def __init__(self) -> None:
        self.on = self.codes = False
        self.versions: dict[int, Version] = {}

    @property
    def is_used(self) -> bool:
        """Whether an all-gather has to tell the other ranks of it: what has changed, or to forget."""
        return self.on or bool(self.versions)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this rank holds for it."""
        return sum([version.words.nbytes for version in tuple(self.versions.values())])


class Differences:
    """What is kept of all that one transport gathers, for as long as its source lives."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Source, Kept] = WeakKeyDictionary()

    def of(self, segment: Segment) -> Kept | None:
        """What is kept of it, if anything may be: the same on all ranks."""
        return None if segment.source is None else self._kept.get(segment.source)

    def send(self, segments: Iterable[Segment], what: Sends) -> None:
        """From their next all-gather on, send what has changed since the last one, or whole spans."""
        for segment in segments:
            if segment.source is not None:
                kept = self._kept.setdefault(segment.source, Kept())
                kept.on, kept.codes = what.changes, what.codes


def differences_of(comm: Comm) -> Differences | None:
    """Of the part of ``comm`` that sends messages of any length (``why_plain``); None where it has none."""
    return getattr(comm.network, "differences", None)
