"""An optimizer's state that the mesh's first rank alone has loaded, for all ranks.

FSDP1's usual way: rank 0 saves and loads the whole state, the others have ``{}``. What isn't a tensor is sent
at once, as JSON; each tensor where it is used, so that a rank holds one whole tensor at a time.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import CheckpointError, InputError
from shardwright.wrapper.states import is_sharded


class Sent:
    """A tensor of the first rank's. Every rank receives the same ones, in the same order."""

    def __init__(self, mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.shape = shape
        self.dtype = dtype
        self.own: Any = None

    def receive(self) -> torch.Tensor:
        """It, whole, on the device of the mesh's collectives. Every rank calls it."""
        if isinstance(self.own, torch.Tensor):
            return _send(self.own.detach().to(self.mesh.device_type).contiguous(), self.mesh)
        return _send(torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device_type), self.mesh)


def from_first(state: Mapping[str, Any], mesh: DeviceMesh, always: bool) -> Mapping[str, Any]:
    """``state`` where every rank has one, else the first rank's, with a ``Sent`` for each tensor.

    Every rank of the mesh calls it. always: the first rank's, whatever others have.
    Raises: InputError, on all ranks, where the first rank has none, or one that can't be sent.
    """
    lacks = torch.tensor([always or not state], dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(lacks, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if not lacks.item():
        return state
    from shardwright.checkpoint.tree import decode  # noqa: PLC0415 a step needs none of its 35 modules

    tensors: dict[str, Any] = {}
    first, text = not any(mesh.get_coordinate() or ()), b""
    if first:
        text = json.dumps(_told(state, tensors)).encode()
    size = _send(torch.tensor([len(text)], device=mesh.device_type), mesh)
    data = torch.zeros(int(size.item()), dtype=torch.uint8, device=mesh.device_type)
    if first:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    told = json.loads(bytes(_send(data, mesh).tolist()))
    if told["fault"]:
        raise InputError(f"the optimizer's state on the mesh's first rank {told['fault']}")

    def sent(key: str) -> Any:
        shape, dtype = told["tensors"][key]
        found = Sent(mesh, tuple(shape), getattr(torch, dtype))
        found.own = tensors.get(key)
        return found

    return decode(told["tree"], sent)


def _told(state: Mapping[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    from shardwright.checkpoint.tree import encode  # noqa: PLC0415 as above

    fault, tree = "", None
    try:
        tree = encode(state, "optimizer", tensors)
    except CheckpointError as error:
        fault = f"can't be sent to the others: {error}"
    if not state:
        fault = "is empty, and other ranks have none: load it there, or on every rank"
    if any(is_sharded(value) for value in tensors.values()):
        fault = "has sharded tensors, of which every rank passes its own: load it on every rank"
    shapes = {
        key: (list(each.shape), str(each.dtype).removeprefix("torch.")) for key, each in tensors.items()
    }
    return {"fault": fault, "tree": tree, "tensors": shapes}


def _send(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    for axis in reversed(range(mesh.ndim)):
        dist.broadcast(tensor, group=mesh.get_group(axis), group_src=0)
    return tensor
