"""What follows every sharded model: the watch over its ranks, and what memory held when it ran out."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.engine.listeners import listeners
from shardwright.engine.unit import unit_of
from shardwright.errors import OutOfMemory
from shardwright.observe.memory.accounts import see_other
from shardwright.observe.watch.lifecycle import keep_watch
from shardwright.torch_private import tree_flatten

if TYPE_CHECKING:
    from shardwright.observe.memory.out_of_memory import Exhausted

_EXPLAINED = "_shardwright_explained"
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def attach(price: "Callable[[Exhausted], list[str]]") -> None:
    """Begin, at the first call in this process; every ``fully_shard`` makes it.

    price: lines about changes that fit, asked for where memory has run out.
    """
    if keep_watch not in listeners.sharding:
        listeners.sharding.append(keep_watch)
    if not listeners.forward:
        last = LastForward(price)
        listeners.forward.append(last.note)
        listeners.failed.append(last.explain)


@dataclass(frozen=True)
class TensorShape:
    """What is remembered of an input tensor. A value of another kind is remembered by its type's name alone:
    to keep it might keep memory alive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


class LastForward:
    """The outermost sharded module that ran last, and the shapes that it was called with, for the note of an
    out-of-memory error, which a traceback shows at its end. Python calls us with an exception that leaves a
    forward, or that nobody has caught; an error of our own budget is explained where it is raised.
    """

    def __init__(self, price: "Callable[[Exhausted], list[str]]") -> None:
        self._price = price
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._inputs: Any = tree_flatten(((), {}))

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost sharded module is called with these."""
        self._model = weakref.ref(module)
        # Put together where they are read: the constructor of a container may look at its leaves, as that of
        # ``PackedSequence`` does.
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        self._inputs = (
            [
                TensorShape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
                if isinstance(leaf, torch.Tensor)
                else (leaf if isinstance(leaf, _PLAIN) else type(leaf))
                for leaf in leaves
            ],
            spec,
        )
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
        from shardwright.observe.memory.out_of_memory import explanation  # noqa: PLC0415 exhausted memory

        setattr(error, _EXPLAINED, True)
        error.add_note(explanation(model, self._inputs, self._price))


def _ran_out(error: BaseException | None) -> bool:
    """Torch's allocator of an accelerator, that of the host, or our own budget."""
    of_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | OutOfMemory) or of_host
