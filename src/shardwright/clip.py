"""Gradient clipping over parameters on any number of meshes."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardwright.errors import InputError


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients that are shards on one mesh or on several, or plain.

    Every rank calls it with the same parameters. The norm is that of all gradients whole, as one process
    would compute it (any ``norm_type``, infinity included). Gradients are scaled in place so that it is at
    most ``max_norm``. Plain gradients must be equal on all ranks.
    Returns the norm before clipping: 0-d, plain, the same on every rank.
    Raises: InputError for a norm_type below 0; RuntimeError where the norm isn't finite and
        ``error_if_nonfinite`` asks for it.
    """
    if norm_type <= 0:
        raise InputError(f"clip_grad_norm_: norm_type must be above 0, got {norm_type}")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for param in given:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)  # type: ignore[arg-type]
    norms = []
    for members in by_mesh.values():
        norm = get_total_norm([p.grad for p in members], norm_type, False, foreach)  # type: ignore[misc]
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so it can't be clipped "
            "to; pass error_if_nonfinite=False to scale by it anyway"
        )
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total
