"""Ranks, groups and devices: the only place that asks for them.

``torch.distributed`` is started elsewhere (torchrun's script, ``shardwright train``). A single process that
never started it gets a world of one, so that sharded code runs in a notebook.
"""

import datetime
import os
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.comm.base import Comm
from shardwright.comm.gloo import GlooComm
from shardwright.comm.nccl import NcclComm
from shardwright.comm.shm import ShmComm, open_arena
from shardwright.errors import InputError

# Bounds a wait for a rank that never comes. new_group() ignores the default group's own timeout (30 min).
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Axis:
    """The mesh axis that parameters are sharded over: this rank's device, and the collectives on it."""

    mesh: DeviceMesh
    device: torch.device
    comm: Comm

    @property
    def world(self) -> int:
        """Number of ranks on the axis."""
        return self.comm.world

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return self.comm.rank


class Transport(StrEnum):
    """How the ranks of an axis move bytes between hosts' memories.

    AUTO: NCCL collectives on CUDA; on CPU shared memory where all ranks are on one host, else sockets.
    SOCKETS: Gloo point-to-point messages, also on one host. COLLECTIVES: the backend's own collectives.
    """

    AUTO = "auto"
    SOCKETS = "sockets"
    COLLECTIVES = "collectives"


_transport = Transport.AUTO


def set_transport(transport: Transport | str) -> None:
    """Choose the transport of meshes that are sharded over from now on; alike on all ranks.

    Raises: InputError for a name that isn't a ``Transport``.
    """
    global _transport
    try:
        _transport = Transport(transport)
    except ValueError:
        choices = ", ".join(repr(str(choice)) for choice in Transport)
        raise InputError(f"transport must be one of {choices}, got {transport!r}") from None


# One pair of process groups per axis, however many modules are sharded over it. Keyed by the axis' own
# group (a DeviceMesh compares equal to that of an earlier, destroyed world).
_comms: WeakKeyDictionary[ProcessGroup, Comm] = WeakKeyDictionary()
_meshes: WeakKeyDictionary[ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def resolve(mesh: DeviceMesh | None) -> Axis:
    """The axis to shard over: of ``mesh``, or of all ranks where it is None.

    Every rank of the mesh calls it; the first call for a mesh makes two process groups.
    Raises: InputError for a mesh that isn't 1-D or doesn't have this rank.
    """
    if mesh is None:
        mesh = _default_mesh()
    elif not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"mesh must be a torch DeviceMesh or None, got {type(mesh).__name__}; "
            'make one with init_device_mesh("cuda", (world,))'
        )
    if mesh.ndim != 1:
        raise InputError(
            "this version shards over a 1-D mesh, got axes "
            f'{mesh.mesh_dim_names or tuple(mesh.shape)}; pass one of them, for example mesh["shard"]'
        )
    if mesh.get_coordinate() is None:
        raise InputError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}; call fully_shard only on the "
            "ranks of its mesh, or make a mesh of all ranks"
        )
    group = mesh.get_group()
    if group not in _comms:
        _comms[group] = _make_comm(group, mesh.device_type)
    return Axis(mesh, _device(mesh.device_type), _comms[group])


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            # No launcher: a world of one, over a store in this process.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
        else:
            dist.init_process_group(timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    if group not in _meshes:
        _meshes[group] = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    return _meshes[group]


def _default_device_type() -> str:
    """The accelerator, unless the process group can't move its tensors."""
    accelerator = torch.accelerator.current_accelerator()
    backend = str(dist.get_backend())
    return "cpu" if accelerator is None or backend == "gloo" else accelerator.type


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _make_comm(group: ProcessGroup, device_type: str) -> Comm:
    ranks = dist.get_process_group_ranks(group)
    backend = "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)
    timeout = min(TIMEOUT, _timeout_of(group))
    gather_group, reduce_group = (
        dist.new_group(ranks, timeout, backend, use_local_synchronization=True) for _ in range(2)
    )
    assert isinstance(gather_group, ProcessGroup)
    assert isinstance(reduce_group, ProcessGroup)
    if backend != "gloo" or _transport is Transport.COLLECTIVES:
        return NcclComm(gather_group, reduce_group, coalesce=backend != "gloo")
    arena = open_arena(gather_group, timeout.total_seconds()) if _transport is Transport.AUTO else None
    return GlooComm(gather_group, reduce_group) if arena is None else ShmComm(arena, len(ranks))


def _timeout_of(group: ProcessGroup) -> datetime.timedelta:
    device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    return group._get_backend(device).options._timeout
