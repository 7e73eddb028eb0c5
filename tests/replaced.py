"""A function of the package that does something else, for as long as a test looks at what comes of it."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import shardwright

PACKAGE = Path(shardwright.__file__).parent


class Site(NamedTuple):
    """A place in the source: which of its file's, in which function ("": of the module), and what
    stands there or becomes of it."""

    file: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file} {self.function or '(module)'}: {self.text}"


def module_of(file: str) -> Any:
    """The module that lies in a file of the package."""
    return importlib.import_module(f"shardwright.{file.removesuffix('.py').replace('/', '.')}")


def function_of(file: str, name: str) -> Any:
    """The plain function of that qualified name, whatever wraps it: a property, a cache, a decorator."""
    function: Any = module_of(file)
    for part in name.split("."):
        function = inspect.getattr_static(function, part)
    for inner in ("fget", "__func__", "func"):
        function = getattr(function, inner, None) or function
    return inspect.unwrap(function)


@contextmanager
def replaced(file: str, name: str, tree: ast.Module, names: dict[str, Any]) -> Iterator[None]:
    """Inside of it the function does what ``tree`` has, which uses ``names`` besides its module's."""
    code = _code_of(compile(ast.fix_missing_locations(tree), str(PACKAGE / file), "exec"), name)
    function = function_of(file, name)
    function.__globals__.update(names)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def _code_of(code: CodeType, name: str) -> CodeType:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == name:
                return inner
            if name.startswith(f"{inner.co_qualname}."):
                return _code_of(inner, name)
    raise LookupError(name)
