"""A folder of checkpoints is never the reason to stop: what can't be removed, listed or read, what was left
behind by a run that went back, and what somebody else changes while it is read."""

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import latest, load, save
from shardwright.checkpoint.folder import Found, _newest, complete_steps, find, read_manifest, survey
from shardwright.checkpoint.format import Manifest, Piece, TensorEntry, dumps
from shardwright.checkpoint.storage import LocalStorage
from shardwright.checkpoint.writer import Keep, Writer, line_of, set_aside_after
from shardwright.errors import CheckpointError
from tests.ranks.models import filled
from tests.ranks.pool import run_ranks
from tests.ranks.test_checkpoint_faults import save_steps


def number(model: nn.Module) -> float:
    """What all weights of the model are."""
    (value,) = {v for p in model.parameters() for v in p.detach().flatten().tolist()}
    return value


def save_all(
    path: Path, steps: list[int], model: nn.Module | None = None, keep: int | None = None
) -> nn.Module:
    """Save each step, of weights that are its number."""
    model = model or filled(0.0)
    for step in steps:
        for p in model.parameters():
            nn.init.constant_(p, float(step))
        save(path, model=model, step=step, keep=keep)
    return model


def gone_back(path: Path) -> nn.Module:
    """The model of a run that has loaded its step 100 again, after two more; as torch compiles it."""
    model, compiled = save_all(path, [100, 200, 300]), nn.Module()
    compiled._orig_mod = model
    assert [(each.number, each.fault) for each in survey(path)] == [(3, ""), (2, ""), (1, "")]
    load(path / ".." / path.name / "step-000100", model=compiled)
    return model


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if "step" in p.name or "torn" in p.name)


# ---- what can't be removed


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path):
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    model = save_all(runs, [1])
    (runs / "step-000001").rename(elsewhere)
    (runs / "step-000001").symlink_to(elsewhere)
    save_all(runs, [2, 3], model, keep=2)
    assert names(runs) == ["step-000002", "step-000003"]
    assert (elsewhere / "manifest.json").is_file()


def test_a_folder_of_another_program_with_the_name_of_a_step_is_left_alone(tmp_path):
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "model.pt").write_text("somebody's")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint \(step-000001: "):
        find(tmp_path)
    save_all(tmp_path, [0, 3, 4], keep=1)
    assert names(tmp_path) == ["step-000001", "step-000004"]


def test_incomplete_ones_arent_counted_and_go_with_the_older_ones(tmp_path):
    model = save_all(tmp_path, [10, 20, 30, 40, 45])
    for step in (10, 45):
        truncate(next((tmp_path / f"step-0000{step}").glob("*.safetensors")))
    for step in (20, 40):
        (tmp_path / f"step-0000{step}" / "manifest.json").write_text("{}")
    save_all(tmp_path, [50], model, keep=2)
    assert names(tmp_path) == [f"step-0000{step}" for step in (30, 40, 45, 50)]
    save_all(tmp_path, [60], model, keep=2)
    assert names(tmp_path) == ["step-000050", "step-000060"]


# ---- a disk that fails


def failing(*_: Any) -> None:
    raise OSError("broken")


def test_a_manifest_is_read_once_more_and_what_missing_files_hold_is_told(tmp_path):
    held = {key: file for file, keys in (("a", "xyz"), ("b", "stuv")) for key in keys}
    tensors = {k: TensorEntry((1,), "U8", (Piece(file, 0, 1, 0, (0,), (1,)),)) for k, file in held.items()}
    for name in ("b", "manifest.json"):
        (tmp_path / name).touch()
    told = [OSError("passing"), dumps(Manifest(1, tensors, {"a": 1, "b": 1}))]
    with patch.object(LocalStorage, "read_text", side_effect=told), pytest.raises(CheckpointError) as caught:
        find(tmp_path)
    of_b = f"{tmp_path}/b has 0 bytes, expected 1 (it holds s, t, u and 1 more tensors)"
    assert f"{tmp_path}/a is missing (it holds x, y, z); {of_b}" in str(caught.value)


def test_a_writer_whose_disk_fails_tells_or_warns_and_gives_the_lock_back(tmp_path):
    model = save_all(tmp_path, [100])
    save_all(tmp_path, [50])  # another line, which goes on
    writer, text = Writer(tmp_path, 110, line_of(model, tmp_path)), dumps(Manifest(110, {}, {}))
    with pytest.raises(CheckpointError, match=r"another process is saving here \(pid "):
        Writer(tmp_path, 110)
    for owner, name, named in ((writer._lock, "check", 50), (LocalStorage, "publish", 100)):
        with patch.object(owner, name, failing), pytest.raises(CheckpointError, match="can't publish"):
            writer.publish(text)
        assert find(tmp_path)[0].name == f"step-{named:06d}"

    def synced_no_more(*arguments: Any, real: Any = LocalStorage.publish) -> None:
        real(*arguments)
        failing()

    with patch.object(LocalStorage, "publish", synced_no_more), pytest.warns(match="may not outlast"):
        writer.publish(text)
    writer._outlasts = True
    for operation, said in (("names", "couldn't be listed"), ("remove", "couldn't be removed, and stays")):
        with patch.object(LocalStorage, operation, failing), pytest.warns(match=said):
            writer.prune(Keep(1))
    with patch.object(LocalStorage, "names", failing):
        assert writer.continued() == writer.line
    with patch.object(LocalStorage, "abandon", failing):
        writer.close()
    Writer(tmp_path, 120).close()


# ---- a run that goes back


def test_a_run_that_goes_back_leaves_the_newer_ones_behind(tmp_path):
    model = gone_back(tmp_path)
    assert latest(tmp_path) == tmp_path / "step-000300"  # nothing was saved yet
    with pytest.warns(UserWarning, match="doesn't go on from step-000200, step-000300: they stay"):
        save_all(tmp_path, [110], model, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        save_all(tmp_path, [120], model, keep=2)
    assert latest(tmp_path) == tmp_path / "step-000120"
    assert names(tmp_path) == [f"step-000{step}" for step in (110, 120, 200, 300)]
    assert complete_steps(tmp_path) == [120, 110, 300, 200]
    restored = load(tmp_path, model=model)
    assert (restored.step, number(model)) == (120, 120.0)
    behind = "of a line of training that was left behind"
    assert restored.skipped == (f"step-000300: {behind}", f"step-000200: {behind}")
    save_all(tmp_path, [200, 250], model, keep=2)  # comes by where the other line was
    assert names(tmp_path) == ["left-step-000200", "step-000200", "step-000250", "step-000300"]
    assert load(tmp_path, model=model).step == 250
    save_all(tmp_path, [255], model)
    (tmp_path / "latest").write_text("step-000300\n")
    with pytest.warns(UserWarning, match="doesn't go on from step-000300: they stay"):
        save_all(tmp_path, [260], model)
    save_all(tmp_path / "other", [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_all(tmp_path / "other", [300], model)


def test_what_is_newer_is_set_aside_under_names_that_nothing_has(tmp_path):
    save_all(tmp_path, [100, 200, 300, 400])
    truncate(next((tmp_path / "step-000300").glob("*.safetensors")))
    (tmp_path / "left-step-000200").mkdir()
    aside = ["left-step-000200.1", "damaged-step-000300", "damaged-step-000400"]
    assert set_aside_after(tmp_path, 100, {400}) == [tmp_path / name for name in aside]
    assert names(tmp_path) == sorted([*aside, "left-step-000200", "step-000100"])
    assert (tmp_path / "latest").read_text() == "step-000100\n"
    assert set_aside_after(tmp_path, 200) == complete_steps(tmp_path / "nothing") == []
    assert (tmp_path / "latest").read_text() == "step-000100\n"


def test_a_damaged_latest_falls_back_on_its_own_line(tmp_path):
    save_all(tmp_path, [110, 120], gone_back(tmp_path))
    truncate(next((tmp_path / "step-000120").glob("*.safetensors")))
    assert find(tmp_path)[0].name == "step-000110"
    (tmp_path / "step-000120" / "manifest.json").write_text("{}")
    assert find(tmp_path)[0].name == "step-000110"
    shutil.rmtree(tmp_path / "step-000120")
    assert find(tmp_path)[0].name == "step-000110"
    (tmp_path / "latest").unlink()
    assert find(tmp_path)[0].name == "step-000110"


def test_a_step_that_is_saved_again_is_no_ancestor_of_what_came_after_the_first(tmp_path):
    save_all(tmp_path, [200], gone_back(tmp_path))
    (tmp_path / "latest").write_text("step-000300\n")
    assert complete_steps(tmp_path) == [300, 100, 200]
    (tmp_path / "latest").write_text("step-000200\n")
    truncate(next((tmp_path / "step-000200").glob("*.safetensors")))
    assert find(tmp_path)[0].name == "step-000100"
    after = frozenset({"step-000200"})  # of one number, as where one can't be read while the other is saved
    both = [Found(step, tmp_path / f"step-{step:06d}", "", False, 4, after) for step in (300, 200)]
    assert _newest(both, "step-000200") is both[1]


def test_checkpoints_of_a_release_that_names_no_ancestors_are_one_line(tmp_path):
    save_all(tmp_path, [100, 200, 300])
    for folder in tmp_path.glob("step-*"):
        manifest = read_manifest(folder)
        state = {key: value for key, value in manifest.state.items() if key != "line"}
        (folder / "manifest.json").write_text(dumps(replace(manifest, state=state)))
    assert complete_steps(tmp_path) == [300, 200, 100]
    model = filled(0.0)
    load(tmp_path, model=model)
    save_all(tmp_path, [400], model, keep=2)
    assert names(tmp_path) == ["step-000300", "step-000400"]
    load(tmp_path / "step-000300", model=model)
    with pytest.warns(UserWarning, match="doesn't go on from step-000400"):
        save_all(tmp_path, [350], model)
    (tmp_path / "latest").write_text("step-000200\n")  # which is gone
    assert find(tmp_path)[0].name == "step-000400"


# ---- extra objects that can't take what was saved


class Counter:
    """An object of the user's."""

    def __init__(self, fails: bool = False) -> None:
        self.value, self.fails = 0, fails

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("of another kind")
        self.value = state["value"]


def extra_fails(rank: int, world: int, path: str) -> tuple[str, float, int]:
    saved = Counter()
    saved.value = 3
    save(path, model=fully_shard(filled(1.0)), extra={"first": saved, "second": saved}, step=1)
    model, first = fully_shard(filled(-1.0)), Counter()
    with pytest.raises(CheckpointError) as caught:
        load(path, model=model, extra={"first": first, "second": Counter(fails=rank == 1)})
    with torch.no_grad():
        own = nn.ParameterList(p.to_local() for p in model.parameters())
        return str(caught.value), number(own), first.value


def test_an_extra_object_that_fails_on_one_rank_is_an_error_on_all_before_any_weight_is_touched(tmp_path):
    for message, value, first in run_ranks(2, extra_fails, str(tmp_path)):
        assert "rank 1: load_state_dict of extra/second raised ValueError: of another kind" in message
        assert "Model and optimizer are as they were" in message
        assert "Restored before it: load_state_dict of extra/first" in message
        assert (value, first) == (-1.0, 3)


def test_small_state_of_a_newer_release_is_refused_before_any_weight_is_touched(tmp_path):
    save_all(tmp_path, [1])
    manifest = read_manifest(tmp_path / "step-000001")
    state = {**manifest.state, "extra": {"new": {"$quaternion": [1, 2, 3, 4]}}}
    (tmp_path / "step-000001" / "manifest.json").write_text(dumps(replace(manifest, state=state)))
    model = filled(-1.0)
    with pytest.raises(CheckpointError, match=r"tagged '.quaternion', which this release does not know"):
        load(tmp_path, model=model)
    assert number(model) == -1.0


def test_two_ranks_find_what_one_saved_after_it_went_back(tmp_path):
    run_ranks(2, save_steps, str(tmp_path), (1, 2, 3))
    model = filled(0.0)
    load(tmp_path / "step-000001", model=model)
    save_all(tmp_path, [2], model, keep=1)
    assert names(tmp_path) == ["left-step-000002", "step-000002", "step-000003"]
    assert find(tmp_path)[0].name == "step-000002"
