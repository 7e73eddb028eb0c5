"""What torch reads of the ``FSDPState`` of a module that it takes for its own, on our runtime.

``torch.distributed.pipelining`` reduces, after the last microbatch, the gradients that the setters have kept;
torch's ``register_fsdp_forward_method`` runs a method as the forward; its ``share_comm_ctx`` shares streams.
"""

import weakref
from types import FrameType
from typing import Any

from torch import nn

from shardwright.engine.step.backward import backward_of
from shardwright.engine.step.hooks import hooks_of
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError
from shardwright.torch_private import STATE_KEY


class TorchState:
    """Of one sharded module. Raises: InputError for anything else that torch's has."""

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


def splits_backward(asking: FrameType) -> bool:
    """Whether a stage of torch's pipelining asks for its module's parameters, to compute the gradients of its
    input first and those of its weights later: ``backward_maybe_with_nosync`` does, in a lambda."""
    module = asking.f_globals.get("__name__")
    return module == "torch.distributed.pipelining.stage" and asking.f_code.co_name == "<lambda>"


class _States(dict[Any, Any]):
    """A module's states, by the function that has made each: of ``fully_shard``, whosever, ours."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.__dict__.get(STATE_KEY, {}))
        self._module = weakref.ref(module)

    def get(self, key: Any, default: Any = None) -> Any:
        module = self._module()
        if module is not None and getattr(key, "__name__", "") == "fully_shard":
            return TorchState(module)
        return super().get(key, default)


def show_state(module: nn.Module) -> None:
    """Have ``torch.distributed.fsdp.fully_shard.state(module)`` be its ``TorchState``."""
    module.__dict__[STATE_KEY] = _States(module)


def hide_state(module: nn.Module) -> None:
    """Have it be None again."""
    others = dict(module.__dict__.pop(STATE_KEY, {}))
    if others:
        module.__dict__[STATE_KEY] = others
