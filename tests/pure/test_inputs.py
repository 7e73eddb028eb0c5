"""``shardwright train`` names a base or data that isn't there before it imports transformers."""

import json
from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.cli.arguments import train
from shardwright.recipe.inputs import check_inputs
from shardwright.recipe.resolve import resolve

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("meta-llama/Llama-3.2-1B", "`hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B`"),
        ("models/llama", "`hf download ORG/NAME --local-dir models/llama`"),
        ("runs/quickstart-llama", "`make finetune` makes it"),
    ],
)
def test_a_base_that_is_no_folder_is_named_with_the_command_that_makes_it(
    tmp_path, monkeypatch, capsys, folder, remedy
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "require", None)  # what looks for transformers isn't reached
    (tmp_path / "models").mkdir()
    assert main(["train", str(RECIPES / "finetune-qlora.toml"), "--base.folder", folder]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"base.folder = {folder!r}: no such folder; " in said and remedy in said


def test_preferences_that_are_not_there_are_described(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    assert main(["train", str(RECIPES / "finetune-dpo.toml"), "--base.folder", "base"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "data.path = 'preferences.jsonl': no such file; write it" in said
    assert '{"prompt": "2 + 2?", "chosen": "4", "rejected": "22"}' in said


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 128}, {"n_positions": 128}, {"text_config": {"n_ctx": 128}}]
)
def test_sequences_longer_than_the_models_positions_are_refused_with_both_numbers(
    tmp_path, monkeypatch, capsys, config
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "require", None)  # what looks for transformers isn't reached
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    words = ["train", str(RECIPES / "finetune-qlora.toml"), "--base.folder", "base"]
    assert main([*words, "--training.sequence_length", "129"]) == 1
    said = capsys.readouterr().err
    assert "training.sequence_length = 129, but the model of base has 128 positions" in said


def test_a_config_that_says_nothing_of_positions_or_is_no_json_is_left_to_what_reads_it(tmp_path):
    recipe = resolve(RECIPES / "finetune-qlora.toml", [("base.folder", str(tmp_path))]).recipe
    for text in ("{}", "[", "[]", '{"text_config": 1}', '{"n_positions": "many"}', "[" * 9_999):
        (tmp_path / "config.json").write_text(text)
        check_inputs(recipe)
