"""``shardwright train``.

shardwright train RECIPE.toml [--backend eager|xla] [--resume [auto|STEP]] [--json] [--section.key VALUE ...]
"""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from shardwright.cli.keys import add_keys, given_keys
from shardwright.cli.verb import add_verb
from shardwright.extras import require
from shardwright.train.config import Recipe
from shardwright.train.engine import Job
from shardwright.train.inputs import check_inputs
from shardwright.train.launch import launch, xla_environment
from shardwright.train.pretrain import Pretraining
from shardwright.train.ranks import ranks_to_start
from shardwright.train.resolve import resolve
from shardwright.train.run import train_rank
from shardwright.train.tasks import is_rank, take_part
from shardwright.train.trackers import check_installed


def run_train(known: argparse.Namespace) -> int:
    """Train as one rank under a launcher, else start local ranks with the arguments ``known.given``."""
    short = [("launch.backend", known.backend), ("run.resume", known.resume)]
    given = [(key, value) for key, value in short if value is not None]
    resolved = resolve(known.recipe, [*given, *given_keys(known)])
    config = resolved.recipe.launch
    if resolved.recipe.base.folder:
        check_inputs(resolved.recipe)
    require("checkpoint", "safetensors")  # which the model is written by at the end
    if resolved.recipe.base.folder:
        require("hf", "transformers")
    if resolved.recipe.optimizer.kind == "adamw-8bit":
        require("bnb", "bitsandbytes")
    check_installed(resolved.recipe.track.to)
    take_part()
    if is_rank():
        train_rank(resolved, _kind_of(resolved.recipe), in_json=known.json)
    elif config.backend == "xla":
        launch(known.given, 1, xla_environment(config.ranks))
    else:
        launch(known.given, ranks_to_start(config))
    return 0


def _kind_of(recipe: Recipe) -> Callable[[Recipe, Any], Job]:
    """What makes the job. Only that kind's own modules are imported: one needs an extra."""
    if recipe.base.folder:
        return importlib.import_module("shardwright.finetune.job").FineTuning
    return Pretraining


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    train = add_verb(
        commands,
        "train",
        "Train or fine-tune the model of a recipe, on local ranks that it starts itself, or as one rank "
        "under torchrun, srun or mpirun. Each key of a recipe can be set here, too, and wins over the file.",
        "shardwright train mine.toml",
        "shardwright train mine.toml --training.steps 50 --optimizer.lr 3e-4",
        "shardwright train mine.toml --resume",
        "torchrun --nproc-per-node 8 -m shardwright train mine.toml --resume auto",
    )
    train.usage = (
        "shardwright train RECIPE.toml [--resume [auto|STEP]] [--backend {eager,xla}] [--json] "
        "[--section.key VALUE ...]"
    )
    train.add_argument("recipe", metavar="RECIPE.toml", help="the recipe")
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
    train.set_defaults(call=run_train)


def _resume(text: str) -> str:
    if text not in ("auto", "last") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, expected auto, a step, or nothing (then give it last)")
    return text
