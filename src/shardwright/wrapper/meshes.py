"""From a process group, or two, and a strategy to the mesh that is sharded over."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import InputError
from shardwright.transport.mesh import comm_of, resolve
from shardwright.wrapper.options import ShardingStrategy


def mesh_for(
    strategy: ShardingStrategy, groups: Any, mesh: DeviceMesh | None, device_type: str | None
) -> DeviceMesh:
    """The mesh of a wrapper: 1-D, or 2-D with copies along its first axis. Every rank of it calls.

    groups: None, a process group, or (sharded over, copied over). mesh: instead of groups.
    Raises: InputError for what doesn't go together.
    """
    if mesh is not None:
        if groups is not None:
            raise InputError("give either process_group or device_mesh, not both: they say the same thing")
        if strategy.is_hybrid and mesh.ndim != 2:
            raise InputError(f"{strategy.name} needs a 2-D device_mesh (copies, shards), got {mesh.ndim}-D")
        if strategy is ShardingStrategy.NO_SHARD:
            return _copies(mesh.mesh.flatten().tolist(), mesh.device_type)
        return mesh
    default = resolve(None).mesh
    kind = device_type or default.device_type
    if strategy.is_hybrid:
        return _hybrid(groups, kind, default)
    if isinstance(groups, tuple):
        raise InputError(f"{strategy.name} takes one process_group; two are for HYBRID_SHARD")
    if strategy is ShardingStrategy.NO_SHARD:
        ranks = list(range(dist.get_world_size())) if groups is None else dist.get_process_group_ranks(groups)
        return _copies(ranks, kind)
    if groups is None or groups is dist.group.WORLD:
        return default
    return _once(groups, "", kind, lambda: DeviceMesh.from_group(groups, kind))


# Meshes made from process groups, so that wrappers on the same ranks share their transports.
_made: dict[tuple[int, str, str], tuple[Any, DeviceMesh]] = {}


def _once(owner: Any, layout: str, kind: str, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """The mesh of a layout of a process group's ranks, made once as long as there is that group."""
    key = (id(owner), layout, kind)
    if key not in _made or _made[key][0] is not owner:
        _made[key] = (owner, make())
    return _made[key][1]


def _copies(ranks: list[int], kind: str) -> DeviceMesh:
    return _grid([[rank] for rank in ranks], kind)


def _grid(rows: list[list[int]], kind: str) -> DeviceMesh:
    """The 2-D mesh of these ranks."""
    layout = torch.tensor(rows, dtype=torch.int)
    return _once(
        dist.group.WORLD,
        str(rows),
        kind,
        lambda: DeviceMesh(kind, layout, mesh_dim_names=("replicate", "shard")),
    )


def _hybrid(groups: Any, kind: str, default: DeviceMesh) -> DeviceMesh:
    if isinstance(groups, tuple):
        shard, replicate = groups
        rows = comm_of(replicate, "cpu").exchange(dist.get_process_group_ranks(shard), "ranks of each copy")
        return DeviceMesh.from_group(
            [replicate, shard],
            kind,
            mesh=torch.tensor(rows, dtype=torch.int),
            mesh_dim_names=("replicate", "shard"),
        )
    if groups is not None:
        raise InputError(
            "a hybrid strategy takes process_group=(sharded over, copied over), a device_mesh, or neither"
        )
    world, near = default.size(), int(os.environ.get("LOCAL_WORLD_SIZE", default.size()))
    if world % near:
        raise InputError(
            f"the {world} ranks are not a multiple of the {near} on this host; pass a device_mesh"
        )
    return _grid([list(range(start, start + near)) for start in range(0, world, near)], kind)
