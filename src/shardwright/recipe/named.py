"""A function of one's own, named in a recipe as ``module:function``."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shardwright.errors import InputError


def named(key: str, name: str) -> Callable[..., Any]:
    """The function ``module:function``; the module is looked for in the current folder, too. ``key`` of the
    recipe has the name.

    Raises: InputError where there is no such module or function. What the module itself raises passes.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"{key} = {name!r}: there is no module {error.name!r}, neither in {os.getcwd()} nor "
            "installed; start in the folder that has it, or install it"
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        raise InputError(f"{key} = {name!r}: {module.__file__} has no function {attribute!r}")
    return found
