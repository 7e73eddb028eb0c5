"""``shardwright init``: a recipe of one's own, with a comment on every key.

shardwright init [FILE] [--kind pretrain|full|lora|qlora|dpo] [--section.key VALUE ...]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from shardwright.cli.outputs import check_file
from shardwright.cli.verb import add_verb
from shardwright.recipe.keys import add_keys, given_keys
from shardwright.recipe.resolve import resolve
from shardwright.recipe.shipped import SHIPPED
from shardwright.recipe.template import KINDS, SCHEMA_FILE, commented, schema


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    init = add_verb(
        commands,
        "init",
        "Write a recipe for shardwright train, with a comment on every section and key, and the values that "
        f"are given here. {SCHEMA_FILE} is written beside it: with it an editor that has taplo (VS Code: "
        "Even Better TOML) completes and checks the recipe.",
        "shardwright init mine.toml",
        "shardwright init qlora.toml --kind qlora --base.folder models/llama --data.path chats.jsonl",
    )
    init.usage = "shardwright init [FILE] [--kind KIND] [--section.key VALUE ...]"
    init.add_argument(
        "file", metavar="FILE", nargs="?", default="recipe.toml", help="default: recipe.toml; must not exist"
    )
    init.add_argument(
        "--kind",
        choices=(*KINDS, *SHIPPED),
        metavar="KIND",
        default="pretrain",
        help="pretrain (the default): a small model from scratch. The others fine-tune the model of "
        "base.folder on data.path; full: all weights; lora: adapters; qlora: adapters on a base in 4 bits; "
        "dpo: as qlora, on preferences; or the name of a recipe of the package (shardwright recipe)",
    )
    add_keys(init)
    init.set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Write both files. Raises: ConfigError where FILE exists or can't be written, or a value is wrong."""
    kind: str = known.kind
    resolved = resolve(SHIPPED[KINDS.get(kind, kind)], given_keys(known))
    path = Path(known.file)
    check_file(path)
    check_file(path.with_name(SCHEMA_FILE), may_exist=True)
    path.with_name(SCHEMA_FILE).write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    with path.open("x", encoding="utf-8") as file:
        file.write(commented(resolved))
    print(f"written: {path}, and {path.with_name(SCHEMA_FILE)} for editors")
    recipe = resolved.recipe
    paths = {"base.folder": recipe.base.folder, "data.path": recipe.data.path} if recipe.base.folder else {}
    for key, value in paths.items():
        is_missing = value not in ("stdlib", "torch") and not Path(value).exists()  # these two are everywhere
        if resolved.origins[key] == "file" and is_missing:
            print(f'set {key} in it to yours: "{value}" isn\'t here')
    print(f"train it: shardwright train {path}")
    return 0
