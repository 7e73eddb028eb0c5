"""``shardwright trace``: the last steps of all ranks, of a job that runs or of a run that has ended.

shardwright trace RUN | HOST:PORT | FILE --out FOLDER [--steps N] [--plan PLAN]
"""

import argparse
import tomllib
from pathlib import Path
from typing import Any

from shardwright.cli.top import exchange_at, store_of
from shardwright.cli.verb import add_verb
from shardwright.errors import CommError, ShardwrightError
from shardwright.observe.steps.rings import Ring, load
from shardwright.observe.steps.step_page import save_page
from shardwright.planned import Plan
from shardwright.train.folder import JOB_FILE, RunFolder

_ANSWER_S = 10.0


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
    trace.add_argument("--steps", type=int, default=1, help="how many of the last whole steps (default: 1)")
    trace.add_argument("--plan", metavar="FILE", help="a plan of this run, to be drawn above it")
    trace.set_defaults(call=run_trace)


def run_trace(known: argparse.Namespace) -> int:
    """Collect, write and say where.

    Raises:
        ConfigError: nothing is at JOB. CommError: no rank answers. InputError: no rings, or no step.
    """
    plan = Plan.load(known.plan) if known.plan else _plan_of(Path(known.job))
    for file in save_page(_rings(known.job, known.steps), known.out, known.steps, plan):
        print(file)
    return 0


def _plan_of(folder: Path) -> Plan | None:
    """The plan that a run was trained by, where it can still be read."""
    config = RunFolder(folder).config
    recipe = tomllib.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    path = recipe.get("training", {}).get("plan", "")
    return Plan.load(path) if path and Path(path).is_file() else None


def _rings(job: str, steps: int) -> list[Ring]:
    folder = Path(job)
    left = RunFolder(folder).trace
    if folder.is_dir() and not (folder / JOB_FILE).exists():
        return load(left if left.is_dir() else folder)
    try:
        asked = _asked(job, steps)
    except ShardwrightError:  # it was killed, and nobody has said that it ended; or it ended meanwhile
        if left.is_dir():
            return load(left)
        raise
    found = [Ring.from_bytes(data) for data in asked]
    if not found:
        raise CommError(
            f"no rank of the job at {job} has answered within {_ANSWER_S:g} s: its processes are held up, or "
            "run another version of Shardwright"
        )
    return found


def _asked(job: str, steps: int) -> list[bytes]:
    """What the ranks of a running job answer."""
    exchange = exchange_at(store_of(job))
    try:
        return exchange.rings(max(1, steps), _ANSWER_S)
    except RuntimeError as error:  # the store is gone, and with it the process that held it
        raise CommError(
            f"the job at {job} has ended while it was asked for its last steps. If it was a run of "
            "`shardwright train`, give the run's folder, where its ranks have left them; else call "
            "model.trace().save(folder) before it ends"
        ) from error
