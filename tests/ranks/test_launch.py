"""The launcher of ranks on one machine leaves none behind, whatever happens while it starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
