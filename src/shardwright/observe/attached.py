"""What follows every sharded model: the watch over its ranks, and what memory held when it ran out."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwright.engine.listeners import listeners
from shardwright.errors import OutOfMemory
from shardwright.observe.memory.accounts import see_other
from shardwright.observe.watch.lifecycle import keep_watch

if TYPE_CHECKING:
    from shardwright.observe.memory.out_of_memory import Exhausted

_EXPLAINED = "_shardwright_explained"


def attach(price: "Callable[[Exhausted], list[str]]") -> None:
    """Begin, at the first call in this process; every ``fully_shard`` makes it.

    price: lines about changes that fit, asked for where memory has run out.
    """
    if keep_watch not in listeners.sharding:
        listeners.sharding.append(keep_watch)
    if not listeners.forward:
        listeners.forward.append(see_other)
        listeners.failed.append(partial(_explain, price))


def _explain(price: "Callable[[Exhausted], list[str]]", error: BaseException) -> None:
    """Add a note to ``error``, once, where it says that memory ran out; never raises. A traceback shows it at
    its end. Python calls us with an exception that leaves a forward, or that nobody has caught; an error of
    our own budget is explained where it is raised."""
    of, inputs = listeners.last or (lambda: None, None)
    model = of()
    if model is None or not _ran_out(error) or hasattr(error, _EXPLAINED):
        return
    from shardwright.observe.memory.out_of_memory import explanation  # noqa: PLC0415 exhausted memory

    setattr(error, _EXPLAINED, True)
    error.add_note(explanation(model, inputs, price))


def _ran_out(error: BaseException | None) -> bool:
    """Torch's allocator of an accelerator, that of the host, or our own budget."""
    of_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | OutOfMemory) or of_host
