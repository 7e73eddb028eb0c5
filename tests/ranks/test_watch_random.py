"""Many steps in which each rank skips, repeats and reorders what it likes, and one fault at the end.

All of it is drawn at random: the parts that a rank runs in a step, in which order, its evaluations, whether
it comes late; who errs in the end, how and where. A few runs by default; as many as asked for by
SHARDWRIGHT_FAULT_RUNS=10 SHARDWRIGHT_FAULT_STEPS=1000 SHARDWRIGHT_FAULT_SEED=1.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard
from shardwright.transport.process import process_state
from tests.ranks.faults import Layer, bad_batch
from tests.ranks.scripts import fault, run_scripts

RUNS = int(os.environ.get("SHARDWRIGHT_FAULT_RUNS", "2"))
STEPS = int(os.environ.get("SHARDWRIGHT_FAULT_STEPS", "40"))
SEED = int(os.environ.get("SHARDWRIGHT_FAULT_SEED", "0"))
NUM_PARTS = 4
DIM = 8


class Skipping(nn.Module):
    """Runs the parts that it is told to, in that order, between two that always run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fully_shard(Layer(DIM))
        self.parts = nn.ModuleList(fully_shard(Layer(DIM)) for _ in range(NUM_PARTS))
        self.last = fully_shard(Layer(DIM))

    def forward(self, x: torch.Tensor, route: Sequence[int]) -> torch.Tensor:
        x = self.first(x)
        for part in route:
            x = x + torch.tanh(self.parts[part](x))
        return self.last(x)


class Steps:
    """One rank's steps, drawn from a seed of its own."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.model = fully_shard(Skipping())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def route(self) -> list[int]:
        """Any parts in any order; the same one twice now and then."""
        route = self.chance.sample(range(NUM_PARTS), self.chance.randint(0, NUM_PARTS))
        return route + route[:1] if self.chance.random() < 0.1 else route

    def loss(self) -> torch.Tensor:
        """Of one forward."""
        return self.model(torch.randn(2, DIM), self.route()).square().mean()

    def take(self) -> None:
        """A step, with as many evaluations before it as this rank likes."""
        if self.chance.random() < 0.05:
            time.sleep(self.chance.random() * 0.02)
        with torch.no_grad():
            for _ in range(self.chance.choice((0, 0, 0, 1, 2))):
                self.model(torch.randn(1, DIM), self.route())
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def in_a_module(act: Callable[[], object], steps: Steps) -> None:
    """From now on one of the modules that always run does ``act()`` first."""
    module = steps.chance.choice((steps.model.first, steps.model.last))
    module.act = act


def in_the_backward(steps: Steps) -> None:
    """Take a step whose backward raises."""
    loss = steps.loss()
    loss.register_hook(lambda grad: bad_batch())
    loss.backward()


def without_a_backward(steps: Steps) -> None:
    """Leave out a backward."""
    steps.loss()


def killed() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[str, tuple[str, Callable[[Steps], None]]] = {
    "raise": ("RankFailed", partial(in_a_module, bad_batch)),
    "raise-in-backward": ("RankFailed", in_the_backward),
    "exit": ("RankFailed", partial(in_a_module, lambda: exec("raise SystemExit(3)"))),
    "kill": ("RankLost", partial(in_a_module, killed)),
    "barrier": ("Diverged", partial(in_a_module, dist.barrier)),
    "no-backward": ("Diverged", without_a_backward),
}


@dataclass(frozen=True)
class Run:
    """One run: its seed, who errs, and how."""

    seed: int
    culprit: int
    end: str

    def __call__(self, rank: int, world: int) -> None:
        steps = Steps(self.seed * world + rank)
        for _ in range(STEPS):
            steps.take()
        assert process_state.diagnosis is None
        fault()
        if rank == self.culprit:
            ENDS[self.end][1](steps)
        for _ in range(3):
            steps.take()


def drawn() -> list[Run]:
    """The runs of this seed: every kind of end before any comes twice."""
    chance, left = random.Random(SEED), list[str]()
    runs = []
    for _ in range(RUNS):
        left = left or chance.sample(sorted(ENDS), len(ENDS))
        runs.append(Run(chance.randrange(10**6), chance.randrange(3), left.pop()))
    return runs


@pytest.mark.parametrize("run", drawn(), ids=lambda run: f"{run.seed}-{run.end}-on-{run.culprit}")
@pytest.mark.slow
def test_after_many_steps_of_random_skips_the_one_fault_is_named(run):
    outcomes = run_scripts(3, run, limit_s=60.0 + STEPS * 0.3)
    for rank, outcome in enumerate(outcomes):
        if rank != run.culprit:
            assert outcome.error == ENDS[run.end][0], (rank, outcome)
            assert f"rank {run.culprit}" in outcome.text, outcome.text
