"""The devices that a model is sharded over: one axis to shard, one to replicate."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.errors import InputError

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Axes:
    """A jax mesh and what its axes are for.

    shard: name of the axis that parameters are sharded over. replicate: name of the axis over which equal
    copies are kept, None on a 1-D mesh. The batch is split over all devices.
    """

    mesh: Mesh
    shard: str
    replicate: str | None

    @cached_property
    def world(self) -> int:
        """Devices that share one copy of the parameters."""
        return self.mesh.shape[self.shard]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All axes, outermost first."""
        return tuple(self.mesh.axis_names)

    @cached_property
    def num_devices(self) -> int:
        return self.mesh.devices.size

    def sharded(self) -> NamedSharding:
        """Dim 0 split over the shard axis."""
        return NamedSharding(self.mesh, self.shard_spec)

    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self) -> NamedSharding:
        """Dim 0 split over all devices."""
        return NamedSharding(self.mesh, self.batch_spec)

    @property
    def shard_spec(self) -> PartitionSpec:
        return PartitionSpec(self.shard)

    @property
    def batch_spec(self) -> PartitionSpec:
        return PartitionSpec(self.names)


def make_mesh(*shape: int) -> Mesh:
    """A mesh over the first devices. Those of one process (or host) lie next to each other, so that the axis
    that is sharded over stays inside of one.

    Args:
        *shape: the number of devices to shard over, as in ``make_mesh(4)``, or the number of copies and the
            devices of each, as in ``make_mesh(2, 4)``.

    Returns:
        A jax Mesh with one or two axes.

    Raises:
        InputError: there are fewer devices, or the shape isn't 1-D or 2-D.
    """
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise InputError(f"a mesh has one or two axes of at least 1 device, got the shape {list(shape)}")
    wanted, devices = int(np.prod(shape)), jax.devices()
    if wanted > len(devices):
        raise InputError(
            f"a mesh of {' x '.join(map(str, shape))} needs {wanted} devices, jax sees {len(devices)} "
            f"({devices[0].platform}); on CPU, XLA_FLAGS=--xla_force_host_platform_device_count={wanted} "
            "before jax is imported gives that many"
        )
    names = (SHARD,) if len(shape) == 1 else (REPLICATE, SHARD)
    return Mesh(np.array(devices[:wanted]).reshape(shape), names)


def resolve(mesh: Mesh | int | Sequence[int] | None, sharding_groups: Sequence[Sequence[int]] | None) -> Axes:
    """The axes to shard over. ``mesh``: a jax Mesh (1-D, or 2-D with the shard axis last), a size, a shape,
    or None for all devices. ``sharding_groups``: positions in that mesh, each group holding one copy.

    Raises: InputError for a mesh larger than the devices, or groups that don't cover it once in equal parts.
    """
    found: Any = mesh
    if mesh is None:
        found = make_mesh(len(jax.devices()))
    elif not isinstance(mesh, Mesh):
        found = make_mesh(*([mesh] if isinstance(mesh, int) else mesh))
    if found.devices.ndim not in (1, 2):
        raise InputError(f"mesh has {found.devices.ndim} axes {found.axis_names}, expected 1 or 2")
    if sharding_groups is not None:
        groups = [list(group) for group in sharding_groups]
        flat = sorted(position for group in groups for position in group)
        sizes = {len(group) for group in groups}
        if flat != list(range(found.devices.size)) or len(sizes) != 1:
            raise InputError(
                f"sharding_groups {groups} must put each of the {found.devices.size} devices into one group, "
                "all groups of one size; for example [[0, 1], [2, 3]]"
            )
        found = Mesh(found.devices.reshape(-1)[np.array(groups)], (REPLICATE, SHARD))
    names = tuple(found.axis_names)
    return Axes(found, names[-1], names[0] if len(names) == 2 else None)
