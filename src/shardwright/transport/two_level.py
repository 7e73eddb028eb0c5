"""All ranks of a hybrid mesh as one world: each collective in two hops, of which one goes between nodes.

    rank of the world   0     1     2     3         two nodes of two ranks: rank = place * nodes + node
    node, place         0,0   1,0   0,1   1,1
                       └ one place ┘

The parts of one place follow one another. So an all-gather first brings a place its parts from the other
nodes, ``1 / places`` of everything, and then goes on inside of each node; a reduce-scatter comes back so.
Between nodes each rank sends ``(nodes - 1) / world`` of the bytes.
"""

from collections.abc import Sequence

import torch

from shardwright.schedule.layout import Spans
from shardwright.transport.base import Comm, Gather, Reduction, Segment
from shardwright.transport.collect import collect
from shardwright.transport.streams import Streams


class TwoLevelComm(Comm):
    """See above. Sums are taken inside of nodes first: the bits of a hybrid mesh that holds copies.

    node: among the ranks of this rank's node. between: among those of its place. flat: of host memory, among
    all ranks, for words and for what is collected on one rank. back: as ``between``, for reductions, whose
    second hops come earlier or later among the gathers of a rank that runs other layers; None: no rank's do,
    as on an accelerator. Bytes are counted by these.
    """

    def __init__(self, node: Comm, between: Comm, flat: Comm, back: Comm | None = None) -> None:
        self.node, self.between, self.flat, self.back = node, between, flat, back or between
        self.world, self.rank = node.world * between.world, node.rank * between.world + between.rank
        self.reads_in_place, self.uses_c10d = node.reads_in_place, node.uses_c10d
        self.streams: Streams | None = node.streams
        self.log = flat.log
        self.sent_nbytes = 0
        self.exposed_s: float | None = 0.0
        self._halfway: list[_TwoGathers | _TwoReductions] = []
        """Collectives whose second hop is still to be issued, in the order in which they were launched."""

    @property
    def host(self) -> Comm:
        """See ``Comm.host``."""
        return self.flat

    @property
    def network(self) -> Comm:
        """See ``Comm``."""
        return self.between

    @property
    def why_plain(self) -> str:
        """See ``Comm``."""
        return self.between.why_plain

    def all_gather(self, segments: Sequence[Segment], key: str) -> Gather:
        """See ``Comm.all_gather``. In place in both hops; a host that moves bytes itself issues the second
        one when it waits, or goes on."""
        # Without an origin: only between nodes it pays to send what has changed alone.
        places = [Segment(each.flat, each.spans.joined(self.between.world)) for each in segments]
        own = [self._of_place(each) for each in segments]
        if self.streams is None:
            made = _TwoGathers(self, self.between.all_gather(own, key), places, key)
            self._halfway.append(made)
            return made
        with self.streams.gathering([segment.flat for segment in segments]):
            self.between.all_gather(own, key).wait()  # the gather stream waits
            return self.node.all_gather(places, key)

    def separate_reductions(self, enable: bool) -> None:
        """See ``Comm.separate_reductions``."""
        self.node.separate_reductions(enable)
        self.between.separate_reductions(enable)

    def go_on(self) -> None:
        """See ``Comm.go_on``: issue the second hops, which a rank of the node or place may wait for."""
        self.go_on_to(None)

    def go_on_to(self, last: "_TwoGathers | _TwoReductions | None") -> None:
        """Issue the second hops that are still to be issued up to ``last`` (None: all), in order.

        Before a rank waits for one it issues those before it, for which others may wait: ranks that run other
        layers would wait for each other in a circle, or launch them in another order.
        """
        while self._halfway and (last is None or last in self._halfway):
            self._halfway[0].issue()
            self._halfway.pop(0)

    def _of_place(self, segment: Segment) -> Segment:
        """This place's part of what is gathered, with the spans of the nodes in it."""
        spans, nodes, place = segment.spans, self.between.world, self.node.rank
        if spans.is_ragged:
            flat = segment.flat[slice(*spans.joined(nodes)[place])]
        else:  # equal parts, of which the last may be padding
            flat = segment.flat.view(self.node.world, -1)[place]
        return Segment(flat, spans.within(place * nodes, nodes), origin=segment.origin)

    def reduce_scatter(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], key: str
    ) -> Reduction:
        """See ``Comm.reduce_scatter``. A host that moves bytes itself issues the second hop with the next
        reduction, or when it waits."""
        nodes = self.between.world
        joined = [each.spans.joined(nodes) for each in segments]
        # Coded only between nodes, too: ranks that share memory would gain nothing.
        near = [Segment(e.flat, s, e.has_room) for e, s in zip(segments, joined, strict=True)]
        far = [(each.spans.within(self.node.rank * nodes, nodes), each.coded) for each in segments]
        # Before it on every rank: one that doesn't use what is gathered would wait for it after this. A
        # reduction was issued a while ago, so that its first hop has most likely ended.
        self.go_on()
        first = self.node.reduce_scatter(near, dtypes, key)
        made = _TwoReductions(self, first, far, list(dtypes), key)
        if self.between.streams is None:
            self._halfway.append(made)
        else:
            with self.between.streams.following():
                made.issue()
        return made

    def gather_many(
        self, shards: Sequence[torch.Tensor], spans: Sequence[Sequence[tuple[int, int]]], dst: int
    ) -> list[torch.Tensor] | None:
        """See ``Comm.gather_many``; on an accelerator over its own two communicators."""
        if self.streams is None:
            return self.flat.gather_many(shards, spans, dst)
        return collect(self, shards, spans, dst)


class _TwoGathers:
    """An all-gather whose second hop is issued by ``wait``."""

    def __init__(self, comm: TwoLevelComm, first: Gather, places: Sequence[Segment], key: str) -> None:
        self._comm, self._first, self._places, self._key = comm, first, places, key
        self._second: Gather | None = None

    def issue(self) -> None:
        """Wait for the first hop and issue the second."""
        self._first.wait()
        self._second = self._comm.node.all_gather(self._places, self._key)
        self._places = ()

    def wait(self) -> None:
        """See ``Gather.wait``."""
        self._comm.go_on_to(self)
        assert self._second is not None
        self._second.wait()


class _TwoReductions:
    """A reduce-scatter in two hops. It holds what the first one reads for as long as it lives."""

    def __init__(
        self,
        comm: TwoLevelComm,
        first: Reduction,
        far: list[tuple[Spans, bool]],
        dtypes: list[torch.dtype],
        key: str,
    ) -> None:
        """far: of each segment of the second hop its spans, and whether it is coded."""
        self._comm, self._first, self._key = comm, first, key
        self._far, self._dtypes = far, dtypes
        self._second: Reduction | None = None

    def issue(self) -> None:
        """Wait for the first hop and issue the second."""
        sums = zip(self._first.wait(), self._far, strict=True)
        segments = [Segment(each, spans, coded=coded) for each, (spans, coded) in sums]
        self._second = self._comm.back.reduce_scatter(segments, self._dtypes, self._key)

    def wait(self) -> list[torch.Tensor]:
        """See ``Reduction.wait``."""
        self._comm.go_on_to(self)
        assert self._second is not None
        return self._second.wait()
