"""How well a plan predicts this machine: steps that are simulated beside steps that are measured.

    python -m bench.plan_machine --out FILE             three links, four groupings: root is needed (links.py)

What a matmul, an elementwise pass, the optimizer and the call of an operation take is measured first, in this
process; what a byte takes on a link, and how much compute it costs, is measured with one group on that link.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bench.links import places
from bench.model import Size, Transformer
from bench.report import Row
from bench.step import Options, Ranks, machine_facts, measure
from bench.systems import GROUPINGS
from shardwright.plan.cluster import Cluster, DeviceSpec
from shardwright.plan.constants import Constants
from shardwright.plan.events import TracedGroup
from shardwright.plan.presets import preset, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import simulate
from shardwright.plan.trace import trace
from shardwright.plan.workload import Workload

LINKS = ("100mbit", "1gbit", "10gbit")
NAMES = ("one", "blocks", "blocks-by-2", "blocks-by-4")
SIZE = Size(layers=8, width=128, vocab=1024)  # none of its groups is large enough to be cut in two
MIB = 2**20


@dataclass(frozen=True)
class Found:
    """One configuration. Milliseconds of a step; ``least_ms``, ``most_ms``: of its blocks."""

    link: str
    grouping: str
    predicted_ms: float
    measured_ms: float
    least_ms: float
    most_ms: float


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call: the least of several timings, after one to warm up."""
    call()
    begin = time.perf_counter()
    call()
    number = max(1, int(0.02 / max(time.perf_counter() - begin, 1e-7)))
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(number):
            call()
        taken.append((time.perf_counter() - begin) / number)
    return min(taken)


def measured_device(size: Size) -> tuple[DeviceSpec, Constants]:
    """This machine, one thread of it, in float32. No constant is fitted to steps."""
    torch.set_num_threads(1)
    inverse: list[tuple[float, float]] = []
    for width in (64, 128, 256, 512):
        x, y = torch.randn(1024, width), torch.randn(width, width)
        taken = seconds_of(lambda x=x, y=y: x @ y)
        inverse.append((1 / width, taken / (2 * 1024 * width**2)))
    # seconds of an operation = (1 + narrow / width) / peak: a line in 1 / width
    mean_x, mean_y = (sum(column) / len(inverse) for column in zip(*inverse, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in inverse) / sum((x - mean_x) ** 2 for x, _ in inverse)
    slope = max(slope, 0.0)
    per_flop = mean_y - slope * mean_x
    a, b = torch.randn(4 * MIB), torch.randn(4 * MIB)
    bandwidth = 3 * a.nbytes / seconds_of(lambda: torch.add(a, b, out=b))
    shorter = a[: size.batch * size.sequence * 4 * size.width]
    reached = 2 * shorter.nbytes / seconds_of(lambda: F.gelu(shorter)) / bandwidth
    query = torch.randn(size.batch, size.heads, size.sequence, size.width // size.heads)
    pairs = size.batch * size.heads * size.sequence**2 * query.shape[-1]
    attention = seconds_of(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    attended = 2 * pairs / max(attention - 4 * query.nbytes / bandwidth / reached, 1e-9)
    params = [nn.Parameter(torch.randn(MIB)) for _ in range(2)]
    for param in params:
        param.grad = torch.randn(MIB)
    optimizer = seconds_of(torch.optim.AdamW(params).step) / (2 * MIB)
    small = torch.zeros(1)
    device = DeviceSpec(
        "this machine", 1 / per_flop, 8e9, bandwidth, 1e12, 1.0, attended * per_flop, ring=1.0
    )
    launch_s = seconds_of(lambda: small.add_(1))
    return device, Constants(
        1.0, 1.0, reached, slope / per_flop, optimizer * bandwidth, 1.0, 5e-5, launch_s, 0.0
    )


def workload(size: Size, grouping: str) -> Workload:
    """The model in the groups of ``GROUPINGS``, as ``fully_shard`` makes them one by one."""
    with torch.device("meta"):
        model = Transformer(size)
    names = {id(module): name for name, module in model.named_modules()}
    listed = GROUPINGS[grouping](model)
    params = {id(param): name for name, param in model.named_parameters()}
    groups = []
    for entry in (*listed, [model]):
        modules = entry if isinstance(entry, list) else [entry]
        mine = [params.pop(id(p)) for m in modules for p in m.parameters() if id(p) in params]
        groups.append(TracedGroup(tuple(names[id(module)] for module in modules), tuple(mine)))
    tokens = torch.empty(size.batch, size.sequence + 1, dtype=torch.int64, device="meta")
    return trace(model, [tokens], {}, groups)


def predicted_s(
    found: Workload, cluster: Cluster, constants: Constants, software: float
) -> tuple[float, float]:
    """Seconds of a step, and of it without any communication. software: factor of all compute."""
    runs = preset("shardwright-cpu")
    prices = Prices(cluster, constants, runs, cluster.ranks, found.itemsize, found.itemsize, software)
    alone = replace(prices, cluster=replace(cluster, ranks=1), shards=1)
    planned = schedule(found, runs)
    return tuple(float(simulate(planned, found, each).step_s) for each in (prices, alone))  # type: ignore


def learn(row: Row, device: DeviceSpec, world: int) -> tuple[Cluster, float]:
    """From a step in one group: what the link moves, and how much compute that costs."""
    assert row.communication_ms is not None
    bandwidth = row.sent_mib * MIB / (row.communication_ms / 1e3)
    busy_s = max(row.cpu_ms - row.local_cpu_ms, 0.0) / 1e3
    return Cluster(device, world, 1, bandwidth), busy_s / (row.communication_ms / 1e3)


def tau(found: Sequence[Found]) -> float:
    """Kendall's, over the pairs on one link whose measured intervals don't overlap."""
    signs = [
        1 if (a.predicted_ms - b.predicted_ms) * (a.measured_ms - b.measured_ms) > 0 else -1
        for a, b in combinations(found, 2)
        if a.link == b.link and (a.least_ms > b.most_ms or b.least_ms > a.most_ms)
    ]
    return sum(signs) / len(signs) if signs else float("nan")


def run(options: Options, links: Sequence[str], names: Sequence[str]) -> list[Found]:
    """Measure every grouping on every link, and predict it."""
    device, constants = measured_device(options.size)
    print(f"{device}\n{constants}", flush=True)
    found: list[Found] = []
    for link in links:
        here = replace(options, link=link)
        with (
            tempfile.TemporaryDirectory() as folder,
            places(link, here.world) as homes,
            Ranks(homes) as ranks,
        ):
            asked = dict.fromkeys(("one", *names))
            rows = {name: measure(here, f"grouping-{name}", ranks, folder) for name in asked}
        cluster, contention = learn(rows["one"], device, here.world)
        costs = replace(constants, contention=contention)
        for name in names:
            traced, row = workload(options.size, name), rows[name]
            rates_ms = 1e3 * predicted_s(traced, cluster, costs, 1.0)[1]
            step_s, _ = predicted_s(traced, cluster, costs, row.local_ms / rates_ms)
            spread = [ratio * row.local_ms for ratio in row.block_ratios]
            found.append(Found(link, name, 1e3 * step_s, row.step_ms, min(spread), max(spread)))
            error = found[-1].predicted_ms / row.step_ms - 1
            print(
                f"{link:8} {name:12} measured {row.step_ms:8.1f} ms, predicted {1e3 * step_s:8.1f} "
                f"({error:+.1%}); local {row.local_ms:.1f}, by rates {rates_ms:.1f}",
                flush=True,
            )
    return found


def main() -> None:
    """Print each configuration, the mean error, and how the order and the choice come out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--groupings", default=",".join(NAMES))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options = Options(
        "loopback", ("local",), given.world, given.blocks, given.steps, False, 900.0, None, SIZE
    )
    found = run(options, given.links.split(","), given.groupings.split(","))
    errors = [abs(each.predicted_ms / each.measured_ms - 1) for each in found]
    print(f"mean error {sum(errors) / len(errors):.1%}, tau {tau(found):.2f}")
    for link in dict.fromkeys(each.link for each in found):
        here = [each for each in found if each.link == link]
        best = min(each.measured_ms for each in here)
        taken = min(here, key=lambda each: each.predicted_ms)
        print(f"{link}: {taken.grouping} is chosen, {taken.measured_ms / best - 1:.1%} over the best")
    if given.out is not None:
        rows = [asdict(each) for each in found]
        given.out.write_text(json.dumps({"machine": machine_facts(), "found": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
