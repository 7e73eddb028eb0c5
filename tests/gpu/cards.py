"""The accelerators of this machine for tests, and jobs on them, of which many share one start of torchrun.

SHARDWRIGHT_TEST_DEVICE=sim runs these tests on CPU ranks that use the transport of accelerators over Gloo.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.prove_gpu.device import SIM, Device

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
NAME = os.environ.get("SHARDWRIGHT_TEST_DEVICE", "accelerator")
CARDS = Device.of(NAME) if NAME == SIM or torch.accelerator.is_available() else None
WORLDS = CARDS.worlds if CARDS and not CARDS.simulated else [2]
"""Numbers of cards that tests are run on."""
NEEDS_CARDS = [
    pytest.mark.gpu,
    pytest.mark.skipif(CARDS is None, reason="no accelerator on this machine"),
]
Jobs = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
Found = dict[str, list[Any] | str]


def run_on_cards(world: int, jobs: Jobs) -> Found:
    """What each rank returns, by a job's name; or the output of the ranks in which it failed.

    jobs: module-level functions, called as ``f(device, rank, world, *arguments)`` one after another on the
    same ranks. After one that failed the others go on with new ranks, as long as there is time.
    """
    ends = time.monotonic() + LIMIT_S
    left = dict(jobs)
    found: Found = dict.fromkeys(left, f"not run: no time was left of {LIMIT_S:.0f} s")
    while left and time.monotonic() < ends:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "jobs").write_bytes(pickle.dumps(left))
            output = _torchrun(world, folder, ends - time.monotonic())
            for name in list(left):
                files = [Path(folder, f"{name}-{rank}") for rank in range(world)]
                ended = all(file.exists() for file in files)
                found[name] = [torch.load(file, weights_only=False) for file in files] if ended else output
                del left[name]
                if not ended:
                    break
    return found


def result(found: Found, name: str) -> list[Any]:
    """What each rank returned. Raises: AssertionError with the ranks' output, where one failed."""
    each = found[name]
    assert not isinstance(each, str), each
    return each


def _torchrun(world: int, folder: str, limit_s: float) -> str:
    """What the ranks print."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    process = subprocess.Popen(
        [sys.executable, *words, "-m", "tests.gpu.cards", folder],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        return f"not ended after {limit_s:.0f} s:\n{process.communicate()[0]}"


def main(folder: Path) -> None:
    """One rank."""
    device = Device.of(NAME)
    device.join()
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, (job, arguments) in pickle.loads((folder / "jobs").read_bytes()).items():
        returned = job(device, rank, world, *arguments)
        device.together()
        torch.save(returned, folder / f"{name}-{rank}.part")
        (folder / f"{name}-{rank}.part").rename(folder / f"{name}-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
