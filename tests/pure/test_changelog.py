"""CHANGELOG.md says each thing once, under a heading by which a reader finds it."""

import itertools
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
OVERLAP = 0.5
"""Share of the words of two entries that are the same, from which on they are taken for one."""


def entries(page: str) -> list[str]:
    return [entry for entry in re.split(r"\n(?=- |#)", page) if entry.startswith("- ")]


def repeated(page: str) -> list[str]:
    """Entries that say what an earlier one says."""
    words = [(entry, set(re.findall(r"[\w./`-]{3,}", entry))) for entry in entries(page)]
    return [
        b for (_, one), (b, other) in itertools.combinations(words, 2)
        if len(one & other) > OVERLAP * len(one | other)
    ]  # fmt: skip


def without_heading(page: str) -> list[str]:
    """Entries of a version that stand before its first heading."""
    versions = re.split(r"^## .*$", page, flags=re.MULTILINE)[1:]
    return [entry for version in versions for entry in entries(version.partition("\n### ")[0])]


def test_no_change_is_listed_twice():
    assert repeated(PAGE) == []


def test_every_change_stands_under_a_heading():
    assert without_heading(PAGE) == []


def test_a_repeated_change_and_one_without_heading_are_noticed():
    change = "- files of `data.path` are copied to each host\n"
    page = f"\n## 0.2.0\n\n{change}\n### Added\n\n{change}"
    assert len(repeated(page)) == len(without_heading(page)) == 1
