"""``shardwright schema``: the JSON schema of recipes, by which editors complete and check them."""

import argparse
import json
from typing import Any

from shardwright.cli.verb import add_verb
from shardwright.recipe.template import SCHEMA_FILE, schema


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    add_verb(
        commands,
        "schema",
        "Print the JSON schema of recipes. An editor that has taplo (VS Code: Even Better TOML) takes it for "
        f"recipes that begin with #:schema ./{SCHEMA_FILE}, as those of shardwright init do.",
        f"shardwright schema > {SCHEMA_FILE}",
    ).set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Print it."""
    print(json.dumps(schema(), indent=1))
    return 0
