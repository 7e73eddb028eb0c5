"""What is wrong with a command line, or with where it writes, is one sentence before torch is imported."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from shardwright import cli
from shardwright.checkpoint.tools import Format
from shardwright.cli import VERBS, command_parser
from shardwright.cli.arguments import checkpoint, plan_choice
from shardwright.plan.file import OFFLOADS
from shardwright.plan.presets import PRESETS
from shardwright.policy import Offload

RUN = """
import json, sys
from shardwright.cli import main
said = []
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    said.append([code, "torch" in sys.modules])
    print("----", file=sys.stderr, flush=True)
print(json.dumps(said))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/file").write_text("as it was")
    Path("a.toml").write_text("")
    Path("config.json").write_text("{}")
    return tmp_path


def said_to(*lines):
    """(exit code, what was said) for each line, of one process that has not imported torch at its end."""

    words = json.dumps([line.split() for line in lines])
    done = subprocess.run([sys.executable, "-c", RUN, words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not any(imported for _, imported in found), [*zip(lines, found, strict=True)]
    told = done.stderr.split("----\n")
    return [(code, text.strip()) for (code, _), text in zip(found, told, strict=False)]


def test_a_misspelt_command_or_option_is_told_with_what_comes_near_for_every_verb():
    for (code, text), verb in zip(said_to(*(f"{verb} --helpx" for verb in VERBS)), VERBS, strict=True):
        told = "unknown option --helpx; did you mean --help? (see shardwright"
        assert (code, text) == (2, f"shardwright: shardwright {verb}: {told} {verb} --help)")
    for (code, text), verb in zip(said_to(*(f"{verb}x" for verb in VERBS)), VERBS, strict=True):
        told = f"shardwright has no command '{verb}x'; did you mean {verb}? (see shardwright --help)"
        assert (code, text) == (2, f"shardwright: {told}")


def test_keys_of_recipes_are_told_where_nothing_else_is_given_and_take_hyphens():
    for verb in ("train", "init"):
        ((code, text),) = said_to(f"{verb} --training.stesp 3")
        assert code == 2
        assert f"shardwright {verb}: unknown option --training.stesp; did you mean --training.steps?" in text
    ((code, _),) = said_to("init mine.toml --training.batch-size 3")
    assert code == 0 and "batch_size = 3" in Path("mine.toml").read_text()


ON = "--device H100 --ranks 8"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train nothere.toml", "no recipe at nothere.toml"),
        ("sample nothere", "RUN is 'nothere', and there is no such file or folder; give the folder of a run"),
        ("chat nothere", "RUN is 'nothere'"),
        ("export nothere out", "RUN is 'nothere'"),
        ("merge nothere out", "RUN is 'nothere'"),
        ("merge there out --base nothere", "--base is 'nothere'"),
        (f"plan nothere {ON}", "MODEL 'nothere' is neither a folder"),
        ("plan there --cluster nothere", "--cluster is 'nothere'"),
        (f"plan nothere.toml {ON}", "no recipe at nothere.toml"),
        ("bench links --out nothere", "nothere has no device yet: first shardwright bench compute"),
        (
            "top nothere",
            "JOB is 'nothere', and there is no such file or folder; give the folder of a run, or a",
        ),
        ("top host:port", "JOB is 'host:port'"),
        ("trace nothere --out out", "JOB is 'nothere'"),
        ("trace there --out out --plan nothere", "--plan is 'nothere'"),
        ("checkpoint verify nothere", "nothere: there is no such file or folder"),
        ("checkpoint convert nothere out --to dcp", "nothere: there is no such file or folder"),
        ("recipe nothere", "no recipe 'nothere' comes with the package"),
    ],
)
def test_what_is_not_there_is_told(line, says):
    ((code, text),) = said_to(line)
    assert code == (1 if line.startswith("checkpoint") else 2)
    assert text.startswith("shardwright: ") and says in text and "\n" not in text


FILES = (f"plan . {ON} --out {{}}", "bench compute --out {}", "preflight --out {}", "init {}")
CHECKPOINTS = ("checkpoint convert there {} --to dcp", "checkpoint consolidate there {}")
FOLDERS = ("export there {}", "merge there {}", "trace there --out {}", *CHECKPOINTS)


@pytest.mark.parametrize("line", [*FILES, *FOLDERS, "train a.toml --run.folder {}"])
def test_an_output_that_cannot_be_written_is_told_and_nothing_is_left(line, folder):
    before = sorted(os.walk("."))
    long, below = "x" * 300, "there/file/out"
    places = [long, below, "."] if line in FILES else [long, below, "a.toml"]
    wrong = said_to(*(line.format(place) for place in places))
    for (code, text), place in zip(wrong, places, strict=True):
        assert code == 2 and "\n" not in text
        assert text.startswith(f"shardwright: {place} ") and ("can't be written" in text or "exists" in text)
    assert sorted(os.walk(".")) == before


@pytest.mark.parametrize(
    "line",
    [
        f"plan . {ON} --out {{}}/file",
        f"plan . {ON} --draw {{}}/x.html",
        "init {}/file",
        *FOLDERS,
        "checkpoint consolidate --ckpt-prefix there/x --save-path {}/file",
    ],
)
def test_what_is_there_is_not_replaced(line):
    for name in ("trace.html", "x.html"):
        Path("there", name).write_text("as it was")
    ((code, text),) = said_to(line.format("there"))
    assert code == 2 and text.endswith(" exists already: give another name, or remove it first")
    assert {path.read_text() for path in Path("there").iterdir()} == {"as it was"}


def test_the_choices_of_arguments_are_those_of_what_they_are_given_to():
    assert tuple(Format) == checkpoint.FORMATS
    assert set(plan_choice.RUNTIMES) == {name for name in PRESETS if not name.endswith("-cpu")}
    assert tuple(OFFLOADS) == get_args(Offload)


SOURCE = Path(cli.__file__).parents[1]
COMMAND = re.compile(r"\bshardwright ([a-z]+)(?: ([a-z]+))?((?: --[a-z_.-]+(?: [\w./-]+)?)*)")


def test_every_command_that_is_told_anywhere_is_one_that_works():
    parsers = command_parser(VERBS)._actions[-1].choices
    told = 0
    for path in SOURCE.rglob("*.py"):
        texts = (n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
        for verb, second, options in COMMAND.findall("\n".join(t for t in texts if isinstance(t, str))):
            if verb in ("import", "runs"):  # Python; and no command
                continue
            told += 1
            assert verb in parsers, (path, verb)
            parser = parsers[verb]
            if verb in ("checkpoint", "bench") and second:
                commands = parser._actions[-1].choices if verb == "checkpoint" else ("compute", "links")
                assert second in commands, (path, verb, second)
                parser = commands[second] if verb == "checkpoint" else parser
            known = parser._option_string_actions.keys()
            found = {each.rstrip(".") for each in re.findall(r"--[a-z_.-]+", options)}
            assert found <= known, (path, verb, options)
    assert told > 60
