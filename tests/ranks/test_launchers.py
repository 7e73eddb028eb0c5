"""The files of deploy/, as their launchers would run them: real processes, real signals, real hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from deploy import ray_train
from shardwright.checkpoint import latest
from tests.ranks.nodes import two_nodes
from tests.ranks.pool import run_ranks
from tests.ranks.slurm import Cluster
from tests.ranks.test_train import LIMIT_S, RECIPE, place, rows, wait_for_steps

__all__ = ["place"]  # a fixture

DEPLOY = Path(__file__).parents[2] / "deploy"
ENDLESS = RECIPE.replace("steps = 40", "steps = 100000").replace("every = 15", "every = 100")


def finished(job):
    try:
        out, err = job.body.communicate(timeout=LIMIT_S)
    finally:
        job.body.kill()
    return job.body.returncode, out, err


def loss_steps(folder):
    return [step for step, loss in rows(folder, "step", "loss") if loss is not None]


def stop_and_go_on(cluster, file, *more):
    """Submit ``file`` for a run that doesn't end, tell it that its time is over, and submit it again as SLURM
    does. What each job printed."""
    text, folder, recipe = cluster.folder / "text", cluster.folder / "run", cluster.folder / "tiny.toml"
    recipe.write_text(ENDLESS.format(text=text))
    first = cluster.submit(file, "tiny.toml", "run", *more)
    try:
        assert "requeue" in first.asked
        wait_for_steps(folder, 5)
        first.is_told()
    finally:
        _, out, err = finished(first)
    assert "which is saved" in out, err
    done = loss_steps(folder)
    assert first.requeued.read_text() == str(cluster.job_id)
    recipe.write_text(RECIPE.format(text=text).replace("steps = 40", f"steps = {done[-1] + 3}"))
    first.requeued.unlink()
    cluster.restarts = 1
    second = cluster.submit(file, "tiny.toml", "run", *more)
    code, again, err = finished(second)
    assert code == 0, err
    assert f"goes on after step {done[-1]} of {done[-1] + 3}" in again
    assert not second.requeued.exists()
    assert loss_steps(folder) == [*done, *range(done[-1] + 1, done[-1] + 4)]
    assert not (cluster.folder / "run.1").exists()
    return out, again


@pytest.fixture
def folder(place, tmp_path):
    (tmp_path / "text").symlink_to(place / "text")
    return tmp_path


@pytest.mark.slow
def test_tasks_of_srun_are_one_run_that_is_saved_requeued_and_goes_on(folder):
    cluster = Cluster(folder, tasks_per_node=2)
    out, again = stop_and_go_on(cluster, DEPLOY / "slurm-one-node.sbatch")
    assert out.count("ranks: 2 on cpu") == again.count("ranks: 2 on cpu") == 1


@pytest.mark.slow
def test_two_nodes_with_a_torchrun_each_are_one_run_that_is_saved_requeued_and_goes_on(folder):
    with two_nodes() as nodes:
        out, again = stop_and_go_on(Cluster(folder, nodes), DEPLOY / "slurm-many-nodes.sbatch", "1")
    assert out.count("ranks: 2 on cpu") == again.count("ranks: 2 on cpu") == 1


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.sbatch")), ids=lambda file: file.name)
def test_each_body_is_one_that_bash_reads_and_tells_its_job_before_the_end(file):
    subprocess.run(["bash", "-n", file], check=True)
    assert re.search(r"^#SBATCH --signal=B:USR1@300\b", file.read_text(), re.MULTILINE)


def words_of(command, after):
    """What torchrun is told, and what ``shardwright train`` is."""
    told = get_args_parser().parse_args(command[1:])
    assert command[0] == "torchrun"
    assert (told.module, told.training_script, told.training_script_args[0]) == (True, "shardwright", "train")
    assert told.shutdown_timeout < after
    return told


def test_the_jobset_is_one_by_its_published_schema_and_its_command_one_of_torchrun():
    """The schema of v1alpha2, and of the pods in it, as Kubeflow publishes it (kubeflow-trainer-api)."""
    if "--shutdown-timeout" not in get_args_parser().format_help():
        pytest.skip("this torch has a torchrun without --shutdown-timeout (docs/launchers.md)")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job_set = yaml.safe_load((DEPLOY / "kubernetes-jobset.yaml").read_text())
    read = models.JobsetV1alpha2JobSet.from_dict(job_set)
    assert read.to_dict() == job_set  # what the schema doesn't know would be lost
    (nodes,) = job_set["spec"]["replicatedJobs"]
    job = nodes["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    told = words_of(container["command"], pod["terminationGracePeriodSeconds"])
    head = f"{job_set['metadata']['name']}-{nodes['name']}-0-0.{job_set['metadata']['name']}"
    assert told.rdzv_endpoint.split(":")[0] == head
    assert int(told.nnodes) == job["parallelism"] == job["completions"]
    assert int(told.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert "--resume=auto" in told.training_script_args  # new pods have no count of restarts


@pytest.mark.slow
def test_the_line_of_skypilot_trains_and_goes_on_when_it_is_run_again(folder):
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    (folder / "recipes").mkdir()
    variables = {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    (mount,) = task["volumes"]
    line = task["run"].replace(f"{mount}/", f"{folder}{mount}/")
    for steps, said in ((3, "ranks: 2 on cpu"), (5, "goes on after step 3 of 5")):
        text = RECIPE.format(text=folder / "text").replace("steps = 40", f"steps = {steps}")
        (folder / "recipes" / "quickstart.toml").write_text(text)
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def follow_ray(rank, world, config):
    return [ray_train.train(config), ray_train.train({**config, "steps": 70})]


def test_the_loop_of_ray_train_saves_and_goes_on(tmp_path):
    assert run_ranks(2, follow_ray, {"folder": str(tmp_path), "steps": 60}) == [[60, 70]] * 2
    assert latest(tmp_path) == tmp_path / "step-000070"
