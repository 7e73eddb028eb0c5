"""The most memory that a step of a recipe is expected to take on one rank, by the plan's prices.

Traced on the meta device before anything is read, so that who sees that it doesn't fit has waited seconds.
"""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.observe.memory.report import Category
from shardwright.plan.memory import HeldBytes, Sharding, memory, peak
from shardwright.plan.predict import Choice, workload_of
from shardwright.plan.presets import preset, schedule
from shardwright.plan.workload import Workload
from shardwright.policy import DEFAULT_OFFLOAD, SchedulePolicy
from shardwright.recipe.config import Recipe
from shardwright.train.eager import plan_of, policies_of, precision_of
from shardwright.train.engine import TrainingProcess
from shardwright.train.models import Transformer, loss_of


def peak_of(recipe: Recipe, place: TrainingProcess, work: Workload, policy: SchedulePolicy) -> HeldBytes:
    """The moment of a steady step at which one of the ranks holds most, with the bytes by category.

    work: one microbatch. Not counted: Python and libraries, the data, and what an evaluation or a save takes.
    """
    shards = choice_of(recipe, place.world).shards_on(place.world)
    runs = replace(preset("shardwright"), policy=policy)
    precision, on_host = precision_of(recipe), place.device_type == "cpu"
    itemsize = precision.sum_dtype(torch.float32, precision.param_dtype or torch.float32).itemsize
    offload = DEFAULT_OFFLOAD if on_host else policies_of(recipe)["offload_policy"]
    sharding = Sharding(shards, itemsize, offload=offload)
    held = peak(memory(schedule(work, runs), work, runs, sharding))
    nbytes = dict(held.nbytes)
    if offload == DEFAULT_OFFLOAD:  # the plan's states are those of AdamW and parameters in float32
        nbytes[Category.STATES] = _states_nbytes(recipe, shards, work)
    if recipe.training.accumulation > 1:  # gradients of earlier microbatches are kept whole
        nbytes[Category.GRADIENTS] += work.trained * itemsize
    return HeldBytes(held.at, nbytes)


def _states_nbytes(recipe: Recipe, shards: int, work: Workload) -> int:
    """Bytes at rest on one rank, in the dtypes that parameters have there, with the optimizer's state."""
    total = 0
    for group in work.groups:
        numel, codes = group.coded
        frozen = max((param.itemsize for param in group.params if not param.trained), default=0)
        total += sum(prod(param.shape) * param.itemsize for param in group.params) - numel * frozen + codes
        for param in group.params:
            each = 2 if recipe.optimizer.kind == "adamw-8bit" else 2 * param.itemsize
            total += param.trained * prod(param.shape) * each
    return total // shards


def choice_of(recipe: Recipe, ranks: int) -> Choice:
    """The dtypes and the mesh of a recipe on so many ranks. Raises: InputError where they make up no mesh."""
    asked = recipe.mesh.model_dump(exclude={"pp_schedule"})
    dp, copies = recipe.mesh.dp, recipe.mesh.replicate
    sizes = {name: size for name, size in asked.items() if name not in ("dp", "replicate")}
    choice = Choice(mp_policy=precision_of(recipe), **sizes)
    found, left = divmod(choice.data_ranks(ranks), copies * choice.cp)
    if left or dp not in (0, found):
        said = " x ".join(f"{name}={size}" for name, size in asked.items() if size > 1)
        raise InputError(f"mesh: {said} are not the {ranks} ranks; change mesh.dp, or leave it out")
    return replace(choice, shards=found * choice.cp)


def expected_of_bytes(recipe: Recipe, place: TrainingProcess) -> HeldBytes:
    """Of the byte-level model. Raises: InputError where it can't be traced."""
    model, sample = meta_transformer(recipe)
    choice, policy = choice_of(recipe, place.world), recipe.schedule.policy()
    if recipe.training.plan:
        plan = plan_of(recipe)
        plan.recompute(model)
        choice, policy = replace(choice, groups=[group.modules for group in plan.groups]), plan.policy
    return peak_of(recipe, place, workload_of(model, sample, choice, loss_of_logits), policy)


def meta_transformer(recipe: Recipe) -> tuple[nn.Module, Tensor]:
    """The byte-level model of a recipe and one microbatch, on the meta device."""
    training = recipe.training
    with torch.device("meta"):
        model = Transformer(recipe.model, activation_checkpointing=training.activation_checkpointing)
        return model, torch.empty(training.batch_size, training.sequence_length, dtype=torch.int64)


def loss_of_logits(logits: Tensor) -> Tensor:
    """Return the loss of logits for targets that may be any: its cost is the same."""
    return loss_of(logits, logits.new_zeros(logits.shape[:2], dtype=torch.int64))
