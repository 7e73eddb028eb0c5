"""What torch.compile must leave as it is."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of the graphs that torch.compile makes of the modules around it.

    Traced, it would be compiled with buffers of the size that they had then. Disabled on each call, not
    here: that imports the compiler, which costs 1-2 s to whoever never compiles.
    """

    @functools.wraps(hook)
    def around(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(hook)(*args, **kwargs)
        return hook(*args, **kwargs)

    return around
