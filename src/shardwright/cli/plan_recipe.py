"""``shardwright plan RECIPE``: the model of a recipe, traced, as the recipe trains it."""

import argparse

from shardwright.cli.plan_choice import changed
from shardwright.errors import ConfigError
from shardwright.plan.predict import Choice
from shardwright.plan.subject import Subject, of_model
from shardwright.train.eager import precision_of
from shardwright.train.expected import loss_of_logits, meta_transformer
from shardwright.train.resolve import resolve


def asked(known: argparse.Namespace) -> tuple[Subject, Choice]:
    """What the recipe says, except where the command line says otherwise. Raises: ConfigError."""
    options = {"sequence_length": known.sequence, "batch_size": known.batch}
    options["accumulation"] = known.microbatches
    given = [(f"training.{key}", str(value)) for key, value in options.items() if value is not None]
    recipe = resolve(known.model, given).recipe
    training, base = recipe.training, recipe.base.folder
    if base:
        raise ConfigError(
            f"{known.model} trains the model of {base}: give that folder in place of the recipe"
        )
    options = Choice(mp_policy=precision_of(recipe), microbatches=training.accumulation)
    choice = changed(options, known)
    return of_model(*meta_transformer(recipe), choice, loss_of_logits), choice
