"""What moving bytes costs alone, by transport: wall time, CPU time and wakeups of its collectives.

    python bench/transport.py --link 1gbit --transports collectives,sockets

Every round gathers and reduces ``--num`` segments of ``--mib`` MiB, two collectives in flight, without any
compute. CPU time and context switches are those of a rank's whole process; a busy step has to find that time.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from bench.launch import arguments, run
from bench.toy import add_toy
from shardwright import set_transport
from shardwright.schedule.layout import ParamLayout
from shardwright.transport.base import Comm, Segment
from shardwright.transport.mesh import comm_of


def one_round(comm: Comm, segments: list[Segment]) -> None:
    """Gather and reduce every segment, each collective waited for when the next but one is issued."""
    for gathers in (True, False):
        flying = []
        for index, segment in enumerate(segments):
            if gathers:
                flying.append(comm.all_gather([segment], f"all-gather {index}"))
            else:
                flying.append(comm.reduce_scatter([segment], [segment.flat.dtype], f"reduce-scatter {index}"))
            if len(flying) == 2:
                flying.pop(0).wait()
        for each in flying:
            each.wait()


def cost(comm: Comm, segments: list[Segment]) -> tuple[float, float, float, float]:
    """Wall ms, CPU ms, context switches and fresh pages of one round, on this rank."""
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    one_round(comm, segments)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    return 1e3 * wall, 1e3 * cpu, switches, after.ru_minflt - before.ru_minflt


def measure(options: argparse.Namespace) -> None:
    """One rank: every transport's rounds; rank 0 prints the table."""
    layout = ParamLayout((int(options.mib * 2**20) // 4,), options.world)
    segments = [Segment(torch.ones(layout.padded_numel), layout.spans) for _ in range(options.num)]
    comms = {}
    for name in options.transports.split(","):
        set_transport(name)
        comms[name] = comm_of(dist.new_group(), "cpu")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in comms}
    for _ in range(options.rounds + 1):
        for name, comm in comms.items():
            found[name].append(cost(comm, segments))
    if options.rank == 0:
        print(
            f"{options.link}, world {options.world}, {options.num} x {options.mib:g} MiB gathered and reduced"
        )
        for name, rounds in found.items():
            wall, cpu, switches, faults = (median(column) for column in zip(*rounds[1:], strict=True))
            print(
                f"{name:>12} {wall:7.0f} ms, CPU {cpu:5.0f} ms, {switches:5.0f} switches, {faults:.0f} faults"
            )


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=120.0)
    parser.add_argument("--transports", default="collectives,sockets", help="see set_transport")
    parser.add_argument("--num", type=int, default=8, help="segments")
    parser.add_argument("--mib", type=float, default=12.0, help="of one segment")
    parser.add_argument("--rounds", type=int, default=5)
    add_toy(parser, num=2, mib=1.0, rounds=1)
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
