"""Gradient clipping over parameters on any number of meshes."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardwright.engine.listeners import State, listeners
from shardwright.engine.optimizers.in_backward import steps_in_backward
from shardwright.errors import InputError, StageError
from shardwright.transport.process import process_state


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp: DeviceMesh | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients that are sharded, on one mesh or several, or plain.

    Every rank calls it with the same parameters. The norm is that of the full gradients, as one process would
    compute it. Gradients are scaled in place so that their norm is at most ``max_norm``. Plain gradients must
    be equal on all ranks.

    Args:
        parameters: one or several parameters; those without a gradient are skipped.
        max_norm: gradients with a larger norm are scaled down to it.
        norm_type: the order of the norm, above 0; ``math.inf`` is one.
        error_if_nonfinite: raise an error if the norm is infinite or NaN, before anything is scaled.
        foreach: as in torch: True or False chooses the implementation, None leaves the choice to torch.
        pp: the stages of a pipeline (``Mesh.pp``): the norm is that of all, each of which calls it with its
            own parameters.

    Returns:
        The norm before clipping, a plain 0-d tensor in the dtype of the gradients, with the same value on
            every rank.

    Raises:
        InputError: ``norm_type`` isn't above 0.
        StageError: ``StepInBackward`` steps the parameters, or their gradients are on the host
            (``offload_states``).
        RuntimeError: the norm isn't finite and ``error_if_nonfinite`` is True.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4, bias=False))
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> float(shardwright.clip_grad_norm_(model.parameters(), max_norm=1.0))  # sqrt(32), of 32 ones
        5.656854152679443
    """
    if norm_type <= 0:
        raise InputError(f"clip_grad_norm_: norm_type must be above 0, got {norm_type}")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    listeners.need("clip_grad_norm_", State.GRADS, params=given)
    if any(steps_in_backward(param) for param in given):
        raise StageError(
            "clip_grad_norm_: StepInBackward has stepped these parameters already, before their total norm "
            "was known; to clip, remove() it and step a plain optimizer after clipping"
        )
    alike: dict[Any, list[torch.Tensor]] = {}
    for param in given:
        if param.grad is not None:
            where = (
                (param.grad.device_mesh, param.grad.placements) if isinstance(param.grad, DTensor) else None
            )
            alike.setdefault(where, []).append(param)
    norms = [
        _norm([p.grad for p in members if p.grad is not None], where, norm_type, foreach)
        for where, members in alike.items()
    ]
    norms = norms or [torch.tensor(0.0)]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if pp is not None:  # stages may have different dtypes
        of_stages = _of_all_ranks(total.double().to(pp.device_type), pp.get_group())
        total = torch.linalg.vector_norm(of_stages, norm_type).to(total)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so it can't be clipped "
            "to; pass error_if_nonfinite=False to scale by it anyway"
        )
    for members in alike.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


def _norm(grads: list[torch.Tensor], where: Any, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm of gradients that are sharded over the same axes: of the local shards, then over the axes that
    shard them.

    Not torch's own norm of DTensors: its infinity norm fails on a rank whose shard is empty.
    """
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    filled = [shard for shard in local if shard.numel()]
    norm = get_total_norm(filled, norm_type, False, foreach) if filled else local[0].new_zeros(())
    if where is None:
        return norm
    mesh, placements = where
    norm = norm.to(mesh.device_type)
    for axis, placed in enumerate(placements):
        if mesh.size(axis) > 1 and not isinstance(placed, Replicate):
            norm = torch.linalg.vector_norm(_of_all_ranks(norm, mesh.get_group(axis)), norm_type)
    return norm


def _of_all_ranks(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A 0-d tensor of each rank of the group, in their order."""
    values = value.new_zeros(group.size())
    values[group.rank()] = value
    # A sum with zeros is exact. Over the transport that parameters have (all ranks have made one, or none):
    # no communicator is made for it, and a rank that doesn't clip is named.
    comm = process_state.made_here().comms.get((group, value.device.type))
    if comm is not None:
        return comm.all_reduce([values], "norms of gradients").wait()[0]
    dist.all_reduce(values, group=group)
    return values
