"""The ledger of a job in which one rank's data come late: what each rank's step went to, by cause."""

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot

from bench.model import Size, build, tokens
from bench.pictures.ranks import finished, start
from shardwright import fully_shard
from shardwright.observe.ledger.causes import NOBODY
from shardwright.observe.ledger.ledger import booked, summary
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.drawing import COLOURS
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.rings import load, write
from shardwright.transport.process import span

WORLD, SLOW, SLOW_S, STEPS, WARM = 3, 1, 0.12, 24, 4
SIZE = Size(layers=4, width=192, vocab=1024, sequence=64, batch=2)
_MOST = 6  # causes with a colour of their own
_LATE, _LINK, _SCHEDULE, _REST = "#c0392b", "#2a9d5c", "#a0614f", "#d0d0d0"


def train(folder: str) -> None:
    """As one rank of torchrun: the data of one rank take longer than those of the others."""
    torch.set_num_threads(1)
    model = build(SIZE)
    for module in [*model.blocks, model]:
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        with span("data"):
            batch = tokens(SIZE, rank, step)
            if rank == SLOW and step >= WARM:
                time.sleep(SLOW_S)  # its disk is slow
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    write(folder, ring())
    torch.distributed.barrier()


def record(folder: Path) -> dict[str, Any]:
    """Run it, and the mean of its steps by rank and cause."""
    words = ["--standalone", "--nproc-per-node", str(WORLD), "-m", "bench.pictures.ledger", "."]
    finished(start(["torch.distributed.run", *words], folder))
    found = booked(on_one_clock(load(folder)), range(WARM + 2, STEPS + 1))
    steps = {step for _, step in found.seconds}
    ranks: dict[str, dict[str, float]] = {str(rank): defaultdict(float) for rank in range(WORLD)}
    for line in found.lines:
        late = line.whose not in (line.rank, NOBODY)
        name = f"waits for rank {line.whose}: {line.cause}" if late else line.cause
        ranks[str(line.rank)][name] += line.seconds / len(steps)
    said = summary(found).replace(f" ({os.uname().nodename})", "").splitlines()
    return {
        "ranks": ranks,
        "steps": len(steps),
        "says": [line.strip().replace(f"{Path.cwd()}/", "") for line in (said[1], said[-1])],
    }


def draw(found: dict[str, Any], out: Path) -> None:
    """A bar per rank; waits for others are hatched."""
    total: dict[str, float] = defaultdict(float)
    for causes in found["ranks"].values():
        for name, seconds in causes.items():
            total[name] += seconds
    largest = sorted((name for name in total if name != "rest"), key=lambda name: -total[name])
    shown = sorted(largest[:_MOST], key=lambda name: (name.startswith("waits"), -total[name]))
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.6 * len(found["ranks"])), layout="constrained")
    places = range(len(found["ranks"]))
    left = [0.0 for _ in places]
    for name in [*shown, "all else"]:
        widths = []
        for causes in found["ranks"].values():
            several = [seconds for each, seconds in causes.items() if each not in shown]
            widths.append(1e3 * (sum(several) if name == "all else" else causes.get(name, 0.0)))
        axes.barh(
            places,
            widths,
            left=left,
            height=0.62,
            label=name,
            color=colour(name),
            edgecolor="white",
            hatch="///" if name.startswith("waits") else "",
        )
        for place, width in zip(places, widths, strict=True):
            if width > 0.06 * 1e3 * max(sum(each.values()) for each in found["ranks"].values()):
                axes.text(
                    left[place] + width / 2,
                    place,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white",
                    bbox={"facecolor": colour(name), "pad": 1.5, "lw": 0},
                )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(list(places), [f"rank {rank}" for rank in found["ranks"]])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds of a step, mean of {found['steps']}")
    axes.set_title("\n".join(found["says"]), loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(out)
    pyplot.close(figure)


def colour(name: str) -> str:
    """A cause has the colour of its lane; a wait for a rank that of what the rank does."""
    cause = name.rpartition(": ")[2]
    own = {"link": _LINK, "launches and copies": _SCHEDULE, "all else": _REST, "user code": COLOURS["user"]}
    return own.get(cause) or COLOURS.get(cause, _LATE)


if __name__ == "__main__":
    train(sys.argv[1])
