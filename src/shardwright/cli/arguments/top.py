"""``shardwright top``: what every rank of a running job waits for, or does, live.

shardwright top RUN | HOST:PORT | FILE [--once] [--json]
"""

from typing import Any

from shardwright.cli.verb import add_verb, check_job, work


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    top = add_verb(
        commands,
        "top",
        "Ask the ranks of a running job what they wait for, or do, again and again (Ctrl-C ends "
        "it). It joins no collective, and runs anywhere from where the job's store can be reached.",
        "shardwright top runs/quickstart",
        "shardwright top 10.0.0.7:29500 --once",
    )
    top.add_argument(
        "job",
        metavar="JOB",
        help="the folder of a run of `shardwright train` (one that has ended: who was late in it); or the "
        "job's store: HOST:PORT (a rank's MASTER_ADDR:MASTER_PORT), or the path of its file",
    )
    top.add_argument("--once", action="store_true", help="print one table and leave")
    top.add_argument("--json", action="store_true", help="print what ranks say as objects, one per line")
    top.set_defaults(call=work("top", lambda known: check_job(known.job)))
