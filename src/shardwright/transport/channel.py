"""Words between ranks, for agreeing and not for data: exchanged over one mesh axis, or combined over several.

A channel combines the words of all ranks into the same words on every rank. They travel on a transport of the
host, where a rank that ended, never came or is elsewhere is named as in any collective.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal, Protocol

from shardwright.errors import CommError, Diverged
from shardwright.transport.base import Comm

Combine = Literal["or", "min"]

NOTHING = 2**63 - 1
"""What a rank says in a ``"min"`` that has nothing to say; 0 says nothing in an ``"or"``."""

COMBINE: dict[str, Callable[[int, int], int]] = {"or": operator.or_, "min": min}


def compare(comm: Comm, text: str, key: str) -> list[str]:
    """[] where ``text`` is the same on every rank, else every rank's text. Every rank of the axis calls it.

    Sends a hash, and the texts where hashes differ.
    """
    data = text.encode()
    # The texts travel only where hashes differ, so the result is the same on all ranks.
    digest = int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)
    rows = comm.host.exchange([digest, len(data)], key)
    if all(row == rows[0] for row in rows):
        return []
    longest = max(nbytes for _, nbytes in rows)
    padded = list(data.ljust(longest, b"\0"))
    texts = comm.host.exchange(padded, f"{key}: what differs")
    return [
        bytes(row[:nbytes]).decode(errors="replace") for row, (_, nbytes) in zip(texts, rows, strict=True)
    ]


def first_difference(sides: list[list[str]]) -> tuple[str, str, int] | None:
    """The first line in which a rank differs from rank 0: rank 0's, its own, and the rank. None where none
    does. sides: of each rank its lines."""
    other = next((rank for rank, side in enumerate(sides) if side != sides[0]), None)
    if other is None:
        return None
    pairs = zip_longest(sides[0], sides[other], fillvalue="nothing: its model ends before")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    return first, second, other


def check_same_lines(comm: Comm, lines: Sequence[str], key: str, what: str, remedy: str) -> None:
    """Every rank of the axis calls it. Raises: Diverged, on all of them, where ``lines`` aren't the same on
    every rank: with ``what`` ranks have, both sides of the first difference, and the remedy."""
    texts = compare(comm, "\n".join(lines), key)
    differs = first_difference([text.splitlines() for text in texts]) if texts else None
    if differs is not None:
        first, second, other = differs
        raise Diverged(
            f"{what}, first seen between ranks 0 and {other} of the mesh:\n"
            f"  rank 0: {first}\n  rank {other}: {second}\n{remedy}"
        )


def check_alike(comm: Comm, text: str, key: str) -> None:
    """Before a collective of which ``text`` says what it moves: on a transport of c10d's collectives, which
    compare nothing (other sizes end the process, other dtypes give other numbers), wait for all ranks' words.

    Every rank of the axis calls it. Raises: CommError where ranks say different things.
    """
    if comm.uses_c10d and (texts := compare(comm, text, key)):
        told = "".join(f"\n  rank {rank}: {each}" for rank, each in zip(comm.log.ranks, texts, strict=True))
        raise CommError(
            f"ranks are in different collectives:{told}\nAll ranks must make the same calls in one order"
        )


class Channel(Protocol):
    """Ranks that agree with each other. All of them call it equally often, with as many words."""

    def exchange(self, words: list[int], combine: Combine = "or", what: str = "") -> list[int]:
        """The ranks' ``words`` (int64), combined one by one; the same on every rank. what: they
        are, so that a rank that exchanges as many others is told from this one.

        Every rank of the channel calls it, and none returns before all have.
        Raises: CommError for a rank that has ended, does not come in time, or exchanges other words.
        """
        ...


class AxisChannel:
    """The ranks of one mesh axis, over the transport that moves its parameters, or the host's beside that.

    Each channel has a number on its transport, so that words of two are never taken for each other's.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm.host  # not an accelerator's: nobody waits for a device to read a word back
        self._number = 0

    def exchange(self, words: list[int], combine: Combine = "or", what: str = "") -> list[int]:
        """See ``Channel.exchange``."""
        comm = self._comm
        if not self._number:  # all ranks are here for the first time; one of them may have made it earlier
            self._number = comm.num_channels = comm.num_channels + 1
        other = f", channel {self._number}" if self._number > 1 else ""
        key = f"agreement on {len(words)} integers{what}{other}"
        return comm.all_reduce_words(words, COMBINE[combine], key)


class JointChannel:
    """The ranks of several axes of one mesh: what one axis says travels on along the next."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = tuple(channels)

    def exchange(self, words: list[int], combine: Combine = "or", what: str = "") -> list[int]:
        """See ``Channel.exchange``."""
        # Both ways of combining are idempotent, so words may reach a rank twice, by any route.
        for channel in self._channels:
            words = channel.exchange(words, combine, what)
        return words


def broadcast(
    channel: Channel, key: int, data: bytes | None, kind: Callable[[int], int] = lambda key: key
) -> dict[int, bytes]:
    """Every rank gets what the ranks have to say, each *kind* of it once: ``{key: data}``.

    Every rank of the channel calls it. ``data`` of None says nothing. Ranks whose keys are of one kind say
    the same, so only those with the smallest key of each kind are heard: as many rounds as there are kinds,
    however many ranks. Ranks with the same key have the same data.
    """
    told: dict[int, bytes] = {}
    while True:
        silent = data is None or kind(key) in map(kind, told)
        [first] = channel.exchange([NOTHING if silent else key], "min", ": key")
        if first == NOTHING:
            return told
        mine = data if data is not None and not silent and key == first else b""
        [nbytes] = channel.exchange([len(mine)], "or", ": size")
        # Seven bytes to a word: eight may be a number beyond int64. Who says nothing sends as many zeros,
        # which an OR leaves out.
        words = [int.from_bytes(mine[at : at + 7], "little") for at in range(0, nbytes, 7)]
        said = b"".join(word.to_bytes(7, "little") for word in channel.exchange(words or [0], "or", ": text"))
        told[first] = said[:nbytes]
