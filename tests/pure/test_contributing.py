"""The pages for contributors and for those who come from other libraries name what is there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import shardwright
from shardwright import checkpoint, policy
from shardwright.recipe.config import Recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("contribute-*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_for_contributors_names_is_there(page):
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)\b", page.read_text())
    named = [path for path in paths if path.split("/")[0] in ("src", "tests", "bench", "docs")]
    assert named or page.name == "contribute-profile.md"
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("library", ["accelerate", "deepspeed", "torchtitan"])
def test_every_name_of_ours_on_a_page_for_those_who_come_from_elsewhere_is_there(library):
    page = (ROOT / "docs" / f"from-{library}.md").read_text()
    cells = [row.split("|")[2:] for row in page.splitlines() if row.startswith("| ")]
    ours = " ".join(cell for row in cells for cell in row)
    for name, arguments in re.findall(r"\b(\w+Policy|Grouping)\(([^()]*)", ours):
        of_policy = getattr(policy, name)
        for argument in re.findall(r"(\w+)=", arguments):
            assert argument in {field.name for field in fields(of_policy)}, f"{name}({argument}=)"
    for name in re.findall(r"`shardwright\.(\w+)\b", ours):
        assert name in {*shardwright.__all__, "checkpoint", "plan", "train"}, name
    for name in re.findall(r"shardwright\.checkpoint\.(\w+)", ours):
        assert name in checkpoint.__all__, name
    words = "".join(row[0] for row in cells)
    for section, key in re.findall(r"`(training|optimizer|checkpoint)\.(\w+)`", words):
        assert key in type(getattr(Recipe(), section)).model_fields, f"{section}.{key}"
