"""``shardwright trace``: the last steps of all ranks, of a job that runs or of a run that has ended.

shardwright trace RUN | HOST:PORT | FILE --out FOLDER [--steps N] [--plan PLAN]
"""

import argparse
from pathlib import Path
from typing import Any

from shardwright.cli.outputs import check_file, check_folder
from shardwright.cli.verb import add_verb, at_least_1, check_exists, check_job, work


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    trace = add_verb(
        commands,
        "trace",
        "Draw what every rank did in its last steps, on one clock, with an arrow from each wait "
        "to the rank that came last: trace.html, trace.png (with matplotlib) and trace.json (for "
        "ui.perfetto.dev). It asks the ranks of a running job, which go on meanwhile; a run that has ended "
        "left it in its folder.",
        "shardwright trace runs/quickstart --out trace --steps 3",
    )
    trace.add_argument(
        "job",
        metavar="JOB",
        help="the folder of a run of `shardwright train`, or one that model.trace().save left rings in; or a "
        "running job's store: HOST:PORT (a rank's MASTER_ADDR:MASTER_PORT), or the path of its file",
    )
    trace.add_argument("--out", metavar="FOLDER", required=True, help="where to write; it is made")
    trace.add_argument("--steps", type=at_least_1, default=1, help="of the last whole steps (default: 1)")
    trace.add_argument("--plan", metavar="FILE", help="a plan of this run, to be drawn above it")
    trace.set_defaults(call=work("trace", _check))


def _check(known: argparse.Namespace) -> None:
    check_job(known.job)
    check_exists(known.plan, "--plan")
    check_folder(known.out, may_exist=True)
    for ending in ("json", "html", "png"):
        if Path(known.out).is_dir():
            check_file(Path(known.out, f"trace.{ending}"))
