"""A model whose parts run in any order, or not at all, per rank and step; and one process beside it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.engine.unit import unit_of, units_in
from tests.ranks.models import Run, assert_same_grads, both_step

WIDTH = 7  # every shard of every world is uneven
TOLERANCE = 1e-10
Route = tuple[str, ...]


class Part(nn.Module):
    """Something that a rank may not need: an expert, an encoder of images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        return x + self.extra.sum() * 0.1 if extra else x


class Routed(nn.Module):
    """Runs the parts that it is told to, in that order: ``"b+"`` is part b with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({name: Part() for name in "abc"})
        self.last = nn.Linear(WIDTH, 2)
        self.recomputes = False

    def forward(self, x: torch.Tensor, route: Sequence[str], detached: Sequence[str] = ()) -> torch.Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for name in route:
            y = self.call(self.parts[name[0]], x, name.endswith("+"))
            total = total + (y.detach() if name in detached else y)
        return self.last(x + total)

    def call(self, part: nn.Module, x: torch.Tensor, extra: bool) -> torch.Tensor:
        """Run a part; recomputed in the backward where ``recomputes`` is set."""
        return checkpoint(part, x, extra, use_reentrant=False) if self.recomputes else part(x, extra)


@dataclass(frozen=True)
class Step:
    """What one rank does in a step: evaluations, then forwards, then one backward through all of them.

    pause_s: how long it sleeps before each of them.
    """

    forwards: tuple[Route, ...]
    evaluations: tuple[Route, ...] = ()
    detached: Route = ()
    pause_s: float = 0.0


Plan = Callable[[int, int, int], Step]
"""Of rank, world and step."""


def built() -> Routed:
    """The same on every rank. In float64, so that rounding hides nothing."""
    torch.manual_seed(5)
    return Routed().double()


def inputs(rank: int, step: int, number: int = 0) -> torch.Tensor:
    """One rank's batch."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, plan: Step, rank: int, step: int) -> torch.Tensor:
    """The loss of a rank's step; what it evaluates first leaves no trace."""
    for number, route in enumerate(plan.evaluations):
        time.sleep(plan.pause_s)
        with torch.no_grad():
            model(inputs(rank, step, 5 + number), route)
    losses = []
    for number, route in enumerate(plan.forwards):
        time.sleep(plan.pause_s)
        losses.append(model(inputs(rank, step, number), route, plan.detached).square().mean())
    time.sleep(plan.pause_s)
    return torch.stack(losses).sum()


@dataclass
class Log:
    """What this rank launched on the transports of a model, in order, those of ``agree`` apart."""

    keys: list[str] = field(default_factory=list)
    agreed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> "Log":
        log = cls()
        for number, comm in enumerate(unit_of(units_in(model)[0].modules[0]).runtime.table.comms()):
            for name in ("all_gather", "reduce_scatter", "exchange"):
                if hasattr(comm, name):
                    setattr(comm, name, log._noting(getattr(comm, name), number))
        return log

    def _noting(self, launch: Callable, number: int) -> Callable:
        def noted(*args):
            kept = self.agreed if args[-1].startswith("agreement") else self.keys
            kept.append(f"{number} {args[-1]}")
            return launch(*args)

        return noted

    @property
    def num_asked(self) -> int:
        """How often the ranks asked each other for what the schedule didn't have."""
        return sum("agreement on 1 integers" in key for key in self.agreed)

    def assert_same_on_all_ranks(self) -> None:
        logs: list = [None] * dist.get_world_size()
        dist.all_gather_object(logs, (self.keys, self.agreed))
        assert all(log == logs[0] for log in logs)


def train_beside_one_process(sharded: nn.Module, plan: Plan, rank: int, world: int, steps: int) -> list[int]:
    """Parity of weights and of which gradients are None; how often this rank asked in each step."""
    ours = Run.of(sharded, lr=0.02, momentum=0.9, weight_decay=0.1)
    theirs = Run.of(built(), lr=0.02, momentum=0.9, weight_decay=0.1)
    log = Log.of(sharded)
    asked = []
    for step in range(steps):
        loss_of(sharded, plan(rank, world, step), rank, step).backward()
        plans = [replace(plan(r, world, step), pause_s=0.0) for r in range(world)]
        losses = [loss_of(theirs.model, its, r, step) for r, its in enumerate(plans)]
        torch.stack(losses).mean().backward()
        assert_same_grads(sharded, theirs.model, TOLERANCE)
        both_step(ours, theirs, TOLERANCE)
        asked.append(log.num_asked)
    log.assert_same_on_all_ranks()
    return [after - before for before, after in zip([0, *asked], asked, strict=False)]
