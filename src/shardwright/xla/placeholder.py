"""What modules of an XLA model show for a parameter: its name, shape and dtype, and no values to lose.

It is a parameter on the meta device, on which torch does nothing, and says nothing: a state dict of it saves
no values, and ``load_state_dict``, an edit or an optimizer's step changes none. So each of these is an error
that says what to do here.
"""

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwright.errors import StageError

LEAF = "_shardwright_xla_leaf"
"""Attribute of a placeholder, and of the parameter that it replaced: the ``unit.Leaf`` of both."""

_HARMLESS = frozenset(
    [
        "__format__",
        "__len__",
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "size",
        "storage_offset",
        "stride",
    ]
)
_STEP = "train with xla.make_train_step(model, loss_fn, xla.AdamW(...))"
_CAST = "cast or move a model before xla.fully_shard, which places it (compute_dtype= casts for computing)"
_REMEDIES = {
    "requires_grad_": "set requires_grad before xla.fully_shard",
    "requires_grad": "set requires_grad before xla.fully_shard",
    "empty_like": "give it values with xla.materialize(model) or xla.load_full_state_dict(model, ...)",
    **dict.fromkeys(("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "type"), _CAST),
}
_VALUES = (
    "read values with xla.full_state_dict(model), set them with xla.load_full_state_dict(model, ...), and "
    "save with save_xla of shardwright.checkpoint.xla"
)


class PlaceholderUsed(StageError):
    """Values were asked of a parameter of an XLA model, or it was to be changed."""


class Placeholder(nn.Parameter):
    """A parameter of an XLA model, as its modules show it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__" and func != _DATA:
            harmless = True
        elif name == "requires_grad_":
            harmless = _asked(args, kwargs) == args[0].requires_grad
        else:
            harmless = name in _HARMLESS
        if harmless:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__  # of the attribute
        raise PlaceholderUsed(
            f"{name} of {_described(args)}, a parameter of an XLA model: modules show its name, shape and "
            f"dtype, its values are a sharded array. Instead, {_remedy(name)}"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"parameter of an XLA model, {list(self.shape)} {self.dtype}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        made = placeholder(self)
        memo[id(self)] = made
        setattr(made, LEAF, copy.deepcopy(getattr(self, LEAF), memo))
        return made


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def placeholder(like: torch.Tensor) -> Placeholder:
    """A placeholder of the shape, dtype and ``requires_grad`` of a parameter; its ``LEAF`` is to be set."""
    shown = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return Placeholder(shown, requires_grad=like.requires_grad)  # type: ignore[call-arg]


def is_sharded(param: torch.Tensor) -> bool:
    """Whether a parameter is a placeholder, or was replaced by one."""
    return LEAF in getattr(param, "__dict__", {})


def refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises: PlaceholderUsed if a torch optimizer holds parameters of an XLA model."""
    held = sum(is_sharded(param) for group in optimizer.param_groups for param in group["params"])
    if held:
        raise PlaceholderUsed(
            f"{type(optimizer).__name__} holds {held} parameters of an XLA model, and would train nothing: "
            f"{_STEP}"
        )


@functools.cache
def watch_optimizers() -> None:
    """From the first call on, every step of a torch optimizer is checked by ``refuse_step``."""
    register_optimizer_step_pre_hook(refuse_step)


def _remedy(name: str) -> str:
    if name.startswith("register_"):  # a hook
        return f"as gradients are inside of a compiled step, {_STEP}"
    return _REMEDIES.get(name, _VALUES)


def _asked(args: Any, kwargs: Any) -> bool:
    return args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)


def _described(args: Any) -> str:
    found = next((arg for arg in args if isinstance(arg, Placeholder)), None)
    if found is None:
        return "one of several"
    owner, name = getattr(found, LEAF).sites[0]
    return f"{type(owner).__name__.removeprefix('Xla')}.{name} {list(found.shape)}"
