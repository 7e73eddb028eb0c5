"""Optimizers that read rows and columns of whole matrices, over shards.

``torch.optim.Adafactor`` keeps a mean of each row and each column, and fails on DTensors. Its state is small,
so a sharded parameter is stepped whole, one after another: gathered, stepped by torch's own code in the
same way on every rank, and cut again. ``torch.optim.Muon`` runs on DTensors, in other roundings than one
process.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adafactor, Muon
from torch.optim.optimizer import Optimizer

from shardwright.engine.group_table import tables
from shardwright.errors import warn

_set_aside: WeakKeyDictionary[Optimizer, list[tuple[Any, Any]]] = WeakKeyDictionary()


@torch.no_grad()
def step_whole(optimizer: Optimizer) -> None:
    """Step what is sharded of an ``Adafactor``, and hide its gradients from the step that follows.

    Every rank calls it with the same parameters, which may be listed in an order of its own on each. Memory:
    one whole parameter, its gradient and its update.
    """
    if not isinstance(optimizer, Adafactor):
        return
    aside = _set_aside.setdefault(optimizer, [])
    names = {
        id(param.sharded): (group.name, param.fqn)
        for table in tuple(tables)
        for group in table.groups
        for param in group.params
    }
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for param in sorted(group["params"], key=lambda each: names.get(id(each), ("", ""))):
            if not isinstance(param, DTensor) or param.grad is None:
                continue
            whole: Any = param.full_tensor().detach().clone().requires_grad_()
            whole.grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            alone = Adafactor([whole])
            alone.param_groups[0].update(options)
            alone.state[whole] = optimizer.state[param]
            alone.step()
            optimizer.state[param] = alone.state[whole]
            parts = distribute_tensor(whole.detach(), param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(parts.to_local())
            aside.append((param, param.grad))
            param.grad = None


def show_grads(optimizer: Optimizer, *_: Any) -> None:
    """After the step: the gradients that ``step_whole`` has hidden."""
    for param, grad in _set_aside.pop(optimizer, ()):
        param.grad = grad


def warn_of_roundings(optimizer: Optimizer, params: list[Any]) -> None:
    """Say once that sharded matrices aren't stepped to the last digit as one process would."""
    if isinstance(optimizer, Muon) and any(isinstance(param, DTensor) for param in params):
        warn(
            "torch.optim.Muon over shards isn't exact: it orthogonalises in bfloat16, and the products of "
            "sharded matrices are summed in another order than one process sums them (seen: weights that "
            "differ by 1e-3 after three steps)",
        )
