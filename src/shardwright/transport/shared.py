"""One collective in flight that several owners wait for, each for its own part."""

from collections.abc import Sequence

import torch

from shardwright.transport.base import Gather, Reduction, Segment
from shardwright.transport.streams import Streams


class SharedGather:
    """An all-gather of several groups: the first that waits waits for all of it.

    segments: what it fills, held until then: of some groups nobody else may hold it.
    """

    def __init__(self, gather: Gather, segments: Sequence[Segment]) -> None:
        self._gather: Gather | None = gather
        self._segments = segments

    def wait(self) -> None:
        """See ``Gather.wait``; may be called by every owner."""
        if self._gather is not None:
            self._gather.wait()  # where it fails it stays, to fail for the next one too
            self._gather = None
            self._segments = []


class SharedReduction:
    """A reduction (a reduce-scatter, or an all-reduce) of several owners' tensors, one after another."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._totals: list[torch.Tensor] | None = None

    def parts(self, counts: Sequence[int]) -> "list[_Part]":
        """Of each owner what it waits for: the next ``count`` sums."""
        stops = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [_Part(self, stop - count, stop) for count, stop in zip(counts, stops, strict=True)]

    def wait(self) -> list[torch.Tensor]:
        """All sums. The reduction lives as long as an owner has its part."""
        if self._totals is None:
            self._totals = self._reduction.wait()
        return self._totals


class _Part:
    """One owner's part of a reduction."""

    def __init__(self, whole: SharedReduction, start: int, stop: int) -> None:
        self._whole = whole
        self._start, self._stop = start, stop

    def wait(self) -> list[torch.Tensor]:
        """See ``Reduction.wait``."""
        return self._whole.wait()[self._start : self._stop]


class Followed:
    """A reduction whose sums another collective takes on an accelerator: made on the reduce stream, once that
    waits for them. What was read is held until compute has waited for that stream."""

    def __init__(self, reduction: Reduction, streams: Streams) -> None:
        self._held = [reduction]
        self._streams, self._due = streams, streams.reduced()

    def wait(self) -> list[torch.Tensor]:
        """Make compute wait; nothing is left to give."""
        self._streams.land(self._due)
        self._held = []
        return []
