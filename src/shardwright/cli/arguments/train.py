"""``shardwright train``.

shardwright train RECIPE [--backend eager|xla] [--resume [auto|STEP]] [--json] [--section.key VALUE ...]
"""

import argparse
from typing import Any

from shardwright.cli.outputs import check_folder
from shardwright.cli.verb import add_verb, is_first, work
from shardwright.extras import require
from shardwright.recipe.inputs import check_inputs
from shardwright.recipe.keys import add_keys, given_keys
from shardwright.recipe.resolve import resolve
from shardwright.train.launch import check_ranks
from shardwright.train.tasks import is_rank


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    train = add_verb(
        commands,
        "train",
        "Train or fine-tune the model of a recipe, on local ranks that it starts itself, or as one rank "
        "under torchrun, srun or mpirun. Each key of a recipe can be set here, too, and wins over the file.",
        "shardwright train mine.toml",
        "shardwright train quickstart --run.folder runs/a",
        "shardwright train mine.toml --training.steps 50 --optimizer.lr 3e-4",
        "shardwright train mine.toml --resume",
        "torchrun --nproc-per-node 8 -m shardwright train mine.toml --resume auto",
    )
    train.usage = (
        "shardwright train RECIPE [--resume [auto|STEP]] [--backend {eager,xla}] [--json] "
        "[--section.key VALUE ...]"
    )
    train.add_argument("recipe", metavar="RECIPE", help="a recipe's file, or the name of one of the package")
    train.add_argument(
        "--backend",
        choices=["eager", "xla"],
        help="short for --launch.backend: a process per rank, or one XLA program (needs the extra [xla])",
    )
    train.add_argument(
        "--resume",
        metavar="auto|STEP",
        nargs="?",
        const="last",
        type=_resume,
        help="short for --run.resume: alone, go on from the run's last checkpoint; auto: begin where there "
        "is none; STEP: from the checkpoint of that step",
    )
    train.add_argument(
        "--json",
        action="store_true",
        help="print the rows of metrics.jsonl as they come and the summary at the end, an object per line, "
        "and all else on stderr",
    )
    add_keys(train)
    train.set_defaults(call=work("train", _check))


def _resume(text: str) -> str:
    if text not in ("auto", "last") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, expected auto, a step, or nothing (then give it last)")
    return text


def _check(known: argparse.Namespace) -> None:
    short = [("launch.backend", known.backend), ("run.resume", known.resume)]
    given = [(key, value) for key, value in short if value is not None]
    known.resolved = resolve(known.recipe, [*given, *given_keys(known)])
    recipe = known.resolved.recipe
    if recipe.base.folder:
        check_inputs(recipe)
    require("checkpoint", "safetensors")  # which the model is written by at the end
    if recipe.base.folder:
        require("hf", "transformers")
    if recipe.optimizer.kind == "adamw-8bit":
        require("bnb", "bitsandbytes")
    require("track", *recipe.track.to)
    if not is_rank():
        check_ranks(recipe.launch.ranks, recipe.launch.ranks_per_core)
    if is_first():
        check_folder(known.resolved.folder, may_exist=True)
