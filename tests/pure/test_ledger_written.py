"""The ledger of random rings, as text (fixtures/ledger.txt). Times are on a grid, so that many are equal.

Where the ledger is to be another one: ``python -m tests.pure.test_ledger_written`` writes the text again.
"""

import random
from pathlib import Path

import pytest

from shardwright.observe.ledger import lateness
from shardwright.observe.ledger.late import late_ranks
from shardwright.observe.ledger.ledger import booked, summary, table
from shardwright.observe.ledger.slow_links import slow_links
from shardwright.observe.steps.rings import CoreUse, Record, RecordedStep, Ring

TEXT = Path(__file__).parent / "fixtures/ledger.txt"
GRID_S = 2.0**-12
SEEDS = range(16)
TILES = (("compute", ""), ("span", "data"), ("span", "save"), ("outside", "user"), ("runtime", "F+"))


class Drawn:
    """Ranks whose records are drawn: what they do, what they launch and wait for, what keeps them from it."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.world = 1 + seed % 4
        self.now = [self.draw.randint(0, 3) for _ in range(self.world)]
        self.records = [[] for _ in range(self.world)]
        self.steps = [[] for _ in range(self.world)]
        self.link = [self.draw.choice((1, 1, 2, 9)) for _ in range(self.world)]
        number = 0
        for step in range(1, 5):
            begun = list(self.now)
            for _ in range(4):
                number += 1
                self.collective(step, number, self.draw.choice((0, 1024)))
            for rank in range(self.world):
                self.tiles(rank, step)
                self.steps[rank].append(RecordedStep(step, begun[rank] * GRID_S, self.now[rank] * GRID_S))

    def add(self, rank, step, kind, action, start, end, **more):
        more = {"issue": start, **more}
        times = {name: more.pop(name) * GRID_S for name in ("issue", "link_s") if name in more}
        groups, note = more.pop("groups", ()), self.draw.choice(("", "train.py:7"))
        record = Record(
            kind, action, groups, step, "forward", more.pop("nbytes", 0), times["issue"], start * GRID_S,
            end * GRID_S, note=note, link_s=times.get("link_s", 0.0), **more,
        )  # fmt: skip
        self.records[rank].append(record)

    def tiles(self, rank, step):
        for _ in range(self.draw.randint(0, 3)):
            start, took = self.now[rank], self.draw.choice((0, 1, 1, 2, 4, 8, 16))
            kind, action = self.draw.choice(TILES)
            self.now[rank] += took
            self.add(rank, step, kind, action, start, start + took, groups=("g",) * (kind == "compute"))
            if took > 1 and self.draw.random() < 0.3:
                begin = start + self.draw.randint(0, took)
                self.add(rank, step, "gc", "", begin, begin + self.draw.randint(0, 6))

    def collective(self, step, number, nbytes):
        issues = []
        for rank in range(self.world):
            self.tiles(rank, step)
            issues.append(self.now[rank])
            self.tiles(rank, step)
        for rank in range(self.world):
            others = [peer for peer in range(self.world) if peer != rank]
            took = {peer: max(self.link[peer], self.link[rank]) + self.draw.randint(0, 1) for peer in others}
            end = max([issues[rank], *(max(issues) + took[peer] for peer in others)])
            start = self.now[rank]
            place = {"transport": "axis", "number": number, "issue": issues[rank], "nbytes": nbytes}
            slowest = max(others, key=took.__getitem__, default=rank)
            ends = self.draw.choice(((slowest, rank), (rank,), ())) if others else ()
            more = {"link": ends, "link_s": max(took.values(), default=0), "groups": ("g",)} if ends else {}
            self.add(rank, step, "collective", "all-gather", issues[rank], end, met=True, **place, **more)
            if end >= start:
                more = {"link": (slowest, rank), "link_s": self.draw.randint(0, 3)} if ends else {}
                ended = end + self.draw.randint(0, 1)
                self.now[rank] = ended + self.draw.randint(0, 1)
                self.add(rank, step, "runtime", "F+", start, self.now[rank])
                self.add(rank, step, "wait", "all-gather", start, ended, **place, **more)

    def cores(self, rank):
        found, at = [], self.draw.randint(0, 4)
        while at < self.now[rank]:
            took = self.draw.choice((8, 16))
            ran = self.draw.randint(0, took)
            queued = self.draw.randint(0, took - ran)
            faults, others = self.draw.choice((0, 0, 1, 40)), self.draw.choice((0, 0, 4))
            counted = (at, at + took, ran, queued), (others, self.draw.choice((0, 0, 8)))
            start, end, ran, queued, others, stopped = (each * GRID_S for part in counted for each in part)
            if self.draw.random() < 0.5:
                found.append(CoreUse(start, end, ran, queued, faults, others, stopped))
            at += took
        return tuple(found)

    def rings(self):
        return [
            Ring(
                rank, self.world, f"node{rank}", {"axis": tuple(range(self.world))},
                [*self.steps[rank], RecordedStep(5, self.now[rank] * GRID_S, self.now[rank] * GRID_S)],
                sorted(self.records[rank], key=lambda each: each.start), [], [], self.cores(rank),
            )
            for rank in range(self.world)
        ]  # fmt: skip


def rounded(numbers):
    return {rank: round(number, 5) for rank, number in numbers.items()}


def text_of(seed):
    """Everything that is said of it, in microseconds."""
    rings = Drawn(seed).rings()
    ledger = booked(rings)
    lines = []
    for rank, step in sorted(ledger.seconds):
        own = [
            f"{line.cause}/{line.whose}/{line.detail} {1e6 * line.seconds:.0f}"
            for line in ledger.of(rank, step)
        ]
        lines.append(f"rank {rank} step {step} {1e6 * ledger.seconds[rank, step]:.0f}: {', '.join(own)}")
    lines += [f"{loss.cause}/{loss.whose}/{loss.detail} {1e6 * loss.seconds:.0f}" for loss in ledger.losses()]
    lines += [
        f"late {rounded(ledger.late())}",
        f"slow {slow_links(rings)}",
        table(ledger, 2),
        summary(ledger),
    ]
    lines += [f"{found.rank} {found.wait.number} {found.text()}" for found in late_ranks(rings)][:12]
    late, shares = lateness.judged(rings, len(rings))
    late = late and late._replace(share=round(late.share, 5))[1:]
    lines.append(f"judged {late} {rounded(shares)}")
    return "\n".join(lines)


def written():
    """By seed the text that is written down."""
    parts = TEXT.read_text().removeprefix("# ").split("\n# ")
    return {int(part.partition("\n")[0]): part.partition("\n")[2].strip("\n") for part in parts}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ledger_of_random_rings_is_the_one_that_is_written_down(seed):
    assert text_of(seed) == written()[seed]


if __name__ == "__main__":
    TEXT.write_text("\n\n".join(f"# {seed}\n{text_of(seed)}" for seed in SEEDS) + "\n")
