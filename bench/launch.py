"""Runs a script of this folder once per rank, each in its place on a link, joined in one process group."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bench.links import LINKS, LinkError, places
from bench.quotas import cgroups


def arguments(doc: str | None, limit_s: float) -> argparse.ArgumentParser:
    """A parser with what every such script takes; ``limit_s``: its default of ``--limit-s``."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--link", choices=list(LINKS), default="loopback")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=limit_s, help="longest time for all of it")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.set_defaults(cores=())
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], None], script: str) -> None:
    """Parse; as one of the ranks join the others and measure, else launch ``script`` once per rank."""
    options = parser.parse_args()
    if options.rank is not None:
        torch.set_num_threads(1)
        store = dist.FileStore(options.store, options.world)
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world)
        measure(options)
        dist.barrier()
        dist.destroy_process_group()
        return
    try:
        start(options.link, options.world, script, options.limit_s, options.cores)
    except LinkError as error:
        sys.exit(f"bench: {error}")


def slowest_s(round_s: Callable[[], float]) -> float:
    """Seconds of a round that all ranks begin together, of the slowest of them. Every rank calls it."""
    dist.barrier()
    took = torch.tensor(round_s())
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def start(link: str, world: int, script: str, limit_s: float, cores: Sequence[float] = ()) -> None:
    """Start ``script`` with this process' arguments and ``--rank``, ``--store`` once per rank; end them all.

    cores: that each rank may use at most, where this machine has CPU cgroups to give away; (): all.

    Exits with a message where a rank fails or runs past ``limit_s``. Raises: LinkError.
    """
    with tempfile.TemporaryDirectory() as folder, places(link, world) as homes, cgroups(len(cores)) as quota:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, home in enumerate(homes):
                words = [*home.prefix, sys.executable, script, *sys.argv[1:]]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": home.interface}
                inner = ["--rank", str(rank), "--store", f"{folder}/store"]
                ranks.append(subprocess.Popen([*words, *inner], env=environment))
                if cores and quota is not None:
                    quota.set(rank, cores[rank])
                    quota.hold(rank, ranks[-1].pid)
            failed = [rank for rank, process in enumerate(ranks) if process.wait(limit_s)]
        except subprocess.TimeoutExpired:
            sys.exit(f"bench: a rank ran past {limit_s:g} s (--limit-s)")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if failed:
        sys.exit(f"bench: ranks {failed} ended with an error")
