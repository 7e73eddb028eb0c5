"""The engine of fine-tuning: a model of a folder, sharded as it is read; all of it trained, or adapters."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright import hf
from shardwright.data.feed import Feed
from shardwright.data.windows import IGNORED, Batch
from shardwright.errors import InputError
from shardwright.finetune.apart import keeps_apart
from shardwright.finetune.generate import Wanted, generate, tokens_of
from shardwright.finetune.objective import objective_of
from shardwright.hf import library
from shardwright.lora import add_lora
from shardwright.ops.activations import inputs_on_host
from shardwright.ops.loss import loss_weights
from shardwright.parallel import Mesh, context_parallel, tensor_parallel
from shardwright.recipe.config import BaseConfig, Recipe
from shardwright.recipe.named import named
from shardwright.train.eager import RankEngine, policies_of
from shardwright.train.flops import flops_per_token
from shardwright.train.ranks import RankPlace
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
    model = tensor_parallel(adapted_model(recipe), place.mesh)
    hf.shard(model, mesh=place.mesh.shard, **policies_of(recipe))
    model.set_schedule_policy(recipe.schedule.policy())
    quantise = None if base.quantise == "none" else base.quantise
    hf.read_weights(model, base.folder, quantise=quantise, dequantise=base.dequantise)
    return model.train()


def adapted_model(recipe: Recipe) -> Any:
    """The model that is trained, on the meta device, with its adapters. Raises: as ``hf.load``."""
    model = meta_model(recipe.base)
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
        self.feed, self.objective = feed, objective_of(recipe, self.model)
        size = self.model.get_input_embeddings().num_embeddings
        largest = feed.largest_token
        if largest >= size:
            raise InputError(
                f"{recipe.base.folder}: its tokenizer makes token {largest}, its embedding has {size} rows; "
                "the tokenizer is another model's"
            )
        self.keeps_apart = keeps_apart(self.model, place.device)
        if place.mesh.cp is not None and not self.keeps_apart:
            raise InputError(
                f"mesh.cp = {place.mesh.cp.size()}: {type(self.model).__name__} has no position_ids, or a "
                "state or attention that goes past where they begin again, so a sequence can't be cut; "
                "leave cp out"
            )
        context_parallel(self.model, place.mesh)
        if not self.keeps_apart and any(source.kind == "text" for source in feed.sources):
            name = type(self.model).__name__
            _log.warning("%s: files of text that share a sequence see each other in this model", name)

    @property
    def flops_per_token(self) -> float:
        """See ``Engine``; a packed sequence counts as one text."""
        model, config = self.model, self.model.config
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
        self.objective.begin_step()
        total = torch.zeros((), device=self.place.device)
        for i, (batch, counted, share) in enumerate(zip(batches, counts, shares, strict=True)):
            self.model.set_requires_gradient_sync(i == count - 1)
            loss = self._loss_sum(batch) * (share / max(1, counted))
            loss.backward()
            total += loss.detach()
        return total * self.place.mesh.loss_group.size()  # others of the world have the same tokens

    def figures(self) -> dict[str, float]:
        """See ``RankEngine``."""
        count, sums = self.objective.step_sums()
        if not sums:
            return {}
        num, *totals = self.place.total(count, *sums.values())
        return {name: total / num for name, total in zip(sums, totals, strict=True)}

    def _loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the losses, fp32."""
        given = batch if self.keeps_apart else replace(batch, positions=None)
        return self.objective.total(given.to(self.place.device))

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """See ``Engine``; nats per learned token."""
        rows, size = self.feed.heldout_rows, self.recipe.training.batch_size
        self.model.eval()
        loss_sum, count = 0.0, 0
        mesh = self.place.mesh
        for first in range(0, len(rows), size * mesh.num_samples):
            start = first + mesh.sample_rank * size
            own = rows[start : start + size]
            # A sharded forward needs all ranks.
            batch = own_part(self.feed.heldout.batch(own or rows[:1]), mesh)
            loss = self._loss_sum(batch).item()
            if own:
                loss_sum, count = loss_sum + loss, count + self.objective.count(batch)
        self.model.train()
        loss_sum, targets = self.place.total(loss_sum, count)
        return loss_sum / targets

    @torch.no_grad()
    def sample(self, tokenizer: Any) -> str:
        """What the model writes after the recipe's prompt, the same on every rank; every rank calls."""
        if self.place.mesh.cp is not None:
            return "(ranks that share sequences write none; one process does: shardwright sample RUN)"
        config = self.recipe.sample
        torch.manual_seed(self.recipe.run.seed)
        self.model.eval()
        wanted = Wanted(config.num_bytes, config.temperature)
        tokens = tokens_of(config.prompt, tokenizer, self.feed.heldout.batch([0]).inputs[0, :1].tolist())
        written = generate(self.model, tokenizer, tokens.to(self.place.device), wanted, synced_gpus=True)
        return tokenizer.decode(written, skip_special_tokens=True)
