"""docs/examples.md: its commands run as they stand, and each example leaves the picture that the page shows.

What runs in other environments: tests/hf/test_examples.py and tests/xla/test_examples.py.
"""

import difflib
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from tests.fences import ROOT, fences
from tests.ranks.pool import as_torchrun, free_port, run_ranks

FENCES = fences("examples.md")
COMMANDS = [c for fence in FENCES for c in fence.commands if ".venv-" not in c]
PICTURE = re.compile(r"\]\(pictures/example-(\w+)\.(svg|png)\)")
OWN_SCRIPT = ROOT / "examples" / "own_script"


def run_script(rank: int, world: int, words: list[str], folder: str, port: int) -> None:
    """What ``python WORDS`` does in ``folder``, or torchrun, in a process that has imported torch before."""
    if port:
        as_torchrun(rank, world, port)
    os.chdir(folder)
    script = ROOT / words[0]
    sys.argv = [str(script), *words[1:]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_here(command: str, folder: Path) -> None:
    """A command of the page: its ranks are forked, which spares the seconds that importing torch takes."""
    found = re.fullmatch(r"(?:python|torchrun --nproc-per-node (\d)) (examples/.+)", command)
    assert found, f"$ {command}: expected torchrun --nproc-per-node N examples/..., or python examples/..."
    words, port = shlex.split(found[2]), free_port() if found[1] else 0
    run_ranks(int(found[1] or 1), run_script, words, str(folder), port, limit_s=120.0)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder in which all commands of the page were run."""
    folder = tmp_path_factory.mktemp("examples")
    for command in COMMANDS:
        run_here(command, folder)
    return folder


ELSEWHERE = ("huggingface", "tpu")
"""Examples that run in environments of their own."""


@pytest.mark.slow
def test_every_example_leaves_the_picture_that_the_page_shows(ran):
    shown = PICTURE.findall((ROOT / "docs" / "examples.md").read_text())
    assert shown
    for name, kind in shown:
        if name not in ELSEWHERE:
            assert (ran / "runs" / name / f"picture.{kind}").stat().st_size > 3000, name


def changed_lines() -> list[str]:
    before, after = ((OWN_SCRIPT / f"{name}.py").read_text().splitlines() for name in ("ddp", "sharded"))
    return [line for line in difflib.unified_diff(before, after, n=0) if not re.match(r"---|\+\+\+|@@", line)]


def test_ddp_becomes_sharded_in_the_six_lines_of_the_page():
    changed = changed_lines()
    assert len(changed) == 6
    (diff,) = [fence for fence in FENCES if re.search(r"^\+from shardwright", fence.text, re.MULTILINE)]
    assert diff.text.splitlines() == changed


@pytest.mark.slow
def test_the_sharded_script_has_ddps_losses_and_leaves_its_weights(ran):
    folder = ran / "runs" / "own_script"
    theirs, ours = (json.loads((folder / f"{name}.json").read_text()) for name in ("ddp", "sharded"))
    assert theirs[-1] < theirs[0] - 2
    assert ours == pytest.approx(theirs, rel=1e-4)
    before, after = (torch.load(folder / f"{name}.pt") for name in ("ddp", "sharded"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        # A key's bias has no gradient but rounding, which Adam takes for one: it moves by up to lr a step.
        torch.testing.assert_close(after[name], weight, rtol=0, atol=2e-3)
