"""Groups whose memory is summed while nobody writes it, so that a bit that flips there is told
(``SHARDWRIGHT_CHECKSUMS=all``).

    what                      summed                         compared
    shards                    after each optimizer's step    before each all-gather and before the next step
    state of the optimizer    after its step                 before the next one
    unsharded parameters      once they are gathered         before they are resharded

What was written since with a mark (autograd counts the versions of a tensor) is summed anew. On a device
shards and state are compared before a step alone, since the host would wait for the device elsewhere.
"""

import platform
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardwright.checksum import crc32
from shardwright.engine.groups.group import ParamGroup, Stage
from shardwright.engine.groups.table import tables
from shardwright.errors import DamagedMemory
from shardwright.torch_private import local_of, version_of
from shardwright.transport.base import Segment
from shardwright.transport.cpu.views import view_of

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def sum_of(tensor: torch.Tensor) -> int:
    """A number that each single bit of a tensor changes."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.device.type == "cpu":
        return crc32(view_of(flat))
    # Of its words as integers, modulo 2**64: one kernel, in whatever order it adds.
    return int(flat.view(_SIGNED.get(flat.element_size(), torch.int64)).sum())


class Sums:
    """Of a group's tensors as they were last written. num_steps: of optimizers, for messages."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._known: dict[int, tuple[ref[torch.Tensor], int, int]] = {}

    def take(self, tensor: torch.Tensor) -> None:
        """Sum a tensor as it is now."""
        key = id(tensor)
        held = ref(tensor, lambda _: self._known.pop(key, None))
        self._known[key] = held, version_of(tensor), sum_of(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """It may have been written without a mark."""
        self._known.pop(id(tensor), None)

    def check(self, what: str, tensor: torch.Tensor) -> None:
        """Compare a tensor with its sum, or sum it where it was written with a mark since. Raises:
        DamagedMemory."""
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != version_of(tensor):
            self.take(tensor)
        elif sum_of(tensor) != found[2]:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.forget(tensor)
            raise DamagedMemory(
                f"{what} of rank {rank} changed in the memory of {platform.node()}, after {self.num_steps} "
                "steps of optimizers, though nothing has written it since it was summed: that memory is "
                "damaged, or your program writes through .data outside of an optimizer's step. Go on from "
                "the newest checkpoint, on another host where it happens again"
            )


class SummedGroup(ParamGroup):
    """A group whose shards and unsharded parameters are summed and compared (see above)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sums = Sums()

    def fill(self, kept: bool) -> list[Segment] | None:
        """Also compares the shards."""
        for param in self.params:
            if _is_summed(param.local) and param.local.device.type == "cpu":
                self.sums.check(f"the shard of {param.fqn!r}", param.local)
        return super().fill(kept)

    def wait(self) -> int:
        """Also sums the unsharded parameters."""
        held_nbytes = super().wait()
        for _, face in self._faces_on_host():
            self.sums.take(face)
        return held_nbytes

    def write_back(self, unmarked: bool = False) -> None:
        """Also forgets what may have been edited without a mark."""
        super().write_back(unmarked)
        for _, face in self._faces_on_host() if unmarked else ():
            self.sums.forget(face)

    def reshard(self, smaller: bool = False) -> None:
        """Also compares the unsharded parameters."""
        if self.stage is Stage.UNSHARDED:
            for name, face in self._faces_on_host():
                self.sums.check(f"the unsharded parameter {name!r}", face)
        super().reshard(smaller)

    def _faces_on_host(self) -> Iterator[tuple[str, torch.Tensor]]:
        for param, face in zip(self.params, self.faces, strict=True):
            local = local_of(face) if isinstance(face, DTensor) else face
            if _is_summed(local) and local.device.type == "cpu":
                yield param.fqn, local


def before_step(optimizer: Optimizer, *_args: Any) -> None:
    """Torch calls it before each step of any optimizer: what it reads is what was written."""
    for sums, what, tensor in _held(optimizer):
        sums.check(what, tensor)


def after_step(optimizer: Optimizer, *_args: Any) -> None:
    """Torch calls it after each step: kernels may have written without a mark."""
    stepped = set()
    for sums, _, tensor in _held(optimizer):
        sums.take(tensor)
        stepped.add(sums)
    for sums in stepped:
        sums.num_steps += 1


def _held(optimizer: Optimizer) -> Iterator[tuple[Sums, str, torch.Tensor]]:
    """This rank's parts of its sharded parameters and of their state, with what messages call them."""
    groups = [group for table in tuple(tables) for group in table.groups if isinstance(group, SummedGroup)]
    owners = {id(param.sharded): (group.sums, param.fqn) for group in groups for param in group.params}
    params = [param for group in optimizer.param_groups for param in group["params"] if id(param) in owners]
    for param in params:
        (sums, name), state = owners[id(param)], optimizer.state.get(param, {})
        held: list[tuple[str, Any]] = [(f"the shard of {name!r}", param)]
        held += [(f"the state {key!r} of {name!r}", tensor) for key, tensor in state.items()]
        for what, tensor in held:
            local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and _is_summed(local):
                yield sums, what, local


def _is_summed(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own: no subclass, not on the meta device, not empty."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.numel() > 0
