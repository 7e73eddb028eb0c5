"""Shards of chosen sizes: whole matrices on the rank that owns them, and rows that blocks keep together.

    weight [6, 4] over three ranks      rank 0      rank 1      rank 2
    rows (the default)                  2 rows      2 rows      2 rows
    Owned(1)                            -           6 rows      -
    Blocks(3)                           -           3 rows      3 rows
    Blocks(shares=(4, 1, 1))            4 rows      1 row       1 row

An optimizer of whole matrices (Muon, Shampoo) so has each on one rank, and sends nothing.
"""

import copyreg
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwright.errors import InputError
from shardwright.params.at_rest import as_torch, reduced
from shardwright.params.placement import RaggedShard, Split, held_by
from shardwright.schedule.balance import Load, Matrices, newton_schulz_flops, owners
from shardwright.schedule.layout import ParamLayout
from shardwright.torch_private import DTensorSpec, TensorMeta, local_of, spec_of, tree_leaves, tree_map
from shardwright.transport.mesh import Axis


@dataclass(frozen=True)
class Owned:
    """One rank has the whole parameter, and the others have nothing of it.

    ``shard_placement_fn`` returns it; or give it as ``layout=`` of ``fully_shard``, for all parameters of the
    call. Under tensor parallelism a rank owns what that has left it: its own part of the matrix.

    Args:
        rank: the owner's place on the sharded axis; None: chosen, so that all ranks own about as much.
    """

    rank: int | None = None

    def sizes(self, layout: ParamLayout, fqn: str) -> tuple[int, ...]:
        """Rows of each rank; ``fully_shard`` asks for them.

        Args:
            layout: shape of the parameter, and number of ranks.
            fqn: its name, for messages.

        Returns:
            One number for each rank.

        Raises:
            InputError: the axis doesn't have this rank.
        """
        if not 0 <= (self.rank or 0) < layout.world:
            raise InputError(f"{fqn!r} was given to rank {self.rank} of an axis of {layout.world} ranks")
        return tuple(layout.rows if rank == self.rank else 0 for rank in range(layout.world))


@dataclass(frozen=True)
class Blocks:
    """Rows are cut between blocks only: heads, experts, or what an optimizer quantises together.

    Ranks get equally many blocks, up to one, or as many as their shares say.

    Args:
        rows: rows (slices of dim 0) of a block.
        elements: elements of a block in the order of memory, in place of ``rows``; as the 256 that block-wise
            8-bit optimizers quantise together. Where it doesn't divide a row, several rows are kept together.
        shares: one number for each rank of the sharded axis, as (2, 1, 1) where the first has twice the
            memory; None: all are equal.

    Raises:
        InputError: a block of nothing, or shares that are no shares.
    """

    rows: int = 1
    elements: int | None = None
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(self.shares))
        if self.rows < 1 or (self.elements is not None and self.elements < 1):
            raise InputError(f"a block has 1 row, or element, or more; got {self}")
        if self.shares is not None and not (min(self.shares, default=-1) >= 0 < sum(self.shares) < math.inf):
            raise InputError(f"shares are finite, 0 or more, and not all 0; got {self}")

    def sizes(self, layout: ParamLayout, fqn: str) -> tuple[int, ...]:
        """Rows of each rank; ``fully_shard`` asks for them.

        Args:
            layout: shape of the parameter, and number of ranks.
            fqn: its name, for messages.

        Returns:
            One number for each rank.

        Raises:
            InputError: there are shares of another number of ranks.
        """
        world, step = layout.world, self.rows
        shares = self.shares or (1,) * world
        if len(shares) != world:
            raise InputError(f"{fqn!r} was given {len(shares)} shares, expected {world}: one for each rank")
        if self.elements is not None:
            step = self.elements // math.gcd(self.elements, max(layout.row_numel, 1))
        num_blocks = -(-layout.rows // step)
        ends = [math.floor(num_blocks * part / sum(shares) + 0.5) for part in accumulate(shares)]
        bounds = [min(end * step, layout.rows) for end in (0, *ends)]
        return tuple(stop - start for start, stop in pairwise(bounds))


Layout = Owned | Blocks | str | None
"""``layout=`` of ``fully_shard``."""


@dataclass(eq=False)
class Balanced:
    """Owners of the hidden matrices of one call of ``fully_shard``, chosen together.

    matrices: shape (under tensor parallelism of this rank's part) and bytes of an element, by the id of the
    parameter, until that is sharded: who holds the parameters would keep their memory. rows: of those whose
    owners are chosen, of each rank, by id and transport.
    """

    matrices: dict[int, tuple[tuple[int, ...], int]]
    rows: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(params: Iterable[nn.Parameter]) -> "Balanced":
        """Of these, none of which is sharded yet."""
        return Balanced({id(param): (_local_shape(param), param.element_size()) for param in params})

    def take(self, param: nn.Parameter, axis: Axis) -> tuple[int, ...]:
        """Rows of each rank of a matrix that is sharded now, or of a stack of them."""
        key = id(param), id(axis.comm)
        if key not in self.rows:
            # At once with those of the call that are still to be sharded: they are spread more evenly then.
            found = {id(param): (_local_shape(param), param.element_size()), **self.matrices}
            weights = [
                Matrices(
                    shape[0] if len(shape) == 3 else 1,
                    math.prod(shape[-2:]) * itemsize,
                    newton_schulz_flops(shape[-2:]) if len(shape) > 1 else 0,
                )
                for shape, itemsize in found.values()
            ]
            loads = axis.comm.loads = axis.comm.loads or [Load() for _ in range(axis.world)]
            for (each, (shape, _)), counts in zip(found.items(), owners(weights, loads), strict=True):
                many = 1 if len(shape) == 3 else shape[0]
                self.rows[each, id(axis.comm)] = tuple(count * many for count in counts)
        self.matrices.pop(id(param), None)
        return self.rows.pop(key)


def _local_shape(param: torch.Tensor) -> tuple[int, ...]:
    return tuple((local_of(param) if isinstance(param, DTensor) else param).shape)


def check_layout(layout: Any) -> None:
    """Raises: InputError for what isn't one."""
    if not isinstance(layout, Owned | Blocks | Balanced) and layout not in (None, "rows"):
        raise InputError(f"layout must be 'rows', 'owner', an Owned or a Blocks, got {layout!r}")


def laid_out(names: Mapping[nn.Parameter, str], splits: Mapping[nn.Parameter, Split], options: Any) -> Any:
    """The splits of a group's parameters, with the rows of each rank.

    options: of the call; their ``layout`` is that of parameters which ``shard_placement_fn`` said nothing of.
    Raises: InputError for a parameter that can't be laid out so.
    """
    if options.flat:
        raise InputError("use_orig_params=False: a flat parameter has no matrices; leave layout= out")
    layout, made = options.layout, dict(splits)
    if not isinstance(layout, Balanced):
        layout = Balanced({}) if options.layout in (None, "rows") else options.layout
    for param, split in splits.items():
        wanted = split.layout
        if wanted is None and split.dim == 0:  # not a scalar, nor one that is cut on another dim
            is_owned = isinstance(layout, Balanced) and id(param) in layout.matrices
            wanted = Owned() if is_owned else None if isinstance(layout, Balanced) else layout
        if wanted is None or split.dim is None:
            continue
        rows = ParamLayout(_local_shape(param), split.axis.world)
        if wanted == Owned():
            sizes = (layout if isinstance(layout, Balanced) else Balanced({})).take(param, split.axis)
        else:
            sizes = wanted.sizes(rows, names[param])
        # Where torch.chunk cuts the same rows it is a plain Shard, which all of torch knows.
        spans = [rows.row_range(rank) for rank in range(rows.world)]
        is_even = sizes == tuple(stop - start for start, stop in spans)
        made[param] = replace(split, layout=wanted, sizes=None if is_even else sizes)
    return made


# ---- the tensor


_LOCAL = {"detach", "alias", "clone", "copy_", "_to_copy", "zero_", "fill_", "empty_like", "zeros_like"} | {
    "ones_like",
    "full_like",
    "is_same_size",
}
_NOT_LOCAL = ("norm", "max", "powsum")


def _is_elementwise(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return not name.endswith(_NOT_LOCAL)
    return name in _LOCAL or torch.Tag.pointwise in func.tags


class RaggedTensor(DTensor):
    """A DTensor of which one placement is a ``RaggedShard``.

    Elementwise operations run on this rank's part alone. ``full_tensor()`` and ``redistribute()`` are its
    own; any other operation that changes nothing runs on what ``redistribute()`` makes of it in equal rows.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_elementwise(func) and _fit(args, kwargs):
            return _run_on_parts(func, args, kwargs)
        if func._schema.is_mutable:
            raise InputError(
                f"{func._schema.name} can't change tensors of which ranks have parts of chosen sizes (see "
                "shardwright.Owned) with others that are cut in another way: give an optimizer of whole "
                "matrices shardwright.owned_params(model), or change to_local() on each rank"
            )
        return func(*tree_map(_in_rows, args), **tree_map(_in_rows, kwargs))

    def redistribute(  # type: ignore[override]
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """See ``DTensor.redistribute``: to other placements on the same mesh. All its ranks call it."""
        joined = _Rejoined.apply(self)
        if placements is None or tuple(placements) == self.placements:
            return self
        return joined.redistribute(device_mesh, placements, **options)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """See ``DTensor.full_tensor``."""
        return _Rejoined.apply(self).full_tensor(grad_placements=grad_placements)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RaggedTensor(local_tensor={local_of(self)}, placements={self.placements})"

    # ---- torch.distributed.checkpoint's protocol (CheckpointableTensor)

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner  # noqa: PLC0415 saves by torch

        properties = metadata.TensorProperties.create_from_tensor(self.to_local())
        return [
            planner.WriteItem(
                metadata.MetadataIndex(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint import metadata  # noqa: PLC0415 saves by torch

        mesh = self.device_mesh
        offset, size = held_by(self.placements, self.shape, mesh.shape, mesh.get_coordinate() or ())
        chunk = metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        return [chunk] if math.prod(size) else []

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.to_local()


copyreg.pickle(RaggedTensor, reduced)  # type: ignore[arg-type]
ForkingPickler.register(RaggedTensor, as_torch)


def _fit(args: Any, kwargs: Any) -> bool:
    """Whether all tensors of an operation, or of each place of its lists, are placed alike."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    alone = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    together = [*map(list, zip(*lists, strict=False))] if lists else [alone]
    for members in together:
        tensors = [each for each in members if isinstance(each, torch.Tensor) and each.ndim]
        if len({(each.shape, getattr(each, "placements", None)) for each in tensors}) > 1:
            return False
    return True


def _run_on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    def local(each: Any) -> Any:
        return local_of(each) if isinstance(each, DTensor) else each

    out = func(*tree_map(local, args), **tree_map(local, kwargs))
    likes = args[0] if args and isinstance(args[0], list | tuple) else None
    if likes is not None:
        return None if out is None else [placed_as(like, each) for like, each in zip(likes, out, strict=True)]
    if func._schema.is_mutable:
        return args[0]
    like = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    return placed_as(like, out) if isinstance(out, torch.Tensor) else out


def placed_as(like: Any, local: torch.Tensor) -> Any:
    """A DTensor over ``local``, placed as ``like``."""
    if not isinstance(like, DTensor):
        return local
    spec = spec_of(like)
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    kind: Any = RaggedTensor if isinstance(like, RaggedTensor) else DTensor
    return kind(local, DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)


def _in_rows(each: Any) -> Any:
    """A tensor in equal rows, which all of torch's operations know. All ranks call it."""
    if not isinstance(each, RaggedTensor):
        return each
    cuts = [Shard(p.dim) if isinstance(p, RaggedShard) else p for p in each.placements]
    return _joined(each).redistribute(placements=cuts)


def _joined(tensor: RaggedTensor) -> DTensor:
    """The same, replicated on the axis that it was cut over: a broadcast of each part."""
    spec, local = spec_of(tensor), local_of(tensor)
    axis = next(i for i, each in enumerate(spec.placements) if isinstance(each, RaggedShard))
    cut, own = spec.placements[axis], spec.mesh.get_local_rank(axis)
    whole = local.new_empty((sum(cut.sizes), *local.shape[1:]))
    group = spec.mesh.get_group(axis)
    for rank, part in enumerate(whole.split(cut.sizes)):
        if part.numel() and not whole.is_meta:
            if rank == own:
                part.copy_(local)
            dist.broadcast(part, group=group, group_src=rank)
    placements = tuple(Replicate() if i == axis else each for i, each in enumerate(spec.placements))
    meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
    return DTensor(whole, DTensorSpec(spec.mesh, placements, meta), requires_grad=False)  # type: ignore[call-arg]


class _Rejoined(torch.autograd.Function):
    """``_joined``; gradients go back to this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> DTensor:  # type: ignore[override]
        ctx.like = tensor.detach()
        return _joined(tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> torch.Tensor:  # type: ignore[override]
        like: RaggedTensor = ctx.like
        spec = spec_of(like)
        axis = next(i for i, each in enumerate(spec.placements) if isinstance(each, RaggedShard))
        placements = [Replicate() if i == axis else each for i, each in enumerate(spec.placements)]
        local = local_of(grad.redistribute(placements=placements))
        start, stop = spec.placements[axis].range_of(spec.mesh.get_local_rank(axis))
        return placed_as(like, local[start:stop].contiguous())
