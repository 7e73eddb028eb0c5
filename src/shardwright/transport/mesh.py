"""Ranks, groups and devices: the only place that asks for them.

``torch.distributed`` is started elsewhere (torchrun's script, ``shardwright train``). A single process that
never started it gets a world of one, so that sharded code runs in a notebook.
"""

import datetime
import logging
import os
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from shardwright.errors import InputError, warn
from shardwright.policy import DataParallelMeshDims
from shardwright.torch_private import backend_names, check_order, concatenated, flattened, timeouts
from shardwright.transport.attempt import Meeting, join_job, keys_of, needing_store, new_group
from shardwright.transport.base import Comm
from shardwright.transport.host_limits import host_limits_told
from shardwright.transport.process import LaunchLog, process_state

logger = logging.getLogger(__name__)

# Bounds a wait for a rank that never comes. new_group() ignores the default group's own timeout (30 min).
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Axis:
    """Where parameters are sharded: this rank's device, the collectives among the ranks that share a copy,
    and those among the ranks that hold the same shards.

    mesh: the 1-D or 2-D mesh that the parameters' DTensors are on. shards: for each of its axes whether
        parameters are sharded over it (else it holds copies).
    comm: over the sharded axis. replicate: over the other one, None where there are no copies.
    hops: of a ``comm`` in two hops: in a node, between nodes, for words; on CPUs for sums between nodes.
    """

    mesh: DeviceMesh
    shards: tuple[bool, ...]
    device: torch.device
    comm: Comm
    replicate: Comm | None = None
    hops: tuple[Comm, ...] = ()

    @cached_property
    def world(self) -> int:
        """Number of ranks on the sharded axis."""
        return self.comm.world

    @cached_property
    def rank(self) -> int:
        """This rank's place on the sharded axis."""
        return self.comm.rank

    @cached_property
    def num_copies(self) -> int:
        """Number of ranks that hold the same shard."""
        return 1 if self.replicate is None else self.replicate.world

    @property
    def group(self) -> ProcessGroup:
        """The caller's process group of the sharded axis."""
        if True not in self.shards:
            raise InputError(
                f"the mesh {self.mesh} replicates only: no process group shards over it, so a custom "
                "collective has nothing to move"
            )
        return self.mesh.get_group(self.shards.index(True))

    def placements(self, placement: Placement) -> tuple[Placement, ...]:
        """A parameter's placement on each axis of the mesh: ``placement`` on the sharded one."""
        return tuple(placement if sharded else Replicate() for sharded in self.shards)


class Transport(StrEnum):
    """How the ranks of an axis move bytes between hosts' memories.

    AUTO: NCCL collectives on CUDA; on CPU shared memory where all ranks are on one host, else sockets, else
    as COLLECTIVES. A warning says why, unless the ranks are on several hosts and have sockets.
    SOCKETS: TCP connections of our own, also on one host; where ranks can't reach each other so, as
    COLLECTIVES, with a warning.
    COLLECTIVES: torch's collectives over the backend. Over Gloo they sum in another order, so bits may
    differ from those of other transports, and a reduce-scatter is an all-reduce: up to twice the bytes.
    """

    AUTO = "auto"
    SOCKETS = "sockets"
    COLLECTIVES = "collectives"


_COSTS = "they sum in another order, so bits may differ, and send up to twice the bytes"

_GLOO_REMOVED = f"Gloo's own messages were removed: take 'sockets', or 'collectives' for torch's ({_COSTS})"


def set_transport(transport: Transport | str) -> None:
    """Choose the transport for meshes that are used for sharding from now on; the same on all ranks. Local.

    Args:
        transport: a ``Transport`` or its value; see docs/design/transport.md.

    Raises:
        InputError: there is no such transport ("gloo" no longer is one).

    Warns:
        UserWarning: a transport over all ranks exists already; what is sharded over them keeps it.
    """
    try:
        before, process_state.transport = process_state.transport, Transport(transport)
    except ValueError:
        choices = ", ".join(repr(str(choice)) for choice in Transport)
        removed = f"; {_GLOO_REMOVED}" if transport == "gloo" else ""
        raise InputError(f"transport must be one of {choices}, got {transport!r}{removed}") from None
    # Of other groups of ranks, as a mesh that is made from now on has them, there may be more to come.
    made = process_state.made_here().comms if dist.is_initialized() else ()
    if before != transport and (dist.group.WORLD, "cpu") in made:
        warn(
            f"set_transport({str(transport)!r}) has no effect on what is sharded over all ranks: the first "
            f"fully_shard has made their transport (by {str(before)!r}), and later ones share it; call "
            "set_transport before the first fully_shard",
        )


def resolve(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None, over_all: bool = False
) -> Axis:
    """Where to shard: on ``mesh``, or over all ranks where it is None.

    A 1-D mesh shards; of a 2-D mesh the first axis holds copies and the second one shards, or both where
    ``over_all`` says so, in two hops. ``dims`` names
    the axes of a larger mesh instead. Every rank of the mesh calls it; the first call for an axis makes one
    communicator of the accelerator.
    Raises: InputError for a mesh of more axes without ``dims``, names that it doesn't have, or a mesh that
        doesn't have this rank.
    """
    if mesh is None:
        mesh = default_mesh()
    elif not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"mesh must be a torch DeviceMesh or None, got {type(mesh).__name__}; "
            "make one with init_device_mesh(device_type, (world,))"
        )
    if dims is None and mesh.ndim not in (1, 2):
        raise InputError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; pass one axis to shard over, or "
            'two of which the first holds copies, for example mesh["shard"]'
        )
    if mesh.get_coordinate() is None:
        raise InputError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}; call fully_shard only on the "
            "ranks of its mesh, or make a mesh of all ranks"
        )
    if over_all:
        if mesh.ndim != 2 or dims is not None:
            raise InputError(
                f"shard_over_all takes a 2-D mesh (nodes, ranks of a node) and no dp_mesh_dims, got {mesh}; "
                "make one with init_device_mesh(device_type, (nodes, ranks_per_node))"
            )
        return _axis_over_all(mesh)
    if dims is not None:
        mesh, shards = _data_parallel(mesh, dims)
    else:
        shards = (True,) if mesh.ndim == 1 else (False, True)
    return _axis(mesh, shards)


def _axis(mesh: DeviceMesh, shards: tuple[bool, ...]) -> Axis:
    device_type = mesh.device_type
    ranks = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    comm = comm_of(mesh.get_group(shards.index(True)), device_type) if True in shards else None
    replicate = None
    if False in shards and len(ranks[shards.index(False)]) > 1:
        replicate = comm_of(mesh.get_group(shards.index(False)), device_type)
    for each, sharded in ((comm, True), (replicate, False)):
        if each is not None and mesh.mesh_dim_names:
            each.log.axis = each.host.log.axis = mesh.mesh_dim_names[shards.index(sharded)]
    return Axis(mesh, shards, _device(device_type), comm or _solo(device_type), replicate)


def _axis_over_all(mesh: DeviceMesh) -> Axis:
    """All ranks of a 2-D mesh, in the order of ``TwoLevelComm``: those of one place follow one another.

    Raises: UnsupportedTorch where this torch can't make a process group in that order.
    """
    kind, groups = mesh.device_type, (mesh.get_group(0), mesh.get_group(1))
    made = process_state.made_here().joined
    if groups not in made:
        ranks = [rank for place in zip(*mesh.mesh.tolist(), strict=True) for rank in place]
        # torch 2.11 sorts the ranks of a new group, whatever order it is given.
        check_order(ranks)
        backend = "gloo" if kind == "cpu" else dist.get_default_backend_for_device(kind)
        group = new_group(ranks, backend, min(TIMEOUT, timeout_of(groups[0])))
        joined = DeviceMesh.from_group(group, kind, mesh=ranks, mesh_dim_names=("shard",))
        if 1 in mesh.shape:
            made[groups] = _axis(joined, (True,))
        else:
            from shardwright.transport.two_level import TwoLevelComm  # noqa: PLC0415 two hops

            between, node = (comm_of(each, kind) for each in groups)
            hops = node, between, comm_of(joined.get_group(), "cpu")
            if kind == "cpu":
                with needing_store("to make a transport"):
                    hops += (_make_comm(dist.get_process_group_ranks(groups[0]), kind, groups[0]),)
            made[groups] = Axis(joined, (True,), _device(kind), TwoLevelComm(*hops), None, hops)
    return made[groups]


def _data_parallel(mesh: DeviceMesh, dims: DataParallelMeshDims) -> tuple[DeviceMesh, tuple[bool, ...]]:
    """The data-parallel part of a larger mesh, and which of its axes shard."""
    names = mesh.mesh_dim_names
    if names is None:
        raise InputError("mesh must have mesh_dim_names when dp_mesh_dims is provided: they name its axes")
    missing = [name for name in (*dims.shard_names, *dims.replicate_names) if name not in names]
    if missing:
        raise InputError(f"Mesh dim name {missing[0]!r} not found in mesh.mesh_dim_names {names}")
    parts = [
        (mesh[wanted[0]] if len(wanted) == 1 else flattened(mesh[wanted], "_".join(wanted)), shards)
        for wanted, shards in ((dims.replicate_names, False), (dims.shard_names, True))
        if wanted
    ]
    if len(parts) == 1:
        return parts[0][0], (parts[0][1],)
    return concatenated([part for part, _ in parts]), (False, True)


def smaller_world(axis: Axis, reshards: bool | int | None) -> Comm | None:
    """The ranks over which shards are kept between forward and backward, where ``reshard_after_forward`` is
    ``reshards``; None: all of the axis, or nothing is resharded. Every rank of the axis calls it.

    On an axis over nodes it is this rank's node, in which a second all-gather crosses no network. Else
    ``reshards`` says how many neighbours.
    """
    if axis.hops:
        return None if reshards is False else axis.hops[0]
    if reshards is None or isinstance(reshards, bool) or reshards in (1, axis.world):
        return None
    size = reshards
    ranks = dist.get_process_group_ranks(axis.group)
    start = axis.rank // size * size
    made, key = process_state.made_here().smaller, (axis.group, size)
    if key not in made:
        made[key] = _make_comm(ranks[start : start + size], axis.mesh.device_type, axis.group)
    return made[key]


def comm_of(group: ProcessGroup | None, device_type: str) -> Comm:
    """The transport among the ranks of a process group (None: all ranks), for tensors of a device type.

    Every rank of the group calls it; the first call makes what the axis has of its own: on an accelerator
    one communicator, on the host shared memory or sockets.
    """
    group = group or dist.group.WORLD
    assert group is not None
    made, key = process_state.made_here().comms, (group, device_type)
    if key not in made:
        # What ranks agree on goes between hosts: no rank waits for its device to read a word back.
        host = None if device_type == "cpu" else comm_of(group, "cpu")
        with needing_store("to make a transport"):
            made[key] = _make_comm(dist.get_process_group_ranks(group), device_type, group, host)
    return made[key]


def _solo(device_type: str) -> Comm:
    """A world of one, for a mesh that only replicates."""
    world = dist.group.WORLD
    assert world is not None
    return _make_comm([dist.get_rank()], device_type, world)


def default_mesh(shards: int | None = None) -> DeviceMesh:
    """All ranks, on their accelerators; a job that wasn't joined is.

    shards: make it 2-D, so many ranks along its second axis, copies along its first, if they divide all.
    """
    if not dist.is_initialized():
        backend = default_backend()
        if "RANK" not in os.environ:
            # No launcher: a world of one, over a store in this process.
            with host_limits_told():
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
        else:
            join_job(backend, TIMEOUT)
    made = process_state.made_here()
    if made.mesh is None:
        made.mesh = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    world = made.mesh.size()
    if shards in (None, world) or world % shards:
        return made.mesh
    return init_device_mesh(made.mesh.device_type, (world // shards, shards))


def default_backend() -> str:
    """What ``init_process_group`` is given where the caller didn't start it: Gloo for words and for CPU
    tensors, beside it the backend of the accelerator, if it has one of its own (MPS has not)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    own = None if accelerator is None else dist.Backend.default_device_backend_map.get(accelerator.type)
    return "gloo" if accelerator is None or own in (None, "gloo") else f"cpu:gloo,{accelerator.type}:{own}"


def _default_device_type() -> str:
    """The accelerator, if the default process group has a backend for it that isn't Gloo; else the CPU."""
    accelerator, group = torch.accelerator.current_accelerator(check_available=True), dist.group.WORLD
    assert group is not None
    if accelerator is None or backend_names(group).get(accelerator.type, "gloo") == "gloo":
        return "cpu"
    return accelerator.type


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _make_comm(ranks: list[int], device_type: str, within: ProcessGroup, host: Comm | None = None) -> Comm:
    """host: the transport of the same ranks for words, where tensors are on an accelerator."""
    backend = "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)
    timeout = min(TIMEOUT, timeout_of(within))
    log = LaunchLog(ranks, device_type)

    def make_group(log: LaunchLog) -> ProcessGroup:
        group = new_group(ranks, backend, timeout)
        log.travels_on(group)
        return group

    refused = []
    if device_type == "cpu" and process_state.transport != Transport.COLLECTIVES:
        place, what = ranks.index(dist.get_rank()), "to make a transport"
        meeting = Meeting(keys_of(ranks, timeout, what), log, place, timeout)
        if process_state.transport == Transport.AUTO:
            from shardwright.transport.cpu.shm import ShmComm, open_arena  # noqa: PLC0415 shared memory

            arena = open_arena(meeting)
            if not isinstance(arena, str):
                return ShmComm(arena, len(ranks))
            refused += [f"no shared memory ({arena})"] if arena else []
        from shardwright.transport.cpu.peers import open_connections, open_near  # noqa: PLC0415 the sockets
        from shardwright.transport.cpu.sockets import SocketComm  # noqa: PLC0415 the sockets

        peers = open_connections(meeting)
        if not isinstance(peers, str):
            _tell_of_fall("TCP sockets", refused, ranks)
            several = process_state.transport == Transport.AUTO and not refused
            return SocketComm(peers, open_near(meeting) if several else None)
        _tell_of_fall("torch's collectives on Gloo", [*refused, f"no sockets of our own ({peers})"], ranks)
    from shardwright.transport.process_group import ProcessGroupComm  # noqa: PLC0415 process groups

    gather_group = make_group(log)
    if backend == "gloo":  # whose threads take work as it comes, so a gather needn't queue behind reductions
        return ProcessGroupComm(gather_group, make_group(log), log, None, host)
    from shardwright.transport.streams import Streams  # noqa: PLC0415 a device

    streams = Streams.of(_device(device_type))
    return ProcessGroupComm(gather_group, gather_group, log, streams, host, make_group)


def _tell_of_fall(to: str, refused: list[str], ranks: list[int]) -> None:
    """Say, once in a process, over what its ranks talk that share no better way, and why."""
    if refused and len(ranks) > 1 and dist.get_rank() == ranks[0] and to not in process_state.told:
        process_state.told.add(to)
        costs = "" if to == "TCP sockets" else f"; {_COSTS}"
        logger.warning("ranks talk over %s: %s%s", to, ", ".join(refused), costs)


def timeout_of(group: ProcessGroup) -> datetime.timedelta:
    """How long a wait in a process group may take: the shortest limit of its backends, one per device."""
    return min(timeouts(group), default=TIMEOUT)
