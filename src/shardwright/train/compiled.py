"""The engine of XLA: one compiled step over all devices, on the same batches and weights as the eager one."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from torch import Tensor

from shardwright import clock, xla
from shardwright.checkpoint import Restored
from shardwright.checkpoint.url import Location
from shardwright.checkpoint.xla import load_xla, save_xla
from shardwright.data.text import TrainBatches, split_targets
from shardwright.recipe.config import Recipe
from shardwright.train.devices import DevicePlace
from shardwright.train.engine import Reading, Sizes
from shardwright.train.loop import learning_rate
from shardwright.train.models import Transformer, flops_of, loss_of
from shardwright.xla.step import TrainStep


def build_model(recipe: Recipe, place: DevicePlace) -> Transformer:
    """The sharded model with its initial weights, those of the eager engine. Every process calls, and makes
    them whole on its host first."""
    training = recipe.training
    model = Transformer(recipe.model)
    model.reset_parameters(recipe.run.seed)
    half = training.dtype == "bf16"
    options: dict[str, Any] = {
        "mesh": place.world,
        "compute_dtype": torch.bfloat16 if half else None,
        "fp32_reduce_scatter": half,
    }
    for block in model.blocks:
        xla.fully_shard(block, checkpoint_activations=training.activation_checkpointing, **options)
    if model.head is not None:
        for part in (model.embedding, model.norm, model.head):
            xla.fully_shard(part, **options)
    xla.fully_shard(model, **options)
    return model


def build_step(recipe: Recipe, model: Transformer) -> TrainStep:
    """The compiled step: accumulation, clipping, AdamW with the recipe's rate of each step."""
    config, steps = recipe.optimizer, recipe.training.steps
    rates = jnp.asarray([learning_rate(config, step, steps) for step in range(1, steps + 1)], jnp.float32)
    optimizer = xla.AdamW(
        lr=lambda count: rates[count],
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        decayed=lambda name, shape: len(shape) > 1,
    )
    return xla.make_train_step(
        model,
        lambda model, inputs, targets: loss_of(model(inputs), targets),
        optimizer,
        clip_norm=config.clip_norm,
        accumulation=recipe.training.accumulation,
    )


class CompiledEngine:
    """See ``Engine``. ``batches`` are those of this process's devices, in order."""

    exposed_s = None  # collectives run inside the program
    peak_nbytes = None  # XLA's to know

    def __init__(
        self, recipe: Recipe, place: DevicePlace, batches: Sequence[TrainBatches], windows: Tensor
    ) -> None:
        self.recipe = recipe
        self.place = place
        torch.manual_seed(recipe.run.seed)  # of dropout: the model's random key is made from it
        self.model = build_model(recipe, place)
        self.train_step = build_step(recipe, self.model)
        self._batches = batches
        self._windows = windows
        self.data_s = 0.0

    @property
    def flops_per_token(self) -> float:
        """See ``Engine``."""
        return flops_of(self.recipe.model, self.recipe.training.sequence_length)

    def tokens(self, first: int, end: int) -> int:
        """See ``Engine``."""
        return (end - first) * self.recipe.training.sequence_length

    def step(self, number: int, position: int) -> Reading:
        """See ``Engine``. A device's rows are its microbatches, one after another."""
        began = clock.perf_counter()
        parts = [
            batches.at(position + microbatch * batches.share.num_windows)
            for batches in self._batches
            for microbatch in range(self.recipe.training.accumulation)
        ]
        inputs, targets = (torch.cat(rows) for rows in zip(*parts, strict=True))
        self.data_s += clock.perf_counter() - began
        loss = self.train_step(inputs, targets)
        norm = self.train_step.grad_norm
        return Reading(lambda: (float(loss), float(norm), {}), lambda: float(norm))

    def heldout_loss(self) -> float:
        """See ``Engine``. The last batch is filled up with rows that don't count."""
        windows = self._windows
        shares = self.place.shares(self.recipe.training.batch_size)
        self.model.eval()
        loss_sum, count = 0.0, 0
        for first in range(0, len(windows), shares[0].num_windows):
            starts = [first + share.rank * share.batch_size for share in shares]
            own = torch.cat([torch.arange(start, start + shares[0].batch_size) for start in starts])
            inside = own < len(windows)
            inputs, targets = split_targets(windows[own.clamp(max=len(windows) - 1)])
            logits = self.model(inputs)
            if inside.any():
                loss_sum += loss_of(logits[inside], targets[inside]).item() * int(inside.sum())
                count += int(inside.sum())
        self.model.train()
        loss_sum, count = self.place.total(loss_sum, count)
        return loss_sum / count

    def save(self, path: Location, extra: dict[str, Any], step: int) -> None:
        """See ``Engine``."""
        keep = self.recipe.checkpoint.keep
        save_xla(path, model=self.model, train_step=self.train_step, extra=extra, step=step, keep=keep)

    def restore(self, path: Location) -> Restored:
        """See ``Engine``."""
        return load_xla(path, model=self.model, train_step=self.train_step)

    def full_state_dict(self) -> dict[str, Tensor]:
        """See ``Engine``."""
        return xla.full_state_dict(self.model)

    def sizes(self) -> Sizes:
        """See ``Engine``. What the compiled program holds at once is XLA's to know."""
        stats = xla.stats(self.model)
        full_nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        return Sizes(stats.param_numel, stats.at_rest_nbytes, full_nbytes, None, None, False)
