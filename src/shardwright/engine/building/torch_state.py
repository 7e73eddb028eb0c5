"""What torch reads of the ``FSDPState`` of a module that it takes for its own, on our runtime.

``torch.distributed.pipelining`` reduces, after the last microbatch, the gradients that the setters have kept;
torch's ``register_fsdp_forward_method`` runs a method as the forward; its ``share_comm_ctx`` shares streams.
Loaded when torch asks for one.
"""

import functools
from typing import Any

from torch import nn

from shardwright.engine.step.backward import backward_of
from shardwright.engine.step.hooks import hooks_of
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError


class TorchState:
    """The state of one sharded module. Raises: InputError for anything else that torch's has."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._state_ctx = self
        self._comm_ctx: Any = unit_of(module).runtime  # torch's pipelining compares whose stages share one
        self._fsdp_param_groups = self.all_states = ()

    def _root_post_backward_final_callback(self) -> None:
        backward_of(unit_of(self._module).runtime).reduce_held()

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return hooks_of(module).before(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        changed = hooks_of(module).after(module, args, output)
        return output if changed is None else changed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            f"torch asks for {name!r} of its own FSDPState, but this module is sharded by shardwright; what "
            "it holds and does is in stats(), trace() and schedule() instead"
        )


# ---- other methods of a sharded module that run as its forward does: unsharded around them


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
