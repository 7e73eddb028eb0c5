"""Shards that lie on the host: pinned, in files that are mapped, or with a copy that stays on the device."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from shardwright.policy import CPUOffloadPolicy, DiskOffloadPolicy
from shardwright.schedule.layout import pack
from shardwright.torch_private import is_traceable_wrapper_subclass


@torch.no_grad()
def place_shards(params: Sequence[Any]) -> None:
    """Have the shards of ``ShardedParam``s of one policy lie where that wants them, pinned ones in one block
    for each dtype. Not those on the meta device, or made of other tensors.

    Also where only a local tensor was replaced, as ``to_empty`` may do.
    """
    new = [p for p in params if p.split.on_host and (p.placed is None or p.placed() is not p.local)]
    new = [p for p in new if p.local.device.type == "cpu" and not is_traceable_wrapper_subclass(p.local)]
    if not new:
        return
    offload, moved = new[0].split.offload, [param.local for param in new]
    if isinstance(offload, DiskOffloadPolicy):
        for shard in moved:
            shard.set_(mapped(shard, offload))  # type: ignore[arg-type]
    elif _pins(new[0]):
        moved = [shard for shard in moved if not shard.is_pinned()]
        for shard, there in zip(moved, empty_on_host(moved), strict=True):
            shard.set_(there.copy_(shard))  # type: ignore[arg-type]
    for param in new:
        param.placed = ref(param.local)


def _pins(param: Any) -> bool:
    offload = param.split.offload
    return isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and param.axis.device.type != "cpu"


def mapped(shard: torch.Tensor, offload: DiskOffloadPolicy) -> torch.Tensor:
    """The same values in a file of their own, mapped. Unlinked at once: it ends with its last user."""
    if not shard.numel():
        return shard
    handle, path = tempfile.mkstemp(suffix=".shard", dir=offload.folder)
    # Torch opens it by its name.
    os.close(handle)
    try:
        file = torch.from_file(path, shared=True, size=shard.nbytes, dtype=torch.uint8)
    finally:
        # At once, so that no file is left whatever ends the process; it lives as long as it is mapped.
        os.unlink(path)
    return file.view(shard.dtype).view(shard.shape).copy_(shard)


def pinned(shard: torch.Tensor) -> torch.Tensor:
    """What a device may copy while the host goes on: a shard of the host, or a copy of it in pinned memory.

    The pages of a mapped file are read here. The device then doesn't wait for them, nor the host for it.
    """
    return shard if shard.is_pinned() else shard.pin_memory()


def empty_on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pinned memory for copies of tensors: parts of one block for each dtype. Copied to it with
    ``non_blocking``, they may be read once the host has waited (``Streams.offloading``)."""
    places = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        offsets, nbytes = pack([tensors[index].nbytes for index in members])
        # One block for all: pinning is dear, a call to the driver each time.
        block = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu", pin_memory=True)
        for index, offset in zip(members, offsets, strict=True):
            start, shape = offset // dtype.itemsize, tensors[index].shape
            places[index] = block[start : start + shape.numel()].view(shape)
    return places


class DeviceCopy:
    """A shard's copy on the device, made anew when the shard has changed."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._of: tuple[int, int, torch.dtype] | None = None

    def of(self, shard: torch.Tensor, version: int, like: torch.Tensor, pins: bool = False) -> torch.Tensor:
        """The copy of ``shard`` in the dtype and on the device of ``like``. pins: see ``pinned``."""
        # By version too, since an optimizer writes into the same tensor.
        state = (id(shard), version, like.dtype)
        if self._copy is None or self._of != state:
            self._copy = (pinned(shard) if pins else shard).to(
                like.device, like.dtype, copy=True, non_blocking=True
            )
            self._of = state
        return self._copy
