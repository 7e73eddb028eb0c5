"""``make prove-gpu DEVICE=sim``: every section of what proves the package on accelerators runs on the CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.prove_gpu.__main__ import sections

ROOT = Path(__file__).resolve().parents[2]
TITLES = {section.module: section.title for section in sections(simulated=True)}


def proven(page, *command):
    """Exit status, and the page's part of each section."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    _, *parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    return ended.returncode, {part.partition("\n")[0]: part for part in parts}


def has_figures(part):
    """Whether a table has a row, and its columns say that they are simulated or count tests."""
    return re.search(r"\(simulated\)|passed", part) is not None and re.search(r"\| \d", part) is not None


@pytest.mark.slow
def test_every_section_runs_and_leaves_its_figures_on_the_page(tmp_path):
    page = tmp_path / "page.md"
    words = ["DEVICE=sim", f"PAGE={page}", f"PROVE_PYTHON={sys.executable}"]
    status, parts = proven(page, "make", "prove-gpu", *words)
    assert status == 0, parts
    assert list(parts) == list(TITLES.values())
    assert all(has_figures(part) and "Failed" not in part for part in parts.values())


@pytest.mark.slow
def test_a_section_that_is_ended_at_its_time_limit_leaves_the_others_whole_and_what_ranks_print(tmp_path):
    page, kept = tmp_path / "page.md", tmp_path / "kept"
    words = ["--device", "sim", "--page", str(page), "--limit-s", "losses", "0.5", "--keep", str(kept)]
    command = [sys.executable, "-m", "bench.prove_gpu", *words, "--only", "losses", "four_bit"]
    status, parts = proven(page, *command)
    assert status == 1
    assert "over its time limit" in parts[TITLES["losses"]]
    assert has_figures(parts[TITLES["four_bit"]])
    assert "Failed" not in parts[TITLES["four_bit"]]
    assert (kept / "four_bit-2" / "rows").read_text()
    assert len(list((kept / "four_bit-2").rglob("stdout.log"))) == 2
