"""Examples as windows of one length, and batches of them.

    text      | a a a a b b | b b c c c c | ...      one after another, cut where a window is full
    records   | a a a b b . | c c c c d . | ...      packed: whole, none sees another; padded: one each

Where an example begins in a window, positions count from 0 again, and the attention of transformers then
sees nothing before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import DataError
from shardwright.finetune.records import Example

IGNORED = -100
"""The target that ``cross_entropy`` leaves out."""


@dataclass(frozen=True)
class Batch:
    """``inputs`` and ``targets``, int64 (b, t), a target not learned is ``IGNORED``; ``positions`` int64
    (b, t), None where every row is one example from its begin; ``num_targets`` are learned."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None
    num_targets: int


@dataclass(frozen=True)
class Windows:
    """``tokens`` int32, ``learned`` and ``starts`` (an example begins) bool, each (n, sequence_length + 1);
    ``cut`` examples were too long and lost their end, ``dropped`` ones had nothing left to learn."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    cut: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int]) -> Batch:
        """The windows of those numbers."""
        tokens = torch.from_numpy(self.tokens[rows].astype(np.int64))
        starts = self.starts[rows].copy()
        starts[:, 0] = True
        counted = np.where(self.learned[rows] & ~starts, self.tokens[rows], IGNORED)[:, 1:].astype(np.int64)
        column = np.arange(starts.shape[1])
        positions = (column - np.maximum.accumulate(np.where(starts, column, 0), axis=1))[:, :-1]
        return Batch(
            tokens[:, :-1].contiguous(),
            torch.from_numpy(counted),
            torch.from_numpy(positions) if starts[:, 1:-1].any() else None,
            int((counted != IGNORED).sum()),
        )

    def spread(self, count: int) -> list[int]:
        """Numbers of ``count`` windows, or all, evenly over them."""
        return np.linspace(0, len(self) - 1, num=min(count, len(self))).round().astype(int).tolist()

    def targets(self) -> np.ndarray:
        """The tokens that are learned, int32, 1-D."""
        return self.tokens[:, 1:][self.learned[:, 1:] & ~self.starts[:, 1:]]


def stream(examples: Sequence[Example], length: int) -> Windows:
    """Windows of ``length`` tokens and the target of the last, each beginning with the last target of the one
    before. Raises: DataError where not one is full."""
    tokens = np.concatenate([example.tokens for example in examples])
    learned = np.concatenate([example.learned for example in examples])
    starts = np.zeros(len(tokens), dtype=bool)
    begins = np.cumsum([0, *(len(example.tokens) for example in examples[:-1])])
    starts[begins[begins < len(tokens)]] = True
    count = (len(tokens) - 1) // length
    if count < 1:
        raise DataError(
            f"{len(tokens)} tokens hold no sequence of {length}: use more text, another data.heldout_share, "
            "or a smaller training.sequence_length"
        )
    rows = np.arange(count)[:, None] * length + np.arange(length + 1)
    return Windows(tokens[rows], learned[rows], starts[rows])


def packed(examples: Sequence[Example], length: int, pad: int, *, several: bool) -> Windows:
    """Windows of whole examples, the rest filled with ``pad``; ``several`` in one as long as they fit, in
    order. One that is longer than a window loses its end. Raises: DataError where nothing is left to learn.
    """
    width, cut = length + 1, sum(len(example.tokens) > length + 1 for example in examples)
    fitting = [Example(e.tokens[:width], e.learned[:width]) for e in examples]
    kept = [example for example in fitting if example.learned[1:].any()]
    if not kept:
        raise DataError(
            f"of {len(examples)} record(s) none has anything to learn in its first {length} tokens: use a "
            "larger training.sequence_length, or data.mask_prompts = false"
        )
    rows: list[list[Example]] = []
    used = width
    for example in kept:
        if not several or used + len(example.tokens) > width:
            rows.append([])
            used = 0
        rows[-1].append(example)
        used += len(example.tokens)
    tokens = np.full((len(rows), width), pad, dtype=np.int32)
    learned, starts = np.zeros((2, len(rows), width), dtype=bool)
    for row, members in enumerate(rows):
        at = 0
        for example in members:
            end = at + len(example.tokens)
            tokens[row, at:end], learned[row, at:end], starts[row, at] = example.tokens, example.learned, True
            at = end
        starts[row, at : at + 1] = True  # the padding is seen by nobody
    return Windows(tokens, learned, starts, cut, len(examples) - len(kept))
