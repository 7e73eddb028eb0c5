"""A group's parameters between forward and backward, sharded over a smaller world.

The all-gather of the backward then stays among neighbours, at the price of larger shards in between. The
smaller layout fits the group's buffer: its padding is never longer than the larger world's.
"""

from collections.abc import Sequence

import torch

from shardwright.params.param import ShardedParam
from shardwright.schedule.layout import ParamLayout
from shardwright.torch_private import foreach_copy_
from shardwright.transport.base import Comm, Gather

Versions = tuple[tuple[int, int], ...]


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
        spans = self._spans()
        self._shards = [torch.empty_like(span) for span in spans]
        foreach_copy_(self._shards, spans)
        self.held_nbytes = sum([shard.nbytes for shard in self._shards])

    def holds(self, versions: Versions) -> bool:
        """Whether the shards of these very parameters are kept."""
        return self._versions == versions

    def gather(self, key: str) -> Gather:
        """Put the shards into the buffer, forget them, and issue the all-gather among neighbours."""
        foreach_copy_(self._spans(), self._shards)
        self.forget()
        pairs = zip(self._params, self._layouts, strict=True)
        return self.comm.all_gather(
            [param.gather_segment(layout) for param, layout in pairs if layout.dim is not None], key
        )

    def kept(self) -> list[tuple[ShardedParam, ParamLayout, torch.Tensor]]:
        """Each parameter with its layout over the smaller world and the shard that is kept."""
        return list(zip(self._params, self._layouts, self._shards, strict=True))

    def forget(self) -> None:
        """Free the shards."""
        self._versions = None
        self._shards = []
        self.held_nbytes = 0

    def _spans(self) -> list[torch.Tensor]:
        pairs = zip(self._params, self._layouts, strict=True)
        spans = (param.gather_segment(layout) for param, layout in pairs)
        return [segment.flat[slice(*segment.spans[self.comm.rank])] for segment in spans]
