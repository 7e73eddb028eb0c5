"""What is seen to before an optimizer's step: that its gradients are those of all ranks, and before its first
one that it holds shards and steps them fast."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardwright.errors import StageError
from shardwright.motion.together import unsettled
from shardwright.motion.unit import sharded_from


class OptimizerGuard:
    """Checks each optimizer once, before its first step; and each step against a backward cut short."""

    def __init__(self) -> None:
        self.handle: Any = None
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if unsettled and torch._C._current_graph_task_id() == -1:  # else it steps from inside the backward
            _check_settled(optimizer, params)
        if self._checked.get(optimizer) == len(params):
            return
        stale = [found.fqn for found in map(sharded_from, params) if found is not None]
        if stale:
            raise StageError(
                f"{type(optimizer).__name__} holds {len(stale)} parameters that fully_shard has replaced, "
                f"or quantize_ ({', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}): stepping it "
                "would train nothing. Build the optimizer after both, from model.parameters()"
            )
        self._checked[optimizer] = len(params)
        _choose_foreach(optimizer)


def _check_settled(optimizer: Optimizer, params: list[Any]) -> None:
    if any(model.holds_any(params) for model in tuple(unsettled)):
        raise StageError(
            f"{type(optimizer).__name__} would step with gradients of a backward that didn't end on all "
            "ranks: parameters would differ between them. Leave the step out where backward() raised; the "
            "next forward starts afresh"
        )


def _choose_foreach(optimizer: Optimizer) -> None:
    """Step DTensors with foreach kernels where torch would for plain parameters: on an accelerator.

    With neither ``foreach`` nor ``fused`` given, torch takes foreach for plain CUDA parameters but, not
    knowing a DTensor for one, a Python loop over sharded ones.
    """
    for group in optimizer.param_groups:
        asked = group.get("fused") or group.get("differentiable") or group.get("foreach", False) is not None
        sharded = [param for param in group["params"] if isinstance(param, DTensor)]
        if not asked and sharded and sharded[0].device.type != "cpu":
            group["foreach"] = True
