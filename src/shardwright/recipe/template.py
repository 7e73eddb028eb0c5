"""A recipe to begin from, with a comment on every key, and the JSON schema of recipes for editors.

Both are made of the declarations in :mod:`shardwright.recipe.config`, which also check a recipe.
"""

import inspect
import textwrap
from pathlib import Path
from typing import Any

from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import Resolved, entry

KINDS = {
    "pretrain": "quickstart",
    "full": "finetune-full-real",
    "lora": "finetune-lora-real",
    "qlora": "finetune-qlora-real",
    "dpo": "finetune-dpo-real",
}
"""Kinds of training, and the recipe of the package that has the values of each."""
SCHEMA_FILE = "shardwright.schema.json"
"""The schema's name beside the recipes that name it in their first line."""

_WIDTH = 110


def commented(resolved: Resolved) -> str:
    """The recipe as TOML, with a comment on every section and key. A key that nobody has set stands behind
    ``#`` with its default. What can't be used beside ``base.folder``, or without it, is left out.
    """
    about = Path(resolved.source).read_text(encoding="utf-8").partition(". ")[0].partition("\n\n")[0]
    lines = [
        f"#:schema ./{SCHEMA_FILE}",
        *(line if line.startswith("#") else f"# {line}" for line in about.rstrip(".").splitlines()),
        "# A key behind a # has its default: take the # away to set it.",
    ]
    no_use = ("model",) if resolved.recipe.base.folder else ("base", "adapter")
    values, defaults = (recipe.model_dump(mode="json") for recipe in (resolved.recipe, Recipe()))
    for name, section in Recipe.model_fields.items():
        if name not in no_use:
            kind = type(section.default)
            lines += ["", *_comment(inspect.cleandoc(kind.__doc__ or "").replace("``", "")), f"[{name}]"]
            for key, field in kind.model_fields.items():
                is_set = _is_set(resolved, f"{name}.{key}")
                assignment = entry(key, (values if is_set else defaults)[name][key])
                lines += _lines(assignment if is_set else f"#{assignment}", field.description or "")
    return "\n".join(lines) + "\n"


def _is_set(resolved: Resolved, path: str) -> bool:
    if path == "run.folder":  # the recipe of the package has its own; one's own recipe is named by its file
        return resolved.origins[path] == "command line"
    return resolved.origins[path] != "default"


def _lines(assignment: str, description: str) -> list[str]:
    line = f"{assignment}  # {description}"
    return [line] if len(line) <= _WIDTH else [*_comment(description), assignment]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for part in text.splitlines() if part for line in textwrap.wrap(part, _WIDTH - 2)]


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a recipe: sections, keys, types, bounds, defaults, and what each is
    for. What must fit between keys is checked by ``shardwright train`` only.
    """
    found = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Shardwright recipe"}
