"""Trains as one rank, or starts ranks that do."""

import argparse
from importlib import import_module

from shardwright.mesh_sizes import fill
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
        tunes = bool(resolved.recipe.base.folder)  # whose modules need an extra
        kind = import_module("shardwright.finetune.job").FineTuning if tunes else Pretraining
        train_rank(resolved, kind, in_json=known.json)
    elif config.backend == "xla":
        launch(known.given, 1, xla_environment(config.ranks))
    else:
        ranks = ranks_to_start(config)
        fill(resolved.recipe.mesh.sizes(), ranks)  # else each rank would find out
        launch(known.given, ranks)
    return 0
