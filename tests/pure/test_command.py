"""The command before any verb, and ``shardwright recipe``: real processes, none of which imports torch."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from shardwright.cli import SECTIONS
from shardwright.recipe.resolve import resolve

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def run(*arguments, code=0):
    """(stdout, stderr) of the command, which must end with that code and without having imported torch."""
    listing = [sys.executable, "-X", "importtime", "-m", "shardwright", *arguments]
    done = subprocess.run(listing, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert done.returncode == code, done.stderr
    assert "shardwright.cli" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy", "pydantic", "rich")}
    return done.stdout, "\n".join(line for line in lines if not line.startswith("import time:"))


def test_help_lists_every_verb_in_its_section_with_its_purpose_and_ends_with_examples():
    out, _ = run("--help")
    listed, examples = out.split("\nexamples:\n")
    shown = {}
    for section in listed.split("\n\n")[2:-1]:
        name, *lines = section.splitlines()
        shown[name.removesuffix(":")] = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    for section, verbs in SECTIONS.items():
        assert shown[section] == {name: verb.purpose for name, verb in verbs.items()}
    assert list(shown) == list(SECTIONS)
    assert list(shown)[:5] == ["train and fine-tune", "afterwards", "plan", "look", "check"]
    assert all(line.startswith("  shardwright ") for line in examples.splitlines())


def test_the_version_names_torch_too():
    out, _ = run("--version")
    assert out.startswith(f"shardwright {version('shardwright')} (torch {version('torch')}, Python 3.")


def without_a_reader(*arguments):
    """(exit code, stderr) of Python where stdout is a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run((sys.executable, *arguments), stdout=writer, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writer)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("arguments", ["--version", "recipe", "recipe quickstart", "schema", "--help"])
def test_a_command_whose_output_nobody_reads_ends_without_a_word(arguments):
    code = 0 if arguments == "--help" else 128 + signal.SIGPIPE  # argparse itself ignores a closed pipe
    assert without_a_reader("-m", "shardwright", *arguments.split()) == (code, "")


def test_a_failure_is_told_also_where_nobody_reads_the_output():
    code, told = without_a_reader("-m", "shardwright", "recipe", "nosuch")
    assert (code, told[:22]) == (2, "shardwright: no recipe")


def test_ranks_whose_output_nobody_reads_end_without_a_traceback_of_their_own():
    starts = "from shardwright.train.launch import launch; launch(['recipe'], 1)"
    _, told = without_a_reader("-c", starts)
    assert told.count("Traceback") == 1 and told.endswith("BrokenPipeError\n")


def test_recipes_are_listed_printed_and_found_by_name():
    names = [path.stem for path in RECIPES]
    out, _ = run("recipe")
    assert [line.split()[0] for line in out.splitlines()[: len(names)]] == names
    assert json.loads(run("recipe", "--json")[0]).keys() == set(names)
    assert run("recipe", "quickstart")[0] == (ROOT / "recipes" / "quickstart.toml").read_text()
    _, err = run("recipe", "nosuch", code=2)
    assert err == f"shardwright: no recipe 'nosuch' comes with the package; there is: {', '.join(names)}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves_and_says_what_it_is_in_its_first_sentence(path):
    assert resolve(path).folder == Path("runs", path.stem)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("kind", ["full", "lora", "qlora", "dpo"])
def test_a_recipe_of_a_real_size_is_the_toy_with_other_numbers_paths_and_dtypes(kind):
    paths = (ROOT / "recipes" / f"finetune-{kind}{size}.toml" for size in ("", "-real"))
    toy, real = (resolve(path).recipe.model_dump() for path in paths)
    others = set()
    for section, values in toy.items():
        other = {key for key, value in values.items() if real[section][key] != value}
        others |= {f"{section}.{key}" for key in other if type(values[key]) not in (int, float)}
    paths = {"run.folder", "base.folder", "data.path"}
    assert others - {"base.dtype", "training.dtype", "training.activation_checkpointing"} <= paths
