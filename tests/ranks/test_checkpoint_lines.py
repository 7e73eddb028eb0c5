"""A folder of checkpoints is never the reason to stop: what can't be removed, listed or read, what was left
behind by a run that went back, and what somebody else changes while it is read."""

import errno
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import latest, load, save, shardfile
from shardwright.checkpoint.folder import complete_steps, find, read_manifest
from shardwright.checkpoint.format import dumps
from shardwright.checkpoint.storage import LocalStorage
from shardwright.errors import CheckpointError, UnreadError
from tests.ranks.models import filled
from tests.ranks.pool import run_ranks
from tests.ranks.test_checkpoint_faults import load_module, save_steps, truncate
from tests.ranks.test_checkpoint_random import disk_of


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
    """The model of a run that has loaded its step 100 again, after two more."""
    model = save_all(path, [100, 200, 300])
    load(path / "step-000100", model=model)
    return model


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if "step" in p.name or "torn" in p.name)


# ---- what can't be removed


def as_a_link(folder: Path) -> Callable[[], None]:
    elsewhere = folder.parent.parent / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    return lambda: None


def with_a_mount_in_it(folder: Path) -> Callable[[], None]:
    (folder / "mounted").mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(folder / "mounted")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    device = os.stat(folder / "mounted").st_dev

    def undo() -> None:
        for mounted in folder.parent.glob("*/mounted"):
            if mounted.stat().st_dev == device:
                subprocess.run(["umount", str(mounted)], check=True)

    return undo


def immutable(folder: Path) -> Callable[[], None]:
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode:
        pytest.skip("needs a file system with immutable files, and the right to make them")
    return lambda: subprocess.run(["chattr", "-R", "-i", str(folder.parent)], capture_output=True) and None


@pytest.mark.parametrize("made", [as_a_link, with_a_mount_in_it, immutable], ids=lambda made: made.__name__)
@pytest.mark.each_case
def test_what_cant_be_removed_stays_and_every_later_save_succeeds(tmp_path, made):
    runs = tmp_path / "runs"
    model = save_all(runs, [1, 2])
    undo = made(runs / "step-000001")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            save_all(runs, [3, 4, 5], model, keep=2)
        assert [n for n in names(runs) if n > "step-000003"] == ["step-000004", "step-000005"]
        assert "step-000002" not in names(runs)
        assert load(runs, model=filled(-1.0)).step == 5
        if made is as_a_link:  # the link is removed, and what it leads to is somebody's
            assert names(runs) == ["step-000004", "step-000005"]
            assert (tmp_path / "elsewhere" / "manifest.json").is_file()
        else:
            assert "couldn't be removed" in str(told[0].message)
    finally:
        undo()


def test_a_folder_of_another_program_with_the_name_of_a_step_is_left_alone(tmp_path):
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "model.pt").write_text("somebody's")
    save_all(tmp_path, [2, 3, 4], keep=1)
    assert names(tmp_path) == ["step-000001", "step-000004"]


def test_incomplete_ones_arent_counted_and_go_with_the_older_ones(tmp_path):
    model = save_all(tmp_path, [1, 2, 3, 4])
    for step in (2, 4):
        truncate(next((tmp_path / f"step-00000{step}").glob("*.safetensors")))
    save_all(tmp_path, [5], model, keep=2)
    assert names(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    save_all(tmp_path, [6], model, keep=2)
    assert names(tmp_path) == ["step-000005", "step-000006"]


def test_a_checkpoint_that_cant_be_read_now_is_neither_removed_nor_counted(tmp_path, monkeypatch):
    model = save_all(tmp_path, [1, 2, 3])
    sizes = LocalStorage.sizes

    def failing(self: LocalStorage, folder: Path) -> dict[str, int]:
        if folder.name == "step-000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sizes(self, folder)

    monkeypatch.setattr(LocalStorage, "sizes", failing)
    save_all(tmp_path, [4, 5], model, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]


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


@pytest.mark.parametrize("moment", ["before it is published", "before the file names it"])
@pytest.mark.each_case
def test_a_kill_of_the_first_save_of_a_line_loses_no_step(tmp_path, moment):
    model = gone_back(tmp_path)
    if os.fork() == 0:
        named = LocalStorage.name_latest

        def name_latest(self: LocalStorage, path: Path, name: str) -> None:
            if name == "step-000110":
                os._exit(0)
            named(self, path, name)

        LocalStorage.name_latest = name_latest  # type: ignore[method-assign]
        if moment == "before it is published":
            LocalStorage.publish = lambda *args: os._exit(0)  # type: ignore[method-assign]
        save(tmp_path, model=model, step=110)
    os.wait()
    assert (tmp_path / "latest").read_text() == "step-000100\n"
    assert find(tmp_path)[0].name == ("step-000300" if moment == "before it is published" else "step-000110")


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


# ---- errors after the publication, and before it


def test_a_full_disk_at_the_file_latest_is_a_warning_and_the_step_is_the_latest(tmp_path, monkeypatch):
    model = save_all(tmp_path, [1])
    named = LocalStorage.name_latest

    def full(self: LocalStorage, path: Path, name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalStorage, "name_latest", full)
    says = r"step-000002 is saved, but .*latest couldn't be written: No space left"
    with pytest.warns(UserWarning, match=says):
        save_all(tmp_path, [2], model)
    assert latest(tmp_path) == tmp_path / "step-000002"
    monkeypatch.setattr(LocalStorage, "name_latest", named)
    save_all(tmp_path, [3], model)
    assert latest(tmp_path) == tmp_path / "step-000003"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path, "64k") as disk:
        yield disk


def test_a_disk_that_was_full_at_the_first_save_takes_the_next_one(small_disk):
    (small_disk / "other").write_bytes(bytes(64 << 10))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_all(small_disk, [1])
    (small_disk / "other").unlink()
    save_all(small_disk, [1])
    assert latest(small_disk) == small_disk / "step-000001"


# ---- what changes while it is read


def test_a_checkpoint_that_a_save_removes_while_it_is_loaded_is_the_next_one(tmp_path, monkeypatch):
    model = save_all(tmp_path, [1])
    opened, prepare = [], load_module._prepare

    def removed_meanwhile(found: Path, *rest):
        opened.append(found.name)
        if len(opened) == 1:
            save_all(tmp_path, [2], model, keep=1)
        return prepare(found, *rest)

    monkeypatch.setattr(load_module, "_prepare", removed_meanwhile)
    assert load(tmp_path, model=filled(-1.0)).step == 2
    assert opened == ["step-000001", "step-000002"]


def passing_error(times: int, monkeypatch) -> None:
    """The first reads of files fail as those of a disk do."""
    left, read = [times], shardfile.Reader._reading

    def reading(self, *args):
        if left[0]:
            left[0] -= 1
            raise UnreadError("shard-00000.safetensors: Input/output error")
        return read(self, *args)

    monkeypatch.setattr(shardfile.Reader, "_reading", reading)


def test_a_passing_error_of_a_disk_is_no_damage(tmp_path, monkeypatch):
    save_all(tmp_path, [1, 2])
    passing_error(2, monkeypatch)
    assert load(tmp_path, model=filled(-1.0)).step == 2
    passing_error(100, monkeypatch)
    model = filled(-1.0)
    with pytest.raises(UnreadError, match="Input/output error"):
        load(tmp_path, model=model)
    assert number(model) == -1.0


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
