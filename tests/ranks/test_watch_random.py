"""Many steps in which ranks come early and late, and one fault at the end, drawn at random.

A few by default; as many as asked for: SHARDWRIGHT_FAULT_RUNS=10 SHARDWRIGHT_FAULT_STEPS=1000.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.ranks.faults import bad_batch, built, on, step
from tests.ranks.scripts import fault, run_scripts

RUNS = int(os.environ.get("SHARDWRIGHT_FAULT_RUNS", "2"))
STEPS = int(os.environ.get("SHARDWRIGHT_FAULT_STEPS", "50"))
SEED = int(os.environ.get("SHARDWRIGHT_FAULT_SEED", "0"))

ENDS: dict[str, tuple[str, Callable[[], object]]] = {
    "raise": ("RankFailed", bad_batch),
    "exit": ("RankFailed", lambda: exec("raise SystemExit(3)")),
    "kill": ("RankLost", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "barrier": ("Diverged", dist.barrier),
}


@dataclass(frozen=True)
class Run:
    """One run: its seed, who errs, and how."""

    seed: int
    culprit: int
    end: str

    def __call__(self, rank: int, world: int) -> None:
        chance = random.Random(self.seed * world + rank)
        model = built()
        for number in range(STEPS):
            if chance.random() < 0.05:
                time.sleep(chance.random() * 0.02)
            if number % 10 == 9:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(1, 8))
                model.train()
            step(model)
        fault()
        if rank == self.culprit:
            on(model, ENDS[self.end][1])
        for _ in range(3):
            step(model)


def drawn() -> list[Run]:
    """The runs of this seed."""
    chance = random.Random(SEED)
    return [
        Run(chance.randrange(10**6), chance.randrange(1, 3), chance.choice(list(ENDS))) for _ in range(RUNS)
    ]


@pytest.mark.parametrize("run", drawn(), ids=lambda run: f"{run.end}-on-{run.culprit}")
def test_after_many_uneven_steps_the_one_fault_is_named(run):
    outcomes = run_scripts(3, run, limit_s=60.0 + STEPS * 0.2)
    for rank, outcome in enumerate(outcomes):
        if rank != run.culprit:
            assert outcome.error == ENDS[run.end][0], (rank, outcome)
            assert f"rank {run.culprit}" in outcome.text
