"""Messages of collectives: their head, and where each stands while it is sent or arrives."""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwright.transport.cpu.pages import take_bytes
from shardwright.transport.cpu.transfer import Transfer
from shardwright.transport.cpu.views import views_of
from shardwright.transport.kept import Kept

HEAD = struct.Struct("<qqqq96s")
"""Number of the collective, bytes of the parts, number of runs, bytes of the code, key."""
NO_RUNS = -1  # all of the parts are sent
NOT_CODED = -1
FAILURE = -1
"""In place of a number: the message is text, of a failure from the collective in place of runs on."""
TEXT_NBYTES = 4096  # at most, of such a message
_KEY_NBYTES = 96


@dataclass
class Incoming:
    """A message that is expected, or that arrives before it is.

    views: the places that are still to be filled. memory: what lies behind them, where the event loop
    took it.
    runs: the table that is to be filled first, where the message has one.
    kept, code, places: of a coded message what is kept of each part, its memory, and where it is decoded to.
    transfer: who waits for it; None until the own rank comes to that collective.
    text: word of a failure from that collective on, which nobody waits for.
    took_s: seconds from its head to its end; while it arrives, less the time of its end.
    """

    number: int
    nbytes: int
    key: str
    views: deque[memoryview]
    memory: torch.Tensor | None = None
    runs: bytearray | None = None
    kept: Sequence[Kept | None] = ()
    code: torch.Tensor | None = None
    places: deque[memoryview] = field(default_factory=deque)
    transfer: Transfer | None = None
    text: bytearray | None = None
    took_s: float = 0.0

    @property
    def arriving(self) -> bool:
        """Whether some of it is still to come."""
        return bool(self.views) or self.runs is not None or self.code is not None

    def take_text(self, number: int) -> None:
        """It is word of a failure from that collective on."""
        self.number, self.text = number, bytearray(self.nbytes)
        self.views.append(memoryview(self.text))

    def take_code(self, nbytes: int) -> None:
        """It is coded: its places are filled once the code is there."""
        self.places, self.code = self.views, take_bytes(nbytes)
        self.views = views_of([self.code])

    @property
    def name(self) -> tuple[int, int, str]:
        """What must be the same on both ends."""
        return self.number, self.nbytes, self.key


@dataclass
class Outgoing:
    """A message that is sent. transfer: who waits until it is sent, None for word of a failure. ready: False
    while it is coded."""

    views: deque[memoryview]
    transfer: Transfer | None
    ready: bool = True


def text_of(key: str) -> bytes:
    """A collective's key, as it travels."""
    return key.encode()[:_KEY_NBYTES]
