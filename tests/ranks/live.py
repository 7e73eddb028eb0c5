"""Bytes of tensors that are alive in this process, as counted from outside: nothing of it knows the package's
plans.

Every storage that an operation returns is remembered by a weak reference, and so is every one that there was
before; of those that still live the bytes are summed, as large as they are at that moment.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.engine.step.runtime import Runtime
from shardwright.observe.watch import process_status

_ADDRESS_SPACE = 1 << 34
"""Larger ones are reserved addresses that ranks share, of which no byte need be taken."""


def storages_here() -> list[torch.UntypedStorage]:
    """Those of every tensor that there is."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    plain = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return list({each.untyped_storage()._cdata: each.untyped_storage() for each in plain}.values())


class LiveStorages(TorchDispatchMode):
    """Counts while it is entered. without: storages that are somebody else's."""

    def __init__(self, without: list[torch.UntypedStorage]):
        super().__init__()
        self._without = {each._cdata for each in without}
        self._alive: dict[int, weakref.ref] = {}
        for storage in storages_here():
            self._see(storage)

    def _see(self, storage):
        if storage._cdata not in self._without and storage.nbytes() < _ADDRESS_SPACE:
            self._alive[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                self._see(local.untyped_storage())
        return out

    @property
    def nbytes(self) -> int:
        """Of all that live now."""
        alive = [storage for ref in self._alive.values() if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in alive)


class PeakStorages(LiveStorages):
    """most_nbytes: the most that lived after any operation while it was entered."""

    most_nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.most_nbytes = max(self.most_nbytes, self.nbytes)
        return out


@contextmanager
def counted_at_events(without):
    """Fills the list that it gives: at each event its name and the live bytes before what is done there, and
    after it."""
    rows: list[tuple[str, int]] = []
    at: Callable = Runtime.at

    def counting(runtime, kind, group=None, holds=False):
        name = f"{kind:<2}" if group is None else f"{kind:<2} {runtime.table.number(group)}"
        rows.append((f"before {name}", live.nbytes))
        at(runtime, kind, group, holds)
        rows.append((f"after {name}", live.nbytes))

    # While the watch thread looks at where this thread is, variables of functions that have returned live on.
    unseen = mock.patch.object(process_status, "frame_of", lambda thread: nullcontext())
    with unseen, mock.patch.object(Runtime, "at", counting), LiveStorages(without) as live:
        yield rows
