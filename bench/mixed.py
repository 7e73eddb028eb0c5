"""Two ranks of unequal speed train one model: samples a second, against the sum of what each does alone.

    python bench/mixed.py --rounds 10

Rank 1 may use half a core: its CPU cgroup says so or, where none can be made, it sleeps for as long as it has
computed. Rank 0 has twice its rows, of each parameter and of each batch. By turns both step alone, each with
a whole model and its own rows of the batch, and together.

Other work on the machine makes figures noisy, and speeds alone other than 2 : 1; then the faster rank waits.
What that leaves of the sum at most, if communication cost nothing, is printed beside the share. Fewer
--cores, as 0.4 0.2, are there more often.
"""

import argparse
import atexit
import signal
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from bench.launch import arguments, run
from bench.links import PREFIX
from bench.model import Size, build, tokens
from bench.toy import add_toy
from shardwright import Blocks, fully_shard, loss_weights

SHARES, WARM_UP_STEPS = (2, 1), 2


def step_s(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, together: bool
) -> tuple[float, float]:
    """Wall and CPU seconds of a step that both ranks begin together."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    loss = model(batch)
    if together:
        (share,) = loss_weights(model, [len(batch)])
        loss = loss * share
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin, time.process_time() - cpu


def measure(options: argparse.Namespace) -> None:
    """One rank: all rounds; rank 0 prints."""
    is_held = PREFIX in Path("/proc/self/cgroup").read_text()
    if not is_held:
        _sleep_besides(options.cores[options.rank])
    alone, shared = build(options.size), build(options.size)
    for module in (*shared.blocks, shared):
        fully_shard(module, layout=Blocks(shares=SHARES))
    pairs = [(model, torch.optim.AdamW(model.parameters(), foreach=True)) for model in (alone, shared)]
    took = []
    for number in range(WARM_UP_STEPS + options.rounds):
        rows = tokens(options.size, 0, number).split(options.rows)[options.rank]
        took.append([step_s(*pair, rows, bool(together)) for together, pair in enumerate(pairs)])
    every: list[list[list[tuple[float, float]]]] = [[], []]
    dist.all_gather_object(every, took[WARM_UP_STEPS:])
    if options.rank == 0:
        print(f"ranks may use {options.cores} cores, by {'their cgroups' if is_held else 'sleeping'}")
        for rank, rounds in enumerate(every):
            got = median(cpu / wall for (wall, cpu), _ in rounds)
            speed = options.rows[rank] / median(wall for (wall, _), _ in rounds)
            print(f"rank {rank} alone: {speed:.2f} samples/s, on {got:.2f} cores")
        by_round = list(zip(*every, strict=True))
        sums = [sum(n / own[0][0] for n, own in zip(options.rows, pair, strict=True)) for pair in by_round]
        speeds, bounds = (
            [sum(options.rows) / max(own[i][0] for own in pair) for pair in by_round] for i in (1, 0)
        )
        share, bound = (median(a / b for a, b in zip(each, sums, strict=True)) for each in (speeds, bounds))
        print(f"together: {median(speeds):.2f} samples/s, {share:.3f} of the sum; at most {bound:.3f}")


def _sleep_besides(cores: float) -> None:
    """From here on this process computes only that part of the time."""
    used_s = time.process_time()

    def sleep(*_: object) -> None:
        nonlocal used_s
        began_s, used_s = used_s, time.process_time()
        time.sleep(max(used_s - began_s, 0.0) * (1 / cores - 1))  # below 0: a signal came within another

    signal.signal(signal.SIGPROF, sleep)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, 5e-3, 5e-3)
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)  # a signal after its handler's end would kill


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=300.0)
    parser.add_argument("--cores", type=float, nargs=2, default=[1.0, 0.5], help="that each rank may use")
    parser.add_argument("--rounds", type=int, default=10)
    parser.set_defaults(size=Size(4, 256, 4096, 128, 24), rows=[16, 8])
    add_toy(parser, rounds=1, size=Size(2, 64, 256, 32, 3), rows=[2, 1])
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
