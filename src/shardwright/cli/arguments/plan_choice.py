"""The arguments of ``shardwright plan`` that say how the model is trained: those of ``plan.Choice``."""

import argparse
from typing import get_args

from shardwright.cli.verb import DTYPES
from shardwright.errors import ConfigError
from shardwright.policy import Base, Offload

RUNTIMES = ("shardwright", "fsdp2", "fsdp1")
"""Names of ``shardwright.plan.presets.PRESETS``."""
SEARCHED = ("shards", "reshard_after_forward", "keep", "offload", "base", "recompute")
"""What ``--search`` and ``--savings`` try every value of."""
AXES = {
    "tp": "ranks that share each layer (default 1)",
    "cp": "ranks that share each sequence (default 1)",
    "ep": "ranks that share the experts (default 1)",
    "pp": "stages of a pipeline (default 1)",
    "chunks": "stages on each rank, interleaved (default 1)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them, as a section of ``--help``."""
    group = parser.add_argument_group("how it is trained", "as the arguments of shardwright.plan.Choice")
    group.add_argument(
        "--runtime",
        choices=RUNTIMES,
        action="append",
        help="whose schedule; given twice, both are shown (default shardwright)",
    )
    group.add_argument("--microbatches", type=int, metavar="N", help="of a step (default 1)")
    group.add_argument("--shards", type=int, metavar="RANKS", help="that share a parameter (default: all)")
    group.add_argument(
        "--reshard-after-forward",
        type=_reshard,
        metavar="true|false|RANKS",
        help="RANKS: shards are kept over so many until the backward (default true)",
    )
    group.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="of the groups, the last ones, unsharded until the backward: 0 to 1 (default 0)",
    )
    group.add_argument("--param-dtype", choices=DTYPES, help="that is computed with (default bfloat16)")
    group.add_argument("--reduce-dtype", choices=DTYPES, help="of sums of gradients (default float32)")
    group.add_argument("--offload", choices=get_args(Offload), help="on the host at rest (default none)")
    group.add_argument(
        "--recompute", type=float, metavar="SHARE", help="of the blocks, in the backward: 0 to 1 (default 0)"
    )
    for name, text in AXES.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument("--base", choices=get_args(Base), help="frozen weights: as they are, or in 4 bits")


def _reshard(text: str) -> bool | int:
    if text in ("true", "false"):
        return text == "true"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected true, false or a number of ranks, got {text!r}")
    return int(text)


def check_arguments(known: argparse.Namespace) -> None:
    """Raise ConfigError for a value that ``--search`` or ``--savings`` would replace."""
    tried = [name for name in SEARCHED if getattr(known, name) is not None]
    if tried and (known.search or known.savings):
        flag = "--search" if known.search else "--savings"
        raise ConfigError(f"{flag} tries every --{tried[0].replace('_', '-')} by itself: leave it out")
    if known.meshes and (not known.search or any(getattr(known, name) for name in AXES)):
        raise ConfigError(
            "--meshes goes with --search, and tries --tp, --cp, --ep and --pp by itself: leave them out"
        )
