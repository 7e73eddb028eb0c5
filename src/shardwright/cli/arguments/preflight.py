"""``shardwright preflight``: in ten seconds, whether a job can train on the ranks that its launcher starts.

torchrun ... -m shardwright preflight [--folder /shared/runs] [--out cluster.toml] [--json]
srun shardwright preflight
"""

import argparse
from typing import Any

from shardwright.cli.outputs import check_file
from shardwright.cli.verb import DTYPES, add_verb, is_first, work
from shardwright.errors import ConfigError


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    preflight = add_verb(
        commands,
        "preflight",
        "Find out whether a job can train on these hosts: names, interfaces, links, clocks, "
        "versions, memory, disks, devices. Start it on every rank, as a training job is. Exit code 1: "
        "something is wrong, and the page says what to do.",
        "shardwright preflight --folder runs",
        "srun shardwright preflight --folder /shared/runs",
        "torchrun --nproc-per-node 8 -m shardwright preflight --out cluster.toml",
    )
    preflight.add_argument("--folder", default=".", help="what all hosts share, where runs are to be kept")
    preflight.add_argument("--seconds", type=float, default=10.0, help="it takes at most (default 10)")
    preflight.add_argument("--out", metavar="FILE", help="measure the cluster, too, into this file for plans")
    preflight.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of what is measured")
    preflight.add_argument("--json", action="store_true", help="print all that was found out as one object")
    preflight.set_defaults(call=work("preflight", _check))


def _check(known: argparse.Namespace) -> None:
    if not 2 <= known.seconds <= 1e6:
        raise ConfigError(
            f"--seconds {known.seconds:g}, expected 2 or more (links alone take that long), and at most 1e6"
        )
    if known.out and is_first():
        check_file(known.out, may_exist=True)
