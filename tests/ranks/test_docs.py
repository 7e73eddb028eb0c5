"""What README.md and docs/ show runs as it stands: files by Python, commands by a shell (tests/fences.py).

The tutorials run in an empty folder, with a wheel. docs/huggingface.md, serving.md, trl.md, xla.md and two of
the tutorials need other environments: tests/hf/test_docs.py, tests/clients/test_trl.py and
tests/xla/test_docs.py. Examples: test_examples.py.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fences import Fence, copy_repository, excuse_for, fences, follow, in_text, run_command, toy
from tests.ranks.pool import as_torchrun, free_port, run_ranks

ROOT = Path(__file__).parents[2]
ELSEWHERE = ["examples.md", "huggingface.md", "serving.md", "trl.md", "xla.md"]
ELSEWHERE += [f"tutorial-{kind}.md" for kind in ("gpus", "qlora", "slurm", "tpu")]
FENCES = [fence for fence in fences() if fence.document not in ELSEWHERE]
FILES = [fence for fence in FENCES if fence.is_file]
COMMANDS = [(fence, command) for fence in FENCES for command in fence.commands]
README = next(fence for fence in FILES if fence.document == "README.md")
FIRST = next(fence for fence in FILES if fence.document == "start.md")
CHANGES = [fence for fence in FENCES if re.search(r"^\+from shardwright\b", fence.text, re.MULTILINE)]

# Commands that don't run here, and why. A pattern is searched for in the whole command.
EXCUSED = [
    (r"--link \d+[gm]bit| 1gbit\.json|bench\.waits$", "root: links are made of network namespaces"),
    (r"\.venv-hf/|^make (setup-hf$|finetune)|train finetune-|finetune-\*", "that of make test-hf"),
    (r"^make test(-torch .*)?$", "it would run itself"),
    (r"^make prove-gpu", "an accelerator; simulated: test_prove_gpu.py"),
    (r"^\S*pip install", "a download; lines of install.md and README, but torch's index: test_dist.py"),
    (r"^make (dist|release)$", "test_dist.py; what a release asks for besides: test_release.py"),
]
# Commands that take minutes, and what runs instead. Benches get their documented ``--toy`` besides.
SHORTER = [
    (r"^pytest tests/ranks/test_compared\.py$", "pytest --collect-only --quiet tests/ranks/test_compared.py"),
    (r"tests\.ranks\.faults$", 'tests.ranks.faults "raise in forward" SIGKILL'),
    (r"FAULT_RUNS=10 SHARDWRIGHT_FAULT_STEPS=1000", "FAULT_RUNS=1 SHARDWRIGHT_FAULT_STEPS=30"),
    (r"--training\.steps 300$", "--training.steps 152"),
    (r"(examples/experts\.py( --api wrapper)?)$", r"\1 --steps 30"),
    (r"(train mine\.toml)$", r"\1 --training.steps 2"),
    (r"(--data\.path ~/notes)$", r"\1 --training.steps 2"),
    (r"(torchrun .* train quickstart)$", r"\1 --training.steps 2 --run.folder runs/torchrun"),
]


def shortened(command: str) -> str:
    """What runs in the place of a command that would take minutes."""
    for pattern, instead in SHORTER:
        command = re.sub(pattern, instead, command)
    return toy(command)


def written(fence: Fence, folder: Path) -> Path:
    """The file that a fence is."""
    path = folder / f"line{fence.line}.py"
    path.write_text(fence.text)
    return path


def run_file(rank: int, world: int, path: str, port: int) -> None:
    """Run a file in a process of torchrun's environment that has imported torch, and nothing else, before."""
    as_torchrun(rank, world, port)
    os.chdir(Path(path).parent)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


@pytest.mark.each_case
@pytest.mark.parametrize("document", sorted({fence.document for fence in FILES}))
def test_the_files_of_a_document_run_one_after_another(document, tmp_path):
    for fence in FILES:
        if fence.document == document:
            run_ranks(2, run_file, str(written(fence, tmp_path)), free_port())


@pytest.mark.each_case
@pytest.mark.parametrize("start", [["python"], ["torchrun", "--nproc-per-node", "2"]])
def test_the_first_file_of_the_readme_trains_in_one_process_and_in_two(start, tmp_path):
    losses = losses_of(run_by(start, README, tmp_path))
    assert len(losses) == 5 * int(start[-1] if len(start) > 1 else 1)
    assert losses[-1] < losses[0]


def test_the_first_script_leaves_plain_weights_of_the_whole_model(tmp_path):
    losses = losses_of(run_by(["torchrun", "--nproc-per-node", "2"], FIRST, tmp_path))
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    weights = torch.load(tmp_path / "weights.pt")
    assert sum(weight.numel() for weight in weights.values()) == 740_864
    assert not any(isinstance(weight, torch.distributed.tensor.DTensor) for weight in weights.values())


def test_the_first_file_of_the_readme_is_as_short_as_a_face_must_be():
    lines = [line for line in README.text.splitlines() if line]
    assert len(lines) <= 13  # one of them seeds every rank alike


def test_what_the_readme_says_before_it_leads_on_fits_on_one_screen():
    first, found, _ = (ROOT / "README.md").read_text().partition("\nRead next: ")
    assert found and len(first.splitlines()) <= 60 and len(first.split()) <= 600
    assert first.index("$ make train") < first.index("$ make test") < len(first) / 3


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.document}-{change.line}")
def test_a_change_of_a_script_trains_as_the_script_did_before_and_goes_on_where_it_did(change, tmp_path):
    told = {}
    for side, left_out in (("-", "+"), ("+", "-")):
        lines = [line for line in change.text.splitlines() if not line.startswith(left_out)]
        folder = tmp_path / side
        folder.mkdir()
        script = "\n".join(line[1:] for line in lines)
        assert "start, steps = 0, 10" in script  # so the second start below has to load and go on
        told[side] = []
        for text in (script, script.replace("start, steps = 0, 10", "start, steps = 0, 20")):  # on and on
            run = run_torchs_own if side == "-" else run_by
            wrote = run(["torchrun", "--nproc-per-node", "2"], change._replace(text=text), folder)
            told[side].append(losses_of(wrote))
    for before, after in zip(told["-"], told["+"], strict=True):
        assert len(after) == 10
        assert after == pytest.approx(before, rel=0.02)  # compute is in bfloat16


def run_torchs_own(start: list[str], fence: Fence, folder: Path) -> str:
    """As ``run_by``, and again from where it was if torch aborts: with its own ``fully_shard`` on two ranks
    over Gloo torch 2.13 does so in 5 of 23 starts ("terminate called without an active exception")."""
    for _ in range(8):
        before = folder.with_name("before")
        shutil.copytree(folder, before)
        try:
            return run_by(start, fence, folder)
        except AssertionError as error:
            if "terminate called" not in str(error):
                raise
            shutil.rmtree(folder)
            before.rename(folder)
        finally:
            shutil.rmtree(before, ignore_errors=True)
    raise AssertionError("torch's own script has aborted eight times")


def run_by(start: list[str], fence: Fence, folder: Path) -> str:
    """What a file writes that is run by ``start`` in a process of its own."""
    path = written(fence, folder)
    words = [str(Path(sys.executable).parent / start[0]), *start[1:], path.name]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(wrote: str) -> list[float]:
    """The losses that a script has printed."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", wrote)]


FAILS = """
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardwright import fully_shard

dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(4)))
fully_shard(model, groups="auto")
optimizer = torch.optim.AdamW(model.parameters())


def collate(rows):
    if dist.get_rank() == 1 and rows[0] >= 12:
        raise ValueError("bad batch")
    return torch.randn(2, 4, 32)


def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for batch in DataLoader(range(20), 2, collate_fn=collate):
    step(batch)
"""
SHOWN = "shardwright.errors.RankFailed: failed: rank 1 raised ValueError: bad batch"


def told(text: str) -> list[str]:
    """The error that ``SHOWN`` begins: every number as 0, every run of spaces as one."""
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in text.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith(SHOWN))
    return [re.sub(r"\d+(\.\d+)?", "0", " ".join(line.split())) for line in lines[first : first + 5]]


def test_the_error_that_the_pages_show_is_the_one_that_a_rank_prints_when_a_collate_raises(tmp_path):
    (tmp_path / "train.py").write_text(FAILS)
    port = str(free_port())  # without torchrun, whose SIGTERM may come before the ranks know
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command, pipes = [sys.executable, "train.py"], {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    envs = [os.environ | common | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes) for env in envs]
    try:
        wrote, of_the_culprit = (rank.communicate(timeout=90)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], wrote + of_the_culprit
    shown = [fence for fence in FENCES if SHOWN in fence.text]
    assert [fence.document for fence in shown] == ["README.md", "watch.md"]
    for fence in shown:
        assert told(fence.text) == told(wrote), fence.document


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository, with runs to look at, and text of the reader's own."""
    folder = tmp_path_factory.mktemp("docs")
    copied = copy_repository(folder)
    (folder / "notes").mkdir()
    (folder / "notes" / "note.txt").write_text("What is worth keeping is worth writing down. " * 500)
    quickstart = "shardwright train quickstart --training.steps 2 --run.folder runs/a"
    run_command(quickstart, copied)
    for name in ("b", "quickstart"):
        shutil.copytree(copied / "runs" / "a", copied / "runs" / name)
    return copied


def runs_here(document: str) -> list[str]:
    """The commands of a document that have no excuse."""
    found = [command for fence, command in COMMANDS if fence.document == document]
    return [command for command in found if not excuse_for(command, EXCUSED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [
        # Of benchmarks: two minutes of their toy forms, whose figures mean nothing.
        pytest.param(document, marks=[pytest.mark.exhaustive] if document == "performance.md" else [])
        for document in sorted({fence.document for fence, _ in COMMANDS})
    ],
)
def test_the_commands_of_a_document_run_one_after_another(document, repository):
    commands = runs_here(document)
    if not commands:
        excuses = {excuse_for(c, EXCUSED) for f, c in COMMANDS if f.document == document}
        pytest.skip("; ".join(sorted(excuses)))
    if "make train" in commands:
        shutil.rmtree(repository / "runs" / "quickstart")
    for command in commands:
        run_command(shortened(command), repository, limit_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("document", ["tutorial-gpus.md", "tutorial-slurm.md"])
def test_a_tutorial_runs_word_for_word_in_an_empty_folder_with_a_wheel(document, tmp_path):
    follow(document, tmp_path)


def test_every_shorter_form_is_of_a_command_that_there_is():
    commands = [command for _, command in COMMANDS]
    for pattern, _ in SHORTER:
        assert any(re.search(pattern, command) for command in commands), pattern


def test_a_fence_is_found_whatever_its_label_and_commands_lose_what_is_said_of_them():
    text = "a\n```\n$ first   # why\nits output\n$ second\n```\n- b\n  ```text\n  import shardwright\n  ```\n"
    text += "```python\nx = 1\n```\n"
    console, file, other = in_text("x.md", text)
    assert console == Fence("x.md", 2, "$ first   # why\nits output\n$ second\n")
    assert console.commands == ["first", "second"]
    assert not console.is_file
    assert file == Fence("x.md", 8, "import shardwright\n")
    assert file.is_file
    assert not other.is_file and not other.commands


def test_ci_runs_every_suite():
    """Also those that excuse a command here: each has an environment of its own."""
    script = (Path(__file__).parents[2] / ".ci" / "run").read_text()
    suites = ("check", "test-ci", "docs", "test-hf", "test-bnb", "test-track", "test-storage", "test-xla")
    for target in (*suites, "clients-short"):
        assert re.search(rf"^ *timed \d+ {target}$", script, re.MULTILINE), target
