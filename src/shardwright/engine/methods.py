"""Other methods of a sharded module that run as its forward does: unsharded around them."""

import functools
from typing import Any

from torch import nn

from shardwright.engine.hooks import hooks_of

_WRAPPED = "_runs_as_forward"


def run_as_forward(module: nn.Module, name: str) -> None:
    """From now on do around another method of a sharded module what is done around its forward."""
    method = getattr(module, name)

    @functools.wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        hooks = hooks_of(module)
        args, kwargs = hooks.before(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            hooks.after(module, args, None)
            raise
        changed = hooks.after(module, args, output)
        return output if changed is None else changed

    setattr(around, _WRAPPED, True)
    setattr(module, name, around)


def methods_run_as_forward(module: nn.Module) -> list[str]:
    """Names of the methods for which ``run_as_forward`` was called."""
    return [name for name, value in module.__dict__.items() if getattr(value, _WRAPPED, False)]
