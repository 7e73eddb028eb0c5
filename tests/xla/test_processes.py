"""Several processes over Gloo train one model as plain torch does, and save it."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch

from shardwright.checkpoint import load
from shardwright.xla.files import read
from tests.ranks.pool import free_port
from tests.xla.models import batch, mlp, optimizers, reference_step


def run(processes: int, devices: int, folder, optimizer: str) -> list[list]:
    """What each process printed: its numbers, and the errors that it was told of."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.xla.worker"]
    tail = [str(processes), str(free_port()), str(folder), optimizer]
    started = [
        subprocess.Popen([*command, str(rank), *tail], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module", params=[(1, "adamw"), (2, "sgd")], ids=["1-adamw", "2-sgd"])
def job(request, tmp_path_factory):
    """What two processes have printed: devices of each, optimizer, folder, lines."""
    folder = tmp_path_factory.mktemp("job")
    return *request.param, folder, run(2, request.param[0], folder, request.param[1])


def test_a_process_builds_its_model_without_one_that_is_late(job):
    assert [numbers["built_alone"] for numbers, _ in job[-1]] == [True, True]


def test_two_processes_train_as_plain_torch_and_resume_bit_equal(job):
    devices, kind, folder, printed = job
    found = [numbers for numbers, _ in printed]
    assert len(printed[0][1]) == 4  # saving and loading, in both formats, on the process that can't
    assert all("failed on process 0" in error for error in printed[1][1])
    assert len(printed[1][1]) == 4
    assert found[0] == found[1]
    assert found[0]["devices"] == 2 * devices
    assert found[0]["again"] == found[0]["losses"][2]
    assert found[0]["rows"] == 4
    plain = mlp()
    _, optimizer = optimizers(kind, plain)
    torch.manual_seed(1)
    for number, loss in enumerate(found[0]["losses"]):
        assert reference_step(plain, optimizer, batch("mlp"), 2 * devices, 0.5) == pytest.approx(
            loss, abs=5e-6
        )
        if number == 1:
            at_two = {name: value.clone() for name, value in plain.state_dict().items()}
    saved = mlp()
    load(folder, model=saved)
    ranks = read(str(folder / "ckpt"))
    assert len(ranks.paths) == 2 * devices
    for name, value in saved.state_dict().items():
        assert torch.equal(value, ranks.model[name])
        assert torch.allclose(value, at_two[name], atol=1e-6)
