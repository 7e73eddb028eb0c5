"""``shardwright recipe``: the recipes that come with the package, to begin one's own from.

shardwright recipe [--json]
shardwright recipe NAME > mine.toml
"""

import argparse
import json
from typing import Any

from shardwright.cli.verb import add_verb
from shardwright.errors import ConfigError
from shardwright.recipe.shipped import SHIPPED


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    recipe = add_verb(
        commands,
        "recipe",
        "List the recipes that come with the package, or print one: a file to change and train.",
        "shardwright recipe",
        "shardwright recipe quickstart > quickstart.toml",
    )
    recipe.add_argument("name", metavar="NAME", nargs="?", help="the one to print, as quickstart")
    recipe.add_argument("--json", action="store_true", help="list them as one object: what each is, by name")
    recipe.set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Print the list or the recipe."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in SHIPPED.items()}
    if known.name is not None:
        text = texts.get(known.name.removesuffix(".toml"))
        if text is None:
            names = ", ".join(texts)
            raise ConfigError(f"no recipe {known.name!r} comes with the package; there is: {names}")
        print(text, end="")
        return 0
    abouts = {name: _about(text) for name, text in texts.items()}
    if known.json:
        print(json.dumps(abouts))
        return 0
    width = max(map(len, abouts))
    for name, about in abouts.items():
        print(f"{name:{width}}  {about}")
    print("\nshardwright train NAME trains one, shardwright recipe NAME > mine.toml writes it, to change it.")
    return 0


def _about(text: str) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = text[: text.index("\n\n")].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines).split(". ")[0].rstrip(".")
