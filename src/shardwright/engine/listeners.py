"""Who is told of what the engine does: lists that code above it fills, so that it imports none of that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Listeners:
    """Of this process; each call is made once, in the order in which they were added.

    sharding: called before a group is made, as soon as its ranks are known. forward: called with the
    outermost sharded module, its arguments and named ones, as it begins. failed: called with an exception
    that leaves a forward, a check of memory or the process; they may add to its message.
    """

    sharding: list[Callable[[], None]] = field(default_factory=list)
    forward: list[Callable[[nn.Module, Any, Any], None]] = field(default_factory=list)
    failed: list[Callable[[BaseException], None]] = field(default_factory=list)

    def amend(self, error: BaseException) -> None:
        """Have everybody who is told of failures add to the message of ``error``."""
        for tell in self.failed:
            tell(error)


listeners = Listeners()
