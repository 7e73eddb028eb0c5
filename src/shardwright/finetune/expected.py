"""A step of fine-tuning to the planner: traced as it is trained, and the most memory that it is expected to
take (see ``train.expected``)."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.finetune.engine import adapted_model
from shardwright.finetune.head import HeadLoss
from shardwright.hf.load import encoded_names
from shardwright.plan.memory import HeldBytes
from shardwright.plan.predict import Choice, chosen_groups, workload_of
from shardwright.plan.subject import Subject, names_of_groups
from shardwright.plan.workload import Workload
from shardwright.quantized.codecs import codec_of
from shardwright.recipe.config import Recipe
from shardwright.recipe.named import named
from shardwright.train.engine import TrainingProcess
from shardwright.train.expected import choice_of, peak_of


class _ChangedLogits(Exception):
    """The model does more to what its head returns, so that the loss can't be made there."""


def expected_peak(recipe: Recipe, place: TrainingProcess) -> HeldBytes:
    """See ``train.expected.peak_of``. Raises: InputError where the model can't be traced; and as
    ``hf.load``."""
    model, choice = adapted_model(recipe), choice_of(recipe, place.world)
    work = _traced(recipe, model, choice)
    if recipe.base.quantise != "none":
        work = _encoded(recipe, model, choice, work)
    return peak_of(recipe, place, work, recipe.schedule.policy())


def subject_of(recipe: Recipe, choice: Choice) -> Subject:
    """The model of ``base.folder`` as the recipe trains it, with its adapters and its loss, for a plan.

    What it encodes in NF4 is what ``choice.base`` is about; another encoding is in the workload for good.
    Raises: InputError, as ``hf.load``.
    """
    model, training = adapted_model(recipe), recipe.training

    @cache
    def at(rows: int, sequence: int | None) -> Workload:
        size = {"batch_size": rows, "sequence_length": sequence}
        sized = recipe.model_copy(update={"training": training.model_copy(update=size)})
        work = _traced(sized, model, choice)
        if recipe.base.quantise == "none":
            return work
        work, is_nf4 = _encoded(recipe, model, choice, work), recipe.base.quantise == "nf4"
        groups = (group._replace(frozen=group.coded if is_nf4 else (0, 0)) for group in work.groups)
        return replace(work, groups=tuple(groups))

    return Subject(names_of_groups(model, choice), training.batch_size, training.sequence_length, at)


def _traced(recipe: Recipe, model: Any, choice: Choice) -> Workload:
    """One microbatch, with the loss that is made of it."""
    try:
        return _with_loss(recipe, model, choice, at_head=recipe.training.loss in ("cross-entropy", "dpo"))
    except _ChangedLogits:
        return _with_loss(recipe, model, choice, at_head=False)


def _with_loss(recipe: Recipe, model: Any, choice: Choice, at_head: bool) -> Workload:
    training = recipe.training
    rows = training.batch_size * (2 if training.loss == "dpo" else 1)  # a pair is two
    inputs = torch.empty(rows, training.sequence_length, dtype=torch.int64, device="meta")
    targets = torch.zeros(rows, -(-training.sequence_length // choice.cp), dtype=torch.int64)  # a rank's
    sample = {"input_ids": inputs, "use_cache": False}
    head: nn.Module = model.get_output_embeddings()

    def loss(out: Any) -> Tensor:
        if at_head and head_loss.is_at_head:
            if not head_loss.is_returned(out.logits):
                raise _ChangedLogits
            return out.logits.sum()
        if training.loss not in ("cross-entropy", "dpo"):
            return named("training.loss", training.loss)(out.logits, targets).float()
        return nn.functional.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten())

    head_loss = HeadLoss(model)
    try:
        if not at_head:
            return workload_of(model, sample, choice, loss)
        with head_loss.returning_losses(targets):  # of DPO too: row by row it would be traced for longer
            return workload_of(model, sample, choice, loss)
    finally:
        vars(head).pop("forward", None)


def _encoded(recipe: Recipe, model: nn.Module, choice: Choice, work: Workload) -> Workload:
    """The workload whose groups have codes at rest and on the wire, as ``hf.read_weights`` encodes them."""
    names, codec = encoded_names(model), codec_of(recipe.base.quantise)
    groups = []
    for group, size in zip(chosen_groups(model, choice), work.groups, strict=True):
        params = [model.get_parameter(name) for name in group.parameters if name in names]
        nbytes = sum(part.nbytes for param in params for part in codec.encode(param.detach()))
        numels = [param.numel() for param in params]
        per_use = max(numels, default=0) if recipe.base.dequantise == "layer" else 0
        groups.append(size._replace(coded=(sum(numels), nbytes), per_use=per_use))
    return replace(work, groups=tuple(groups))
