"""Which modules become units of their own: policies for ``fully_shard(auto_wrap_policy=...)``."""

from collections.abc import Callable, Collection
from functools import partial

from torch import nn

from shardwright.errors import InputError

Policy = Callable[..., bool]
"""``policy(module=, recurse=, unwrapped_params=)``: whether to look inside (``recurse``), or else to wrap.
``unwrapped_params`` counts the elements that no nested unit holds yet."""

AutoWrap = Collection[type[nn.Module]] | Policy

_KEPT_WHOLE = (nn.MultiheadAttention,)  # reads the weights of its children without calling them
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # no forward to unshard around


def size_based_policy(min_num_params: int = 10**8) -> Policy:
    """A policy for ``auto_wrap_policy``: shard modules that hold many elements which no nested unit holds.

    Args:
        min_num_params: how many elements are enough.

    Returns:
        The policy.
    """

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        large = unwrapped_params >= min_num_params
        if recurse:
            return large and not isinstance(module, _KEPT_WHOLE)
        return large and not isinstance(module, _CONTAINERS)

    return policy


def modules_to_wrap(
    root: nn.Module, auto_wrap: AutoWrap, taken: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """The modules below ``root`` to shard, children before parents; those ``taken`` stay as they are.

    Raises: InputError for a policy that is neither classes nor callable.
    """
    if not callable(auto_wrap):
        classes = tuple(auto_wrap)
        if not classes or not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
            raise InputError(f"auto_wrap_policy must hold nn.Module classes, got {auto_wrap!r}")
        auto_wrap = partial(_is_instance, classes)
    found: list[nn.Module] = []
    _walk(root, auto_wrap, taken, found)
    return found


def _is_instance(classes: tuple[type, ...], module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
    return recurse or isinstance(module, classes)


def _walk(
    module: nn.Module, policy: Policy, taken: Callable[[nn.Module], bool], found: list[nn.Module]
) -> int:
    """Collect below ``module``; returns how many elements the units found there will hold."""
    held = 0
    for child in module.children():
        numel = sum(p.numel() for p in child.parameters())
        if taken(child) or child in found:
            held += numel
            continue
        inner = 0
        if policy(module=child, recurse=True, unwrapped_params=numel):
            inner = _walk(child, policy, taken, found)
        if policy(module=child, recurse=False, unwrapped_params=numel - inner):
            found.append(child)
            inner = numel
        held += inner
    return held
