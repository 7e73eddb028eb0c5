"""The keys of a recipe as options of a command (``--training.steps 50``), grouped by section."""

import argparse
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from shardwright.errors import ConfigError
from shardwright.train.config import Recipe
from shardwright.train.resolve import entry

_PATHS = ("folder", "path", "cache", "plan")
_METAVARS = {bool: "{true,false}", int: "N", float: "X", str: "TEXT"}


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add an option for each key. Those with no value of their own aren't in what is parsed, and options that
    are none of them are left to ``given_keys``, which says which key comes near."""
    parser.set_defaults(takes_keys=True)
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
    """(key, value) of each ``--section.key value`` that was given, also of those that are no key."""
    return [*((key, value) for key, value in vars(known).items() if "." in key), *_unknown(known.rest)]


def _unknown(rest: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    words = iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"got {word!r}, expected --section.key VALUE; see: shardwright train --help")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"--{key} has no value; write --{key} VALUE")
        pairs.append((key.replace("-", "_"), value))
    return pairs
