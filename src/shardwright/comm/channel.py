"""Channels: words of every rank, combined into the same words on every rank. For agreeing, not for data.

Both ways of combining are idempotent, so words may reach a rank twice: any number of ranks, any route, and
one axis of a mesh after the other, all give the same answer.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from shardwright.comm.agreement import exchange
from shardwright.comm.base import Comm

Combine = Literal["or", "min"]

NOTHING = 2**63 - 1
"""What a rank says in a ``"min"`` that has nothing to say; 0 says nothing in an ``"or"``."""

COMBINE: dict[str, Callable[[int, int], int]] = {"or": operator.or_, "min": min}


class Channel(Protocol):
    """Ranks that agree with each other. All of them call it equally often, with as many words."""

    def exchange(self, words: list[int], combine: Combine = "or") -> list[int]:
        """The ranks' ``words`` (int64), combined one by one; the same on every rank.

        Every rank of the channel calls it, and none returns before all have.
        Raises: CommError for a rank that has ended or does not come in time.
        """
        ...


class AxisChannel:
    """The ranks of one mesh axis, over the transport that moves its parameters."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._device = device

    def exchange(self, words: list[int], combine: Combine = "or") -> list[int]:
        """See ``Channel.exchange``."""
        rows = exchange(self._comm, words, self._device, f"agree on {len(words)} words")
        return [functools.reduce(COMBINE[combine], column) for column in zip(*rows, strict=True)]


class JointChannel:
    """The ranks of several axes of one mesh: what one axis says travels on along the next."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = tuple(channels)

    def exchange(self, words: list[int], combine: Combine = "or") -> list[int]:
        """See ``Channel.exchange``."""
        for channel in self._channels:
            words = channel.exchange(words, combine)
        return words


def tell(
    channel: Channel, key: int, data: bytes | None, kind: Callable[[int], int] = lambda key: key
) -> dict[int, bytes]:
    """What the ranks have to say, each *kind* of it once: ``{key: data}``, the same on every rank.

    Every rank of the channel calls it. ``data`` of None says nothing. Ranks whose keys are of one kind say
    alike, so only those with the smallest key of each kind are heard: as many rounds as there are kinds,
    however many ranks. Ranks with the same key have the same data.
    """
    told: dict[int, bytes] = {}
    while True:
        silent = data is None or kind(key) in map(kind, told)
        [first] = channel.exchange([NOTHING if silent else key], "min")
        if first == NOTHING:
            return told
        mine = data if data is not None and not silent and key == first else b""
        [nbytes] = channel.exchange([len(mine)])
        words = [int.from_bytes(mine[at : at + 7], "little") for at in range(0, nbytes, 7)]
        said = b"".join(word.to_bytes(7, "little") for word in channel.exchange(words or [0]))
        told[first] = said[:nbytes]
