"""Defaults < file < command line, checked in one go, with the origin of every value.

    recipe.toml ---\\
                    merge -> Recipe (or one ConfigError that lists all that is wrong) -> Resolved ->
                    config.toml
    --section.key -/

Pure: reads one file, starts nothing.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import ConfigError, nearest
from shardwright.extras import from_extra
from shardwright.files import parsed
from shardwright.recipe.config import Recipe
from shardwright.recipe.shipped import SHIPPED, recipe_at

with from_extra("train"):
    import tomli_w
    from pydantic import ValidationError

_INSTEAD = {"data.path": "data.sources", "data.sources": "data.path"}
"""Of the two only one is given: on the command line it replaces the other of the file."""

Origin = Literal["default", "file", "command line"]


def leaf_keys() -> tuple[str, ...]:
    """Every key of a recipe by its path, as ``training.steps``."""
    sections = Recipe.model_fields.items()
    return tuple(f"{name}.{key}" for name, section in sections for key in type(section.default).model_fields)


@dataclass(frozen=True)
class Resolved:
    """A recipe, its file, and where each value came from (by path, as ``training.steps``)."""

    recipe: Recipe
    source: str
    origins: Mapping[str, Origin]

    @property
    def folder(self) -> Path:
        """The run's folder: ``run.folder``, or ``runs/<name of the recipe>``."""
        return Path(self.recipe.run.folder or Path("runs", Path(self.source).stem))

    def to_toml(self) -> str:
        """The whole recipe as TOML that parses back to the same one, each value with its origin beside it."""
        lines = [f"# resolved from {self.source}; the origin of each value stands beside it"]
        for name, section in self.recipe.model_dump(mode="json").items():
            lines += ["", f"[{name}]"]
            for key, value in section.items():
                lines.append(f"{entry(key, value)}  # {self.origins[f'{name}.{key}']}")
        return "\n".join(lines) + "\n"


def entry(key: str, value: Any) -> str:
    """``key = value`` on one line of TOML."""
    if isinstance(value, dict):
        return f"{key} = {_table(value)}"
    if isinstance(value, list):
        return f"{key} = [{', '.join(entry('', each).removeprefix(' = ') for each in value)}]"
    shown = tomli_w.dumps({"value": value}, multiline_strings=False).strip()
    return f"{key} = {shown.removeprefix('value = ')}"


def _table(value: dict[str, Any]) -> str:
    return f"{{{', '.join(entry(json.dumps(name), inner) for name, inner in value.items())}}}"


def resolve(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Resolved:
    """Merge the defaults, the file at ``path`` and ``overrides`` (pairs as ``("training.steps", "50")``).

    path: a file, or the name of a recipe of the package.

    Raises:
        ConfigError: no such file, not TOML, or unknown keys, wrong types and values out of range: all of them
            in one message, each with its path, its origin and, for an unknown key, the nearest right one.
    """
    path = recipe_at(path)
    from_file = _read(path)
    problems: list[str] = []
    merged: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(leaf_keys(), "default")
    for name, section in from_file.items():
        if isinstance(section, dict) and name in Recipe.model_fields:
            merged[name] = dict(section)
            origins.update({f"{name}.{key}": "file" for key in section})
        elif name in Recipe.model_fields:
            problems.append(
                f"{name} (file): got {section!r}, expected a section: write [{name}] and its keys below"
            )
        else:
            wider = () if isinstance(section, dict) else leaf_keys()
            problems.append(
                f"{name} (file): unknown {_kind(section)}{_nearest(name, Recipe.model_fields, wider)}"
            )
    for key, text in overrides:
        if key not in leaf_keys():
            problems.append(f"--{key} (command line): unknown key{_nearest(key, leaf_keys(), prefix='--')}")
            continue
        name, leaf = key.split(".")
        merged.setdefault(name, {})[leaf] = _value(name, leaf, text)
        origins[key] = "command line"
    given = {key for key, _ in overrides}
    for key in given & _INSTEAD.keys():
        name, leaf = _INSTEAD[key].split(".")
        if _INSTEAD[key] not in given and merged[name].pop(leaf, None) is not None:
            origins[_INSTEAD[key]] = "default"
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        problems += [_sentence(detail, origins) for detail in error.errors()]
        recipe = None
    if problems or recipe is None:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"{path}: {len(problems)} thing(s) to correct; nothing was started\n{listed}")
    return Resolved(recipe, str(path), origins)


def _read(path: Path) -> dict[str, Any]:
    try:
        return parsed(tomllib.loads, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.toml"))
        hint = f" (there is: {', '.join(near)})" if near else ""
        raise ConfigError(
            f"no recipe at {path}: give the path of a TOML file{hint}, or the name of one that comes with "
            f"the package: {', '.join(SHIPPED)}{nearest(path.stem, SHIPPED)}"
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder: give the path of a TOML file (of a run's folder, {path / 'config.toml'})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the recipe {path}: {error}; give the path of a TOML file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct it there") from None


def _value(name: str, leaf: str, text: str) -> Any:
    """``text`` as the TOML or JSON value that it spells; what is neither, or for a text key, stays as it
    is."""
    if isinstance(getattr(Recipe.model_fields[name].default, leaf), str):
        return text
    try:
        return parsed(tomllib.loads, f"value = {text}")["value"]
    except ValueError:
        pass
    try:
        if text.lstrip()[:1] in ("[", "{"):
            return parsed(json.loads, text)
        return {"True": True, "False": False}[text]
    except (ValueError, KeyError):
        return text


def _sentence(detail: Any, origins: Mapping[str, Origin]) -> str:
    path = ".".join(str(part) for part in detail["loc"][:2])
    origin = origins.get(path, "file")
    if detail["type"] == "extra_forbidden":
        name = path.split(".")[0]
        known = type(Recipe.model_fields[name].default).model_fields
        return f"{path} (file): unknown key{_nearest(path, [f'{name}.{key}' for key in known], leaf_keys())}"
    message = detail["msg"].removeprefix("Value error, ")
    if len(detail["loc"]) < 2:
        return f"{path}: {message}" if path else message
    shown = "command line" if origin == "command line" else "file"
    return f"{path} ({shown}): got {detail['input']!r:.200}; {message[0].lower()}{message[1:]}"


def _nearest(key: str, known: Any, wider: Any = (), prefix: str = "") -> str:
    names = list(dict.fromkeys((*known, *wider)))
    return nearest(key, names, prefix) or f"; known: {', '.join(prefix + name for name in known)}"


def _kind(value: object) -> str:
    return "section" if isinstance(value, dict) else "key outside of any section"
