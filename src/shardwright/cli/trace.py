"""The last steps of all ranks, collected and written."""

import argparse
import tomllib
from pathlib import Path

from shardwright.cli.top import exchange_at, store_of
from shardwright.errors import CommError, ShardwrightError
from shardwright.observe.steps.rings import Ring, load
from shardwright.observe.steps.step_page import save_page
from shardwright.plan.file import Plan
from shardwright.train.folder import JOB_FILE, RunFolder

_ANSWER_S = 10.0


def run(known: argparse.Namespace) -> int:
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
