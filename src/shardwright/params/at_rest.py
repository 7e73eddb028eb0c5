"""Parameters at rest, taken for whole ones: pickling them is refused, as are numbers of a rank's part, and
computing with them is explained.

At rest a parameter is a DTensor: its shape is the whole one, its numbers are this rank's. Torch's class is
not ours to extend, so ours are known by their meshes.
"""

import copy
import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.torch_private import before_numbers, local_of, spec_of

_meshes: set[int] = set()  # hashes: a mesh would keep its process groups
_allowed = ContextVar("pickle_shards", default=False)  # of a thread: a save in the background isn't allowed
_PER_RANK = "_kept_per_rank"
_BETWEEN = ("shardwright.", "torch.distributed.tensor")  # who asks for a number, and this
_MIXED = "got mixed torch.Tensor and DTensor"
_REMEDY = (
    "The DTensor may be a sharded parameter at rest, of which this rank has only its rows: a parameter is "
    "whole in the forward of the module that was sharded with it. Call that module, or compute inside of "
    "`with model.unsharded():`, which all ranks enter."
)


def guard(mesh: DeviceMesh) -> None:
    """From now on, what is sharded over this mesh is guarded."""
    # With the first mesh: a process that shards nothing pickles its DTensors as torch does.
    if not _meshes:
        copyreg.pickle(DTensor, reduced)  # type: ignore[arg-type]
        ForkingPickler.register(DTensor, as_torch)  # through a queue it stays on this rank
        before_numbers(_check_whole)
    _meshes.add(hash(mesh))


@contextmanager
def pickle_shards() -> Iterator[None]:
    """A context in which this thread may pickle sharded tensors: each rank pickles its own rows, into its own
    file.

    ``with pickle_shards(): torch.save(model.state_dict(), f"rank-{rank}.pt")`` writes files that have to be
    loaded on the same number of ranks, each rank its own. Outside of it pickling a sharded tensor raises
    InputError: one rank's file lacks the other ranks' values, and its shapes, which are the full ones, don't
    show that. Any rank may enter it; no communication.
    """
    before = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(before)


def keep_per_rank(tensor: Any) -> Any:
    """The tensor, which may be pickled: the caller has asked for a state dict of this rank's rows."""
    if isinstance(tensor, DTensor):
        setattr(tensor, _PER_RANK, True)
    return tensor


def reduced(tensor: DTensor) -> Any:
    spec = spec_of(tensor)
    cuts = any(
        spec.mesh.size(axis) > 1 and not placement.is_replicate()
        for axis, placement in enumerate(spec.placements)
    )
    # `copy.copy` comes here too (it looks into `copyreg`), and what it makes stays on this rank.
    allowed = _allowed.get() or hasattr(tensor, _PER_RANK) or sys._getframe(1).f_code is copy.copy.__code__
    if cuts and hash(spec.mesh) in _meshes and not allowed:
        raise InputError(
            f"a sharded tensor of shape {list(tensor.shape)} is being pickled, of which this rank holds "
            f"{list(local_of(tensor).shape)}: the file would have the whole shape and lack the numbers "
            "of other ranks. Save shardwright.full_state_dict(model), which all ranks call and rank 0 saves, "
            "or use shardwright.checkpoint.save; for a file of each rank on purpose save inside of `with "
            "shardwright.pickle_shards():`"
        )
    return as_torch(tensor)


def as_torch(tensor: DTensor) -> Any:
    return tensor.__reduce_ex__(2)


def _read_by_torch() -> bool:
    """Whether torch's own code reads it, which is written for DTensors and means this rank's part: that of
    ``nn.init.trunc_normal_`` draws again where its own rows ask for it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_BETWEEN):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")


def _check_whole(tensor: DTensor) -> None:
    spec = spec_of(tensor)
    parts = [spec.mesh.size(axis) > 1 and each.is_partial() for axis, each in enumerate(spec.placements)]
    if any(parts) and hash(spec.mesh) in _meshes and not _read_by_torch():
        raise InputError(
            f"a number was read (item(), float(), bool()) from a DTensor placed {spec.placements}: it is "
            "this rank's part alone, which isn't reduced over ranks yet. Call full_tensor() on it first, on "
            "all ranks, also where only one of them prints it (p.grad.norm().full_tensor().item())"
        )


def name_remedy(error: BaseException | None) -> None:
    """Have torch's error of an operation on a plain tensor and a sharded one say what to do.

    The operation fails in C++, where it can't be told beforehand: called with what leaves a forward, and with
    what nobody has caught.
    """
    if _meshes and isinstance(error, RuntimeError) and _MIXED in str(error) and _REMEDY not in str(error):
        error.args = (f"{error} {_REMEDY}",)
