"""A step of ours and one of FSDP2's on a link of 1 Gbit/s, on one axis of time.

Ours is what its ranks record (docs/trace.md). Of FSDP2 the collectives are stamped, each of which holds up
the thread that calls it; what lies between them is drawn as compute, FSDP2's own copies among it.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.launch import arguments, run
from bench.model import Size, build, tokens
from bench.pictures.ranks import LIMIT_S, finished, start
from bench.systems import build_system
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.drawing import Bar, Drawing, Shade
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.rings import Ring, load, write
from shardwright.observe.steps.step_page import draw as lanes_of

LINK, PRECISION, WARM = "1gbit", "bf16", 3
SIZE = Size()
LANES = ("compute", "gather", "reduce", "wait")
Stamps = list[tuple[str, str, float, float]]
"""A lane, or "phase" with the name of one; from when to when, in seconds."""


def measure(options: Any) -> None:
    """As one rank: some steps; of ours the ring is left, of FSDP2 the stamps of the last step."""
    rank = dist.get_rank()
    stamps: Stamps = []
    system = build_system(options.system, build(SIZE, PRECISION))
    if options.system == "fsdp2":
        stamp_collectives(stamps)
    began = 0.0
    for step in range(WARM + 1):
        stamps.clear()
        began = time.perf_counter()
        batch = tokens(SIZE, rank, step)
        loss = stamped(stamps, "forward", lambda batch=batch: system.module(batch))
        stamped(stamps, "backward", loss.backward)
        stamped(stamps, "optimizer", system.optimizer.step)
        system.optimizer.zero_grad()
    if options.system == "fsdp2":
        shifted = [(lane, name, begin - began, end - began) for lane, name, begin, end in stamps]
        Path(options.out, f"fsdp2-{rank}.json").write_text(json.dumps(shifted))
    else:
        write(options.out, ring())


def stamped(stamps: Stamps, name: str, call: Callable[[], Any]) -> Any:
    """What the call returns, with a note of how long this phase of the step took."""
    begin = time.perf_counter()
    returned = call()
    stamps.append(("phase", name, begin, time.perf_counter()))
    return returned


def stamp_collectives(stamps: Stamps) -> None:
    """Torch's two collectives of FSDP2 note how long they held up the thread."""
    for name, lane in (("all_gather_single", "gather"), ("reduce_scatter_single", "reduce")):
        call = getattr(dist, name)

        def noted(*given: Any, call: Any = call, lane: str = lane, **named: Any) -> None:
            begin = time.perf_counter()
            if call(*given, **named) is not None:
                raise RuntimeError(
                    "this collective of FSDP2 doesn't block: its end must be stamped elsewhere"
                )
            stamps.append((lane, "", begin, time.perf_counter()))

        setattr(dist, name, noted)


def record(folder: Path) -> dict[str, Any]:
    """Both, one after another, each by two processes; the bars of rank 0."""
    for system in ("shardwright", "fsdp2"):
        words = ["--link", LINK, "--system", system, "--out", str(folder)]
        finished(start(["bench.pictures.step", *words], folder))
    stamps = json.loads((folder / "fsdp2-0.json").read_text())
    bars, shades = bars_of_ours(on_one_clock(load(folder)))
    return {"ours": bars, "shades": shades, "fsdp2": bars_of_stamps(stamps)}


def bars_of_ours(rings: list[Ring]) -> tuple[list[Bar], list[tuple[float, float]]]:
    """Rank 0's lanes of the last whole step, with what is exposed."""
    last = rings[0].steps[-2].number
    cut = []
    for each in rings:
        step = next(step for step in each.steps if step.number == last)
        inside = [record for record in each.records if step.start <= record.start < step.end]
        cut.append(each._replace(steps=[step], records=inside, memory=[]))
    first = cut[0].steps[0].start
    drawn = lanes_of([each.shifted(first) for each in cut])
    bars = [bar._replace(row=bar.row.split()[-1]) for bar in drawn.bars if bar.row.startswith("rank 0 ")]
    shades = [(each.start, each.end) for each in drawn.shades if each.first.startswith("rank 0 ")]
    return bars, shades


def bars_of_stamps(stamps: Stamps) -> list[Bar]:
    """Of FSDP2: collectives in their lanes and, as they block, in that of waits; between them compute."""
    blocked = sorted((begin, end, lane) for lane, _, begin, end in stamps if lane != "phase")
    bars = [Bar(lane, lane, begin, end) for begin, end, lane in blocked]
    bars += [Bar("wait", f"blocked in {lane}", begin, end) for begin, end, lane in blocked]
    for name, begin, end in [each[1:] for each in stamps if each[0] == "phase"]:
        colour = "optimizer" if name == "optimizer" else "compute"
        for held, freed, _ in [each for each in blocked if begin <= each[0] < end]:
            bars.append(Bar("compute", name, begin, held, colour))
            begin = freed
        bars.append(Bar("compute", name, begin, end, colour))
    return bars


def draw(found: dict[str, Any], out: Path) -> None:
    """Ours above FSDP2's, by the drawing that pages of steps are made of."""
    named = {
        "Shardwright": [Bar(*each) for each in found["ours"]],
        "FSDP2": [Bar(*each) for each in found["fsdp2"]],
    }
    exposed = {
        "Shardwright": found["shades"],
        "FSDP2": [(bar.start, bar.end) for bar in named["FSDP2"] if bar.row == "wait"],
    }
    notes = []
    for name, bars in named.items():
        seconds, held_s = max(bar.end for bar in bars), sum(end - start for start, end in exposed[name])
        notes.append(
            f"{name}: {1e3 * seconds:.0f} ms, of which {1e3 * held_s:.0f} ms are exposed communication"
        )
    Drawing(
        f"A step of rank 0 of 2, 33.7 M parameters, {PRECISION}, a link of 1 Gbit/s",
        tuple(bar._replace(row=f"{name} {bar.row}") for name, bars in named.items() for bar in bars),
        lanes=tuple(f"{name} {lane}" for name in named for lane in LANES),
        shades=tuple(
            Shade(f"{name} compute", f"{name} wait", *each) for name in named for each in exposed[name]
        ),
        notes=tuple(notes),
    ).save(out)


if __name__ == "__main__":
    parser = arguments(__doc__, LIMIT_S)
    parser.add_argument("--system", choices=("shardwright", "fsdp2"), required=True)
    parser.add_argument("--out", required=True, help="folder of what is measured")
    run(parser, measure, __file__)
