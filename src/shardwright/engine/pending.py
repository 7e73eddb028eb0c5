"""A reduction on its way, and the parameters whose gradients it brings."""

from collections.abc import Sequence

import torch

from shardwright.params.param import ShardedParam
from shardwright.transport.base import Reduction


class PendingReduction:
    """``params``: none where nobody wants what it brings any more."""

    def __init__(self, reduction: Reduction, params: Sequence[ShardedParam]) -> None:
        self.reduction = reduction
        self.params = list(params)
        self._outlives = False

    def outlive(self) -> None:
        """The backward ends that has issued it: who clears gradients from here on clears what it brings."""
        for param in self.params:
            param.waiting.begin(param.sharded)
        self._outlives = True

    def land(self) -> tuple[list[torch.Tensor], list[ShardedParam]]:
        """Wait for it: what it brings of the parameters whose gradients weren't cleared meanwhile."""
        totals = self.reduction.wait()
        if not (self._outlives and self.params):
            return totals, self.params
        pairs = zip(totals, self.params, strict=True)
        kept = [(total, p) for total, p in pairs if not p.waiting.is_cleared(p.sharded)]
        return [total for total, _ in kept], [param for _, param in kept]

    def drop(self) -> None:
        """Its backward failed: it ends unseen, and what waited for it is lost."""
        for param in self.params:
            param.waiting.lose(param.sharded)
        self.params = []
