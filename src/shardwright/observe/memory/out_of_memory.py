"""An out-of-memory error says what was alive on its rank, and which changes would fit.

Told as a note of the exception, which a traceback shows at its end. Python calls us with an exception that
leaves a forward, or that nobody has caught; an error of our own budget is explained where it is raised.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.engine.unit import unit_of
from shardwright.errors import OutOfMemory
from shardwright.observe.memory.accounts import memory_of, see_other
from shardwright.observe.memory.report import MemoryReport
from shardwright.torch_private import tree_flatten, tree_unflatten
from shardwright.transport.launches import process_state

_EXPLAINED = "_shardwright_explained"
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True)
class TensorShape:
    """What is remembered of an input tensor. A value of another kind is remembered by its type's name alone:
    to keep it might keep memory alive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True)
class Exhausted:
    """A model that ran out of memory. inputs: positional and named ones of its last forward, with a
    ``TensorShape`` for each tensor. report: what was alive. capacity_nbytes: what could have been allocated.
    """

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    report: MemoryReport
    capacity_nbytes: int


class LastForward:
    """The outermost sharded module that ran last, and the shapes that it was called with.

    price: lines about changes that would have fitted, for the end of an explanation.
    """

    def __init__(self, price: Callable[[Exhausted], list[str]]) -> None:
        self._price = price
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._inputs: Any = tree_flatten(((), {}))

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost sharded module is called with these."""
        self._model = weakref.ref(module)
        # Put together where they are read: the constructor of a container may look at its leaves, as that of
        # ``PackedSequence`` does.
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        self._inputs = [_shape_of(leaf) for leaf in leaves], spec
        # At the first, second, fourth, eighth forward and so on: to ask a malloc with many free blocks takes
        # it milliseconds.
        runtime = unit_of(module).runtime
        if not runtime.pass_number & (runtime.pass_number + 1) and runtime.groups:
            see_other(module)

    def explain(self, error: BaseException) -> None:
        """Add the note to ``error``, once, where it says that memory ran out; never raises."""
        model = self._model()
        if model is None or not _ran_out(error) or hasattr(error, _EXPLAINED):
            return
        setattr(error, _EXPLAINED, True)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        where = f" in its {process_state.phase}" if process_state.phase else ""
        lines = [f"rank {rank} of {world} ran out of memory{where}. Alive on it:"]
        try:
            report = memory_of(model)
            lines.append(str(report))
            inputs = tree_unflatten(*self._inputs)
            lines += self._price(Exhausted(model, inputs, report, _capacity_nbytes(model, report)))
        except Exception as other:  # whatever it is, the error that is being explained is what must be seen
            lines.append(f"No change could be priced: {type(other).__name__}: {other}".splitlines()[0])
        error.add_note("\n".join(lines))


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorShape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _ran_out(error: BaseException | None) -> bool:
    """Torch's allocator of an accelerator, that of the host, or our own budget."""
    of_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | OutOfMemory) or of_host


def _capacity_nbytes(model: nn.Module, report: MemoryReport) -> int:
    """What this process can allocate in all: on a host without a budget, no more than it had."""
    runtime = unit_of(model).runtime
    device, budget = runtime.groups[0].axis.device, runtime.executor.memory.budget
    if device.type != "cpu":
        return torch.accelerator.memory_reserved(device) + torch.accelerator.get_memory_info(device)[0]
    left = 0 if budget is None else budget.nbytes - budget.held_nbytes()
    return report.total_nbytes + left
