"""Whole matrices for optimizers that need them (Muon, Shampoo): collected from the shards, and given back.

whole = gathered([p.grad for p in params])      # plain tensors, the same on every rank
update = [orthogonalise(g) for g in whole]
for p, u in zip(params, update): scattered(p, u)  # a DTensor placed like p: each rank keeps its rows
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.placement import part_of
from shardwright.torch_private import DTensorSpec, TensorMeta


def gathered(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gather each tensor: returns a plain tensor of its logical shape and dtype, on the device of its shards.

    Every rank of their mesh calls it with the same tensors in the same order. All returned tensors are in
    memory at once, so pass a few at a time if memory is short.

    Args:
        tensors: sharded parameters, their gradients or optimizer state. Plain tensors are only detached.

    Returns:
        One tensor for each, detached, of the same logical shape and dtype.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> weight, = shardwright.gathered([model.weight])
        >>> update = shardwright.scattered(model.weight, weight.sign())
        >>> update.placements
        (Shard(dim=0),)
    """
    with torch.no_grad():
        return [t.full_tensor() if isinstance(t, DTensor) else t.detach() for t in tensors]


def scattered(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Shard ``whole`` as ``like`` is sharded; the inverse of ``gathered``. No communication.

    Every rank passes the same ``whole`` and keeps its own rows of it. The shard is a copy, so that the memory
    of ``whole`` can be freed.

    Args:
        like: a sharded tensor, such as a parameter or its gradient, or a plain one.
        whole: a plain tensor of the logical shape of ``like``, of any dtype.

    Returns:
        A DTensor of the shape of ``whole``, placed like ``like``, in the dtype of ``whole`` and on the device
            of ``like``; ``whole`` itself if ``like`` is plain.

    Raises:
        InputError: the shapes differ.
    """
    if whole.shape != like.shape:
        raise InputError(
            f"scattered got a whole tensor of shape {list(whole.shape)} for one of shape {list(like.shape)}; "
            "pass what gathered() gave for it, or a tensor of that shape"
        )
    if not isinstance(like, DTensor):
        return whole
    local = part_of(like, whole.detach())
    local = local.to(like.device).clone(memory_format=torch.contiguous_format)
    spec = DTensorSpec(like.device_mesh, like.placements, TensorMeta(like.shape, like.stride(), local.dtype))
    return type(like.detach())(local, spec, requires_grad=False)  # type: ignore[call-arg]
