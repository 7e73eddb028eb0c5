"""docs/troubleshooting.md quotes the messages of the package as they stand in its source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from shardwright import errors
from tests.fences import fences

ROOT = Path(__file__).parents[2]
PAGE = "troubleshooting.md"
QUOTED = [line for fence in fences(PAGE) for line in fence.text.splitlines() if line]
LEAST = 15
"""Letters that a text of the source must have beside its holes, or it would fit anything."""
SHARE = 0.4
"""Of a message that is an example: how much of it the text in the source must say."""


def text_of(node: ast.expr) -> str | None:
    """A string of the source, with ``…`` for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d)?[sdfr]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or "…") + (text_of(node.right) or "…")
    return None


@cache
def texts() -> list[str]:
    """Every line of every string of the package that says enough."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    found = {text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr)}
    lines = {re.sub("…+", "…", line).strip() for text in found if text for line in text.splitlines()}
    return [line for line in lines if len(line.replace("…", "")) >= LEAST]


@cache
def raised_texts() -> list[tuple[str, str]]:
    """Every line of a string that stands in ``raise Class(...)``, and the name of the class."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                strings = {text_of(part) for part in ast.walk(node.exc) if isinstance(part, ast.expr)}
                lines = [line for text in strings if text for line in text.splitlines()]
                found |= {(ast.unparse(node.exc.func), re.sub("…+", "…", line).strip()) for line in lines}
    return [(name, line) for name, line in sorted(found) if len(line.replace("…", "")) >= LEAST]


def sections(page: str) -> list[tuple[str, list[str]]]:
    """(heading, quoted lines) of each section that quotes messages."""
    parts = re.split(r"^#+ ", page, flags=re.MULTILINE)
    quoted = [(part.partition("\n")[0], re.findall(r"```text\n(.*?)```", part, re.DOTALL)) for part in parts]
    return [(heading, "".join(fences).splitlines()) for heading, fences in quoted if fences]


def stands_in_source(message: str, sources: list[str]) -> bool:
    """Whether a quoted line is part of a text of the source, or an example of one."""
    message = re.sub("…+", "…", message)
    if any(message in text for text in sources):
        return True
    long = [text for text in sources if len(text.replace("…", "")) >= SHARE * len(message.replace("…", ""))]
    return any(pattern(text).search(message) for text in long)


@cache
def pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("…"))))


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_stands_in_the_source(message):
    assert stands_in_source(message, texts()), f"no text of src/ says it any more: mend docs/{PAGE}"


def test_each_class_of_error_is_in_a_heading():
    headings = re.findall(r"^#+ .*", (ROOT / "docs" / PAGE).read_text(), flags=re.MULTILINE)
    named = {name for heading in headings for name in re.findall(r"`(?:torch\.)?(\w+)", heading)}
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    concrete = {name for name, kind in kinds.items() if issubclass(kind, BaseException)} - {
        "ShardwrightError"
    }
    assert concrete - named == set(), f"docs/{PAGE}: someone searches for what a traceback prints"


@pytest.mark.parametrize(("heading", "quoted"), sections((ROOT / "docs" / PAGE).read_text()))
def test_a_heading_names_the_classes_as_which_its_messages_are_raised(heading, quoted):
    for message in quoted:
        names = {name for name, text in raised_texts() if stands_in_source(message, [text])}
        assert not names or any(f"`{name}`" in heading for name in names), f"{names}: {message}"


def test_a_message_that_nobody_says_is_noticed():
    sources = ["rank … is not in the mesh …; make one of all ranks", "shards"]
    assert stands_in_source("rank 3 is not in the mesh of 2; make one of all ranks", sources)
    assert stands_in_source("is not in the mesh …", sources)
    assert not stands_in_source("rank 3 is not in the mesh of 2; wait for all ranks", sources)
