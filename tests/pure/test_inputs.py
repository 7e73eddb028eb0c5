"""``shardwright train`` names a base or data that isn't there before it imports transformers."""

from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.cli.arguments import train

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
