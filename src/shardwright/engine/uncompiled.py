"""What torch.compile must leave as it is."""

import functools
from collections.abc import Callable
from typing import Any

from shardwright.torch_private import skipped_by_compiler


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of the graphs that torch.compile makes of the modules around it.

    Traced, it would be compiled with buffers of the size that they had then. As with
    ``torch.compiler.disable``, a frame that calls it breaks its graph there. But where a compiled module is
    called (``block.compile()``), dynamo leaves ``nn.Module``'s own code alone and comes to the hook as to a
    frame of its own: that, and what it calls, it passes over, and the forward is one graph without a break.
    """

    @functools.wraps(hook)
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return skipped_by_compiler(around)
