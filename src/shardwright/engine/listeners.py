"""Who is told of what the engine does: lists that code above it fills, so that it imports none of that."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from weakref import ref

from torch import nn


class State(StrEnum):
    """What of a group can be on the host between two steps (``offload_states``)."""

    PARAMS = "parameters"
    GRADS = "gradients"
    OPTIMIZER = "optimizer state"


Need = Callable[[str, tuple[State, ...], Iterable[Any], Iterable[Any]], None]


@dataclass
class Listeners:
    """Who is told in this process; each call is made once, in the order in which they were added.

    sharding: called before a group is made, as soon as its ranks are known. forward: called with the
    outermost sharded module before its first, second, fourth, eighth forward and so on. failed: called with
    an exception that leaves a forward, a check of memory or the process; they may add to its message. needs:
    called as ``need`` is; they refuse by an exception. last: the outermost sharded module that ran last, and
    what it was called with (``shapes_in``); None before one has run.
    """

    sharding: list[Callable[[], None]] = field(default_factory=list)
    forward: list[Callable[[nn.Module], None]] = field(default_factory=list)
    failed: list[Callable[[BaseException], None]] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    last: tuple[ref[nn.Module], Any] | None = None

    def amend(self, error: BaseException) -> None:
        """Have everybody who is told of failures add to the message of ``error``."""
        for tell in self.failed:
            tell(error)

    def need(self, user: str, *states: State, groups: Iterable[Any] = (), params: Iterable[Any] = ()) -> None:
        """``user`` is about to use these states of groups, or of sharded parameters."""
        for refuse in self.needs:
            refuse(user, states, groups, params)


listeners = Listeners()
