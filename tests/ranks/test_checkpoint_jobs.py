"""Jobs of their own: two that save into one folder, and one that ends while its last save fails."""

import json
import threading
from functools import partial
from pathlib import Path

import torch

from shardwright import fully_shard
from shardwright.checkpoint import async_save, load, save
from shardwright.checkpoint.folder import find, step_folders
from shardwright.errors import CheckpointError
from tests.ranks.models import filled
from tests.ranks.scripts import run_scripts

STEPS = 12
build = partial(filled, width=500)


def one_of_two_jobs(path: str, number: int, rank: int, world: int) -> None:
    """Saves every second step, filled with the job's number; what was refused is told in a file."""
    model, refused = fully_shard(build(float(number))), []
    for step in range(number, 2 * STEPS, 2):
        try:
            save(f"{path}/run", model=model, step=step)
        except CheckpointError as error:
            refused.append((step, str(error)))
    Path(path, f"refused-{number}-{rank}").write_text(json.dumps(refused))


def test_two_jobs_that_save_into_one_folder_are_each_told_and_nothing_is_mixed(tmp_path):
    codes = {}

    def run(number: int) -> None:
        ends = run_scripts(2, partial(one_of_two_jobs, str(tmp_path), number))
        codes[number] = [(end.code, end.text) for end in ends]

    jobs = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert codes == {number: [(0, "")] * 2 for number in (0, 1)}
    published = {step for step, _ in step_folders(tmp_path / "run")}
    for number in (0, 1):
        first, second = (json.loads((tmp_path / f"refused-{number}-{r}").read_text()) for r in (0, 1))
        assert [step for step, _ in first] == [step for step, _ in second]
        for _, error in (*first, *second):
            assert "another process is saving here (pid " in error
        assert published.isdisjoint(step for step, _ in first)
        published_here = set(range(number, 2 * STEPS, 2)) - {step for step, _ in first}
        assert published_here <= published
        for step in published_here:
            model = build(-1.0)
            load(tmp_path / "run" / f"step-{step:06d}", model=model)
            assert {p.unique().item() for p in model.parameters()} == {float(number)}
    assert find(tmp_path / "run")[1] == ()
    assert not list((tmp_path / "run").glob(".torn-*"))


def leave_with_a_save_that_fails(path: str, rank: int, world: int) -> None:
    model = fully_shard(build(1.0))
    save(path, model=model, step=1)
    async_save(path, model=model, step=1)


def test_an_error_that_nobody_waits_for_is_told_at_exit(tmp_path):
    for end in run_scripts(2, partial(leave_with_a_save_that_fails, str(tmp_path))):
        assert "the last checkpoint was not saved: " in end.stderr
        assert "step-000001 exists already" in end.stderr
    model = build(-1.0)
    assert load(tmp_path, model=model).step == 1
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
