"""docs/troubleshooting.md quotes the messages of the package as they stand in its source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

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


def stands_in_source(message: str, sources: list[str]) -> bool:
    """Whether a quoted line is part of a text of the source, or an example of one."""
    message = re.sub("…+", "…", message)
    if any(message in text for text in sources):
        return True
    long = [text for text in sources if len(text.replace("…", "")) >= SHARE * len(message.replace("…", ""))]
    return any(re.search(".*".join(map(re.escape, text.split("…"))), message) for text in long)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_stands_in_the_source(message):
    assert stands_in_source(message, texts()), f"no text of src/ says it any more: mend docs/{PAGE}"


def test_a_message_that_nobody_says_is_noticed():
    sources = ["rank … is not in the mesh …; make one of all ranks", "shards"]
    assert stands_in_source("rank 3 is not in the mesh of 2; make one of all ranks", sources)
    assert stands_in_source("is not in the mesh …", sources)
    assert not stands_in_source("rank 3 is not in the mesh of 2; wait for all ranks", sources)
