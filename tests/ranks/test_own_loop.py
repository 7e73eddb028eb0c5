"""The loop of docs/start.md that goes on, as it stands: a file that is run twice."""

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import latest, load, save
from shardwright.errors import DamagedError
from tests.ranks.pool import run_ranks

START = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
(FILE,) = [block for block in re.findall(r"```python\n(.*?)```", START, re.DOTALL) if "latest(" in block]


def run_twice(rank, world, folder, ports):
    """As torchrun would, in this process: the file makes its own process group."""
    os.chdir(folder)
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    told = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path("mine.py")
        told.append(out.getvalue())
        if dist.is_initialized():
            dist.destroy_process_group()
    return told


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [made.getsockname()[1] for made in sockets]


def loss_at(step, line):
    found = re.fullmatch(rf"step {step}: loss (\d+\.\d+)\n", line)
    assert found, line
    return float(found[1])


def test_it_goes_on_when_it_is_run_again(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    first, second = run_ranks(2, run_twice, str(tmp_path), free_ports(2))[0]
    assert loss_at(200, second) < loss_at(100, first)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-000150", "step-000200"]


def save_damage_load(rank, world, folder):
    """What ``latest`` says before, between and after three saves; then the message of a load of the last, one
    bit of which has turned, and what is loaded once it has another name."""
    model = fully_shard(nn.Linear(6, 5))
    told = [latest(folder / "none"), latest(folder)]
    for step in (1, 2, 3):
        save(folder, model=model, step=step)
        told.append(latest(folder))
    damaged = told[-1]
    if rank == 0:
        file = damaged / "shard-00001.safetensors"
        read = file.read_bytes()
        file.write_bytes(read[:-1] + bytes([read[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(DamagedError) as caught:
        load(folder, model=model)
    dist.barrier()
    if rank == 0:
        damaged.rename(folder / "damaged")
    dist.barrier()
    return told, str(caught.value), load(folder, model=model).step


def test_a_damaged_checkpoint_names_the_older_ones_and_how_the_next_is_taken(tmp_path):
    steps = [tmp_path / f"step-{step:06d}" for step in (1, 2, 3)]
    for told, message, step in run_ranks(2, save_damage_load, tmp_path):
        assert told == [None, None, *steps]
        assert re.search(r"shard-00001.safetensors: \S+ is damaged", message)
        assert "older complete checkpoints: step-000002, step-000001" in message
        assert f"rename {steps[2]}, and load takes step-000002" in message
        assert step == 2


@pytest.mark.slow
def test_it_goes_on_under_torchrun(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "mine.py"]
    for step in (100, 200):
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        loss_at(step, ran.stdout)
