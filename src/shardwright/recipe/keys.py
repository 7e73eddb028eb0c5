"""The keys of a recipe as options of a command (``--training.steps 50``), grouped by section."""

import argparse
from typing import Any, Literal, get_args, get_origin

from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import entry

_PATHS = ("folder", "path", "cache", "plan")
_METAVARS = {bool: "{true,false}", int: "N", float: "X", str: "TEXT"}


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add an option for each key. Those that aren't given aren't in what is parsed."""
    defaults = Recipe().model_dump(mode="json")
    for name, section in Recipe.model_fields.items():
        kind = type(section.default)
        group = parser.add_argument_group(
            f"[{name}]", (kind.__doc__ or name).splitlines()[0].replace("``", "")
        )
        for key, field in kind.model_fields.items():
            default = entry(key, defaults[name][key]).partition(" = ")[2]
            group.add_argument(
                f"--{name}.{key}",
                default=argparse.SUPPRESS,
                metavar="PATH" if key in _PATHS else _metavar(field.annotation),
                help=f"{field.description} (default {default})".replace("%", "%%"),
            )


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"{{{','.join(get_args(annotation))}}}"
    return _METAVARS.get(annotation, "TOML")


def given_keys(known: argparse.Namespace) -> list[tuple[str, str]]:
    """(key, value) of each ``--section.key value`` that was given."""
    return [(key, value) for key, value in vars(known).items() if "." in key]
