"""Processes of the runs that pictures are of."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0


def start(words: Sequence[str], folder: Path, *, unbuffered: bool = False) -> subprocess.Popen[str]:
    """``python -m WORDS`` in ``folder``, by this Python and with this checkout, one thread a rank.

    Its output and errors are one stream, ``stdout``.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        **({"PYTHONUNBUFFERED": "1"} if unbuffered else {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(job: subprocess.Popen[str], *, fails: bool = False) -> str:
    """What a job has written when it ends. Raises: RuntimeError where it fails and ``fails`` isn't said."""
    try:
        wrote, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    if bool(job.returncode) != fails:
        raise RuntimeError(f"{job.args} ended with {job.returncode}:\n{wrote}")
    return wrote


def children(pid: int) -> list[int]:
    """Of a process that runs, those that it has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
