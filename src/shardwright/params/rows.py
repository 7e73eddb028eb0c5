"""The rows of a lookup's weight that are in use, and collectives that move only those.

    before a lookup      ranks exchange which rows theirs read: a bit for each row
    all-gather           the rows that any of them reads; the rest of the buffer stays unwritten
    gradients there      ranks exchange which rows of theirs have a bit set
    reduce-scatter       the rows that any of them has; the rest of each shard is zero

Exact, bit for bit: a row that no rank looks up is read by nobody, since the weight is at rest again before
other code runs (``wanted_by`` says when that is so); and of a row that travels every rank's part is
summed, zeros included, in the order in which whole gradients are. Which rows have gradients is read from the
gradients, whatever brought them. Where more than half of the rows are in use, all travel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.schedule.layout import ParamLayout, Spans, equal_spans
from shardwright.torch_private import forward_hooks_of, forward_pre_hooks_of
from shardwright.transport.base import Comm, Gather, Reduction, Segment

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Rows:
    """What the ranks of ``comm`` look up of a weight that is sharded over them by rows.

    wanted: bool, one for each row: those that the lookup to come on this rank reads; None: all of them.
    """

    def __init__(self, layout: ParamLayout) -> None:
        assert layout.dim == 0
        self.wanted: torch.Tensor | None = None
        self._layout = layout

    @contextmanager
    def wanted_by(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """While the group is unsharded for this call of ``module``, the rows that it looks up suffice."""
        inputs = (*args, *kwargs.values())
        # Hooks of others, methods of the instance or those that run as its forward might read the rest.
        alone = len(forward_pre_hooks_of(module)) == len(forward_hooks_of(module)) == 1
        as_built = not any(callable(value) for value in module.__dict__.values())
        if alone and as_built and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            self.wanted = rows_in(inputs[0], self._layout.rows)
        try:
            yield
        finally:
            self.wanted = None

    def gather(self, comm: Comm, local: torch.Tensor, region: torch.Tensor, key: str) -> Gather | None:
        """Issue the all-gather of the rows in use; waits for the exchange before it.

        local: this rank's rows. region: the padded region in the group's buffer, 1-D, which ``wait`` of the
        gather fills in part. None: most rows are in use, so all are to be gathered.
        """
        wanted = self.wanted
        if wanted is None:
            # Ranks that need all of it say so in the same exchange: they would wait for each other else.
            wanted = torch.ones(self._layout.rows, dtype=torch.bool, device=region.device)
        rows = _Exchange(comm, wanted.to(region.device), self._layout, f"rows of {key}").wait()
        return None if rows is None else _RowGather(comm, local, region, rows, key)

    def reduce(self, comm: Comm, segment: Segment, dtype: torch.dtype, key: str) -> Reduction:
        """Issue the exchange for a reduce-scatter of a gradient; ``wait`` does the rest."""
        return _RowReduction(comm, segment, dtype, self._layout, key)


class _Rows:
    """The rows that travel, the same on all ranks, each rank's in a place as long as the longest of them.

    ids: int64, ascending. places: the row of each where they travel. own: this rank's, within its shard.
    spans: elements of each rank's; of its whole place where the transport moves equal parts.
    """

    def __init__(self, used: torch.Tensor, layout: ParamLayout, comm: Comm) -> None:
        world, self.width = layout.world, layout.row_numel
        self.ids = used.nonzero().view(-1)
        self.own = used[slice(*layout.row_range(comm.rank))].nonzero().view(-1)
        by_rank = F.pad(used, (0, world * layout.chunk_rows - layout.rows)).view(world, -1)
        counts = by_rank.sum(1)
        # Here, as in `nonzero`, the host waits for the device: collectives are launched with their sizes.
        longest = int(counts.max())
        skipped = torch.arange(world, device=used.device) * longest - (counts.cumsum(0) - counts)
        owners = self.ids.div(layout.chunk_rows, rounding_mode="floor")
        self.places = torch.arange(len(self.ids), device=used.device) + skipped.index_select(0, owners)
        self.spans = equal_spans(longest * self.width, world)
        if comm.reads_in_place:
            numels = tuple((counts * self.width).tolist())
            self.spans = _RowSpans(world, self.spans.longest, self.spans.end, numels=numels)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for them as they travel, ``[ranks x the longest, width]``."""
        return like.new_empty(self.spans.end // self.width, self.width)


@dataclass(frozen=True)
class _RowSpans(Spans):
    """Each rank's rows at the beginning of equal places. numels: elements of each rank's."""

    numels: tuple[int, ...] = ()

    def __getitem__(self, rank: int) -> tuple[int, int]:
        start = rank * self.longest
        return start, start + self.numels[rank]


class _Exchange:
    """Which rows any rank uses: an all-gather of ``ceil(rows / 8)`` bytes from each, in flight."""

    def __init__(self, comm: Comm, used: torch.Tensor, layout: ParamLayout, key: str) -> None:
        self._comm, self._layout = comm, layout
        nbytes = -(-layout.rows // 8)
        self._bits = torch.empty(comm.world, nbytes, dtype=torch.uint8, device=used.device)
        eights = F.pad(used.to(torch.uint8), (0, -used.numel() % 8)).view(-1, 8)
        self._bits[comm.rank] = (eights << _places(used.device)).sum(1, dtype=torch.uint8)
        spans = equal_spans(nbytes, comm.world)
        self._gather = comm.all_gather([Segment(self._bits.view(-1), spans)], key)

    def wait(self) -> _Rows | None:
        """The rows; None where they are more than half of all."""
        self._gather.wait()
        used = _unpack(self._bits, self._layout.rows).any(0)
        # Then picking rows out, and putting them back, saves little. All ranks see the same bits and decide
        # the same.
        if 2 * int(used.sum()) > self._layout.rows:
            return None
        return _Rows(used, self._layout, self._comm)


class _RowGather:
    """An all-gather of some rows, in flight."""

    def __init__(self, comm: Comm, local: torch.Tensor, region: torch.Tensor, rows: _Rows, key: str) -> None:
        self._region, self._rows = region, rows
        self._travelled = rows.empty(region)
        segment = Segment(self._travelled.view(-1), rows.spans)
        own = segment.part(comm.rank).view(-1, rows.width)[: len(rows.own)]
        own.copy_(local.flatten(1).index_select(0, rows.own))
        self._gather = comm.all_gather([segment], key)

    def wait(self) -> None:
        """Wait for it, then put the rows in their places."""
        self._gather.wait()
        whole = self._region.view(-1, self._rows.width)
        whole.index_copy_(0, self._rows.ids, self._travelled.index_select(0, self._rows.places))


class _RowReduction:
    """A reduce-scatter of the rows that have gradients, in flight."""

    def __init__(
        self, comm: Comm, segment: Segment, dtype: torch.dtype, layout: ParamLayout, key: str
    ) -> None:
        self._comm, self._layout = comm, layout
        self._segment, self._dtype, self._key = segment, dtype, key
        self._exchange = _Exchange(comm, _rows_with_bits(segment.flat, layout), layout, f"rows of {key}")

    def wait(self) -> list[torch.Tensor]:
        """See ``Reduction.wait``: the whole shard's sum."""
        rows = self._exchange.wait()
        segment, layout = self._segment, self._layout
        if rows is None:
            return self._comm.reduce_scatter([segment], [self._dtype], self._key).wait()
        some = rows.empty(segment.flat)
        some.index_copy_(0, rows.places, segment.flat.view(layout.rows, rows.width).index_select(0, rows.ids))
        narrow = Segment(some.view(-1), rows.spans)
        (total,) = self._comm.reduce_scatter([narrow], [self._dtype], self._key).wait()
        # Rows that no rank has a gradient of are sums of zeros.
        whole = total.new_zeros(layout.shard_numel(self._comm.rank))
        whole.view(-1, rows.width).index_copy_(0, rows.own, total.view(-1, rows.width)[: len(rows.own)])
        return [whole]


def _rows_with_bits(flat: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """Bool for each row: whether it has anything but +0.0, which adds nothing to a sum of such."""
    size = next(n for n in _WORDS if layout.row_numel * flat.element_size() % n == 0)
    words = flat.view(torch.uint8).view(_WORDS[size]).view(layout.rows, -1)
    least, most = torch.aminmax(words, dim=1)  # 1.3 ms for 16 MiB; any() takes 7-13 (measured)
    return (least != 0) | (most != 0)


def _unpack(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Uint8 [ranks, ceil(n / 8)] -> bool [ranks, n]."""
    return (packed.unsqueeze(2) >> _places(packed.device) & 1).flatten(1)[:, :numel].bool()


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def rows_in(indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Bool [num_rows]: the rows that ``indices`` (integers of any shape) name; others are left to the lookup
    to refuse."""
    flat = indices.detach().reshape(-1).long()
    named = flat[(flat >= 0) & (flat < num_rows)]
    return torch.zeros(num_rows, dtype=torch.bool, device=indices.device).index_fill_(0, named, True)
