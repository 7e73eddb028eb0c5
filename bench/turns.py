"""Systems by turns in one process: which of them is quicker, on a machine whose speed changes within minutes.

    python bench/turns.py --systems fsdp2,shardwright-split,shardwright-keep --rounds 16

In each round a local step and one of each system come in an order of their own, begun by all ranks together.
A system's ratio is the sum of its steps over the sum of the local ones, the mean over ranks; its CPU is what
it takes more than the local step, median of the rounds. What one system asks of the process (malloc's
thresholds, say) it asks for all of them here: ``bench/step.py`` measures each in processes of its own.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # imported by the first optimizer step otherwise
import torch.distributed as dist

from bench.launch import arguments, run
from bench.model import Size, build, tokens
from bench.systems import System, build_system
from bench.toy import add_toy

WARM_UP_STEPS = 2


def step_s(system: System, batch: torch.Tensor) -> tuple[float, float]:
    """Wall and CPU seconds of a step that all ranks begin together."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    system.step(batch)
    system.flush()
    return time.perf_counter() - begin, time.process_time() - cpu


def measure(options: argparse.Namespace) -> None:
    """One rank: all rounds; rank 0 prints the table."""
    size, names = options.size, ["local", *options.systems.split(",")]
    systems = {name: build_system(name, build(size)) for name in names}
    order, taken = random.Random(0), {name: [] for name in names}
    for number in range(WARM_UP_STEPS + options.rounds):
        order.shuffle(names)  # alike on all ranks
        for name in names:
            taken[name].append(step_s(systems[name], tokens(size, options.rank, number)))
    steps = {name: found[WARM_UP_STEPS:] for name, found in taken.items()}
    rows = {name: _against(found, steps["local"]) for name, found in steps.items()}
    every: list[dict[str, tuple[float, ...]]] = [{}] * options.world
    dist.all_gather_object(every, rows)
    if options.rank == 0:
        print(f"{options.link}, {options.world} ranks, {options.rounds} rounds")
        print("| system | step / local | of each rank | step ms | CPU ms over local |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name in systems:
            ratios, walls, cpus = zip(*(rank[name] for rank in every), strict=True)
            each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"| {name} | {mean(ratios):.3f} | {each} | {mean(walls):.0f} | {mean(cpus):+.0f} |")


def _against(found: list[tuple[float, float]], local: list[tuple[float, float]]) -> tuple[float, ...]:
    """Ratio, median ms, and median ms of CPU over the local step's."""
    ratio = sum(wall for wall, _ in found) / sum(wall for wall, _ in local)
    cpu_s = median(ours[1] - theirs[1] for ours, theirs in zip(found, local, strict=True))
    return ratio, 1e3 * median(wall for wall, _ in found), 1e3 * cpu_s


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=900.0)
    parser.add_argument("--systems", default="local-met,shardwright-split,shardwright-keep")
    parser.add_argument("--rounds", type=int, default=16)
    parser.set_defaults(size=Size())
    add_toy(parser, rounds=1, size=Size(2, 64, 256, 32, 2))
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
