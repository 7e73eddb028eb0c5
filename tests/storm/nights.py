"""Nights with the engine: a job trains, saves, is hurt in some way and started again, all by a seed.

Every number is an integer that a double holds exactly, so what the ranks have is compared with the sums of
one process, not with a tolerance.
"""

import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright import MixedPrecisionPolicy, SchedulePolicy, fully_shard
from shardwright.checkpoint import latest, load, save
from shardwright.errors import ShardwrightError
from shardwright.transport.mesh import default_mesh
from shardwright.transport.process import process_state
from tests.storm.job import SWAPPED, Gloo, Job, simulated
from tests.storm.network import Network
from tests.storm.sim import Process, Simulation

UNIT = 840
"""Inputs are multiples of it, so that a mean over 1 to 8 ranks is an integer, too."""
PATIENCE_S = 5.0
"""In which a process that has ended is found (docs/watch.md)."""
LAUNCHER_S = 20.0
"""After which the launcher of a job ends its other ranks, where one has ended."""
LOST_S = 40.0
"""In which a host that went dark is: ``lost_s`` and ten seconds."""


class BadBatch(Exception):
    """What a user's script raises."""


class Block(nn.Module):
    """Adds ``w . x``: its gradient is ``x``, whatever the weights are."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h + (self.w * x).sum()


class Model(nn.Module):
    """Runs the blocks that it is told to, in that order."""

    def __init__(self, plan: "Plan") -> None:
        super().__init__()
        *widths, width = plan.widths
        self.w = nn.Parameter(torch.zeros(width, dtype=plan.dtype))
        self.blocks = nn.ModuleList(Block(width, plan.dtype) for width in widths)

    def forward(self, xs: Sequence[torch.Tensor], route: Sequence[int]) -> torch.Tensor:
        h = (self.w * xs[-1]).sum()
        for block in route:
            h = self.blocks[block](h, xs[block])
        return h


@dataclass(frozen=True)
class Fault:
    """What goes wrong in an attempt: with which rank, at which of its events or steps, for how long."""

    kind: str = "none"
    rank: int = 0
    events: int = 0
    seconds: float = 0.0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.kind} (rank {self.rank}, event {self.events}, step {self.step}, {self.seconds:g} s)"


@dataclass(frozen=True)
class Plan:
    """What a seed draws: the model, its schedule, the steps of each rank, the network, and what goes wrong.

    worlds: of each attempt the hosts of its ranks. uniform: how often ranks run the same. every: steps
    between saves. keeps_store: all attempts have one store. network: see ``Network``. faults: one of each
    attempt. copies: of the model, each sharded over as many ranks, where that divides the world; over_all:
    over all of them. dtype: of the parameters; of any other than float64 gradients travel in that.
    """

    seed: int
    widths: list[int]
    policy: SchedulePolicy
    reshard: list[bool | int | None]
    steps: int
    every: int
    worlds: list[list[str]]
    uniform: float
    evaluations: float
    microbatches: int
    momentum: float
    keeps_store: bool
    network: tuple[float, float, float]
    faults: list[Fault]
    frozen: list[tuple[int, int]]
    copies: int = 1
    over_all: bool = False
    dtype: torch.dtype = torch.float64

    def copies_in(self, world: int) -> int:
        return self.copies if world % self.copies == 0 else 1

    def is_frozen(self, group: int, step: int) -> bool:
        first, end = self.frozen[group] if group < len(self.frozen) else (0, 0)  # the root is always trained
        return first <= step < end


FAULTS = ("none", "kill", "stop", "cut", "raise", "silent store", "leave", "kill two", "interrupt", "dark")


def drawn(seed: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"plan {seed}")
    num_blocks = chance.randint(1, 4)
    worlds = []
    for _ in range(chance.choice((1, 2, 2, 3))):
        world = chance.choice((2, 2, 2, 3, 3, 4, 5, 8))
        num_hosts = chance.choice((1, 2, 3))
        worlds.append([f"host {chance.randrange(num_hosts)}" for _ in range(world)])
    policy = SchedulePolicy(
        backward_prefetch=chance.choice(("none", "pre", "post")),
        forward_prefetch=chance.random() < 0.5,
        depth=chance.randint(0, 3),
        max_reductions=chance.randint(1, 3),
        keep_last=chance.randint(0, 2),
        bucket_cap_mb=chance.choice((0.0, 1.0)),
    )
    steps = chance.choice((6, 12, 25))
    faults = [
        Fault(
            "none" if number == len(worlds) - 1 and number else chance.choice(FAULTS),
            chance.randrange(len(hosts)),
            int(10 ** chance.uniform(0.5, 3.6)),
            chance.choice((0.3, 2.0, 8.0, 50.0)),
            chance.randrange(steps),
        )
        for number, hosts in enumerate(worlds)
    ]
    widths = [chance.randint(1, 9) for _ in range(num_blocks + 1)]
    reshard: list[bool | int | None] = [chance.choice((True, False, None)) for _ in range(num_blocks + 1)]
    mesh = random.Random(f"mesh {seed}")  # of its own, so that all else of a seed is drawn as before
    copies = mesh.choice((1, 1, 2))
    for group in range(num_blocks + 1):
        if mesh.random() < 0.2:
            reshard[group] = mesh.choice((2, 3))
    plan = Plan(
        seed,
        widths,
        policy,
        reshard,
        steps=steps,
        every=chance.randint(2, 5),
        worlds=worlds,
        uniform=chance.choice((0.0, 0.5, 1.0)),
        evaluations=chance.choice((0.0, 0.3)),
        microbatches=chance.randint(1, 3),
        momentum=chance.choice((0.0, 0.5)),
        keeps_store=chance.random() < 0.5,
        network=(
            chance.choice((0.0, 2e-5, 5e-4)),
            chance.choice((0.0, 1.0, 10.0)),
            chance.choice((float("inf"), 1e9, 1e6)),
        ),
        faults=faults,
        frozen=[
            (begin := chance.randrange(steps), begin + chance.randint(1, 8))
            if chance.random() < 0.3
            else (0, 0)
            for _ in range(num_blocks)
        ],
        copies=copies,
        over_all=copies > 1 and mesh.random() < 0.4,
    )
    # A float32 holds the integers, but no halves of halves.
    is_mixed = not plan.momentum and random.Random(f"dtype {seed}").random() < 0.5
    return replace(plan, dtype=torch.float32) if is_mixed else plan


def with_a_flipped_bit(plan: Plan) -> Plan:
    """That plan with one bit flipped on the way between two ranks, and nothing else wrong."""
    chance = random.Random(f"flip {plan.seed}")
    faults = [Fault("flip", events=int(10 ** chance.uniform(3, 6))) for _ in plan.worlds]
    return replace(plan, faults=faults)


class Night:
    """Attempts of one job on one folder, one after the other. truth: the weights after each step, as one
    process has them, with the optimizer's state."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(
            tempfile.mkdtemp(prefix="storm-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        zeros = [[0] * width for width in self.plan.widths]
        self.truth: dict[int, tuple[list[list[float]], list[Any]]] = {0: (zeros, [None] * len(zeros))}
        self.saved: list[int] = []
        self.waits: list[tuple[str, float, float]] = []
        self.keys: dict[str, bytes] = {}
        self.began: list[str] = []
        self.history: list[tuple[float, str, str]] = []
        self.steps = self.rank_steps = self.switches = self.flips = 0

    # ---- what one process would have

    def batch(self, attempt: int, step: int, rank: int, micro: int) -> tuple[list[int], list[list[int]]]:
        """The route of a rank, and its inputs."""
        chance = random.Random(f"{self.plan.seed} {step} {micro} {attempt} {rank}")
        shared = random.Random(f"{self.plan.seed} {step} {micro} {attempt}")
        num = len(self.plan.widths) - 1
        of = shared if shared.random() < self.plan.uniform else chance
        route = of.sample(range(num), of.randint(0, num))
        if of.random() < 0.1:
            route += route[:1]
        return route, [[UNIT * chance.randint(-3, 3) for _ in range(width)] for width in self.plan.widths]

    def after(self, attempt: int, step: int) -> list[list[float]]:
        """The weights after that many steps, of which this attempt made the last."""
        if step not in self.truth:
            weights, momenta = self.truth[step - 1]
            self.truth[step] = self._stepped(attempt, step - 1, weights, momenta)
        return self.truth[step][0]

    def _stepped(self, attempt: int, step: int, weights: Any, momenta: Any) -> tuple[Any, Any]:
        world, momentum = len(self.plan.worlds[attempt]), self.plan.momentum
        sums: list[Any] = [None] * len(weights)
        for rank in range(world):
            for micro in range(self.plan.microbatches):
                route, xs = self.batch(attempt, step, rank, micro)
                for group in (*route, len(weights) - 1):
                    if self.plan.is_frozen(group, step):
                        continue
                    before = sums[group] or [0] * len(xs[group])
                    sums[group] = [a + b for a, b in zip(before, xs[group], strict=True)]
        after, moved = [], []
        for weight, total, before in zip(weights, sums, momenta, strict=True):
            if total is None:
                after.append(weight)
                moved.append(before)
                continue
            mean = [value / world for value in total]
            if momentum and before is not None:
                mean = [momentum * a + b for a, b in zip(before, mean, strict=True)]
            after.append([a - b for a, b in zip(weight, mean, strict=True)])
            moved.append(mean if momentum else None)
        return after, moved

    # ---- what a rank does

    def script(self, attempt: int, rank: int, world: int) -> int:
        """A training script. Returns the step that it came to."""
        plan = self.plan
        process_state.transport = "sockets"
        own: Process = self.sim.here
        model = Model(plan)
        copies = plan.copies_in(world)
        options: dict[str, Any] = {}
        if plan.dtype != torch.float64:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        if copies > 1:
            options |= {"mesh": default_mesh(world // copies), "shard_over_all": plan.over_all}
        for module, reshard in zip([*model.blocks, model], plan.reshard, strict=True):
            if type(reshard) is int and (options.get("shard_over_all") or world // copies % reshard):
                reshard = True  # there is no such smaller world
            fully_shard(module, reshard_after_forward=reshard, **options)
        model.set_schedule_policy(plan.policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=plan.momentum)
        began = 0
        if attempt and latest(self.folder) is not None:
            began = load(self.folder, model=model, optimizer=optimizer).step
        if rank == 0:
            self.truth = {step: value for step, value in self.truth.items() if step <= began}
        self.began.append(f"attempt {attempt} begins at step {began}")
        self.check(model, attempt, rank, world, began)
        fault = plan.faults[attempt]
        for step in range(began, plan.steps):
            own.step = step
            if fault.kind == "raise" and (fault.rank, fault.step) == (rank, step):
                self.sim.note("raises in its script")
                self.begins_fault(self.sim)
                raise BadBatch("bad batch")
            if fault.kind == "leave" and (fault.rank, fault.step) == (rank, step):
                self.sim.note("ends early")
                self.begins_fault(self.sim)
                return step
            chance = random.Random(f"{plan.seed} {attempt} {rank} {step}")
            for number, block in enumerate(model.blocks):
                block.w.requires_grad_(not plan.is_frozen(number, step))
            while chance.random() < plan.evaluations:
                self.evaluate(model, attempt, step, chance)
            for micro in range(plan.microbatches):
                last = micro == plan.microbatches - 1
                if plan.microbatches > 1:
                    model.set_requires_gradient_sync(last)
                route, xs = self.batch(attempt, step, rank, micro)
                out = model([torch.tensor(x, dtype=torch.float64) for x in xs], route)
                assert out.item() == self.output(attempt, step, route, xs), "a forward is wrong"
                if chance.random() < 0.2:
                    self.sim.sleep(chance.choice((1e-4, 1e-2, 1.0)))
                out.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.rank_steps += 1
            self.steps += rank == 0
            self.check(model, attempt, rank, world, step + 1)
            if (step + 1) % plan.every == 0:
                save(self.folder, model=model, optimizer=optimizer, step=step + 1, keep=2)
                if rank == 0:
                    self.saved.append(step + 1)
        model.join_evaluations()
        return plan.steps

    def evaluate(self, model: Any, attempt: int, step: int, chance: random.Random) -> None:
        """An evaluation that this rank may do alone."""
        num = len(self.plan.widths) - 1
        route = chance.sample(range(num), chance.randint(0, num))
        xs = [[UNIT * chance.randint(-3, 3) for _ in range(width)] for width in self.plan.widths]
        with torch.no_grad():
            out = model([torch.tensor(x, dtype=torch.float64) for x in xs], route)
        assert out.item() == self.output(attempt, step, route, xs), "an evaluation is wrong"

    def output(self, attempt: int, step: int, route: Sequence[int], xs: Sequence[Sequence[int]]) -> float:
        weights = self.after(attempt, step)
        groups = (*route, len(weights) - 1)
        return sum(sum(a * b for a, b in zip(weights[g], xs[g], strict=True)) for g in groups)

    def check(self, model: nn.Module, attempt: int, rank: int, world: int, step: int) -> None:
        """This rank's shards are those of one process."""
        weights = self.after(attempt, step)
        copies = self.plan.copies_in(world)
        num, place = world // copies, rank % (world // copies)
        if self.plan.over_all:
            num, place = world, place * copies + rank // num
        for param, whole in zip((*(b.w for b in model.blocks), model.w), weights, strict=True):
            size = -(-len(whole) // num)
            own = whole[place * size : (place + 1) * size]
            found = param.to_local().tolist()  # type: ignore[attr-defined]
            assert found == own, f"rank {rank} has {found} after step {step}, {own} is right"

    # ---- the night

    def run(self) -> None:
        """Raises: AssertionError, for what must not be."""
        try:
            for attempt, hosts in enumerate(self.plan.worlds):
                self._attempt(attempt, hosts)
                self._check_folder()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _attempt(self, attempt: int, hosts: list[str]) -> None:
        sim = self.sim = Simulation(
            self.plan.seed * 10 + attempt, [(owner, name) for owner, name, _ in SWAPPED]
        )
        network = Network(sim, *self.plan.network)
        gloo = Gloo(sim, network)
        fault = self.plan.faults[attempt]
        with simulated(sim, network, gloo):
            job = Job(sim, network, hosts)
            if self.plan.keeps_store:  # as torchrun's agent does, which starts the ranks again
                job.store.keys = self.keys
            self.fault_s, self.is_promised = float("inf"), False
            self._arm(sim, network, job, fault)
            job.start(partial(self.script, attempt))
            try:
                sim.run()
            finally:
                self.history += [
                    (0.0, "", f"--- attempt {attempt}: {len(hosts)} ranks, {fault}"),
                    *sim.history,
                ]
                self.switches += sim.switches
        self._judge(job, fault)

    def begins_fault(self, sim: Simulation) -> None:
        """From now on something is wrong. How soon it must be told is promised for ranks that have begun."""
        self.fault_s = sim.now
        self.is_promised = all(hasattr(process, "step") for process in sim.processes[1:])

    def _arm(self, sim: Simulation, network: Network, job: Job, fault: Fault) -> None:
        """What is to go wrong, does so at its event."""
        victim, kind, seconds = job.ranks[fault.rank], fault.kind, fault.seconds

        def now() -> None:
            self.begins_fault(sim)
            if kind in ("kill", "kill two", "interrupt"):
                sim.at(sim.now + LAUNCHER_S, lambda: self._end_all(job))
            if kind in ("kill", "kill two"):
                victim.end("killed")
                if kind == "kill two":
                    job.ranks[fault.rank - 1].end("killed")
            elif kind == "stop":
                victim.stop(seconds)
            elif kind == "cut":
                network.part(victim.host, set(job.hosts))
                sim.at(sim.now + seconds, network.join)
            elif kind == "interrupt":
                sim.note("is interrupted", victim)
                victim.interrupt = True
            elif kind == "dark":
                for process in sim.processes:
                    if process.host == victim.host:
                        process.end("its host has lost its power", is_dark=True)
                network.part(victim.host, set(job.hosts))
            elif kind == "silent store":
                sim.note(f"the store is silent for {seconds} s")
                job.store.silent_until = sim.now + seconds
                sim.at(sim.now + seconds, sim.look_at_all)

        def flipped() -> None:
            self.flips += 1
            self.begins_fault(sim)

        if kind == "flip":
            network.flip_at, network.on_flip = fault.events, flipped
        elif kind in ("raise", "leave"):
            victim.on_end = lambda: sim.at(sim.now + LAUNCHER_S, lambda: self._end_all(job))
        elif kind != "none":
            victim.on_event = fault.events, now

    def _end_all(self, job: Job) -> None:
        """The launcher has seen that a rank is gone, and ends the others; much later than launchers do."""
        for rank, process in enumerate(job.ranks):
            if process.alive:
                job.outcomes[rank] = "ended by the launcher" if hasattr(process, "step") else "not begun"
                process.end("ended by the launcher")

    def _judge(self, job: Job, fault: Fault) -> None:
        kind = fault.kind
        for process in self.sim.processes:
            for name, error in process.errors:
                raise AssertionError(f"{process.name}'s thread {name!r} failed: {error!r}") from error
        outcomes, plan = job.outcomes, self.plan
        wrong = [error for error in outcomes.values() if isinstance(error, AssertionError)]
        if wrong:
            raise wrong[0]
        victims, host = {fault.rank}, job.ranks[fault.rank].host
        if kind == "kill two":
            victims.add((fault.rank - 1) % len(job.ranks))
        elif kind in ("dark", "cut"):
            victims |= {rank for rank, process in enumerate(job.ranks) if process.host == host}
        elif kind == "flip":
            damaged = "with other bits than were sent"
            victims = {rank for rank, each in outcomes.items() if damaged in str(each)}
        happened = self.fault_s < float("inf")
        limit_s = {"dark": LOST_S, "stop": LOST_S, "cut": LOST_S}.get(kind, PATIENCE_S)
        heals = kind in ("stop", "cut", "silent store") and fault.seconds < 30
        for rank, process in enumerate(job.ranks):
            outcome = outcomes.get(rank, "killed")
            if not happened or heals:
                assert outcome == plan.steps, f"rank {rank} of a healthy job: {outcome!r}"
            elif rank in victims and kind != "flip":
                continue
            elif outcome not in (plan.steps, "not begun"):
                assert isinstance(outcome, ShardwrightError), f"rank {rank}: {outcome!r}"
                # Where ranks meet in several groups, who is missed in one may have missed others in another.
                named = {rank, *_named(str(outcome))}
                named |= {each for other in named for each in _named(str(outcomes.get(other, "")))}
                # Before ranks have met, who holds the store (an agent of the first host's) is known by that.
                unmet = 0 in victims and "has not answered for 30 s, since before" in str(outcome)
                assert kind == "silent store" or victims & named or unmet, str(outcome)
                took_s = process.ended_s - self.fault_s
                self.waits.append((kind, took_s, limit_s))
                in_time = not self.is_promised or self.plan.network[0] > 1e-3 or took_s < limit_s
                assert in_time or kind == "silent store", f"rank {rank} took {took_s:.1f} s: {outcome}"

    def _check_folder(self) -> None:
        """What was published loads in a plain process, and is right."""
        found = latest(self.folder)
        newest = 0 if found is None else int(found.name.removeprefix("step-"))
        assert newest >= max((step for step in self.saved if step in self.truth), default=0), (
            newest,
            self.saved,
        )
        if found is None:
            return
        model = Model(self.plan)
        restored = load(self.folder, model=model)
        assert restored.step == newest
        if newest in self.truth:
            for param, whole in zip(
                (*(b.w for b in model.blocks), model.w), self.truth[newest][0], strict=True
            ):
                assert param.tolist() == whole, f"the checkpoint of step {newest} is wrong"


def _named(text: str) -> set[int]:
    """The ranks that an error names."""
    lists = re.findall(r"ranks? \[?([\d, ]+)", text)
    return {int(each) for names in lists for each in re.findall(r"\d+", names)}


def told(history: Sequence[tuple[float, str, str]]) -> str:
    """A history, to be read."""
    return "\n".join(f"{when:12.6f}  {who:8}  {what}" for when, who, what in history)
