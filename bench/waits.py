"""Whether the ledger of waits finds what made steps slow: causes put into real ranks at random.

    python -m bench.waits        200 trials; as root, with iproute2 and cgroups

Three ranks, each in a network namespace and a CPU cgroup of its own, train a small Transformer over TCP. A
trial is a few steps as they are, then a few in which one cause, or two at once, makes ranks slow:

    data                  one rank's data loader sleeps
    CPU quota             one rank's cgroup gets less than it needs
    link                  `tc` gives what one rank sends a lower rate
    garbage collection    one rank calls gc.collect() over many objects
    paging                one rank's forward reads pages of a file that aren't in memory
    checkpoint            all ranks save after each step, and one rank's disk is slow

The ledger of the slow steps is right where its first loss names the cause and the rank, or its first two do,
the larger one first. Which is larger was measured apart from the ledger: what the cause took on its rank, and
of a link, which compute and the other cause may hide, how much longer steps were than without it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.links import DEVICE, LinkError, Place, Shape, places, reshape
from bench.quotas import Quota, cgroups
from bench.toy import add_toy
from bench.waits_rank import AS_IS, Order
from bench.waits_rank import main as rank_main
from shardwright.observe.ledger.causes import CHECKPOINT, CORES, DATA, GARBAGE, LINK, PAGING, QUOTA, REST
from shardwright.observe.ledger.ledger import booked, table
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.rings import load

WORLD, WARM, SLOW, LEFT_OUT = 3, 5, 10, 2
CAUSES = (DATA, QUOTA, LINK, GARBAGE, PAGING, CHECKPOINT)
SMALLER_MS = (45.0, 90.0)  # what a cause is to take of a step
LARGER = (1.6, 2.2)  # the larger one of two: so many times that
FREE = Shape("10gbit")


@dataclass(frozen=True)
class Cause:
    """What one rank is to suffer, in milliseconds of a step."""

    name: str
    rank: int
    wanted_ms: float


@dataclass
class Trial:
    """What was done, and what the ledger says of it.

    took_ms: of a step, by cause, as measured apart from the ledger. found: the losses, the largest first, as
    (cause, rank, milliseconds of a step, detail). rest, cores: shares of what nothing recorded, and of busy
    cores. table: of the last step.
    """

    causes: tuple[Cause, ...]
    took_ms: dict[str, float] = field(default_factory=dict)
    found: list[tuple[str, int, float, str]] = field(default_factory=list)
    rest: float = 0.0
    cores: float = 0.0
    step_ms: float = 0.0
    table: str = ""

    def is_right(self, without: Sequence[str] = ()) -> bool:
        """Whether the causes are the first losses, the larger one first. without: losses that don't count."""
        wanted = sorted(self.causes, key=lambda cause: -self.took_ms[cause.name])
        found = [loss for loss in self.found if loss[0] not in without][: len(wanted)]
        return [loss[:2] for loss in found] == [(cause.name, cause.rank) for cause in wanted]

    def __str__(self) -> str:
        done = ", ".join(f"{c.name} of rank {c.rank} {self.took_ms[c.name]:.0f} ms" for c in self.causes)
        found = ", ".join(f"{name} of rank {rank} {ms:.0f} ms {of}" for name, rank, ms, of in self.found[:4])
        return f"{done}; found, of all ranks: {found}"


def drawn(chance: random.Random, causes: Sequence[str]) -> tuple[Cause, ...]:
    """One cause or two, of random ranks, the larger one first."""
    names = chance.sample(list(causes), min(len(causes), chance.choice((1, 2))))
    smaller = chance.uniform(*SMALLER_MS)
    sizes = [smaller * chance.uniform(*LARGER), smaller] if len(names) > 1 else [smaller]
    return tuple(Cause(name, chance.randrange(WORLD), ms) for name, ms in zip(names, sizes, strict=True))


class Ranks:
    """The processes of the ranks: each does what a line of its standard input asks for, and answers."""

    def __init__(self, stack: ExitStack, homes: Sequence[Place], quota: Quota | None, folder: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
        self._processes = []
        for rank, home in enumerate(homes):
            group = "" if quota is None else str(quota.folders[rank])
            # Not by `ip netns exec`, which mounts another /sys, where no cgroups are.
            inside = ["nsenter", f"--net=/run/netns/{home.prefix[-1]}"]
            process = subprocess.Popen(
                [
                    *inside,
                    sys.executable,
                    __file__,
                    "--rank",
                    str(rank),
                    "--folder",
                    folder,
                    "--group",
                    group,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            self._processes.append(process)
            stack.callback(_end, process)

    def ask(self, orders: Sequence[Order]) -> list[dict[str, Any]]:
        """An order for each rank; returns the answers of all."""
        for process, order in zip(self._processes, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(order.dumps() + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"rank {rank} ended: its own output says why")
            answers.append(json.loads(line))
        return answers


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


@dataclass
class Bench:
    """The ranks, what holds them back, and what a step of theirs is like when nothing does."""

    ranks: Ranks
    homes: Sequence[Place]
    quota: Quota | None
    folder: Path
    cpu_ms: list[float] = field(default_factory=lambda: [20.0] * WORLD)
    sent_nbytes: list[float] = field(default_factory=lambda: [1e6] * WORLD)

    def run(self, causes: tuple[Cause, ...]) -> Trial:
        """One trial."""
        before = self.ranks.ask([AS_IS] * WORLD)
        for rank, answer in enumerate(before):
            self.cpu_ms[rank], self.sent_nbytes[rank] = answer["cpu_ms"], answer["sent_nbytes"]
        after = self._slowed(causes, str(self.folder))
        trial = Trial(causes)
        for cause in causes:
            if cause.name == LINK:
                others = tuple(other for other in causes if other is not cause)
                without = self._slowed(others) if others else before
                trial.took_ms[LINK] = _step_ms(after) - _step_ms(without)
            else:
                trial.took_ms[cause.name] = after[cause.rank]["took_ms"][cause.name]
        rings = load(self.folder)
        last = min(ring.steps[-1].number for ring in rings)
        window = range(last - SLOW + LEFT_OUT, last)
        ledger = booked(on_one_clock(rings), window)
        steps, total = len({step for _, step in ledger.seconds}), sum(ledger.seconds.values())
        trial.found = [
            (loss.cause, loss.whose, 1e3 * loss.seconds / steps, loss.detail) for loss in ledger.losses()
        ]
        trial.step_ms = 1e3 * total / len(ledger.seconds)
        trial.rest = sum(line.seconds for line in ledger.lines if line.cause == REST) / total
        trial.cores = sum(line.seconds for line in ledger.lines if line.cause == CORES) / total
        trial.table = table(ledger, last - 1)
        return trial

    def _slowed(self, causes: tuple[Cause, ...], ring: str = "") -> list[dict[str, Any]]:
        """What ranks answer after steps with these causes. ring: a folder for their rings."""
        self._hold_back(causes)
        answers = self.ranks.ask([Order(SLOW, self._own(causes, rank), ring) for rank in range(WORLD)])
        self._let_go(causes)
        return answers

    def _own(self, causes: tuple[Cause, ...], rank: int) -> dict[str, float]:
        """Of the causes those that a rank brings about itself; all ranks save, where one has a slow disk."""
        own = {cause.name: cause.wanted_ms for cause in causes if cause.rank == rank}
        if any(cause.name == CHECKPOINT for cause in causes):
            own.setdefault(CHECKPOINT, 0.0)
        return own

    def _hold_back(self, causes: tuple[Cause, ...]) -> None:
        """Set quotas and rates."""
        for cause in causes:
            if cause.name == QUOTA and self.quota is not None:
                cpu_ms = self.cpu_ms[cause.rank]
                self.quota.set(cause.rank, cpu_ms / (cpu_ms + cause.wanted_ms))
            elif cause.name == LINK:
                bits_per_s = 8e3 * self.sent_nbytes[cause.rank] / cause.wanted_ms
                reshape(self.homes[cause.rank], Shape(f"{int(bits_per_s)}bit"), "16k")

    def _let_go(self, causes: tuple[Cause, ...]) -> None:
        for cause in causes:
            if cause.name == QUOTA and self.quota is not None:
                self.quota.set(cause.rank, None)
            elif cause.name == LINK:
                reshape(self.homes[cause.rank], FREE)


def _step_ms(answers: Sequence[dict[str, Any]]) -> float:
    return median(answer["step_ms"] for answer in answers)


@contextmanager
def started() -> Iterator[Bench]:
    """Ranks that have made their first steps. Raises: LinkError where links can't be shaped."""
    with ExitStack() as stack:
        homes = stack.enter_context(places("10gbit", WORLD))
        quota = stack.enter_context(cgroups(WORLD))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwright-waits-"))
        bench = Bench(Ranks(stack, homes, quota, folder), homes, quota, Path(folder, "rings"))
        bench.ranks.ask([Order(2 * WARM, {})] * WORLD)
        yield bench


def interval(right: int, number: int) -> tuple[float, float]:
    """Wilson's, of 95%, for a share."""
    z, share = 1.96, right / number
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def report(trials: Sequence[Trial]) -> str:
    """The table: of each cause alone, of each in pairs, and of all."""
    rows: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        is_pair = len(trial.causes) > 1
        for cause in trial.causes:
            rows[f"{cause.name}, {'one of two' if is_pair else 'alone'}"].append(trial)
    alone, pairs = ([trial for trial in trials if len(trial.causes) == number] for number in (1, 2))
    said = {**dict(sorted(rows.items())), "all alone": alone, "all pairs": pairs, "all": list(trials)}
    lines = ["| cause | trials | right | share, and its 95% interval |", "| --- | ---: | ---: | ---: |"]
    for name, of in said.items():
        if of:
            right = sum(trial.is_right((CORES,)) for trial in of)
            low, high = interval(right, len(of))
            share = f"{right / len(of):.0%} ({low:.0%} to {high:.0%})"
            lines.append(f"| {name} | {len(of)} | {right} | {share} |")
    counted, rest = sum(trial.is_right() for trial in trials), [trial.rest for trial in trials]
    step_ms, cores = median(trial.step_ms for trial in trials), median(trial.cores for trial in trials)
    lines += ["", f"Losses to busy cores are left out; with them {counted} of {len(trials)} are right."]
    lines.append(f"A step took {step_ms:.0f} ms, {cores:.1%} of it busy cores (medians).")
    lines.append(f"The rest was {median(rest):.2%} of it in the median, and at most {max(rest):.2%}.")
    return "\n".join(lines)


def main() -> None:
    """Parse, run, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=CAUSES)
    parser.add_argument("--show", action="store_true", help="each trial, with the table of its last step")
    for name in ("rank", "folder", "group"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    add_toy(parser, trials=2)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(int(options.rank), WORLD, options.folder, options.group)
        return
    chance, trials = random.Random(options.seed), []
    try:
        with started() as bench:
            causes = [name for name in options.causes if name != QUOTA or bench.quota is not None]
            if len(causes) < len(options.causes):
                print("no CPU cgroup can be made here: trials have no CPU quota")
            began = time.monotonic()
            for number in range(options.trials):
                trial = bench.run(drawn(chance, causes))
                trials.append(trial)
                is_right = trial.is_right((CORES,))
                if options.show or not is_right:
                    print(f"trial {number}, {'right' if is_right else 'wrong'}: {trial}", flush=True)
                if options.show:
                    print(trial.table, flush=True)
            print(f"{options.trials} trials of seed {options.seed}, {time.monotonic() - began:.0f} s")
    except LinkError as error:
        raise SystemExit(str(error)) from error
    print(report(trials))


if __name__ == "__main__":
    main()
