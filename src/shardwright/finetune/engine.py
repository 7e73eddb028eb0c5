"""The engine of fine-tuning: a model of a folder, sharded as it is read; all of it trained, or adapters."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright import hf
from shardwright.data.feed import Feed
from shardwright.data.text import to_device
from shardwright.data.windows import IGNORED, Batch
from shardwright.errors import InputError
from shardwright.finetune.apart import keeps_apart
from shardwright.finetune.generate import Wanted, generate, tokens_of
from shardwright.finetune.objective import objective_of
from shardwright.finetune.stages import cut_model, filled, run_as_stage
from shardwright.hf import library
from shardwright.lora import add_lora
from shardwright.ops.activations import inputs_on_host
from shardwright.ops.loss import loss_weights
from shardwright.parallel import Mesh, context_parallel, expert_parallel, tensor_parallel
from shardwright.parallel.experts import counts_in
from shardwright.recipe.config import BaseConfig, Recipe
from shardwright.recipe.named import named
from shardwright.train.eager import RankEngine, policies_of, precision_of
from shardwright.train.flops import flops_per_token
from shardwright.train.ranks import RankPlace
from shardwright.train.stages import Pipeline
from shardwright.transport.mesh import set_transport

DTYPES = {"files": None, "fp32": torch.float32, "bf16": torch.bfloat16}

_CHECKPOINT = "_gradient_checkpointing_func"  # of modules of transformers that recompute

_log = logging.getLogger(__name__)


def build_model(recipe: Recipe, place: RankPlace) -> Any:
    """The model of ``base.folder`` with its adapters, sharded, read and encoded. Every rank calls.

    Adapters are kept in float32 whatever the base is, since an optimizer steps them.
    Raises: as ``hf.load``.
    """
    base = recipe.base
    set_transport(recipe.schedule.transport)
    model = adapted_model(recipe, place.mesh)
    hf.shard(model, mesh=place.mesh.shard, **policies_of(recipe))
    model.set_schedule_policy(recipe.schedule.policy())
    quantise = None if base.quantise == "none" else base.quantise
    hf.read_weights(model, base.folder, quantise=quantise, dequantise=base.dequantise)
    return model.train()


def adapted_model(recipe: Recipe, mesh: Mesh | None = None) -> Any:
    """The model that is trained, on the meta device, with its adapters, and layers and experts that
    ranks of ``mesh`` share, or a stage of it. Raises: as ``hf.load``, ``tensor_parallel``,
    ``expert_parallel`` and ``cut_model``."""
    model = meta_model(recipe.base)
    if mesh is not None:
        tensor_parallel(model, mesh)
        cut_model(model, meta_model(recipe.base) if mesh.pp else None, mesh)
        # Where ranks share no experts their tokens are counted, of those that can be.
        with nullcontext() if mesh.ep else suppress(InputError):
            if mesh.ep or not recipe.base.build:  # a list of experts would be stacked
                expert_parallel(model, mesh)
    if recipe.adapter.rank:
        add_lora(model, recipe.adapter.policy(), torch.float32)
    if recipe.training.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if recipe.training.offload_activations:
        layers = [module for module in model.modules() if hasattr(module, _CHECKPOINT)]
        checkpoint = inputs_on_host(getattr(layers[0], _CHECKPOINT))  # one for all, which knows their order
        for layer in layers:
            setattr(layer, _CHECKPOINT, checkpoint)
    return model.train()


def meta_model(base: BaseConfig) -> Any:
    """The model of [base] on the meta device, by transformers or by ``base.build``."""
    folder, dtype = Path(base.folder), DTYPES[base.dtype]
    if not base.build:
        return library.build(folder, dtype)
    with torch.device("meta"):
        return named("base.build", base.build)(folder, dtype)


def own_part(batch: Batch, mesh: Mesh) -> Batch:
    """What this rank computes of a batch that all ranks of ``mesh.cp`` have: the batch, or a part of each
    sequence, which is padded first where it can't be cut evenly. Targets are shifted already."""
    if mesh.cp is None:
        return batch
    given = {"inputs": (batch.inputs, 0), "targets": (batch.targets, IGNORED)}
    if batch.positions is not None:
        given["position_ids"] = batch.positions, 0
    short = -batch.inputs.shape[1] % mesh.cp.size()
    part = mesh.split({name: F.pad(tensor, (0, short), value=v) for name, (tensor, v) in given.items()})
    learned = int((part["targets"] != IGNORED).sum())
    return Batch(part["inputs"], part["targets"], part["position_ids"], learned)


class TunedEngine(RankEngine):
    """See ``Engine``. A step's loss is the mean over the learned tokens of all ranks and microbatches,
    however these are spread over them."""

    def __init__(self, recipe: Recipe, place: RankPlace, feed: Feed) -> None:
        super().__init__(recipe, place, build_model(recipe, place))
        self.feed, mesh = feed, place.mesh
        self._experts: list[Tensor] = []  # how many of a step's tokens, of this rank, each has got, by layer
        self._outline = self.model if mesh.pp is None else meta_model(recipe.base)
        size = self._outline.get_input_embeddings().num_embeddings
        largest = feed.largest_token
        if largest >= size:
            raise InputError(
                f"{recipe.base.folder}: its tokenizer makes token {largest}, its embedding has {size} rows; "
                "the tokenizer is another model's"
            )
        self._pipeline: Pipeline | None = None
        if mesh.pp is None:
            self.objective = objective_of(recipe, self.model)
            self.keeps_apart = keeps_apart(self.model, size, place.device)
        else:
            self.objective = run_as_stage(self.model, mesh, partial(objective_of, recipe, self.model))
            self._pipeline = self._as_pipeline()
            apart = keeps_apart(self.model, size, place.device, self._of_stage)
            self.keeps_apart = not place.largest(not apart)[0]
        for key, axis in (("cp", mesh.cp), ("pp", mesh.pp)):
            if axis is not None and not self.keeps_apart:
                raise InputError(
                    f"mesh.{key} = {axis.size()}: {type(self.model).__name__} has no position_ids, or a "
                    "state or attention that goes past where they begin again, so a sequence can't be cut or "
                    f"filled up; leave {key} out"
                )
        context_parallel(self.model, place.mesh)
        if not self.keeps_apart and any(source.kind == "text" for source in feed.sources):
            name = type(self.model).__name__
            _log.warning("%s: files of text that share a sequence see each other in this model", name)

    def _as_pipeline(self) -> Pipeline:
        recipe, mesh = self.recipe, self.place.mesh
        shape, dtype = self._shape(), precision_of(recipe).param_dtype or self._outline.dtype
        tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
        hidden = torch.zeros(*shape, self.model.config.hidden_size, dtype=dtype, device="meta")
        how = recipe.mesh.pp_schedule, recipe.training.accumulation
        tensors = tokens, hidden, torch.zeros(1, device="meta")
        return Pipeline(self.model, mesh, how, tensors, lambda loss, _: loss.sum(), self.place.device)

    def _shape(self) -> tuple[int, int]:
        """Of what a stage is given at once, on this rank."""
        training, cp = self.recipe.training, self.place.mesh.cp
        return training.batch_size, training.sequence_length // (1 if cp is None else cp.size())

    def _of_stage(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What this rank's stage makes of tokens, or of hidden states that are different for each token."""
        if self._pipeline is not None and not self._pipeline.is_first:
            width = torch.arange(1, 1 + self.model.config.hidden_size, device=ids.device)
            ids = torch.sin(ids.unsqueeze(-1) * width).to(self._outline.dtype)
        return self.model(ids, position_ids=positions)

    @property
    def flops_per_token(self) -> float:
        """See ``Engine``; a packed sequence counts as one text."""
        model, config = self._outline, self.model.config
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        unread = [table] if head is None or head.weight is not table else []
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width *= config.num_attention_heads
        return flops_per_token(
            self.whole()[0] - sum(p.numel() for p in unread),
            trained - sum(p.numel() for p in unread if p.requires_grad),
            config.num_hidden_layers * width * self.feed.train.inputs.mean() / self.feed.train.per,
        )

    def tokens(self, first: int, end: int) -> int:
        """See ``Engine``."""
        return int(self.feed.train.inputs[self.feed.order.between(first, end)].sum())

    def gradients(self, position: int) -> Tensor:
        """See ``RankEngine``."""
        count, order = self.recipe.training.accumulation, self.feed.order
        with self.getting_data():
            numbers = [order.at(position + i * order.share.num_windows) for i in range(count)]
            batches = [own_part(self.feed.train.batch(each), self.place.mesh) for each in numbers]
        counts = [self.objective.count(batch) for batch in batches]
        shares = loss_weights(self.model, counts)
        if self._pipeline is not None:
            scale = sum(shares) / max(1, sum(counts))
            whole = self._losses_of_stages(self._pipeline, batches, len(batches[0].inputs), scale)
            return whole * self.place.mesh.loss_group.size() * self._pipeline.stages
        self.objective.begin_step()
        total = torch.zeros((), device=self.place.device)
        for i, (batch, counted, share) in enumerate(zip(batches, counts, shares, strict=True)):
            self.model.set_requires_gradient_sync(i == count - 1)
            loss = self._loss_sum(batch) * (share / max(1, counted))
            loss.backward()
            total += loss.detach()
            counts = counts_in(self.model).values()
            self._experts = [a + b for a, b in zip(self._experts, counts, strict=True)] if i else [*counts]
        return total * self.place.mesh.loss_group.size()  # others of the world have the same tokens

    def _losses_of_stages(
        self, pipeline: Pipeline, batches: Sequence[Batch], rows: int, scale: float = 1.0
    ) -> Tensor:
        """Of batches that are filled up to ``rows`` each, and to the length of all."""
        parts = zip(*(filled(batch, rows, self._shape()[1]) for batch in batches), strict=True)
        inputs, targets, positions = (to_device(torch.cat(part), self.place.device) for part in parts)
        return pipeline.losses(inputs, targets, scale, labels=targets, position_ids=positions)

    def figures(self) -> dict[str, float]:
        """See ``RankEngine``."""
        count, sums = self.objective.step_sums()
        num, *totals = self.place.total(count, *sums.values()) if sums else (0,)
        means = {name: total / num for name, total in zip(sums, totals, strict=True)}
        return means | self._balance()

    def _balance(self) -> dict[str, float]:
        """How evenly a step's tokens went to experts, in the layer that is worst at it."""
        if not self._experts:
            return {}
        total = torch.tensor(self.place.total(*torch.cat(self._experts).tolist()))
        layers = total.split([len(each) for each in self._experts])
        return {
            "experts/largest": max(float(each.max() / each.mean()) for each in layers),
            "experts/idle": max(float((each == 0).sum()) for each in layers),
        }

    def _loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the losses, fp32."""
        given = batch if self.keeps_apart else replace(batch, positions=None)
        return self.objective.total(given.to(self.place.device))

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """See ``Engine``; nats per learned token."""
        rows, size = self.feed.heldout_rows, self.recipe.training.batch_size
        pipeline = self._pipeline
        size *= 1 if pipeline is None else self.recipe.training.accumulation
        self.model.eval()
        loss_sum, count = 0.0, 0
        mesh = self.place.mesh
        for first in range(0, len(rows), size * mesh.num_samples):
            start = first + mesh.sample_rank * size
            own = rows[start : start + size]
            # A sharded forward needs all ranks.
            batch = own_part(self.feed.heldout.batch(own or rows[:1]), mesh)
            if pipeline is None:
                loss = self._loss_sum(batch).item()
            else:
                loss = self._losses_of_stages(pipeline, [batch], size).item()
            if own and (pipeline is None or pipeline.is_last):
                loss_sum, count = loss_sum + loss, count + self.objective.count(batch)
        self.model.train()
        loss_sum, targets = self.place.total(loss_sum, count)
        return loss_sum / targets

    @torch.no_grad()
    def sample(self, tokenizer: Any) -> str:
        """What the model writes after the recipe's prompt, the same on every rank; every rank calls."""
        if self.place.mesh.cp is not None or self._pipeline is not None:
            return "(ranks that share sequences or are stages write none; shardwright sample RUN does)"
        config = self.recipe.sample
        torch.manual_seed(self.recipe.run.seed)
        self.model.eval()
        wanted = Wanted(config.num_bytes, config.temperature)
        tokens = tokens_of(config.prompt, tokenizer, self.feed.heldout.batch([0]).inputs[0, :1].tolist())
        written = generate(self.model, tokenizer, tokens.to(self.place.device), wanted, synced_gpus=True)
        return tokenizer.decode(written, skip_special_tokens=True)
