"""An out-of-memory error says what was alive on its rank, and which changes would fit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.engine.unit import unit_of
from shardwright.observe.memory.accounts import memory_of
from shardwright.observe.memory.report import MemoryReport
from shardwright.torch_private import tree_unflatten
from shardwright.transport.process import process_state


@dataclass(frozen=True)
class Exhausted:
    """A model that ran out of memory. inputs: positional and named ones of its last forward, with a
    ``TensorShape`` for each tensor. report: what was alive. capacity_nbytes: what could have been allocated.
    """

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    report: MemoryReport
    capacity_nbytes: int


def explanation(model: nn.Module, inputs: Any, price: Callable[[Exhausted], list[str]]) -> str:
    """What was alive as ``model`` ran out of memory, and which changes would have fitted; never raises.

    inputs: of its last forward, taken apart. price: lines about such changes. They are priced here, not by
    a call of the user's: the process of a job that has run out of memory ends with its error.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    where = f" in its {process_state.phase}" if process_state.phase else ""
    lines = [f"rank {rank} of {world} ran out of memory{where}. Alive on it:"]
    try:
        report = memory_of(model)
        lines.append(str(report))
        lines += price(Exhausted(model, tree_unflatten(*inputs), report, _capacity_nbytes(model, report)))
    except Exception as other:  # whatever it is, the error that is being explained is what must be seen
        lines.append(f"No change could be priced: {type(other).__name__}: {other}".splitlines()[0])
    return "\n".join(lines)


def _capacity_nbytes(model: nn.Module, report: MemoryReport) -> int:
    """What this process can allocate in all: on a host without a budget, no more than it had."""
    runtime = unit_of(model).runtime
    device, budget = runtime.groups[0].axis.device, runtime.executor.memory.budget
    if device.type != "cpu":
        return torch.accelerator.memory_reserved(device) + torch.accelerator.get_memory_info(device)[0]
    left = 0 if budget is None else budget.nbytes - budget.held_nbytes()
    return report.total_nbytes + left
