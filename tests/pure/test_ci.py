"""A target of .ci/run that has grown beyond its minutes fails, where the machine was idle."""

import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TIMED = Path(__file__).parents[2] / ".ci" / "timed"


@contextmanager
def pressure(path, share):
    """A file as the kernel's /proc/pressure/cpu, of a machine whose processes wait this share of the time."""
    ended, start = threading.Event(), time.monotonic()

    def keep():
        while not ended.is_set():
            fresh = path.with_suffix(".new")
            total = int((time.monotonic() - start) * 1e6 * share)
            some = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}"
            fresh.write_text(f"{some}\nfull avg10=0.00 total=0\n")
            fresh.replace(path)
            ended.wait(0.05)

    keeper = threading.Thread(target=keep)
    keeper.start()
    while not path.exists():
        time.sleep(0.01)
    yield
    ended.set()
    keeper.join()


def timed(pressure_file, *words):
    env = {"CI_PRESSURE": str(pressure_file), "PATH": "/usr/bin:/bin"}
    return subprocess.run([str(TIMED), *words], env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("share", "minutes", "command", "status"),
    [
        (0, "0.01", "sleep 3", 3),
        (0, "1", "sleep 1", 0),
        (0.5, "0.01", "sleep 3", 0),
        (0, "0.01", "sleep 1; exit 7", 7),
    ],
    ids=["too long", "in time", "too long beside other work", "it failed"],
)
def test_a_target_fails_above_three_times_its_minutes_on_an_idle_machine(
    tmp_path, share, minutes, command, status
):
    with pressure(tmp_path / "cpu", share):
        done = timed(tmp_path / "cpu", minutes, "bash", "-c", command)
    assert done.returncode == status, done
    assert f"min {command[6]} s, stated {minutes} min" in done.stdout
    assert ("more than three times" in done.stderr) == (status == 3)


def test_without_pressure_information_time_is_only_printed(tmp_path):
    done = timed(tmp_path / "none", "0.01", "sleep", "1")
    assert done.returncode == 0
    assert "sleep 1: 0 min 1 s" in done.stdout
