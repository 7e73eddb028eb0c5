"""Trains as one rank, or starts ranks that do."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from shardwright.recipe.config import Recipe
from shardwright.train.engine import Job
from shardwright.train.launch import launch, xla_environment
from shardwright.train.pretrain import Pretraining
from shardwright.train.ranks import ranks_to_start
from shardwright.train.run import train_rank
from shardwright.train.tasks import is_rank


def run(known: argparse.Namespace) -> int:
    """Train as one rank under a launcher, else start local ranks with the arguments ``known.given``."""
    resolved = known.resolved
    config = resolved.recipe.launch
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
