"""Whole matrices for optimizers that need them (Muon, Shampoo): collected from the shards, and given back.

whole = gathered([p.grad for p in params])      # plain tensors, the same on every rank
update = [orthogonalise(g) for g in whole]
for p, u in zip(params, update): scattered(p, u)  # a DTensor placed like p: each rank keeps its rows
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.placement import cuts_of
from shardwright.schedule.layout import ParamLayout


def gathered(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor whole, as a plain tensor of its logical shape and dtype, on the device of its shards.

    tensors: sharded parameters, their gradients or optimizer state; plain ones are returned as they are,
        detached. Every rank of their mesh calls it with the same ones in the same order.
    All that are returned are held at once: pass a few at a time where memory counts.
    """
    with torch.no_grad():
        return [t.full_tensor() if isinstance(t, DTensor) else t.detach() for t in tensors]


def scattered(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole`` placed as ``like`` is: a DTensor of which this rank has its rows, or ``whole`` itself where
    ``like`` is plain. No communication: every rank passes the same ``whole``.

    The shard is a copy, so that the memory of ``whole`` can go; dtype of ``whole``.
    Raises: InputError where the shapes differ.
    """
    if whole.shape != like.shape:
        raise InputError(
            f"scattered got a whole tensor of shape {list(whole.shape)} for one of shape {list(like.shape)}; "
            "pass what gathered() gave for it, or a tensor of that shape"
        )
    if not isinstance(like, DTensor):
        return whole
    local = whole.detach()
    for dim, placement in cuts_of(like.placements):
        cut = ParamLayout(tuple(local.shape), like.device_mesh.size(dim), placement.dim)
        start, stop = cut.row_range(like.device_mesh.get_local_rank(dim))
        local = local.narrow(placement.dim, start, stop - start)
    local = local.to(like.device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
