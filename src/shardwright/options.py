"""Options as frozen dataclasses: what a field may be stands beside it, what it means is in the docstring. The
checks here have it from there, and so have the sections of recipes, and the files of plans and clusters."""

import dataclasses
import inspect
import operator
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from shardwright.errors import InputError

_KINDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_SIGNS = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}


def limited(default: Any, **limits: float) -> Any:
    """A field that is a number within ``limits``, which have pydantic's names: ge, gt, le, lt. One without a
    default is ``dataclasses.field(metadata=limits)``."""
    return dataclasses.field(default=default, metadata=limits)


def check(options: Any, error: type[Exception] = InputError) -> None:
    """Raise ``error`` for a field that isn't of its kind or within its limits. None passes where it is the
    default, and so does what is no text, number or choice."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is not None or field.default is not None:
            expected = _expected(field.type, value, field.metadata)
            if expected:
                name = f"{type(options).__name__}.{field.name}"
                raise error(f"{name} must be {expected}, got {value!r}")


def read(kind: Any, table: Any, where: str = "") -> Any:
    """A dataclass out of a table of TOML.

    Raises: ValueError for a key that is unknown or missing, or a value that isn't of its kind; as ``kind``.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    known = ", ".join(fields)
    if not isinstance(table, dict):
        raise ValueError(f"{where}got {table!r}, expected {known}")
    for name in table.keys() - fields.keys():
        raise ValueError(f"{where}{name} is unknown; known: {known}")
    missing = dataclasses.MISSING
    for field in fields.values():
        if field.default is missing and field.default_factory is missing and field.name not in table:
            raise ValueError(f"{where}{field.name} is missing")
    return kind(**{name: _value(fields[name].type, value, where, name) for name, value in table.items()})


def words_of(kind: Any) -> dict[str, str]:
    """What the docstring of a dataclass says of each field."""
    args = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", args, re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()).rstrip(".") for name, text in found}


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    if dataclasses.is_dataclass(kind) and not isinstance(value, kind):  # type: ignore[arg-type]
        return read(kind, value, f"[{name}] ")
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}{name}: got {value!r}, expected a list")
        return tuple(_value(get_args(kind)[0], each, where, f"[{name}]") for each in value)
    expected = _expected(kind, value, {})
    if expected:
        raise ValueError(f"{where}{name}: got {value!r}, expected {expected}")
    return value


def _expected(kind: Any, value: Any, limits: Mapping[str, float]) -> str:
    """What a value should be; "" where it is that, or anything may come."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    union = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kinds = tuple(each for each in union if each is not NoneType)
    if not all(each in _KINDS for each in kinds):
        return ""
    is_kind = isinstance(value, (*kinds, int) if float in kinds else kinds)
    is_kind = is_kind and (bool in kinds or not isinstance(value, bool))
    if is_kind and all(_SIGNS[name][1](value, limit) for name, limit in limits.items()):
        return ""
    bounds = " and ".join(f"{_SIGNS[name][0]} {limit:g}" for name, limit in limits.items())
    return f"{' or '.join(_KINDS[each] for each in kinds)} {bounds}".rstrip()
