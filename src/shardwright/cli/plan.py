"""``shardwright plan``: what a step takes and holds, before anything is rented.

shardwright plan --runs runs.csv --models models.csv --out predicted.csv
"""

import argparse
import sys
from typing import Any

from shardwright.errors import ConfigError
from shardwright.plan import runs
from shardwright.plan.constants import Constants


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    plan = commands.add_parser(
        "plan",
        description="Predict step times and memory of the runs in a table: the schedule of each step is "
        "planned and simulated. No GPU, no weights.",
        allow_abbrev=False,
    )
    plan.add_argument("--runs", required=True, metavar="CSV", help="a run in each row (docs/plan.md)")
    plan.add_argument("--models", required=True, metavar="CSV", help="a model's architecture in each row")
    plan.add_argument("--out", required=True, metavar="CSV", help="where the predictions go")
    plan.set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Predict every row. One that can't be predicted stays empty, and standard error says why."""
    models = runs.architectures(runs.read(known.models))
    found, refused = [], 0
    for row in runs.read(known.runs):
        try:
            found.append(runs.predict(runs.setup(row, models), Constants()))
        except ConfigError as error:
            print(f"shardwright plan: {error}", file=sys.stderr)
            found.append({"row_id": row["row_id"]})
            refused += 1
    runs.write(known.out, found)
    print(f"{len(found) - refused} of {len(found)} runs predicted: {known.out}")
    return 0
