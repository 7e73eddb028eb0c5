"""Where the shards of a parameter lie: how it is cut, over which ranks, and beside which other placements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwright.policy import DEFAULT_OFFLOAD, CPUOffloadPolicy, DataParallelMeshDims, OffloadPolicy
from shardwright.schedule.layout import ParamLayout
from shardwright.torch_private import DTensorSpec, StridedShard, TensorMeta, concatenated
from shardwright.transport.mesh import Axis

if TYPE_CHECKING:
    from shardwright.transport.streams import Streams


class RaggedShard(Placement):
    """Each rank of the mesh's axis has as many rows (slices of ``dim``) as ``sizes`` says, in rank order.

    The term is that of veScale's RaggedShard (Li et al. 2025). It cuts what all other axes have left.
    """

    def __init__(self, sizes: Sequence[int], dim: int = 0) -> None:
        super().__init__()
        self.sizes, self.dim = tuple(sizes), dim

    def range_of(self, rank: int) -> tuple[int, int]:
        """``(start, stop)`` rows of ``rank``."""
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.sizes, self.dim) == (other.sizes, other.dim)

    def __hash__(self) -> int:
        return hash((self.sizes, self.dim))

    def __reduce__(self) -> Any:
        return RaggedShard, (self.sizes, self.dim)

    def __repr__(self) -> str:
        owners = [rank for rank, size in enumerate(self.sizes) if size]
        if len(owners) == 1:  # of hundreds of ranks one line shows no more than this
            return f"RaggedShard(rank={owners[0]}, dim={self.dim})"
        return f"RaggedShard(sizes={self.sizes}, dim={self.dim})"


@dataclass(frozen=True)
class Split:
    """How a parameter is to be sharded.

    dim: the dim that is cut (None: kept whole). offload: where its shard lies.
    dims: the data-parallel axes, where the parameter is a DTensor on a mesh that has them already.
    keeps_dtype: the policy's ``param_dtype_override_fn`` leaves it in its dtype.
    num_averaged: over how many ranks its gradient is the mean; None: over those of the axis.
    layout: the ``Owned`` or ``Blocks`` that was asked for. sizes: by that, rows of each rank; None: equal.
    """

    axis: Axis
    dim: int | None
    offload: OffloadPolicy = DEFAULT_OFFLOAD
    dims: DataParallelMeshDims | None = None
    keeps_dtype: bool = False
    num_averaged: int | None = None
    layout: Any = None
    sizes: tuple[int, ...] | None = None

    @cached_property
    def on_host(self) -> bool:
        """Whether shard and gradient lie on the host."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.offload.shards_on_host

    @cached_property
    def grads_on_host(self) -> bool:
        """Whether gradients are copied there in the backward; else once at the end of a step's last one."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.offload.grads

    @cached_property
    def pages_state(self) -> bool:
        """Whether the optimizer's state alone lies on the host, except during a step."""
        return self.offload_streams is not None and not self.on_host

    @cached_property
    def offload_streams(self) -> "Streams | None":
        """By which gradients, or an optimizer's state, go to pinned memory of the host; None where nothing is
        offloaded from a device, and where memory isn't pinned, so that the copy stops the host."""
        pins = isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory
        return self.axis.comm.streams if pins else None


@dataclass(frozen=True)
class ParamPlacement:
    """Where one parameter's shards lie.

    layout: the spans that ``split`` cuts it into. inner: the placement that tensor parallelism has given it,
    or None; what is split here is then this rank's local tensor.
    """

    split: Split
    layout: ParamLayout
    inner: DTensorSpec | None

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole parameter (of the local one, under tensor parallelism): a view."""
        start, stop = self.layout.row_range(self.split.axis.rank)
        return whole if self.layout.dim is None else whole.narrow(self.layout.dim, start, stop - start)

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a plain tensor of the logical shape: a view."""
        for mesh, sharding in self._other_axes():
            if isinstance(sharding, Shard):
                layout = ParamLayout(tuple(whole.shape), mesh.size(), sharding.dim)
                start, stop = layout.row_range(mesh.get_local_rank())
                whole = whole.narrow(sharding.dim, start, stop - start)
        return self.rows_of(whole)

    def spec(self, param: torch.Tensor) -> DTensorSpec:
        """Where the shards lie. Tensor parallelism that cuts the same dim has cut it first (strided)."""
        axis, dim = self.split.axis, self.layout.dim
        meta = TensorMeta(param.shape, torch.empty(param.shape, device="meta").stride(), param.dtype)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        others = self._other_axes()
        cuts = [mesh.size() for mesh, sharding in others if sharding.is_shard(dim)]
        if self.layout.sizes is not None:
            placement = RaggedShard(self.layout.sizes)
        elif cuts and dim is not None:
            # A plain Shard on both axes would say that ours cut first, and full_tensor() would join the parts
            # in another order.
            placement = StridedShard(dim, split_factor=math.prod(cuts))
        mesh = axis.mesh
        if others:
            mesh = concatenated([mesh, *(other for other, _ in others)])
        return DTensorSpec(mesh, (*axis.placements(placement), *(p for _, p in others)), meta)

    def _other_axes(self) -> list[tuple[DeviceMesh, Placement]]:
        """The axes that aren't data parallel, on which the parameter was a DTensor before."""
        if self.inner is None:
            return []
        mesh, dims = self.inner.mesh, self.split.dims
        if mesh.ndim == 1 and dims is None:
            return [(mesh, self.inner.placements[0])]
        ours = () if dims is None else (*dims.shard_names, *dims.replicate_names)
        placed = zip(mesh.mesh_dim_names or (), self.inner.placements, strict=True)
        return [(mesh[name], placement) for name, placement in placed if name not in ours]

    def local_grad(self, grad: DTensor) -> torch.Tensor:
        """This rank's part of an unsharded gradient: placed like the parameter on all but the data-parallel
        axes, over which it is reduced later."""
        assert self.inner is not None
        dims, names = self.split.dims, self.inner.mesh.mesh_dim_names or ()
        ours = () if dims is None else (*dims.shard_names, *dims.replicate_names)
        # Sums over the data-parallel axes are ours, later; what tensor parallelism has left unsummed is
        # summed here.
        wanted = tuple(
            grad.placements[place] if names[place : place + 1] and names[place] in ours else placement
            for place, placement in enumerate(self.inner.placements)
        )
        return grad.redistribute(placements=wanted).to_local()


Cut = Shard | StridedShard | RaggedShard

SHARD = "_shardwright_shard"
"""The attribute of an ``OwnedParameter`` that is the shard in whose memory it lies."""


def shard_behind(param: Any) -> Any:
    """The shard of a parameter that an optimizer holds: of a matrix that a rank owns, or itself."""
    return getattr(param, SHARD, param)


def rows_of(cut: Cut, rows: int, parts: int, rank: int) -> tuple[int, int]:
    """``(start, stop)`` rows that ``cut`` gives ``rank``, of ``rows`` in ``parts``."""
    if isinstance(cut, RaggedShard):
        return cut.range_of(rank)
    return ParamLayout((rows,), parts).row_range(rank)


def held_by(
    placements: Sequence[Placement], shape: Sequence[int], mesh: Sequence[int], at: Sequence[int]
) -> tuple[list[int], list[int]]:
    """``(offset, size)`` of what coordinate ``at`` of a mesh holds of a tensor: each ``Shard`` cuts as
    torch.chunk does, in mesh order; then those that data parallelism cut out of what others had left."""
    offset, size = [0] * len(shape), list(shape)
    for axis, cut in cuts_of(placements):
        start, stop = rows_of(cut, size[cut.dim], mesh[axis], at[axis])
        offset[cut.dim] += start
        size[cut.dim] = stop - start
    return offset, size


def part_of(like: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``whole``, a plain tensor, where it is cut as ``like`` is: a view."""
    mesh = like.device_mesh
    offset, size = held_by(like.placements, whole.shape, mesh.shape, mesh.get_coordinate() or ())
    return whole[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]


def cuts_of(placements: Sequence[Placement]) -> list[tuple[int, Cut]]:
    """Mesh axes that cut, in the order in which they did: tensor parallelism first where both cut one dim."""
    cuts = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, Cut)]
    # Python's sort is stable: cuts of different dims stay in the order of the mesh.
    return sorted(cuts, key=lambda cut: not isinstance(cut[1], Shard))
