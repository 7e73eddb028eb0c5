"""The transport's device path with one wait, record, release or kept reference left out; each in turn.

waits, releases: statements that only call ``wait``, ``land``, ``release`` and the like.
records: ``Due(...)``; in its place comes one that was due long ago.
kept references: attributes that a ``wait`` empties are emptied at the end of ``__init__``; and of what is
added to ``kept`` a part is left out.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import shardwright

FILES = ("transport/streams.py", "transport/nccl.py", "transport/shared.py")
CALLS = {"wait", "wait_event", "wait_stream", "land", "release", "_release", "filled", "forget_filled"}
_PACKAGE = Path(shardwright.__file__).parent


class Site(NamedTuple):
    """A place in the source: which of its file, of these in its function, and what stands there."""

    file: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.text}"


def sites() -> list[Site]:
    """All of them, in the order of the source."""
    found = []
    for file in FILES:
        tree = ast.parse((_PACKAGE / file).read_text())
        for number, (function, text, _) in enumerate(_places(tree)):
            found.append(Site(file, number, function, text))
    return found


@contextmanager
def left_out(site: Site) -> Iterator[None]:
    """Inside of it this process does without."""
    path = _PACKAGE / site.file
    tree = ast.parse(path.read_text())
    list(_places(tree))[site.number][2]()
    name = f"shardwright.{site.file.removesuffix('.py').replace('/', '.')}"
    module = importlib.import_module(name)
    code = _code_of(compile(ast.fix_missing_locations(tree), str(path), "exec"), site.function)
    function: Any = module
    for part in site.function.split("."):
        function = inspect.getattr_static(function, part)
    function = inspect.unwrap(getattr(function, "fget", None) or getattr(function, "__func__", function))
    long_ago = SimpleNamespace(record_event=lambda: SimpleNamespace(done=True))
    function.__globals__["_due_long_ago"] = lambda: module.Due(long_ago)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def _code_of(code: CodeType, function: str) -> CodeType:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == function:
                return inner
            if function.startswith(f"{inner.co_qualname}."):
                return _code_of(inner, function)
    raise LookupError(function)


def _places(tree: ast.Module) -> Iterator[tuple[str, str, Any]]:
    """``(function, text, what leaves it out of the tree)``."""
    for owner in tree.body:
        if isinstance(owner, ast.FunctionDef):
            yield from _in_function(owner, owner.name)
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                yield from _in_function(method, f"{owner.name}.{method.name}")
        if isinstance(owner, ast.ClassDef):
            yield from _kept(owner)


def _in_function(function: ast.FunctionDef, name: str) -> Iterator[tuple[str, str, Any]]:
    for node in ast.walk(function):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS:
            yield name, ast.unparse(node), _setter(node, "value", call.func.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Due":
            yield name, ast.unparse(node), _becomes_long_ago(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "kept":
            assert isinstance(node.value, ast.BinOp)
            for side in ("left", "right"):
                text = f"{ast.unparse(getattr(node.value, side))}, kept"
                yield name, text, _setter(node.value, side, ast.List([], ast.Load()))


def _kept(owner: ast.ClassDef) -> Iterator[tuple[str, str, Any]]:
    methods = {method.name: method for method in owner.body if isinstance(method, ast.FunctionDef)}
    for node in ast.walk(methods["wait"]) if {"wait", "__init__"} <= methods.keys() else ():
        text = ast.unparse(node)
        if text.startswith("self._") and text.endswith((" = []", ".clear()")) and isinstance(node, ast.stmt):
            kept = text.removesuffix(" = []").removesuffix(".clear()")
            yield f"{owner.name}.__init__", f"{kept}, kept", _appender(methods["__init__"], f"{kept} = []")


def _setter(node: Any, field: str, value: ast.AST) -> Any:
    return lambda: setattr(node, field, value)


def _appender(function: ast.FunctionDef, statement: str) -> Any:
    return lambda: function.body.extend(ast.parse(statement).body)


def _becomes_long_ago(node: ast.Call) -> Any:
    def change() -> None:
        node.func, node.args = ast.Name("_due_long_ago", ast.Load()), []

    return change
