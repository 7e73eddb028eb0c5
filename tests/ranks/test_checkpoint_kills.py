"""Ranks killed at random moments: what was confirmed stays, what is found is whole, and training goes on.

Eight kills by default; as many as you like, on seeds of your own:

    SHARDWRIGHT_NUM_KILLS=100 SHARDWRIGHT_KILL_SEED=1 pytest -s tests/ranks/test_checkpoint_kills.py
"""

import os
import random
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from shardwright.checkpoint.folder import find
from shardwright.errors import CheckpointError
from tests.ranks.models import filled
from tests.ranks.pool import run_ranks

NUM_KILLS = int(os.environ.get("SHARDWRIGHT_NUM_KILLS", "8"))
SEED = int(os.environ.get("SHARDWRIGHT_KILL_SEED", "0"))
LONGEST_S = 0.25  # a few saves, on an idle machine


@dataclass(frozen=True)
class Kill:
    """Which ranks are killed, and when after their first save has begun."""

    ranks: tuple[int, ...]
    after_s: float


build = partial(filled, width=40_000)


def kill_after(delay_s: float) -> None:
    """SIGKILL at whatever this process then does; by a thread, which can't outlive it as a fork does."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def resume_and_be_killed(rank: int, world: int, path: str, kill: Kill) -> None:
    model = fully_shard(build(-1.0))
    step = load(path, model=model).step
    torch.distributed.barrier()
    if rank in kill.ranks:
        kill_after(kill.after_s)
    try:
        while True:
            step += 1
            for p in model.parameters():
                p.detach().to_local().fill_(float(step))
            save(path, model=model, step=step, keep=2)
            if rank == 0:
                Path(path, "confirming").write_text(str(step))
                os.replace(Path(path, "confirming"), Path(path, "confirmed"))
    except CheckpointError as error:
        assert any(s in str(error) for s in ("lost contact", "have ended")), error


@pytest.mark.slow
def test_ranks_killed_at_random_moments_lose_nothing_that_was_confirmed(tmp_path):
    save(tmp_path, model=build(1.0), step=1)
    chance = random.Random(SEED)
    num_torn, confirmed = 0, 1
    for number in range(NUM_KILLS):
        kill = Kill(chance.choice([(0,), (1,), (0, 1)]), chance.uniform(0, LONGEST_S))
        with pytest.raises(AssertionError, match="died without a report") as died:
            run_ranks(2, resume_and_be_killed, str(tmp_path), kill)
        assert "Traceback" not in str(died.value), died.value
        assert "still running" not in str(died.value), died.value
        num_torn += bool(list(tmp_path.glob(".torn-*")))
        if (tmp_path / "confirmed").exists():
            confirmed = max(confirmed, int((tmp_path / "confirmed").read_text()))
        model = build(-1.0)
        restored = load(tmp_path, model=model)
        what = f"kill {number} of seed {SEED}: {kill}"
        assert restored.step - confirmed in (0, 1), what
        assert {p.unique().item() for p in model.parameters()} == {float(restored.step)}, what
        assert restored.skipped == (), what  # what was torn never had the name of a checkpoint
        confirmed = restored.step  # also where it was published and the rank killed before it said so
    save(tmp_path, model=model, step=restored.step + 1)
    assert find(tmp_path)[0].name == f"step-{restored.step + 1:06d}"
    assert not list(tmp_path.glob(".torn-*"))
    print(f"{NUM_KILLS} kills, {num_torn} left a torn one, {restored.step} steps saved")
