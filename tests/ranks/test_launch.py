"""The launcher of ranks on one machine leaves none behind, whatever happens while it starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.pool import free_port

LAUNCH = """
import os, signal, subprocess
from shardwright.train import launch

start, launch._GRACE_S = launch._start, 0.2

def then_happens(arguments, place, scratch, variables):
    if place[0] == 2 and {limits!r}:
        launch.subprocess.Popen = refused
    process = start(arguments, place, scratch, variables)
    print(process.pid, flush=True)
    if place[0] == 1 and not {limits!r}:
        os.kill(os.getpid(), signal.{name})
    return process

def refused(*_, **__):
    raise BlockingIOError(11, "Resource temporarily unavailable")

launch._start = then_happens
try:
    launch.launch(["recipe"], 1000)
except launch.LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "limits", "told"),
    [
        ("SIGTERM", False, "SIGTERM came when 2 of 1000 ranks were started; all of them have ended"),
        ("SIGINT", False, "SIGINT came when 2 of 1000 ranks were started; all of them have ended"),
        ("SIGTERM", True, "rank 2 of 1000 can't be started: Resource temporarily unavailable; start fewer "),
    ],
)
def test_a_signal_or_a_limit_while_ranks_are_started_ends_them_all(name, limits, told, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif 'RANK' in os.environ:\n    time.sleep(100)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(name=name, limits=limits)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    *pids, line = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(pids)) == (0, "", 2)
    assert line.startswith(told)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(params=["launched", "torchrun"])
def trained(request, tmp_path):
    """What a run says that has these variables and at most so many files open."""
    (tmp_path / "text.py").write_text("x = 1\n" * 500)
    (tmp_path / "tiny.toml").write_text(TINY)
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **port}

    def run(files=0, **variables):
        command = f"{f'ulimit -n {files};' if files else ''} {sys.executable} -m shardwright train tiny.toml"
        env = {**os.environ, **(alone if request.param == "torchrun" else {}), **variables}
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]

    return run


TINY = """
data = {path = "text.py"}
model = {num_layers = 1, dim = 32, num_heads = 2, hidden_dim = 32}
training = {steps = 2, sequence_length = 16, batch_size = 1}
launch = {ranks = 1}
"""


@pytest.mark.parametrize("trained", ["torchrun"], indirect=True)
def test_too_few_files_that_may_be_open_are_told_with_the_limit(trained):
    assert "has as many files and connections open as it may, 18: raise the limit" in trained(18)


def test_an_interface_that_is_not_there_is_told_with_those_that_are(trained):
    told = trained(GLOO_SOCKET_IFNAME="nope0")
    assert "GLOO_SOCKET_IFNAME=nope0: " in told and "has no interface nope0 with an address" in told
    assert "expected one of lo" in told
