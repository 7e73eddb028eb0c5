"""docs/examples.md: its commands run as they stand, and each example leaves the picture that the page shows.

What runs in other environments: tests/hf/test_examples.py and tests/xla/test_examples.py.
"""

import contextlib
import difflib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.fences import ROOT, fences
from tests.ranks.pool import as_torchrun, free_port, run_ranks

FENCES = fences("examples.md")
COMMANDS = [c for fence in FENCES for c in fence.commands if ".venv-" not in c]
PICTURE = re.compile(r"\]\(pictures/example-(\w+)\.(svg|png)\)")
# Trainings that take longer than to see that they run, and what runs instead.
SHORTER = [
    (r"(examples/experts\.py)$", r"\1 --steps 30"),
    (r"(examples/(vit|resnet)\.py)$", r"\1 --epochs 1"),
    (r"(examples/diffusion\.py) --steps 800$", r"\1 --steps 10"),
]
OWN_SCRIPT = ROOT / "examples" / "own_script"


def run_script(rank: int, world: int, words: list[str], folder: str, port: int) -> str:
    """Do what ``python WORDS`` does, or torchrun, in a process that has imported torch; what it writes."""
    if port:
        as_torchrun(rank, world, port)
    os.chdir(folder)
    script = ROOT / words[0]
    sys.argv = [str(script), *words[1:]]
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as wrote:
        runpy.run_path(str(script), run_name="__main__")
    return wrote.getvalue()


def run_here(command: str, folder: Path) -> str:
    """Run a command of the page; what rank 0 writes. Ranks are forked, which spares them importing torch."""
    found = re.fullmatch(r"(?:python|torchrun --nproc-per-node (\d)) (examples/.+)", command)
    assert found, f"$ {command}: expected torchrun --nproc-per-node N examples/..., or python examples/..."
    words, port = shlex.split(found[2]), free_port() if found[1] else 0
    return run_ranks(int(found[1] or 1), run_script, words, str(folder), port, limit_s=120.0)[0]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder in which all commands of the page were run."""
    folder = tmp_path_factory.mktemp("examples")
    for command in COMMANDS:
        for pattern, instead in SHORTER:
            command = re.sub(pattern, instead, command)
        run_here(command, folder)
    return folder


ELSEWHERE = ("huggingface", "xla_vit")
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


@pytest.fixture
def images(tmp_path):
    """As ImageNet is unpacked: dark and light pictures, of several sizes, in colour or not."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 5)):
        for label, name in enumerate(("dark", "light")):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                shape = (30 + number, 40, 3) if number % 2 else (25, 30 + number)
                pixels = rng.integers(150 * label, 150 * label + 100, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.slow
def test_a_folder_of_images_is_learnt_in_bf16_and_a_run_goes_on_after_its_newest_checkpoint(images, tmp_path):
    command = f"torchrun --nproc-per-node 2 examples/vit.py --data {images} --rows 4 --bf16"
    first, second = (run_here(f"{command} --epochs {epochs}", tmp_path) for epochs in (3, 5))
    assert re.findall(r"epoch (\d):", first) == ["1", "2", "3"]
    assert re.findall(r"epoch (\d):", second) == ["4", "5"]
    assert "goes on after epoch 3" in second
    assert float(second.split()[-1]) >= 0.9


@pytest.mark.slow
def test_the_residual_networks_file_is_as_accurate_in_plain_torch_as_the_shards_were(
    images, tmp_path, monkeypatch
):
    command = f"torchrun --nproc-per-node 2 examples/resnet.py --data {images} --rows 4 --epochs 2"
    wrote = run_here(command, tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    resnet = importlib.import_module("resnet")
    model = resnet.ResNet("tiny", 2).eval()
    model.load_state_dict(torch.load(tmp_path / "runs" / "resnet" / "model.pt"))
    _, held = resnet.datasets(images, 16)
    with torch.no_grad():
        answers = model(torch.stack([image for image, _ in held])).argmax(1)
    right = (answers == torch.tensor([label for _, label in held])).float().mean().item()
    assert float(wrote.split()[-1]) == pytest.approx(right, abs=1e-3)
