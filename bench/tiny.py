"""What a model of many tiny groups costs per step, by how much of it may share a collective.

    python bench/tiny.py --link 1gbit --num 1000
    python bench/tiny.py --num 100 --depth 2 --width 64 --caps 1 --beside

A model of ``--num`` groups of ``--depth`` layers each trains with every ``bucket_cap_mb`` of ``--caps`` and
without any communication; the steps alternate in one process, one compute thread per rank. Median of the
steps, in ms; ``local`` is the step without communication. ``--beside`` adds FSDP2 with the same groups, and
DDP, and to each line the median of its steps' ratios to DDP's step of the same round.
"""

import argparse
import copy
import sys
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bench.launch import arguments, run, slowest_s
from bench.layers import build_layers, step_s
from bench.toy import add_toy
from shardwright import SchedulePolicy, fully_shard, set_transport, stats
from shardwright.schedule.schedule import ActionKind

WARM_UP_STEPS = 2


def collectives(model: nn.Module) -> tuple[int, int]:
    """All-gathers and reduce-scatters of a step, from its schedule."""
    phases = model.schedule().phases.values()  # type: ignore[operator]
    kinds = [action.kind for entries in phases for _, actions in entries for action in actions]
    return kinds.count(ActionKind.UNSHARD), kinds.count(ActionKind.REDUCE)


def measure(options: argparse.Namespace) -> None:
    """One rank: every variant's steps; rank 0 prints the table."""
    set_transport(options.transport)
    local = build_layers(options.num, options.width, options.depth)
    models: dict[str, nn.Module] = {"local": copy.deepcopy(local)}
    for cap in options.caps:
        model = models[f"{cap:g} MiB"] = copy.deepcopy(local)
        for layer in model:
            fully_shard(layer)
        fully_shard(model).set_schedule_policy(SchedulePolicy(bucket_cap_mb=cap))
    if options.beside:
        models["fsdp2"] = copy.deepcopy(local)
        mesh = init_device_mesh("cpu", (options.world,))
        for module in [*models["fsdp2"], models["fsdp2"]]:
            torch_fsdp.fully_shard(module, mesh=mesh)
        models["ddp"] = DistributedDataParallel(copy.deepcopy(local))
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-3) for name, model in models.items()}
    inputs = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(options.rank))
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.steps + WARM_UP_STEPS):
        for name, model in models.items():
            times[name].append(slowest_s(partial(step_s, model, optimizers[name], inputs)))
    if options.rank == 0:
        nbytes = sum(p.nbytes for p in local.parameters())
        print(f"{options.num} groups, {nbytes / 2**20:.1f} MiB, world {options.world}, {options.link}")
        for name, model in models.items():
            took_ms = [each * 1e3 for each in times[name][WARM_UP_STEPS:]]
            line = f"  {name:>9} {median(took_ms):8.1f} ms ({min(took_ms):.1f}-{max(took_ms):.1f})"
            if options.beside:
                ratios = (step / ddp for step, ddp in zip(times[name], times["ddp"], strict=True))
                line += f"  {median(list(ratios)[WARM_UP_STEPS:]):5.2f} of ddp"
            if name.endswith("MiB"):
                gathers, reductions = collectives(model)
                peak = stats(model).peak_unsharded_nbytes / 2**20
                line += f"  {gathers} all-gathers, {reductions} reduce-scatters, {peak:.1f} MiB unsharded"
            print(line)


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=300.0)
    parser.add_argument("--transport", default="auto", help="see set_transport")
    parser.add_argument("--num", type=int, default=1000, help="number of groups")
    parser.add_argument("--width", type=int, default=32, help="a layer has width * (width + 1) parameters")
    parser.add_argument("--depth", type=int, default=1, help="layers of a group")
    parser.add_argument("--beside", action="store_true", help="measure FSDP2 and DDP, too")
    parser.add_argument("--batch", type=int, default=64, help="rows of each rank's input")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--caps", type=float, nargs="+", default=[0, 0.25, 1, 4], help="MiB, each measured")
    add_toy(parser, num=8, steps=1, caps=[0, 1])
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
