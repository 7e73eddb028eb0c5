"""Clipping by the norm of all gradients, which is read later, and that of each, to say which isn't finite."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.torch_private import foreach_norm


class Norms:
    """The norms of a step's gradients before clipping. Every rank calls a method, or none: they may
    communicate, and they wait for the device."""

    def __init__(self, names: list[str], each: Tensor, total: Tensor) -> None:
        self._names, self._each, self._total = names, each, total

    def total(self) -> float:
        """Of all gradients together."""
        return float(_whole(self._total))

    def first_nonfinite(self) -> str:
        """The first parameter whose gradient has an infinite or NaN element; "" where none has."""
        wrong = [not finite for finite in _whole(self._each).isfinite().tolist()]
        return self._names[wrong.index(True)] if any(wrong) else ""


@torch.no_grad()
def clip(model: nn.Module, max_norm: float, pp: DeviceMesh | None = None) -> Norms:
    """``torch.nn.utils.clip_grad_norm_`` over a model's parameters, by the same operations. Those that ranks
    share by tensor parallelism are on another mesh. pp: the stages of a pipeline, whose norm it is."""
    meshes: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            meshes.setdefault(getattr(param.grad, "device_mesh", None), []).append((name, param))
    if not meshes:
        return Norms([], torch.zeros(0), torch.tensor(0.0))
    norms = []
    for trained in meshes.values():
        grads: Any = [param.grad for _, param in trained]
        norms.append(torch.stack(list(foreach_norm(grads, 2.0))))
    each = norms[0] if len(norms) == 1 else torch.cat([_whole(norm) for norm in norms])
    total = torch.linalg.vector_norm(each, 2.0)
    if pp is not None:
        total = _whole(total).double().square()
        dist.all_reduce(total, group=pp.get_group())
        total = total.sqrt()
    for trained in meshes.values():  # one scale for all of them
        torch.nn.utils.clip_grads_with_norm_([param for _, param in trained], max_norm, total)
    return Norms([name for trained in meshes.values() for name, _ in trained], each, total)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
