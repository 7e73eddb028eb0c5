"""``lockstep``: ranks whose training data differ in length go on, and end, together."""

import operator
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import DataError, InputError
from shardwright.transport.mesh import resolve

T = TypeVar("T")
MODES = ("pad", "stop")


class _Has(IntEnum):
    """What a rank says of its next batch."""

    NEXT = 0
    ENDED = 1
    NOTHING = 2
    FAILED = 3


class Lockstep(Generic[T]):
    """What ``lockstep`` returns: iterate over it once per epoch, on every rank."""

    def __init__(self, loader: Iterable[T], mode: str, mesh: DeviceMesh | None) -> None:
        self._loader = loader
        self._mode = mode
        self._axis = resolve(mesh)

    def __iter__(self) -> Iterator[T]:
        batches = iter(self._loader)
        last: list[T] = []
        while True:
            error, has = None, _Has.NEXT
            try:
                last = [next(batches)]
            except StopIteration:
                has = _Has.ENDED if last else _Has.NOTHING
            except Exception as raised:  # told to the others first: they would wait in the next forward
                error, has = raised, _Has.FAILED
            said = self._said(has)
            if error is not None:
                raise error
            if _Has.FAILED in said:
                raise DataError("another rank's data raised an exception; its own error says why")
            if self._ends(said):
                return
            yield last[0]

    def _said(self, has: _Has) -> set[int]:
        """What the ranks of the mesh say, each answer once; the same on all of them."""
        flags = [1 << has]
        for comm in (self._axis.comm, self._axis.replicate):
            if comm is not None:
                flags = comm.host.all_reduce_words(flags, operator.or_, "lockstep")
        return {answer for answer in _Has if flags[0] & 1 << answer}

    def _ends(self, said: set[int]) -> bool:
        if self._mode == "stop" or _Has.NEXT not in said:
            return said != {_Has.NEXT}
        if _Has.NOTHING in said:
            raise DataError(
                "a rank has no batch at all while others have some, so there is none to repeat; give every "
                'rank at least one, or use lockstep(loader, mode="stop")'
            )
        return False


def lockstep(loader: Iterable[T], mode: str = "stop", mesh: DeviceMesh | None = None) -> Lockstep[T]:
    """Wrap ``loader`` so that all ranks take the same number of batches, even if they have different numbers.

    Every rank of the mesh calls it and iterates over it. Before each batch the ranks exchange one word, from
    host to host. Without it, the other ranks wait for a rank whose data ends early.

    Args:
        loader: an iterable over this rank's batches; it is iterated again for each epoch.
        mode: ``"stop"``: all ranks end with the shortest one, and the remaining batches of the others aren't
            used in this epoch. ``"pad"``: all continue to the end of the longest one; a rank without further
            data repeats its last batch, which then weighs more in the average.
        mesh: the ranks that take the same number, as for ``fully_shard``; None: all.

    Returns:
        An iterable over the batches; iterate once per epoch, on every rank. While iterating, if a rank has no
            batch to repeat or its data raises an exception, every rank raises DataError; that rank raises its
            own exception.

    Raises:
        InputError: ``mode`` is neither, or the mesh lacks this rank.

    Examples:
        >>> loader = [torch.ones(2), torch.ones(2)]
        >>> sum(1 for batch in shardwright.lockstep(loader, mode="pad"))
        2
    """
    if mode not in MODES:
        raise InputError(f'lockstep\'s mode must be "pad" or "stop", got {mode!r}')
    return Lockstep(loader, mode, mesh)
