"""``shardwright bench``: this cluster as ``shardwright plan --cluster FILE`` takes it.

shardwright bench compute --out cluster.toml                           one device, or all at the same time:
torchrun --nproc-per-node 8 -m shardwright bench compute --out cluster.toml
torchrun --nproc-per-node 8 -m shardwright bench links --out cluster.toml
"""

import argparse
import os
from pathlib import Path
from typing import Any

from shardwright.cli.outputs import check_file
from shardwright.cli.verb import DTYPES, add_verb, work
from shardwright.errors import ConfigError
from shardwright.train.tasks import is_rank


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    bench = add_verb(
        commands,
        "bench",
        "Measure this cluster for shardwright plan --cluster FILE. Start it on every rank, as a "
        "training job is; both write the same file, devices first.",
        "shardwright bench compute --out cluster.toml",
        "torchrun --nproc-per-node 8 -m shardwright bench compute --out cluster.toml",
        "torchrun --nproc-per-node 8 -m shardwright bench links --out cluster.toml",
    )
    bench.add_argument("what", choices=("compute", "links"), help="of the devices, or of what joins them")
    bench.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of compute")
    bench.add_argument("--out", required=True, metavar="FILE", help="the cluster, TOML; rank 0 writes")
    bench.set_defaults(call=work("bench", _check))


def _check(known: argparse.Namespace) -> None:
    if not is_rank() or os.environ["WORLD_SIZE"] == "1":  # of several, the first one tells the others
        check_out(known.out, known.what)


def check_out(path: str | Path, what: str) -> None:
    """Raise ConfigError unless the file can be written, and holds devices where links are to be measured."""
    if what == "links" and not Path(path).exists():
        raise ConfigError(f"{path} has no device yet: first shardwright bench compute --out {path}")
    check_file(path, may_exist=True)
