"""A group's parameters between two uses, sharded over a smaller world: from a forward to its backward, and
from there to the next microbatch where gradients aren't reduced.

The second all-gather then stays among neighbours, at the price of larger shards in between. The smaller
layout fits the group's buffer: its padding is never longer than the larger world's.
"""

from collections.abc import Callable, Sequence

import torch

from shardwright.params.param import ShardedParam, Versions
from shardwright.schedule.layout import ParamLayout
from shardwright.transport.base import Comm, Gather, Segment, copy_together


class SmallerWorld:
    """What a group keeps of its parameters on this rank: shards over ``comm``'s ranks, or nothing.

    held_nbytes: bytes of the shards kept now.
    """

    def __init__(self, comm: Comm, params: Sequence[ShardedParam]) -> None:
        self.comm = comm
        self._params = params
        self.held_nbytes = 0
        self._shards: list[torch.Tensor] = []
        self._versions: Versions | None = None
        self._layouts = [ParamLayout(p.layout.shape, comm.world, p.layout.dim) for p in params]

    def keep(self, versions: Versions) -> None:
        """Keep this rank's smaller-world shards of the buffer, which is filled. ``versions``: of what."""
        self._versions = versions
        spans = self._parts(self._segments(ShardedParam.gather_segment))
        # Copies, since the buffer that the spans lie in is freed next.
        self._shards = [torch.empty_like(span) for span in spans]
        copy_together(self._shards, spans)
        self.held_nbytes = sum([shard.nbytes for shard in self._shards])

    def holds(self, versions: Versions) -> bool:
        """Whether the shards of these very parameters are kept."""
        return self._versions == versions

    def gather(self, place_of: Callable[[ShardedParam, ParamLayout], Segment], key: str) -> Gather:
        """Copy the shards to their places, forget them, and issue the all-gather over the smaller world.

        place_of: the memory that a parameter is gathered into.
        """
        segments = self._segments(place_of)
        copy_together(self._parts(segments), self._shards)
        self.forget()
        split = zip(segments, self._layouts, strict=True)
        return self.comm.all_gather([segment for segment, layout in split if layout.dim is not None], key)

    def forget(self) -> None:
        """Free the shards."""
        self._versions = None
        self._shards = []
        self.held_nbytes = 0

    def _segments(self, place_of: Callable[[ShardedParam, ParamLayout], Segment]) -> list[Segment]:
        return [place_of(param, layout) for param, layout in zip(self._params, self._layouts, strict=True)]

    def _parts(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        return [segment.part(self.comm.rank) for segment in segments]
