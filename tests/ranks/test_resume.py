"""A run goes on from the right checkpoint, alone in its folder: ranks of the pool, and whole jobs (slow)."""

import contextlib
import io
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint import StopRequest
from shardwright.checkpoint.storage import FolderLock, Held
from shardwright.cli import main
from shardwright.errors import CheckpointError, ConfigError
from shardwright.recipe.resolve import resolve
from shardwright.train.folder import RunFolder
from shardwright.train.pretrain import Pretraining
from shardwright.train.ranks import RankPlace, mesh_of
from shardwright.train.report import Screen
from shardwright.train.run import _train
from tests.ranks.pool import run_ranks
from tests.ranks.test_train import LIMIT_S, RECIPE, place, ranks_of, rows, run, start, wait_for_steps

__all__ = ["place"]  # a fixture


def tiny_recipe(folder, changes):
    """A recipe of six steps on two small files, with parts of its text replaced."""
    (folder / "text").mkdir()
    for name in "ab":
        (folder / "text" / f"{name}.py").write_text("".join(f"{name}_{i} = {i}\n" for i in range(200)))
    text = RECIPE.format(text="text")
    for old, new in ({"steps = 40": "steps = 6", "num_bytes = 20": "num_bytes = 1"} | changes).items():
        text = text.replace(old, new)
    (folder / "tiny.toml").write_text(text)
    return folder / "tiny.toml"


@pytest.fixture(scope="module")
def place_of_run(tmp_path_factory):
    """A folder with a recipe that saves each second step and keeps three, and its run of six steps."""
    folder = tmp_path_factory.mktemp("resume")
    tiny_recipe(folder, {"every = 15": "every = 2\nkeep = 3", "every = 20": "every = 100"})
    (told,) = run_ranks(2, train, str(folder / "tiny.toml"), [({"run.resume": "auto"}, {})])[0]
    assert "goes on" not in told
    return folder


@pytest.fixture
def recipe(place_of_run, tmp_path):
    """The recipe, with its run in ``run`` beside it, to be changed."""
    shutil.copytree(place_of_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "tiny.toml"


def train(rank, world, recipe, jobs):
    """Trains as ``rank`` of several jobs, one after another: ``(options, variables of rank 1)`` each. What
    each printed, or its error."""
    os.chdir(Path(recipe).parent)
    told = []
    for options, variables in jobs:
        os.environ.update(variables if rank == 1 else {})
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), StopRequest(()) as stop:
                resolved = resolve(recipe, [("run.folder", "run"), *options.items()])
                here = RankPlace(rank, world, torch.device("cpu"), mesh_of(resolved.recipe.mesh, "cpu"))
                _train(resolved, here, Screen(shown=rank == 0), stop, Pretraining)
            told.append(out.getvalue())
        except (CheckpointError, ConfigError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def damage(step_folder):
    """Turn one bit of the last byte of a shard."""
    file = step_folder / "shard-00001.safetensors"
    read = bytearray(file.read_bytes())
    read[-1] ^= 1
    file.write_bytes(read)


def saved(recipe):
    return sorted(path.name for path in (recipe.parent / "run" / "checkpoint").glob("*step-*"))


def test_auto_goes_on_and_is_taken_where_a_launcher_tells_any_rank_that_it_restarts(recipe):
    auto, restarted = {"run.resume": "auto"}, {"TORCHELASTIC_RESTART_COUNT": "1"}
    jobs = [({**auto, "training.steps": "7"}, {}), ({"training.steps": "8"}, restarted)]
    went_on, again = run_ranks(2, train, str(recipe), jobs)[0]
    assert "goes on after step 6 of 7" in went_on
    assert "goes on after step 7 of 8" in again
    assert [step for step, loss in rows(recipe.parent / "run", "step", "loss") if loss] == list(range(1, 9))
    assert not (recipe.parent / "run.1").exists()


def test_a_damaged_checkpoint_names_the_older_ones_and_auto_takes_one(recipe):
    damage(recipe.parent / "run" / "checkpoint" / "step-000006")
    jobs = [({"run.resume": "last"}, {}), ({"run.resume": "auto"}, {})]
    (refused, went_on), (refused_too, _) = run_ranks(2, train, str(recipe), jobs)
    for message in (refused, refused_too):
        assert message.startswith("DamagedError: loading run/checkpoint/step-000006")
        assert "is damaged" in message
        assert "older complete checkpoints: step-000004, step-000002" in message
        assert "there are steps 4, 2: go on from one with --resume 4" in message
        assert "--resume auto takes the newest that is whole" in message
    assert "DAMAGED, and not taken: loading run/checkpoint/step-000006" in went_on
    assert "going on from step 4 instead of step 6" in went_on
    assert "goes on after step 4 of 6" in went_on
    assert saved(recipe) == ["damaged-step-000006", "step-000002", "step-000004", "step-000006"]


def test_a_run_goes_back_to_a_step_and_where_nothing_is_whole_only_auto_begins(recipe):
    shutil.copytree(recipe.parent / "run", recipe.parent / "cut")
    for manifest in (recipe.parent / "cut" / "checkpoint").glob("*/manifest.json"):
        os.truncate(manifest, 100)
    cut = {"run.folder": "cut"}
    jobs = [{"run.resume": "3"}, {"run.resume": "2"}]
    jobs += [{**cut, "run.resume": "last"}, {**cut, "run.resume": "auto"}]
    told = run_ranks(1, train, str(recipe), [(options, {}) for options in jobs])[0]
    assert "run has no complete checkpoint of step 3; there are steps 6, 4, 2" in told[0]
    assert "goes on after step 2 of 6" in told[1]
    left = ["left-step-000004", "left-step-000006"]
    assert saved(recipe) == [*left, "step-000002", "step-000004", "step-000006"]
    assert "cut has no checkpoint to go on from: start without --resume, or with --resume auto" in told[2]
    assert "which is now in cut.1" in told[3]
    assert {path.name for path in (recipe.parent / "cut.1").iterdir()} >= {"config.toml", "checkpoint"}


def test_a_second_job_in_the_folder_is_refused_on_all_ranks_before_anything_is_moved(recipe):
    def state():
        return {path: path.stat().st_mtime_ns for path in recipe.parent.rglob("*") if path.name != ".lock"}

    before, lock = state(), FolderLock(recipe.parent / "run")
    for told in run_ranks(2, train, str(recipe), [({}, {}), ({"run.resume": "auto"}, {})]):
        for message in told:
            assert f"another job trains in this folder (pid {os.getpid()} on " in message
            assert "--run.folder" in message
    assert state() == before
    lock.close()


def test_the_lock_dies_with_a_holder_that_is_killed(tmp_path):
    holder = os.fork()
    if not holder:
        held = FolderLock(tmp_path)
        (tmp_path / "held").touch()
        time.sleep(60)
        held.close()
        os._exit(0)
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with pytest.raises(Held, match=rf"pid {holder} on "):
            FolderLock(tmp_path)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    FolderLock(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't write to .*file/run: Not a directory.*--run\.folder"):
        RunFolder(tmp_path / "file" / "run").claim(make=True)


def test_a_file_system_without_locks_is_said_once_and_trained_on(tmp_path, monkeypatch):
    def no_locks(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.warns(UserWarning, match="this file system has no locks"):
        FolderLock(tmp_path).close()


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on_at_once_in_the_folder_that_it_held(place):
    """The launcher and its ranks by SIGKILL, then the same line again; a third job is refused meanwhile."""
    options = ("--run.folder=held", "--resume=auto", "--training.steps=100000", "--checkpoint.every=5")
    first = start(place, *options)
    wait_for_steps(place / "held", 8)
    code, _, err = run(place, "--run.folder=held", "--launch.ranks=1")
    assert code == 1
    assert "held: another job trains in this folder (pid " in err
    ranks = ranks_of(first)
    for pid in (first.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    code, out, err = run(place, "--run.folder=held", "--resume", "auto", "--training.steps=12")
    assert code == 0, err
    assert "goes on after step" in out
    assert not (place / "held.1").exists()


@pytest.mark.slow
def test_torchrun_goes_on_with_a_run_whose_rank_was_killed_without_being_told_to(place):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    options = ("--run.folder=restarted", "--training.steps=60", "--checkpoint.every=5")
    job = start(place, *options, module=(*torchrun, "-m", "shardwright"))
    try:
        wait_for_steps(place / "restarted", 8)
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        out, err = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert "goes on after step" in out
    steps = [step for step, loss in rows(place / "restarted", "step", "loss") if loss is not None]
    assert steps == list(range(1, 61))


def test_the_command_refuses_a_resume_that_swallowed_the_recipe(recipe, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--resume", str(recipe)])
    assert "expected auto, a step, or nothing (then give it last)" in capsys.readouterr().err
