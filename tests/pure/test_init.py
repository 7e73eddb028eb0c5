"""``shardwright init``, ``schema`` and ``completion``: what a user gets before a first run."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import fastjsonschema
import pytest

from shardwright.cli import VERBS, command_parser, main
from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import leaf_keys, resolve
from shardwright.recipe.shipped import SHIPPED
from shardwright.recipe.template import KINDS, SCHEMA_FILE

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_the_package_s_recipe_of_that_kind_with_every_key_and_its_comment(kind, capsys):
    assert main(["init", "mine.toml", "--kind", kind]) == 0
    text = Path("mine.toml").read_text()
    assert text.startswith(f"#:schema ./{SCHEMA_FILE}\n# ")
    mine, ours = resolve("mine.toml"), resolve(ROOT / "recipes" / f"{KINDS[kind]}.toml")
    assert mine.folder == Path("runs/mine")
    assert mine.recipe == ours.recipe.model_copy(update={"run": Recipe().run})
    left_out = ("model.",) if mine.recipe.base.folder else ("base.", "adapter.")
    for key in leaf_keys():
        section, leaf = key.split(".")
        assert (f"\n[{section}]\n" in text) == (not key.startswith(left_out))
        comment = type(Recipe.model_fields[section].default).model_fields[leaf].description
        if not key.startswith(left_out):
            assert " ".join(comment.split()) in re.sub(r"\s+(# )?", " ", text), key
    Path("all.toml").write_text(re.sub(r"(?m)^#(?=\w+ = )", "", text))  # each # taken away
    every = resolve("all.toml")
    assert every.recipe == mine.recipe
    assert all(every.origins[key] == "file" for key in leaf_keys() if not key.startswith(left_out))
    missing = re.findall(r"^set ([\w.]+) in it to yours", capsys.readouterr().out, re.MULTILINE)
    assert missing == ([] if kind == "pretrain" else ["base.folder", "data.path"])


@pytest.mark.parametrize("name", SHIPPED)
def test_init_writes_each_recipe_of_the_package_by_its_name(name, capsys):
    assert main(["init", "mine.toml", "--kind", name]) == 0
    assert resolve("mine.toml").recipe == resolve(name).recipe.model_copy(update={"run": Recipe().run})
    assert '"torch" isn\'t here' not in capsys.readouterr().out


def test_init_takes_keys_and_neither_overwrites_a_file_nor_leaves_one_behind_a_mistake(capsys):
    assert main(["init", "--kind", "lora", "--base.folder", ".", "--adapter.rank=4", "--data.path", "."]) == 0
    assert resolve("recipe.toml").recipe.adapter.rank == 4
    assert "in it to yours" not in capsys.readouterr().out
    before = Path("recipe.toml").read_text()
    assert main(["init"]) == 2
    assert "recipe.toml exists already: give another name" in capsys.readouterr().err
    assert Path("recipe.toml").read_text() == before
    assert main(["init", "other.toml", "--adapter.rnk", "4"]) == 2
    assert "did you mean --adapter.rank?" in capsys.readouterr().err
    assert main(["init", "nosuch/other.toml"]) == 2
    assert {path.name for path in Path().iterdir()} == {"recipe.toml", SCHEMA_FILE}


def test_the_schema_takes_what_a_recipe_may_hold_and_nothing_else(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    check = fastjsonschema.compile(schema)
    for path in (ROOT / "recipes").glob("*.toml"):
        check(tomllib.loads(path.read_text()))
    sources = {"sources": [{"path": "a.jsonl", "weight": 3}]}
    check({"adapter": {"targets": "auto"}})
    check({"adapter": {"targets": ["q_proj"]}})
    check({"run": {"resume": 150}, "launch": {"ranks": "auto"}, "data": sources, "track": {"to": ["wandb"]}})
    wrong = [
        {"trainin": {}},
        {"training": {"stepz": 1}},
        {"training": {"steps": "50"}},
        {"training": {"steps": 0}},
        {"launch": {"ranks": "all"}},
        {"run": {"resume": "never"}},
        {"adapter": {"targets": "q_proj"}},
        {"base": {"quantise": "nf5"}},
    ]
    for recipe in wrong:
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            check(recipe)
    for key in leaf_keys():
        section, leaf = key.split(".")
        declared = type(Recipe.model_fields[section].default).__name__
        assert schema["$defs"][declared]["properties"][leaf]["description"]
    main(["init", "mine.toml"])
    assert json.loads(Path(SCHEMA_FILE).read_text()) == schema


COMPLETE = """
source ./script
for words in "$@"; do
  COMP_WORDS=(shardwright $words); [[ $words == *" " || -z $words ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_shardwright shardwright "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_commands_keys_values_and_files_and_zsh_and_fish_have_the_same(folder, capsys):
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
    Path("script").write_text(scripts["bash"])
    Path("mine.toml").touch()
    typed = ["", "checkpoint co", "train m", "train mine.toml --adapter.", "init --base.quantise "]
    words = ["bash", "-c", COMPLETE, "bash", *typed]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    commands, verbs, files, keys, values = (line.split() for line in done.stdout.splitlines())
    assert sorted(commands) == sorted(VERBS)
    assert verbs == ["convert", "consolidate"]
    assert files == ["mine.toml"]
    assert keys == [f"--{key}" for key in leaf_keys() if key.startswith("adapter.")]
    assert values == ["none", "nf4", "nf4-double", "int8"]
    for shell in ("zsh", "fish"):
        for word in ("consolidate", "adapter.rank", "nf4-double", VERBS["top"].purpose):
            assert word in scripts[shell], (shell, word)


def test_every_command_has_its_purpose_and_an_example_at_the_end_of_its_help():
    commands = command_parser(VERBS)
    for verb in VERBS:
        text = help_of(commands, verb)
        assert re.search(rf"\nexamples?:\n(  .*\bshardwright {verb}\b.*\n)+$", text), text


def help_of(parser, verb):
    """What ``shardwright VERB --help`` prints."""
    action = next(action for action in parser._actions if action.dest == "command")
    return action.choices[verb].format_help()
