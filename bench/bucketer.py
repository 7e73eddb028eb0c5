"""What it costs to reduce-scatter many small gradients: bucketed, one by one, and by others' bucketers.

    python bench/bucketer.py --link loopback --world 2

Ranks are processes joined by the links of links.py, one compute thread each. In a round every gradient
(float32, one part per rank) is handed over and waited for; the slowest rank counts. The systems alternate
round by round, after one that isn't counted; printed are medians, and the median of the ratios within rounds.
``fairscale`` runs where 0.4.13 can be imported. ``ddp`` is what DDP adds to a backward through a sum over as
many parameters; it all-reduces, twice the bytes. The bound is the bytes that a rank must send over the rate
of the link.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # fairscale's default path fails on Gloo

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.launch import arguments, run, slowest_s
from bench.links import BITS_PER_S
from bench.toy import add_toy
from shardwright import ReduceScatterBucketer

try:
    from fairscale.internal.reduce_scatter_bucketer import (  # pyright: ignore[reportMissingImports]
        ReduceScatterBucketer as FairscaleBucketer,
    )
except ImportError:
    FairscaleBucketer = None

MIN_NUMEL, MAX_NUMEL = 256, 8192
SYSTEMS = ("shardwright", "shardwright-single", "torch-single", "fairscale", "ddp")


def gradients(num: int, world: int) -> list[list[Tensor]]:
    """``num`` gradients of 1 to 32 KiB times ``world``, each as its parts, one for each rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(MIN_NUMEL, MAX_NUMEL + 1, (num,), generator=generator).tolist()
    return [list(torch.ones(numel * world).chunk(world)) for numel in sizes]


def bucketed(bucketer: ReduceScatterBucketer, grads: list[list[Tensor]]) -> float:
    """Seconds of a round through Shardwright's bucketer."""
    start = time.perf_counter()
    for parts in grads:
        bucketer.reduce_scatter_async(parts)
    bucketer.flush()
    return time.perf_counter() - start


def one_by_one(grads: list[list[Tensor]]) -> float:
    """Seconds of a round with torch's own reduce-scatter of each gradient."""
    start = time.perf_counter()
    for parts in grads:
        dist.reduce_scatter(torch.empty_like(parts[0]), parts)
    return time.perf_counter() - start


def by_fairscale(bucketer: object, grads: list[list[Tensor]]) -> float:
    """Seconds of a round through fairscale's bucketer."""
    start = time.perf_counter()
    for parts in grads:
        bucketer.reduce_scatter_async(parts, group=dist.group.WORLD)  # type: ignore[attr-defined]
    bucketer.flush()  # type: ignore[attr-defined]
    return time.perf_counter() - start


class Sum(nn.Module):
    """A model whose backward does next to nothing but bring the gradients."""

    def __init__(self, grads: list[list[Tensor]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(len(parts) * parts[0].numel()) for parts in grads)

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


def by_ddp(model: nn.Module, alone: nn.Module) -> float:
    """Seconds that DDP adds to a backward."""
    took = []
    for one in (model, alone):
        one.zero_grad()
        loss = one()
        start = time.perf_counter()
        loss.backward()
        took.append(time.perf_counter() - start)
    return took[0] - took[1]


def systems(grads: list[list[Tensor]], wanted: list[str]) -> dict[str, Callable[[], float]]:
    """A round of each wanted system, by name."""
    ours, single = ReduceScatterBucketer(25), ReduceScatterBucketer(0)
    found: dict[str, Callable[[], float]] = {
        "shardwright": lambda: bucketed(ours, grads),
        "shardwright-single": lambda: bucketed(single, grads),
        "torch-single": lambda: one_by_one(grads),
    }
    if FairscaleBucketer is not None:
        theirs = FairscaleBucketer(25)
        found["fairscale"] = lambda: by_fairscale(theirs, grads)
    if "ddp" in wanted:
        alone, model = Sum(grads), nn.parallel.DistributedDataParallel(Sum(grads))
        found["ddp"] = lambda: by_ddp(model, alone)
    return {name: round_s for name, round_s in found.items() if name in wanted}


def measure(options: argparse.Namespace) -> None:
    """One rank: every system's rounds; rank 0 prints the table."""
    grads = gradients(options.num, options.world)
    part_nbytes = sum(parts[0].nbytes for parts in grads)
    rounds = systems(grads, options.systems.split(","))
    names, times = list(rounds), {name: list[float]() for name in rounds}
    for number in range(options.rounds + 1):
        for turn in range(len(names)):  # each comes after each other one
            name = names[(number + turn) % len(names)]
            times[name].append(slowest_s(rounds[name]))
    if options.rank == 0:
        print(f"{options.num} gradients, world {options.world}, {options.link}: ", end="")
        print(f"{part_nbytes * options.world / 2**20:.1f} MiB per rank")
        first = times[names[0]][1:]
        for name, took_s in ((name, found[1:]) for name, found in times.items()):
            ratio = median(other / own for own, other in zip(first, took_s, strict=True))
            print(f"  {name:20} {median(took_s) * 1e3:9.1f} ms   {ratio:6.2f}x {names[0]}, paired")
        if options.link in BITS_PER_S:
            bound_s = part_nbytes * (options.world - 1) * 8 / BITS_PER_S[options.link]
            print(f"  {'bound':20} {bound_s * 1e3:9.1f} ms   {bound_s / median(first):6.2f}x {names[0]}")


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=200.0)
    parser.add_argument("--num", type=int, default=2000, help="number of gradients")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}")
    add_toy(parser, num=20, rounds=1)
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
