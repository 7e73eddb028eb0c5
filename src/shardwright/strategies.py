"""What the strategies of Lightning's Fabric and of its Trainer share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import nn

from shardwright.grouped import choices
from shardwright.policy import Grouping


def strategies_of(package: str) -> Any:
    """Its ``strategies``, or None where it isn't installed."""
    try:
        return import_module(f"{package}.strategies")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise
        return None


def groups_for(groups: Any, module: nn.Module) -> Any:
    """The same, or None, with a warning, where they are "auto" and nothing in the module says how."""
    if groups != "auto" or choices(module, Grouping()):
        return groups
    warnings.warn(
        f"nothing in {type(module).__name__} says how to group it, so all of it is gathered at once; "
        "give the strategy groups=, lists of names or a Grouping, or None if that's meant",
        stacklevel=3,
    )
    return None


@contextmanager
def unreduced(module: Any) -> Iterator[None]:
    """A context in which a module's gradients are accumulated, and not reduced."""
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
