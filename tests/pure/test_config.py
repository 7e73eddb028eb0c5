"""A recipe: what comes from where, and that everything wrong with it is said at once."""

import ast
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
import tomli_w

from shardwright import cli
from shardwright.errors import ConfigError, InputError
from shardwright.options import words_of
from shardwright.policy import Lora, SchedulePolicy, WatchPolicy
from shardwright.recipe import config
from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import leaf_keys, resolve
from shardwright.recipe.shipped import SHIPPED
from shardwright.train.engine import steps_of

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_defaults_then_file_then_command_line(tmp_path):
    path = write(tmp_path, "[training]\nsteps = 7\nbatch_size = 3\n")
    resolved = resolve(path, [("training.steps", "9"), ("optimizer.lr", "1e-4")])
    assert resolved.recipe.training.steps == 9
    assert resolved.recipe.training.batch_size == 3
    assert resolved.recipe.training.accumulation == Recipe().training.accumulation
    assert resolved.recipe.optimizer.lr == 1e-4
    keys = ("training.steps", "training.batch_size", "training.accumulation")
    assert [resolved.origins[key] for key in keys] == ["command line", "file", "default"]


def test_the_resolved_recipe_reads_back_and_names_each_origin(tmp_path):
    text = '[data]\nsuffixes = [".py", ".txt"]\n[sample]\nprompt = "a \\"b\\"\\n\\u0001 # c"\n'
    path = write(tmp_path, text)
    resolved = resolve(path, [("model.tied_embedding", "true")])
    text = resolved.to_toml()
    assert resolve(write(tmp_path, text)).recipe == resolved.recipe
    assert "tied_embedding = true  # command line\n" in text
    assert next(line for line in text.splitlines() if line.startswith("suffixes")).endswith("# file")
    origins = ("# default", "# file", "# command line")
    assert sum(line.endswith(origins) for line in text.splitlines()) == len(leaf_keys())


@pytest.mark.parametrize("text", ['[{"path": "a"}, {"path": "b"}]', '[{path = "a"}, {path = "b"}]'])
def test_sources_on_the_command_line_in_json_or_toml_replace_the_path_of_the_file(tmp_path, text):
    path = write(tmp_path, '[base]\nfolder = "."\n[data]\npath = "chats.jsonl"\n')
    resolved = resolve(path, [("data.sources", text)])
    assert [each.path for each in resolved.recipe.data.each()] == ["a", "b"]
    assert resolved.origins["data.path"] == "default"
    with pytest.raises(ConfigError, match="path and sources: give one of the two"):
        resolve(path, [("data.sources", text), ("data.path", "c")])
    again = resolve(write(tmp_path, resolved.to_toml()), [("data.path", "c")])
    assert [each.path for each in again.recipe.data.each()] == ["c"]
    assert again.origins["data.sources"] == "default"


def test_everything_wrong_is_listed_at_once_with_path_and_nearest_key(tmp_path):
    path = write(
        tmp_path,
        """
        steps = 3
        [trainng]
        [training]
        stepz = 50
        lr = 0.1
        batch_size = 0
        sequence_length = "128"
        [model]
        dim = 6
        num_heads = 4
        """,
    )
    overrides = [("training.stps", "3"), ("optimizer.lr", "fast"), ("training.dtype", "fp8")]
    with pytest.raises(ConfigError) as caught:
        resolve(path, overrides)
    lines = str(caught.value).splitlines()
    expected = [
        ("steps (file)", "training.steps"),
        ("trainng (file)", "did you mean training?"),
        ("training.stepz (file)", "did you mean training.steps?"),
        ("training.lr (file)", "did you mean optimizer.lr?"),
        ("training.batch_size (file)", "got 0"),
        ("training.sequence_length (file)", "got '128'"),
        ("model", "multiple of 2 * num_heads"),
        ("--training.stps (command line)", "did you mean --training.steps?"),
        ("optimizer.lr (command line)", "got 'fast'"),
        ("training.dtype (command line)", "got 'fp8'"),
    ]
    for start, remedy in expected:
        told = [line for line in lines if line.startswith(f"  - {start}")]
        assert any(remedy in line for line in told), (start, lines)
    assert len(lines) == 1 + len(expected)


@pytest.mark.parametrize("key", leaf_keys())
def test_each_key_misspelt_is_refused_with_the_right_one(key, tmp_path):
    path = write(tmp_path, "")
    with pytest.raises(ConfigError, match=rf"did you mean --{key}\?"):
        resolve(path, [(key + "x", "1")])


def test_each_key_is_read_by_the_code():
    """A key that nothing reads would be one that is silently ignored."""
    read = set()
    for path in (ROOT / "src" / "shardwright").rglob("*.py"):
        if path.name != "config.py":
            read |= {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    assert {key.split(".")[1] for key in leaf_keys()} <= read


def test_a_recipe_that_is_not_there_names_those_that_are(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"no recipe at .*nosuch\.toml.*recipe\.toml\).* quickstart$"):
        resolve(tmp_path / "nosuch.toml")
    with pytest.raises(ConfigError, match=r"quickstart; did you mean finetune-qlora-real\?$"):
        resolve(tmp_path / "finetune-qlora-real.toml")


def test_the_name_of_a_recipe_of_the_package_is_taken_where_no_such_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, path in SHIPPED.items():
        assert resolve(name).recipe == resolve(f"{name}.toml").recipe == resolve(path).recipe
        assert resolve(name).folder == resolve(path).folder
    Path("quickstart.toml").write_text("[training]\nsteps = 7\n")
    assert resolve("quickstart.toml").recipe.training.steps == 7


def test_what_is_no_toml_is_refused_with_the_line(tmp_path):
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 2"):
        resolve(write(tmp_path, "[training]\nsteps == 3\n"))


@pytest.mark.parametrize(("begin", "end"), ["[]", ("{a = ", "}")])
def test_what_is_nested_too_deeply_is_refused_where_it_stands(begin, end, tmp_path):
    text = begin * 20_000 + end * 20_000
    with pytest.raises(ConfigError, match=r"not valid TOML: it is nested too deeply"):
        resolve(write(tmp_path, f"a = {text}"))
    with pytest.raises(ConfigError, match=r"data\.columns \(command line\): got '[\[{]") as refused:
        resolve(write(tmp_path, ""), [("data.columns", text)])
    assert len(str(refused.value)) < 600


FLOATS = [
    f"{name}.{key}"
    for name, section in Recipe.model_fields.items()
    for key, field in type(section.default).model_fields.items()
    if field.annotation is float
]


@pytest.mark.parametrize("key", FLOATS)
def test_no_number_of_a_recipe_overflows_where_it_is_used(key, tmp_path):
    for text in ("inf", "nan", "1" + "0" * 400):
        if (key, text) != ("optimizer.clip_norm", "inf"):  # that means not to clip
            with pytest.raises(ConfigError, match=rf"{re.escape(key)} \(command line\): got "):
                resolve(write(tmp_path, ""), [(key, text)])


@pytest.mark.parametrize(
    ("key", "text"),
    [("run.seed", "1" + "0" * 30), ("training.steps", str(2**63)), ("launch.timeout_s", "1e30")],
)
def test_numbers_have_the_bounds_of_what_they_are_given_to(key, text, tmp_path):
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} \(command line\): got "):
        resolve(write(tmp_path, ""), [(key, text)])


def test_activations_go_to_the_host_only_where_blocks_are_recomputed(tmp_path):
    given = [("training.offload_activations", "true")]
    with pytest.raises(ConfigError, match=r"training.offload_activations.* set training.activation_ch"):
        resolve(write(tmp_path, ""), given)
    training = resolve(
        write(tmp_path, ""), [*given, ("training.activation_checkpointing", "true")]
    ).recipe.training
    assert training.offload_activations


def test_an_old_recipe_with_gloos_own_messages_is_refused_with_what_to_take_instead(tmp_path):
    says = r'schedule\.transport.*removed; take .*"sockets", or "collectives"'
    with pytest.raises(ConfigError, match=says):
        resolve(write(tmp_path, '[schedule]\ntransport = "gloo"\n'))


def test_text_keys_take_the_command_line_as_it_is(tmp_path):
    path = write(tmp_path, "")
    recipe = resolve(path, [("data.path", "123"), ("sample.prompt", "true"), ("run.folder", "[a]")]).recipe
    assert (recipe.data.path, recipe.sample.prompt, recipe.run.folder) == ("123", "true", "[a]")


def test_recipes_of_the_project_are_valid():
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        resolve(path)


def test_a_bad_command_line_is_refused_before_anything_starts(tmp_path, capsys):
    path = write(tmp_path, "[training]\nstepz = 1\n")
    assert cli.main(["train", str(path)]) == 2
    assert "did you mean training.steps?" in capsys.readouterr().err
    assert cli.main(["train", str(path), "steps", "4"]) == 2
    assert cli.main(["train", str(path), "--training.stepz"]) == 2
    assert "unknown option --training.stepz; did you mean --training.steps?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", str(path), "--training.steps"])
    assert "--training.steps: expected one argument" in capsys.readouterr().err


def test_help_names_every_key_in_its_section_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    sections = dict(re.findall(r"^\[(\w+)\]:\n(.*?)\n(?=\[|example)", shown, re.DOTALL | re.MULTILINE))
    assert list(sections) == list(Recipe.model_fields)
    for key in leaf_keys():
        assert re.search(rf"\n  --{key} .*?\(default\s", sections[key.split(".")[0]], re.DOTALL), key
    assert all(field.description for s in Recipe.model_fields.values() for field in fields_of(s))


def fields_of(section):
    return type(section.default).model_fields.values()


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        config.Recipe().training.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_every_schedule_policy_is_reachable_from_a_recipe(tmp_path):
    assert Recipe().schedule.policy() == SchedulePolicy()
    orders = {"backward_prefetch": "post", "forward_prefetch": False, "agreement": "off", "row_wise": True}
    limits = {"depth": 3, "budget_nbytes": 1000, "max_reductions": 4, "keep_last": 0, "bucket_cap_mb": 2.5}
    wanted = SchedulePolicy(**orders, **limits, wire="difference")
    changed = {key: value for key, value in asdict(wanted).items() if value != getattr(SchedulePolicy(), key)}
    assert changed == asdict(wanted)  # none is left at its default, so none can be forgotten below
    path = write(tmp_path, tomli_w.dumps({"schedule": changed}))
    resolved = resolve(path)
    assert resolved.recipe.schedule.policy() == wanted
    assert resolve(write(tmp_path, resolved.to_toml())).recipe == resolved.recipe


def test_keys_of_policies_have_their_words_limits_and_defaults():
    sections = {"schedule": SchedulePolicy, "watch": WatchPolicy, "adapter": Lora}
    for name, policy in sections.items():
        keys, words = type(getattr(Recipe(), name)).model_fields, words_of(policy)
        assert [key for key in keys if key in words] == [field.name for field in fields(policy)]
        own = {"rank"} if name == "adapter" else set()  # 0 there means that there are none
        for key in words.keys() - own:
            assert keys[key].description.split(";")[0].split(". ")[0].lower() in words[key].lower(), key
    assert Recipe().watch.policy() == WatchPolicy()
    assert config.AdapterConfig(rank=8).policy() == Lora()


def test_a_recipe_is_checked_without_torch():
    code = "import sys; from shardwright.recipe import resolve; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False\n"


REMOVED = "one_copy_per_host was removed: it took more memory, .*; leave it out"


def test_an_option_that_was_removed_is_an_error_that_says_what_to_do(tmp_path):
    for make in (SchedulePolicy, partial(replace, SchedulePolicy())):
        with pytest.raises(InputError, match=f"SchedulePolicy: {REMOVED}"):
            make(one_copy_per_host=True)
    path = write(tmp_path, "[schedule]\none_copy_per_host = true\n")
    with pytest.raises(ConfigError, match=rf"schedule.one_copy_per_host \(file\): unknown key; {REMOVED}"):
        resolve(path)
    with pytest.raises(ConfigError, match=f"unknown key; {REMOVED}"):
        resolve(write(tmp_path, ""), [("schedule.one_copy_per_host", "true")])


def test_epochs_stand_for_steps():
    training = config.TrainingConfig(epochs=3, steps=5)
    assert steps_of(training, 7).steps == 21
    assert steps_of(config.TrainingConfig(steps=5), 7).steps == 5


def test_muon_is_refused_where_it_has_no_weights_to_step(tmp_path):
    path = write(tmp_path, '[optimizer]\nkind = "muon"\n')
    assert resolve(path).recipe.optimizer.kind == "muon"
    with pytest.raises(ConfigError, match=r'muon steps on "eager" only'):
        resolve(path, [("launch.backend", "xla")])
    with pytest.raises(ConfigError, match=r"which \[adapter\] freezes; take another one"):
        resolve(path, [("base.folder", "."), ("adapter.rank", "4")])
