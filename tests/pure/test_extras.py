"""What installs with the core and what with an extra: real processes, in which packages can't be imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BLOCK = "import sys; sys.modules.update(dict.fromkeys({!r}));"
COMMAND = "from shardwright.cli import main; sys.exit(main({!r}))"


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].replace("-", "_").lower()


def run(code, blocked, cwd=ROOT):
    """The ended process of ``code``, which finds none of the packages ``blocked``."""
    listing = [sys.executable, "-c", BLOCK.format(list(blocked)) + code]
    return subprocess.run(listing, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_the_core_needs_torch_and_numpy_and_trains_and_saves_without_any_extra(tmp_path):
    assert [name_of(each) for each in PROJECT["dependencies"]] == ["torch", "numpy"]
    blocked = {name_of(each) for extra in EXTRAS.values() for each in extra} - {"shardwright"}
    assert blocked >= {"safetensors", "isal", "rich", "pydantic", "tomli_w"}
    for script in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:2]:
        (tmp_path / "script.py").write_text(script)
        done = run("import runpy; runpy.run_path('script.py')", blocked, tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints").is_dir()


VERBS = [
    ("train", "pydantic", ["train", "recipes/quickstart.toml"]),
    ("train", "tomli_w", ["train", "recipes/quickstart.toml"]),
    ("checkpoint", "safetensors", ["train", "recipes/quickstart.toml"]),
    ("train", "rich", ["checkpoint", "inspect", "x"]),
    ("train", "rich", ["top", "x"]),
    ("hf", "transformers", ["train", "recipes/finetune-qlora.toml"]),
    ("xla", "jax", ["train", "recipes/quickstart.toml", "--backend", "xla"]),
]


@pytest.mark.parametrize(("extra", "package", "arguments"), VERBS, ids=lambda value: str(value)[:40])
def test_the_command_says_in_one_line_which_extra_is_missing(extra, package, arguments):
    done = run(COMMAND.format(arguments), [package])
    (line,) = done.stderr.splitlines()
    assert line.startswith("shardwright: ") and f"needs {package}" in line
    assert line.endswith(f"pip install 'shardwright[{extra}]'")
    assert (done.returncode, done.stdout) == (2, "")
    assert package in {name_of(each) for each in EXTRAS[extra]}


IMPORTS = [
    ("checkpoint", "safetensors", "from shardwright.train.lora import add_lora"),
    ("hf", "transformers", "from shardwright import hf"),
    ("xla", "jax", "from shardwright import xla; xla.fully_shard"),
    ("xla", "torchax", "from shardwright.xla import make_train_step"),
    ("fabric", "lightning_fabric", "import shardwright.fabric"),
]


@pytest.mark.parametrize(("extra", "package", "statement"), IMPORTS, ids=lambda value: str(value)[:40])
def test_an_import_that_needs_an_extra_says_which(extra, package, statement):
    done = run(statement, [package])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shardwright.errors.MissingExtra: ") and "needs " in last
    assert last.endswith(f"pip install 'shardwright[{extra}]'")


def test_missing_extras_are_import_errors_too():
    code = "\ntry:\n  from shardwright import hf\nexcept ModuleNotFoundError as error: print(error.name)"
    done = run(code, ["transformers"])
    assert done.stdout == "transformers\n"
