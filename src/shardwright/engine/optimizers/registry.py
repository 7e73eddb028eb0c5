"""What is known of the optimizers of this process, and of what they step."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.groups.table import GroupTable
from shardwright.engine.listeners import State
from shardwright.params.placement import Split


@dataclass
class KnownOptimizer:
    """One that has stepped.

    num_params: that it had when it was checked. tables: of the models whose parameters these are. hidden:
    while it steps, parameters and their gradients that it is not to see. paged: while it steps, parameters
    whose state was brought to the device for that. owned: matrices of this rank's own that it steps.
    on_host: by parameter and key the memory of the host that the state of such parameters lies in.
    """

    num_params: int = -1
    tables: WeakSet[GroupTable] = field(default_factory=WeakSet)
    hidden: list[tuple[Any, Any]] = field(default_factory=list)
    paged: dict[Any, Split] = field(default_factory=dict)
    owned: list[Any] = field(default_factory=list)
    on_host: dict[tuple[int, Any], torch.Tensor] = field(default_factory=dict)


@dataclass
class OptimizerRegistry:
    """What is known of optimizers.

    num_checked: optimizers that were checked before their first step. away: what ``offload_states`` has put
    on the host, by group. steppers: names of the parameters that a ``StepInBackward`` steps.
    is_hooked: torch calls ours around each step.
    """

    num_checked: int = 0
    is_hooked: bool = False
    known: WeakKeyDictionary[Optimizer, KnownOptimizer] = field(default_factory=WeakKeyDictionary)
    away: WeakKeyDictionary[ParamGroup, dict[State, list[Any]]] = field(default_factory=WeakKeyDictionary)
    steppers: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)


registry = OptimizerRegistry()
"""One for the process, as torch's hooks of optimizers are: an optimizer may step parameters of several
models, or of none. All of it is held weakly."""
