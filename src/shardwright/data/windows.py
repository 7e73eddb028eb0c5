"""Examples as windows of one length, and batches of them.

    text      | a a a a b b | b b c c c c | ...      one after another, cut where a window is full
    records   | a a a b b   | c c c c d   | ...      packed: whole, none sees another; or one each
    pairs     | a a a       | A A         | ...      the chosen and the rejected answer

A batch has the positions that the longest of its windows needs, and shorter ones are padded to that.

Where an example begins in a window, positions count from 0 again, and the attention of transformers then
sees nothing before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwright.data.store import Examples
from shardwright.data.text import to_device
from shardwright.errors import DataError

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

    def to(self, device: torch.device) -> "Batch":
        """The same on ``device``."""
        positions = None if self.positions is None else to_device(self.positions, device)
        inputs, targets = to_device(self.inputs, device), to_device(self.targets, device)
        return Batch(inputs, targets, positions, self.num_targets)


@dataclass(frozen=True)
class Windows:
    """Rows of at most ``width`` tokens, sequence_length + 1, as spans of the tokens of ``examples``; nothing
    is copied until a batch is made.

    at, length: int64 (spans,), where a span begins there, and how long it is; starts: bool (spans,), whether
    an example begins with it. first: int64 (rows + 1,), the first span of each row. num_targets: tokens to
    learn in all rows. pad: fills a batch. ``cut`` examples were too long and lost their end, ``dropped`` ones
    had nothing left to learn.
    """

    examples: Examples
    width: int
    at: np.ndarray
    length: np.ndarray
    starts: np.ndarray
    first: np.ndarray
    num_targets: int
    pad: int = 0
    cut: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def inputs(self) -> np.ndarray:
        """Tokens that a model is given of each row, int64: all but the last, and no padding."""
        return np.add.reduceat(self.length, self.first[:-1]) - 1

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(its tokens, int32, one that isn't learned as its complement; whether an example begins there)."""
        spans = range(self.first[number], self.first[number + 1])
        parts = [self.examples.tokens[self.at[span] : self.at[span] + self.length[span]] for span in spans]
        coded = np.concatenate(parts)
        starts = np.zeros(len(coded), dtype=bool)
        starts[np.cumsum([0, *map(len, parts[:-1])])] = self.starts[spans.start : spans.stop]
        return coded, starts

    def batch(self, rows: Sequence[int]) -> Batch:
        """The windows of those numbers."""
        return batch_of([self.row(number) for number in rows], self.width, self.pad)


def positions_for(tokens: int, most: int) -> int:
    """How many positions rows of so many tokens get, of ``most``: whole eights. Tensor cores take these, and
    there are fewer shapes, for each of which a library makes its kernels, in memory that it keeps."""
    return min(-(-tokens // 8) * 8, most)


def batch_of(rows: Sequence[tuple[np.ndarray, np.ndarray]], width: int, pad: int) -> Batch:
    """Rows, as ``Windows.row`` gives them, as what a model takes, padded with ``pad``, but not over
    ``width``."""
    shape = len(rows), 1 + positions_for(max(len(own) for own, _ in rows) - 1, width - 1)
    coded, starts = np.full(shape, ~pad, dtype=np.int32), np.zeros(shape, dtype=bool)
    for row, (own, begins) in enumerate(rows):
        coded[row, : len(own)], starts[row, : len(own)] = own, begins
        starts[row, len(own) : len(own) + 1] = True  # the padding is seen by nobody
    tokens = torch.from_numpy(np.where(coded < 0, ~coded, coded).astype(np.int64))
    starts[:, 0] = True
    counted = np.where((coded >= 0) & ~starts, coded, IGNORED)[:, 1:].astype(np.int64)
    column = np.arange(starts.shape[1])
    positions = (column - np.maximum.accumulate(np.where(starts, column, 0), axis=1))[:, :-1]
    return Batch(
        tokens[:, :-1].contiguous(),
        torch.from_numpy(counted),
        torch.from_numpy(positions) if starts[:, 1:-1].any() else None,
        int((counted != IGNORED).sum()),
    )


def stream(examples: Examples, chosen: np.ndarray, length: int) -> Windows:
    """Windows of ``length`` tokens and the target of the last, each beginning with the last target of the one
    before, of the ``chosen`` numbers of examples. Raises: DataError where not one is full."""
    chosen = chosen[examples.ends[chosen] > examples.begins[chosen]]
    begins = examples.begins[chosen]
    ends = np.cumsum(examples.ends[chosen] - begins)  # in the stream of those that are chosen
    total = int(ends[-1]) if len(ends) else 0
    count = (total - 1) // length
    if count < 1:
        raise DataError(
            f"{total} tokens hold no sequence of {length}: use more text, another data.heldout_share, "
            "or a smaller training.sequence_length"
        )
    offsets = np.concatenate([[0], ends[:-1]])
    row_begin = np.arange(count) * length
    low = np.searchsorted(ends, row_begin, side="right")
    high = np.searchsorted(ends, row_begin + length, side="right")
    spans_of = high - low + 1
    first = np.concatenate([[0], np.cumsum(spans_of)])
    member = np.arange(first[-1]) - np.repeat(first[:-1] - low, spans_of)
    begin = np.maximum(offsets[member], np.repeat(row_begin, spans_of))
    end = np.minimum(ends[member], np.repeat(row_begin + length + 1, spans_of))
    starts = begin == offsets[member]
    unpredicted = int((starts & (begin != np.repeat(row_begin, spans_of))).sum())
    at = begins[member] + begin - offsets[member]
    return Windows(examples, length + 1, at, end - begin, starts, first, count * length - unpredicted)


def packed(examples: Examples, chosen: np.ndarray, length: int, pad: int, *, several: bool) -> Windows:
    """Windows of whole examples of the ``chosen`` numbers; ``several`` in one as they fit, the longest first,
    each where the least room is left. One that is longer than a window loses its end.

    Raises: DataError where nothing is left to learn.
    """
    width = length + 1
    targets = _targets(examples, chosen, width)
    kept, sizes = chosen[targets > 0], (examples.ends - examples.begins)[chosen]
    if not len(kept):
        raise DataError(
            f"of {len(chosen)} record(s) none has anything to learn in its first {length} tokens: use a "
            "larger training.sequence_length, or data.mask_prompts = false"
        )
    lengths = np.minimum(sizes, width)[targets > 0]
    order, first = _best_fit(lengths, width) if several else (np.arange(len(kept)), np.arange(len(kept) + 1))
    return Windows(
        examples,
        width,
        examples.begins[kept][order],
        lengths[order],
        np.ones(len(kept), dtype=bool),
        first,
        int(targets.sum()),
        pad,
        int((sizes > width).sum()),
        len(chosen) - len(kept),
    )


def paired(examples: Examples, chosen: np.ndarray, length: int, pad: int) -> Windows:
    """Windows of one example each: 2 i is a chosen answer, 2 i + 1 the rejected one to the same prompt. Pairs
    with a side that has nothing to learn within ``length`` tokens are dropped.

    Raises: DataError where none is left.
    """
    targets = _targets(examples, chosen, length + 1).reshape(-1, 2)
    return packed(examples, chosen[np.repeat((targets > 0).all(axis=1), 2)], length, pad, several=False)


def _targets(examples: Examples, chosen: np.ndarray, width: int) -> np.ndarray:
    """How many tokens are to be learned in the first ``width`` of each, int64."""
    counts, begins = np.array(examples.targets[chosen]), examples.begins[chosen]
    for i in np.flatnonzero(examples.ends[chosen] - begins > width).tolist():
        counts[i] = np.count_nonzero(examples.tokens[begins[i] + 1 : begins[i] + width] >= 0)
    return counts


def _best_fit(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Best fit, decreasing: (which one comes when, where each row begins among them), both int64.

    As in the packing of TRL. A bit for each number of tokens that some row has left finds the least that
    suffices in one step, so that a million records take seconds.
    """
    room: list[list[int]] = [[] for _ in range(width + 1)]
    there, rows = 0, list[list[int]]()
    for i in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[i])
        fits = there >> size
        if fits:
            left = size + (fits & -fits).bit_length() - 1
            row = room[left].pop()
            if not room[left]:
                there ^= 1 << left
        else:
            left, row = width, len(rows)
            rows.append([])
        rows[row].append(i)
        room[left - size].append(row)
        there |= 1 << (left - size)
    order = np.array([i for row in rows for i in row], dtype=np.int64)
    return order, np.concatenate([[0], np.cumsum([len(row) for row in rows])])
