"""Windows of several sources as one, in an order whose position is one plain integer.

    epoch e     of source s, the n_s windows that come next in its own endless order; all of them shuffled

n_s is the source's share, by its weight, of as many windows as all sources have. So a small source with a
large weight is repeated within an epoch, and of a large one with a small weight each epoch has another part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.data.text import Order, Share
from shardwright.data.windows import Batch, Windows, batch_of


@dataclass(frozen=True)
class Mixture:
    """The windows of all ``parts``, ``per`` of them by each number, numbered one part after the other.

    per: 1, or 2 for preferences: the chosen and the rejected answer.
    """

    parts: tuple[Windows, ...]
    per: int = 1

    def __len__(self) -> int:
        return sum(len(part) // self.per for part in self.parts)

    @property
    def num_targets(self) -> int:
        """Tokens to learn in all of them."""
        return sum(part.num_targets for part in self.parts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The windows of those numbers: of preferences all chosen answers, then in the same order all that
        were rejected."""
        rows = [self._row(n * self.per + i) for i in range(self.per) for n in numbers]
        return batch_of(rows, self.parts[0].width, self.parts[0].pad)

    @cached_property
    def inputs(self) -> np.ndarray:
        """Tokens that a model is given by each number, int64, without padding."""
        return np.concatenate([part.inputs for part in self.parts]).reshape(-1, self.per).sum(axis=1)

    def spread(self, count: int) -> list[int]:
        """``count`` numbers, or all, evenly over them."""
        return np.linspace(0, len(self) - 1, num=min(count, len(self))).round().astype(int).tolist()

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        for part in self.parts:
            if number < len(part):
                return part.row(number)
            number -= len(part)
        raise IndexError(number)


class MixedOrder(Order):
    """An ``Order`` of windows of which source ``i`` has ``sizes[i]``, by their ``weights``, all above 0.

    Numbers are below the sum of ``sizes``; an epoch has ``counts[i]`` of source ``i``.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], share: Share, seed: int) -> None:
        total, weight = sum(sizes), sum(weights)
        self.counts = [max(1, round(total * each / weight)) for each in weights]
        super().__init__(sum(self.counts), share, seed)
        self._sizes = sizes

    def _order_of(self, epoch: int) -> np.ndarray:
        parts, offset = [], 0
        for source, (size, count) in enumerate(zip(self._sizes, self.counts, strict=True)):
            laps = range(epoch * count // size, ((epoch + 1) * count - 1) // size + 1)
            drawn = [np.random.default_rng((self._seed, source, lap)).permutation(size) for lap in laps]
            begin = epoch * count - laps[0] * size
            parts.append(offset + np.concatenate(drawn)[begin : begin + count])
            offset += size
        return np.random.default_rng((self._seed, len(parts), epoch)).permutation(np.concatenate(parts))
