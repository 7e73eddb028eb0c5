"""What follows every sharded model: the watch over its ranks, and what memory held when it ran out."""

from collections.abc import Callable

from shardwright.engine.listeners import listeners
from shardwright.observe.memory.out_of_memory import Exhausted, LastForward
from shardwright.observe.watch.lifecycle import keep_watch


def attach(price: Callable[[Exhausted], list[str]]) -> None:
    """Begin, at the first call in this process; every ``fully_shard`` makes it.

    price: lines about changes that fit, asked for where memory has run out.
    """
    if keep_watch not in listeners.sharding:
        listeners.sharding.append(keep_watch)
    if not listeners.forward:
        last = LastForward(price)
        listeners.forward.append(last.note)
        listeners.failed.append(last.explain)
