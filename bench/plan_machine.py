"""How well a plan predicts this machine: steps that are simulated beside steps that are measured.

    python -m bench.plan_machine --out FILE             three links, four groupings: root is needed (links.py)

What a matmul, an elementwise pass, the optimizer and the call of an operation take is measured first, in this
process; what a byte takes on a link, and how much compute it costs, is measured with one group on that link.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

import torch

from bench.links import places
from bench.model import Size, Transformer
from bench.report import Row, interval
from bench.step import Options, Ranks, machine_facts, measure
from bench.systems import GROUPINGS
from shardwright.plan.cluster import Cluster, DeviceSpec
from shardwright.plan.groups import groups_of_calls
from shardwright.plan.measure import measured_device
from shardwright.plan.presets import preset, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import simulate
from shardwright.plan.trace import trace
from shardwright.plan.workload import Workload
from shardwright.policy import MixedPrecisionPolicy

LINKS = ("100mbit", "1gbit", "10gbit")
NAMES = ("one", "blocks", "blocks-by-2", "blocks-by-4")
SIZE = Size(layers=8, width=128, vocab=1024)  # none of its groups is large enough to be cut in two
MIB = 2**20
HOP_S = 5e-5  # between two ranks, by the sockets of one machine


@dataclass(frozen=True)
class Found:
    """One configuration. Milliseconds of a step, at the pace of the median local step on that link;
    ``least_ms``, ``most_ms``: between which the measured median lies."""

    link: str
    grouping: str
    predicted_ms: float
    measured_ms: float
    least_ms: float
    most_ms: float


def workload(size: Size, grouping: str) -> Workload:
    """The model in the groups of ``GROUPINGS``, as ``fully_shard`` makes them one by one."""
    with torch.device("meta"):
        model = Transformer(size)
    listed = GROUPINGS[grouping](model)
    calls = [entry if isinstance(entry, list) else [entry] for entry in (*listed, model)]  # type: ignore[misc]
    groups = groups_of_calls(
        model, lambda shard: [shard(each, set()) for each in calls], MixedPrecisionPolicy()
    )
    tokens = torch.empty(size.batch, size.sequence + 1, dtype=torch.int64, device="meta")
    return trace(model, [tokens], {}, groups)


def predicted_s(found: Workload, prices: Prices) -> float:
    """Seconds of a step."""
    planned = schedule(found, prices.preset)
    return float(simulate(planned, found, prices).step_s)


def compute_factor(found: Workload, prices: Prices, local_s: float) -> float:
    """Of all compute: with it a step without communication takes ``local_s``."""
    alone = replace(prices, cluster=replace(prices.cluster, ranks=1), shards=1)
    rest, by_rates = (predicted_s(found, replace(alone, software=factor)) for factor in (0.0, 1.0))
    return (local_s - rest) / (by_rates - rest)


def learn(row: Row, found: Workload, device: DeviceSpec, world: int) -> tuple[Cluster, float]:
    """From a step in one group, which waits for its all-gather and its reduce-scatter: what the link moves,
    and how much compute a second of that costs beside it, at most all."""
    assert row.exposed_ms is not None
    seconds = row.exposed_ms / 1e3
    nbytes = 2 * found.numel * found.itemsize * (world - 1) / world
    busy_s = max(row.cpu_ms - row.local_cpu_ms, 0.0) / 1e3
    return Cluster(device, world, 1, nbytes / seconds), min(busy_s / seconds, 1.0)


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
    torch.set_num_threads(1)
    device, constants = measured_device(torch.float32)
    constants = replace(constants, hop_s=HOP_S)
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
        # All groupings compute the same, and the machine's pace changes from one to the next; so what each
        # takes longer than a local step beside it counts.
        local_ms = median(row.local_ms for row in rows.values())
        whole = workload(options.size, "one")
        cluster, contention = learn(rows["one"], whole, device, here.world)
        prices = Prices(
            cluster,
            replace(constants, contention=contention),
            preset("shardwright-cpu"),
            here.world,
            whole.itemsize,
            whole.itemsize,
        )
        prices = replace(prices, software=compute_factor(whole, prices, local_ms / 1e3))
        print(
            f"{link}: {cluster.host_bandwidth / 1e6:.1f} MB/s, contention {contention:.2f}, local step "
            f"{local_ms:.1f} ms, {prices.software:.2f} times what rates say",
            flush=True,
        )
        for name in names:
            row, predicted_ms = rows[name], 1e3 * predicted_s(workload(options.size, name), prices)
            excess_ms = row.excess_ms or []
            least, most = (local_ms + each for each in interval(excess_ms))
            found.append(Found(link, name, predicted_ms, local_ms + median(excess_ms), least, most))
            error = predicted_ms / found[-1].measured_ms - 1
            print(
                f"{link:8} {name:12} measured {found[-1].measured_ms:8.1f} ms ({least:.1f}-{most:.1f}), "
                f"predicted {predicted_ms:8.1f} ({error:+.1%}); its local step {row.local_ms:.1f}",
                flush=True,
            )
    return found


def main() -> None:
    """Print each configuration, the mean error, and how the order and the choice come out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--groupings", default=",".join(NAMES))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
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
