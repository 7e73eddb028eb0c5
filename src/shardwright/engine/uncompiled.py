"""What torch.compile must leave as it is."""

import functools
from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import (  # there without the compiler, whose import costs 1-2 s
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)


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

    marked: Any = around
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "a hook of Shardwright"
    marked._torchdynamo_disable_recursive = True
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return around
