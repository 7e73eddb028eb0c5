"""What a publisher asks of the place that versions go to."""

from collections.abc import Sequence

import torch


class Destination:
    """Where versions go. What raises ends the publisher: the next ``send`` raises it."""

    address = ""
    takes_each = False
    """Whether no version may be left out: all ranks' threads take the same ones, together."""

    def is_due(self, number: int) -> bool:
        """Whether a version is to be taken. Asked under the publisher's lock."""
        raise NotImplementedError

    def take(self, number: int, pieces: Sequence[torch.Tensor]) -> None:
        """Hand over a version, whose pieces stay as they are meanwhile. On the publisher's thread."""
        raise NotImplementedError

    def has_more(self) -> bool:
        """Whether there is something to do that needs no piece."""
        return False

    def do_more(self) -> None:
        """Do it. On the publisher's thread."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this keeps of versions, at most, beside what is on its way."""
        return 0

    def close(self, timeout: float) -> None:
        """Let those who wait for the last version have it, and end."""
