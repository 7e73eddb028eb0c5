"""The most memory that a step of fine-tuning is expected to take; see ``train.expected``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.finetune.engine import adapted_model
from shardwright.finetune.head import HeadLoss
from shardwright.hf.load import encoded_names
from shardwright.params.quantized.codec import codec_of
from shardwright.plan.memory import HeldBytes
from shardwright.plan.predict import Choice, chosen_groups, workload_of
from shardwright.plan.workload import Workload
from shardwright.train.config import Recipe
from shardwright.train.eager import precision_of
from shardwright.train.engine import TrainingProcess
from shardwright.train.expected import peak_of
from shardwright.train.named import named


class _ChangedLogits(Exception):
    """The model does more to what its head returns, so that the loss can't be made there."""


def expected_peak(recipe: Recipe, place: TrainingProcess) -> HeldBytes:
    """See ``train.expected.peak_of``. Decoding each weight where it is read (``base.dequantise = "layer"``)
    takes less. Raises: InputError where the model can't be traced; and as ``hf.load``."""
    model = adapted_model(recipe)
    try:
        work = _traced(recipe, model, at_head=recipe.training.loss in ("cross-entropy", "dpo"))
    except _ChangedLogits:
        work = _traced(recipe, model, at_head=False)
    if recipe.base.quantise != "none":
        work = _encoded(recipe, model, work)
    return peak_of(recipe, place, work, recipe.schedule.policy())


def _traced(recipe: Recipe, model: Any, at_head: bool) -> Workload:
    """One microbatch, with the loss that is made of it."""
    training = recipe.training
    rows = training.batch_size * (2 if training.loss == "dpo" else 1)  # a pair is two
    targets = torch.zeros(rows, training.sequence_length, dtype=torch.int64)
    sample = {"input_ids": targets.to("meta"), "use_cache": False}
    choice = Choice(mp_policy=precision_of(recipe))
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


def _encoded(recipe: Recipe, model: nn.Module, work: Workload) -> Workload:
    """The workload whose groups have codes at rest and on the wire, as ``hf.read_weights`` encodes them."""
    names, codec = encoded_names(model), codec_of(recipe.base.quantise)
    groups = []
    for group, size in zip(
        chosen_groups(model, Choice(mp_policy=precision_of(recipe))), work.groups, strict=True
    ):
        params = [model.get_parameter(name) for name in group.parameters if name in names]
        nbytes = sum(part.nbytes for param in params for part in codec.encode(param.detach()))
        groups.append(size._replace(coded=(sum(param.numel() for param in params), nbytes)))
    return replace(work, groups=tuple(groups))
