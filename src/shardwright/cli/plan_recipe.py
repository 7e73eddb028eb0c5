"""``shardwright plan RECIPE``: the model of a recipe, traced, as the recipe trains it."""

import argparse
from dataclasses import replace
from importlib import import_module

from shardwright.cli.plan_choice import changed, cluster_of
from shardwright.errors import ConfigError
from shardwright.plan.file import OFFLOADS
from shardwright.plan.predict import Choice
from shardwright.plan.subject import Subject, of_model
from shardwright.recipe.inputs import check_inputs
from shardwright.recipe.resolve import resolve
from shardwright.train.expected import choice_of, loss_of_logits, meta_transformer


def asked(known: argparse.Namespace) -> tuple[Subject, Choice]:
    """What the recipe says, except what the command line says.

    Raises: ConfigError; of a recipe with a base InputError and DataError, as its run would, and MissingExtra.
    """
    options = {"sequence_length": known.sequence, "batch_size": known.batch}
    options["accumulation"] = known.microbatches
    given = [(f"training.{key}", str(value)) for key, value in options.items() if value is not None]
    recipe = resolve(known.model, given).recipe
    choice = replace(
        choice_of(recipe, cluster_of(known).ranks),
        microbatches=recipe.training.accumulation,
        offload=OFFLOADS[recipe.training.offload],
        base="nf4" if recipe.base.quantise == "nf4" else "plain",
    )
    if known.out or known.search or known.savings or known.recompute is not None:  # a plan names the blocks
        choice = replace(choice, recompute=float(recipe.training.activation_checkpointing))
        training = recipe.training.model_copy(update={"activation_checkpointing": False})
        recipe = recipe.model_copy(update={"training": training})
    choice = changed(choice, known)
    if not recipe.base.folder:
        return of_model(*meta_transformer(recipe), choice, loss_of_logits), choice
    if recipe.training.loss == "dpo":
        raise ConfigError(
            f"{known.model}: training.loss = 'dpo' has no price, since its step has a forward of the "
            "reference as well; plan the recipe with 'cross-entropy' and twice its batch_size, which holds "
            "as much"
        )
    check_inputs(recipe)
    tuned = import_module("shardwright.finetune.expected")  # transformers comes with an extra
    return tuned.subject_of(recipe, choice), choice
