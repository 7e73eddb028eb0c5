"""What README.md shows is what works."""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import step
from shardwright.cli import checkpoint, main, train
from shardwright.train import resolve as resolution
from tests.ranks.pool import run_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
EXAMPLE, _, FINE_TUNING = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def follow_example(rank: int, world: int, code: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = Model()
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    losses = []

    def loss_of(output, target):
        loss = nn.functional.mse_loss(output, target)
        losses.append(loss.item())
        return loss

    names = {"model": model, "batches": [(x, y)] * 20, "loss_of": loss_of}
    exec(code, names)
    return losses[0], losses[-1], names["weights"]


def test_the_example_trains_and_gives_the_whole_model():
    start = "torch.distributed.init_process_group()"
    assert start in EXAMPLE
    code = EXAMPLE.replace(start, "pass")  # the ranks of the pool have theirs
    first, second = run_ranks(2, follow_example, code)
    assert first[1] < first[0]
    assert {name: w.shape for name, w in first[2].items()} == {
        name: w.shape for name, w in Model().state_dict().items()
    }
    assert second[2] == {}


def follow_fine_tuning(rank: int, world: int, folder: str) -> tuple[float, float]:
    torch.manual_seed(1)
    os.chdir(folder)
    model, losses = Model(), []
    x, y = torch.randn(8, 6), torch.randn(8, 2)

    def loss_of(output, target):
        loss = nn.functional.mse_loss(output, target)
        losses.append(loss.item())
        return loss

    exec(FINE_TUNING, {"torch": torch, "model": model, "batches": [(x, y)] * 30, "loss_of": loss_of})
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"blocks.{block}.proj.lora_{part}.weight" for block in range(3) for part in "AB"
    }
    return losses[0], losses[-1]


def test_the_fine_tuning_example_trains_adapters_and_leaves_their_files(tmp_path):
    first, last = run_ranks(2, follow_fine_tuning, str(tmp_path))[0]
    assert last < first
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_the_example_is_as_short_as_it_is_said_to_be():
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 12


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one_that_there_is(command, monkeypatch):
    """Parsed and resolved as the real one would be, up to where it would start."""
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if "bench/step.py" in words:
        assert step.parse(words[words.index("bench/step.py") + 1 :]).blocks
        return
    arguments = words[words.index("shardwright") + 1 :] if "shardwright" in words else words[1:]
    seen = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, "launch", lambda given, ranks: seen.append(ranks))
    monkeypatch.setattr(train, "load_run", lambda run: (resolution.resolve("recipes/quickstart.toml"), None))
    monkeypatch.setattr(checkpoint.tools, "inspect", lambda path, values: seen.append(path))
    monkeypatch.setattr(checkpoint, "_inspect", lambda console, found: 0)
    monkeypatch.setattr(train, "generate", lambda *given: seen.append(given) or b"text")
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        return
    assert main(arguments) == 0
    assert seen


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "\nmake check\nmake test\n" in ci
    assert {"make train", "make test"} <= set(COMMANDS)
