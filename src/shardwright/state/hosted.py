"""A group's buffer that all ranks of the host share (``comm/hostcopy.py``): one copy, nothing gathered."""

import torch

from shardwright.comm.base import Comm
from shardwright.comm.hostcopy import HostCopy, HostPiece, open_host_copy
from shardwright.comm.shm import ShmComm
from shardwright.state.binding import Bound, layout_of, own_buffer
from shardwright.state.buffer import Buffer
from shardwright.state.near import Versions
from shardwright.state.param import ShardedParam


class HostedBuffer(Buffer):
    """``nbytes`` that are never freed: ``free`` says that this rank no longer reads them.

    written: the versions of the shards that lie there; () where they may have changed without a mark.
    """

    def __init__(self, copy: HostCopy, nbytes: int, world: int) -> None:
        super().__init__(nbytes, torch.device("cpu"))
        self.written: Versions = ()
        self._copy = copy
        self._world = world
        self._storage = copy.everything.untyped_storage()
        self._places: list[tuple[ShardedParam, torch.Tensor]] = []
        self._whole: list[ShardedParam] = []

    @property
    def allocated_nbytes(self) -> int:
        """Bytes held now: all of them, always. (Other ranks of the host hold the same bytes.)"""
        return self.nbytes

    def alloc(self) -> None:
        """No-op: the memory is there."""

    def free(self) -> None:
        """This rank reads it no longer; what code has written to unsharded parameters is gone."""
        self._copy.leave()

    def tensor(
        self, dtype: torch.dtype, offset_nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """See ``Buffer.tensor``."""
        head_nbytes = int(self._copy.everything.storage_offset())
        return super().tensor(dtype, head_nbytes + offset_nbytes, shape, strides)

    def bind(self, param: ShardedParam, offset_nbytes: int, dtype: torch.dtype) -> None:
        """Lay a parameter's unsharded face at ``offset_nbytes``; in memory of its own where it isn't cut."""
        if param.layout.dim is None:
            own_buffer([(param, dtype)], torch.device("cpu")).alloc()
            self._whole.append(param)
            return
        param.bind(self, offset_nbytes, dtype)
        place, own = torch.empty(0, dtype=dtype), param.own
        mine = self._copy.mine.untyped_storage()
        place.set_(mine, own.storage_offset(), own.shape, own.stride())  # type: ignore[arg-type]
        self._places.append((param, place))

    def piece(self, versions: Versions, is_aside: bool = False) -> HostPiece:
        """This rank's part in an all-gather. versions: of its shards now.

        is_aside: it takes part for others, and reads nothing of what they write.
        """

        @torch.no_grad()
        def write() -> None:
            if self.written != versions:
                for param, place in self._places:
                    param.copy_in(place)
                self.written = versions
            for param in () if is_aside else self._whole:
                param.copy_in()

        return HostPiece.of(self._copy, self._world, write, is_aside)

    def detach(self) -> None:
        """Keep what is there now for this rank alone, until ``free``: others go on without it."""
        self._copy.detach()


def hosted_buffer(bound: Bound, comm: Comm, name: str) -> HostedBuffer | None:
    """One buffer for all ranks of ``comm`` that parameters lie in; None on all where they can't share it.

    Every rank calls it at one place of its program. name: of the group, for messages.
    """
    layout = layout_of(bound)
    copy = open_host_copy(comm.arena, layout.nbytes, name) if isinstance(comm, ShmComm) else None
    if copy is None:
        return None
    buffer = HostedBuffer(copy, layout.nbytes, comm.world)
    for (param, dtype), offset in zip(bound, layout.offsets_nbytes, strict=True):
        buffer.bind(param, offset, dtype)
    return buffer
