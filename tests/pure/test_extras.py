"""What the core and its extras need, and what is said where it is missing: real processes that lack it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwright.torch_private import SEEN_ON

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].replace("-", "_").lower()


def run(code, cwd=ROOT):
    """stdout of a process that runs ``code``, and must succeed."""
    listing = [sys.executable, "-c", code]
    done = subprocess.run(listing, cwd=cwd, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # 40 s of processor time
def test_the_core_needs_torch_and_numpy_and_trains_and_saves_without_any_extra(tmp_path):
    assert [name_of(each) for each in PROJECT["dependencies"]] == ["torch", "numpy"]
    blocked = {name_of(each) for extra in EXTRAS.values() for each in extra} - {"shardwright"}
    assert blocked >= {"safetensors", "isal", "rich", "pydantic", "tomli_w"}
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)[:2]
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({sorted(blocked)}))"
    for number, script in enumerate(scripts):
        (tmp_path / f"{number}.py").write_text(script)
        code += f"; runpy.run_path('{number}.py')"
    run(code, tmp_path)
    assert (tmp_path / "checkpoints").is_dir()


NEEDS = [
    ("train", "pydantic", ["train", "recipes/quickstart.toml"]),
    ("checkpoint", "safetensors", "shardwright.lora:"),
    ("train", "tomli_w", ["train", "recipes/quickstart.toml"]),
    ("train", "rich", ["checkpoint", "inspect", "docs"]),
    ("train", "rich", ["top", "docs"]),
    ("train", "shtab", ["completion", "bash"]),
    ("checkpoint", "safetensors", ["train", "recipes/quickstart.toml"]),
    ("track", "wandb", ["train", "recipes/quickstart.toml", "--track.to", '["wandb"]']),
    ("hf", "transformers", ["train", "recipes/finetune-qlora.toml", "--base.folder", "docs"]),
    ("hf", "transformers", "shardwright.hf:"),
    ("fabric", "lightning_fabric", "shardwright.fabric:"),
    ("lightning", "lightning", "shardwright.lightning:"),
    ("xla", "jax", ["train", "recipes/quickstart.toml", "--backend", "xla"]),
    ("xla", "jax", "shardwright.xla:fully_shard"),
]
"""Extra, a package of it, and what needs that: arguments of the command, or a name to import. What is
imported stays so: each package is missing for the first that needs it."""

WITHOUT = """
import contextlib, io, json, pkgutil, sys
from shardwright.cli import main
said = []
for _, package, what in {needs!r}:
    sys.modules[package] = None  # as if it weren't installed
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            code = main(what) if isinstance(what, list) else bool(pkgutil.resolve_name(what))
    except ModuleNotFoundError as error:
        code = error.name
        err.write(f"shardwright: {{error}}\\n")
    said.append((code, err.getvalue()))
    del sys.modules[package]
print(json.dumps(said))
"""


def test_what_needs_an_extra_says_in_one_line_which():
    ends = json.loads(run(WITHOUT.format(needs=NEEDS)))
    for (extra, package, what), (code, said) in zip(NEEDS, ends, strict=True):
        assert said.startswith(f"shardwright: this needs {package}, which is not installed: pip ")
        assert said.endswith(f" install 'shardwright[{extra}]'\n")
        assert code == (2 if isinstance(what, list) else package)
        assert package in {name_of(each) for each in EXTRAS[extra]}


NAMES = [
    ("torch.utils._pytree", "tree_map"),
    ("torch._C", "_current_graph_task_id"),
    ("torch.distributed.tensor:DTensor", "_local_tensor"),
    ("torch.distributed.device_mesh:DeviceMesh", "_concatenate"),
]

WITHOUT_NAME = """
import json, pkgutil
import torch.distributed.tensor
said = []
for where, name in {names!r}:
    owner = pkgutil.resolve_name(where)
    value = vars(owner)[name]
    delattr(owner, name)
    try:
        from shardwright import fully_shard
    except ImportError as error:
        said.append([type(error).__name__, str(error)])
    setattr(owner, name, value)
from shardwright import fully_shard
print(json.dumps([torch.__version__, said]))
"""


@pytest.mark.slow
def test_a_torch_that_lacks_a_private_name_is_refused_by_its_version_and_told_which_have_it():
    version, said = json.loads(run(WITHOUT_NAME.format(names=NAMES)))
    for (_, name), (kind, message) in zip(NAMES, said, strict=True):
        assert kind == "UnsupportedTorch"
        assert message.startswith(f"torch {version} lacks a name that Shardwright needs: ")
        assert repr(name) in message
        assert all(seen in message for seen in SEEN_ON)


def test_any_torch_from_the_lowest_that_was_tested_may_be_installed_and_the_docs_say_which_were():
    assert min(SEEN_ON) == "2.11.0"
    assert "torch>=2.11" in PROJECT["dependencies"]
    versions = (ROOT / "docs" / "versions.md").read_text()
    assert all(seen in versions for seen in SEEN_ON)
