"""Shards that lie on the host: pinned, in files that are mapped, or with a copy that stays on the device."""

import os
import tempfile

import torch

from shardwright.policy import CPUOffloadPolicy, DiskOffloadPolicy, OffloadPolicy
from shardwright.torch_private import is_traceable_wrapper_subclass


def placed(shard: torch.Tensor, offload: OffloadPolicy, device: torch.device) -> torch.Tensor:
    """A shard where its policy wants it; ``device`` is where it is computed with. The shard itself where it
    lies there already, or can't yet: on the meta device, or made of other tensors."""
    if shard.device.type != "cpu" or is_traceable_wrapper_subclass(shard):
        return shard
    if isinstance(offload, DiskOffloadPolicy):
        return mapped(shard, offload)
    if isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type != "cpu":
        return shard if shard.is_pinned() else shard.pin_memory()
    return shard


def mapped(shard: torch.Tensor, offload: DiskOffloadPolicy) -> torch.Tensor:
    """The same values in a file of their own, mapped. Unlinked at once: it ends with its last user."""
    if not shard.numel():
        return shard
    handle, path = tempfile.mkstemp(suffix=".shard", dir=offload.folder)
    os.close(handle)
    try:
        file = torch.from_file(path, shared=True, size=shard.nbytes, dtype=torch.uint8)
    finally:
        os.unlink(path)
    return file.view(shard.dtype).view(shard.shape).copy_(shard)


class DeviceCopy:
    """A shard's copy on the device, made anew when the shard has changed."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._of: tuple[int, int, torch.dtype] | None = None

    def of(self, shard: torch.Tensor, version: int, like: torch.Tensor) -> torch.Tensor:
        """The copy of ``shard`` in the dtype and on the device of ``like``."""
        state = (id(shard), version, like.dtype)
        if self._copy is None or self._of != state:
            self._copy = shard.to(like.device, like.dtype, copy=True)
            self._of = state
        return self._copy
