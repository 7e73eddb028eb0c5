"""Optimizer kernels that torch 2.13 has for plain tensors but not for DTensors.

A shard is stepped by the elementwise kernel on each rank's own rows, so the rule that torch registers for
``_fused_adam_`` is right for these too. Without it ``SGD(fused=True)`` and ``Adagrad(fused=True)`` raise
"does not have a sharding strategy registered". (``Rprop`` assigns through a mask, which DTensor refuses.)
"""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops._pointwise_ops import _register_single_dim_pointwise

aten = torch.ops.aten
_MISSING = (
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adagrad_.default,
    aten._fused_adagrad_.tensor_lr,
)


def register_optimizer_kernels() -> None:
    """Make every elementwise kernel of ``torch.optim`` work on DTensors; once per process is enough."""
    known = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    for op in _MISSING:
        if op not in known:
            _register_single_dim_pointwise(op)
