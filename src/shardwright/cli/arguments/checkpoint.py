"""``shardwright checkpoint``: look at checkpoints, check, compare and export them. One process, no model.

    shardwright checkpoint inspect PATH [--no-values] [--json]
    shardwright checkpoint verify PATH [--json]
    shardwright checkpoint seal FOLDER
    shardwright checkpoint diff A B [--json]
    shardwright checkpoint consolidate PATH OUT [--dtype bfloat16] [--max-file-bytes N] [--tied-copies]
    shardwright checkpoint convert SRC DST --to FORMAT [--ranks N]
    shardwright checkpoint consolidate --ckpt-prefix PREFIX [--ckpt-suffix SUFFIX] [--save-path FILE]

The last one joins the per-rank files of XlaFullyShardedDataParallel, optimizer state included.
PATH is one checkpoint, a folder of them (then its latest complete one), or one that others wrote; FOLDER is
one of the last kind, for verify to find what changes in it from now on.
Exit codes for scripts: 0 all is well, 1 it is not (damage, differences, NaNs, or it can't be opened).
"""

import argparse
import os
from typing import Any

from shardwright.cli.outputs import check_file, check_folder
from shardwright.cli.verb import DTYPES, add_verb, at_least_1, work
from shardwright.errors import CheckpointError, ConfigError

FORMATS = ("shardwright", "safetensors", "dcp", "torch", "fairscale", "xla")
"""Those of ``shardwright.checkpoint.tools.Format``."""
_PATH = "a checkpoint, a folder of them (then its latest complete one), or the URL of either"

_CODES = "Exit code 1: damage, NaN or differences were found, or it can't be opened."

_VERBS = {
    "inspect": (
        "list what is in it, with NaN and constant tensors",
        f"List the tensors of a checkpoint, and which of them hold NaN or one value only. {_CODES}",
        "runs/quickstart/checkpoint",
    ),
    "verify": (
        "read every byte, compare every checksum",
        f"Read every byte of a checkpoint, and compare every checksum. {_CODES}",
        "runs/quickstart/checkpoint",
    ),
    "seal": (
        "store checksums of a folder that torch saved, for verify",
        "Store the checksums of a folder of torch.distributed.checkpoint, or of any other files, in one file "
        f"beside them, so that verify finds every byte that changes. {_CODES}",
        "saved/step-100",
    ),
    "diff": (
        "compare two, bit by bit, whatever their pieces",
        f"Compare two checkpoints, bit by bit, however many ranks wrote each. {_CODES}",
        "runs/first/checkpoint runs/second/checkpoint",
    ),
    "convert": (
        "write the weights in another format",
        "Write the weights of a checkpoint in the format of another library.",
        "runs/quickstart/checkpoint dcp --to dcp",
    ),
    "consolidate": (
        "write the weights as plain safetensors",
        "Write the weights of a checkpoint as plain safetensors, whole; or join the files of ranks that "
        "XlaFullyShardedDataParallel has left.",
        "runs/quickstart/checkpoint weights --dtype bfloat16",
    ),
}
"""What it can do: the purpose and the description of each, and an example of its arguments."""


def add_commands(commands: Any) -> None:
    """Add ``checkpoint`` and what it can do to the subparsers of the command."""
    parser = add_verb(
        commands,
        "checkpoint",
        f"Inspect, verify, seal, diff, convert or consolidate checkpoints. {_CODES}",
        "shardwright checkpoint verify runs/quickstart/checkpoint",
        "shardwright checkpoint verify --help",
    )
    parser.set_defaults(call=work("checkpoint", _check))
    verbs = parser.add_subparsers(dest="verb", required=True)
    inspect, verify, seal, diff, convert, consolidate = (
        add_verb(verbs, name, description, f"shardwright checkpoint {name} {example}", purpose=purpose)
        for name, (purpose, description, example) in _VERBS.items()
    )
    for verb in (inspect, verify):
        verb.add_argument("path", metavar="PATH", help=_PATH)
    inspect.add_argument("--no-values", action="store_true", help="list only; don't read the tensors")
    seal.add_argument("path", metavar="FOLDER", help="its files are only read")
    diff.add_argument("a", metavar="A", help=_PATH)
    diff.add_argument("b", metavar="B", help="the other one")
    for verb in (inspect, verify, diff):
        verb.add_argument("--json", action="store_true", help="print one object instead")
    convert.add_argument("src", metavar="SRC", help=_PATH)
    convert.add_argument("dst", metavar="DST", help="a folder, or a file for torch, that doesn't exist yet")
    convert.add_argument("--to", required=True, choices=FORMATS)
    convert.add_argument("--ranks", type=at_least_1, default=1, help="of per-rank files (fairscale, xla)")
    consolidate.add_argument("path", metavar="PATH", nargs="?", help=_PATH)
    consolidate.add_argument("out", metavar="OUT", nargs="?", help="a folder that doesn't exist yet")
    consolidate.add_argument("--dtype", choices=DTYPES, help="convert floating weights to it")
    consolidate.add_argument("--max-file-bytes", type=at_least_1, default=5 * 10**9)
    consolidate.add_argument("--tied-copies", action="store_true", help="store tied weights under each name")
    xla = consolidate.add_argument_group("per-rank files of XlaFullyShardedDataParallel, instead of PATH OUT")
    # The original spells them with underscores.
    xla.add_argument("--ckpt-prefix", "--ckpt_prefix", help="what their paths begin with")
    xla.add_argument("--ckpt-suffix", "--ckpt_suffix", default="*.pth", help="the rest (default: *.pth)")
    xla.add_argument("--save-path", "--save_path", default="", help="default: PREFIX_consolidated.pth")


def _check(known: argparse.Namespace) -> None:
    given = vars(known)
    joins = given.get("ckpt_prefix") is not None
    if known.verb == "consolidate" and (known.path is not None if joins else known.out is None):
        raise ConfigError("consolidate takes PATH OUT, or --ckpt-prefix PREFIX for per-rank files")
    for name in ("path", "a", "b", "src"):
        path = given.get(name)
        if path is not None and "://" not in path and not os.path.exists(path):
            raise CheckpointError(f"{path}: there is no such file or folder; give {_PATH}")
    out = given.get("dst") or given.get("out")
    if out is not None and "://" not in out:
        check_folder(out)
    if given.get("save_path"):
        check_file(known.save_path)
