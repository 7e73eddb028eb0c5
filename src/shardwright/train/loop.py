"""The training loop: microbatches, one optimizer step, and when to evaluate, log and save.

    for each step:  [microbatch: forward, backward] x accumulation -> clip -> AdamW -> zero
                    every log_every / heldout.every / checkpoint.every steps: a row, an evaluation, a
                    checkpoint

Everything that a step depends on is the weights, the optimizer's state and two integers (step, position in
the data): the learning rate follows from the step, and the random numbers of dropout from (seed, step, rank).
So a resumed run is the same run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.api import fully_shard, stats
from shardwright.checkpoint import StopRequest
from shardwright.comm.mesh import set_transport
from shardwright.module import FSDPModule
from shardwright.policy import MixedPrecisionPolicy
from shardwright.train.config import OptimizerConfig, Recipe
from shardwright.train.data import TrainBatches, split_targets
from shardwright.train.models import Transformer, loss_of
from shardwright.train.ranks import Place


def build_model(recipe: Recipe, place: Place) -> Transformer:
    """The sharded model with its initial weights; every rank calls, none ever holds the whole of it.

    A group per block, one for the embedding, one for norm and head; with a tied embedding these three are the
    root's own group, because the root multiplies by the embedding's weight.
    """
    with torch.device("meta"):
        model = Transformer(recipe.model, activation_checkpointing=recipe.training.activation_checkpointing)
    param_dtype = torch.bfloat16 if recipe.training.dtype == "bf16" else None
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None
    )
    set_transport(recipe.schedule.transport)
    for block in model.blocks:
        fully_shard(block, mesh=place.mesh, mp_policy=policy)
    if model.head is not None:
        fully_shard(model.embedding, mesh=place.mesh, mp_policy=policy)
        fully_shard([model.norm, model.head], mesh=place.mesh, mp_policy=policy)
    fully_shard(model, mesh=place.mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.set_schedule_policy(recipe.schedule.policy())
    model.to_empty(device=place.device)
    model.reset_parameters(recipe.run.seed)
    return model


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the (sharded) parameters; matrices are decayed, vectors are not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step ``step`` (from 1) of ``steps``: linear up to the peak, then a cosine down."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


@torch.no_grad()
def heldout_loss(model: nn.Module, windows: Tensor, batch_size: int, place: Place | None = None) -> float:
    """Mean nats per byte over ``windows`` (n, sequence_length + 1), dealt out in batches to the ranks.

    Every rank calls and makes the same number of forwards (a sharded forward needs all ranks); one that has
    no window left repeats an old one with weight 0. Without ``place``: one process does them all.
    """
    rank, world = (place.rank, place.world) if place else (0, 1)
    device = place.device if place else torch.device("cpu")
    was_training = model.training
    model.eval()
    loss_sum, count = 0.0, 0
    for first in range(0, len(windows), batch_size * world):
        start = first + rank * batch_size
        batch = windows[start : start + batch_size]
        own = len(batch)
        inputs, targets = split_targets((batch if own else windows[:1]).to(device))
        loss = loss_of(model(inputs), targets).item()
        loss_sum, count = loss_sum + loss * own, count + own
    model.train(was_training)
    if place:
        loss_sum, count = place.total(loss_sum, count)
    return loss_sum / count


@dataclass
class Progress:
    """Where a run is (``step`` and ``position`` are kept in checkpoints), and what this process measured."""

    step: int = 0
    position: int = 0
    saved_step: int | None = None
    trained_s: float = 0.0
    tokens: int = 0
    exposed_s: list[float] = field(default_factory=list)  # of each step
    step_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepReport:
    """One step, over all ranks: ``loss`` in nats per byte (mean), ``tokens_per_s`` since the last report."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float


@dataclass(frozen=True)
class Listener:
    """Whom the loop tells: a logged step, an evaluation (step, loss), and that a checkpoint is due."""

    stepped: Callable[[StepReport], None]
    evaluated: Callable[[int, float], None]
    save: Callable[[Progress], None]


class Loop:
    """Trains ``model`` from ``progress`` to the last step; every rank makes one and calls ``run``."""

    def __init__(self, recipe: Recipe, place: Place, model: Transformer, batches: TrainBatches) -> None:
        self.recipe = recipe
        self.place = place
        self.model = model
        self.batches = batches
        self.optimizer = build_optimizer(recipe.optimizer, model)
        self.progress = Progress()
        self._since_report = (0, 0.0)  # tokens and trained_s at the last report

    def run(self, windows: Tensor, listener: Listener, stop: StopRequest) -> bool:
        """Train to the end or until a stop is asked for, and save. Returns whether it is the end."""
        training, progress = self.recipe.training, self.progress
        while progress.step < training.steps and not stop.agreed():
            report = self._step()
            step, last = progress.step, progress.step == training.steps
            if report is not None:
                listener.stepped(report)
            if last or step % self.recipe.heldout.every == 0:
                listener.evaluated(step, heldout_loss(self.model, windows, training.batch_size, self.place))
            if last or step % self.recipe.checkpoint.every == 0:
                self._save(listener)
        if progress.saved_step != progress.step:
            self._save(listener)
        return progress.step >= training.steps

    def _save(self, listener: Listener) -> None:
        listener.save(self.progress)
        self.progress.saved_step = self.progress.step

    def _step(self) -> StepReport | None:
        """One optimizer step; a report when one is due."""
        recipe, progress = self.recipe, self.progress
        started, exposed = time.perf_counter(), self._exposed_s()
        step = progress.step + 1
        lr = learning_rate(recipe.optimizer, step, recipe.training.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # As a function of the step, random numbers need no state in the checkpoint, and none per rank.
        torch.manual_seed((recipe.run.seed * 1_000_003 + step) * 65_537 + self.place.rank)
        loss = self._gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step = step
        due = step % recipe.training.log_every == 0 or step == recipe.training.steps
        if not due:
            self._count(started, exposed)
            return None
        mean_loss = self.place.total(loss.item())[0] / self.place.world
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self._count(started, exposed)  # after the items, which wait for the device
        tokens, seconds = self._since_report
        self._since_report = (progress.tokens, progress.trained_s)
        speed = (progress.tokens - tokens) / (progress.trained_s - seconds)
        return StepReport(step, mean_loss, lr, grad_norm, speed)

    def _gradients(self) -> Tensor:
        """Forward and backward of each microbatch; the last reduces the gradients. Returns the mean loss."""
        training, progress, share = self.recipe.training, self.progress, self.batches.share
        total = torch.zeros((), device=self.place.device)
        assert isinstance(self.model, FSDPModule)
        for microbatch in range(training.accumulation):
            self.model.set_requires_gradient_sync(microbatch == training.accumulation - 1)
            inputs, targets = (part.to(self.place.device) for part in self.batches.at(progress.position))
            loss = loss_of(self.model(inputs), targets) / training.accumulation
            loss.backward()
            total += loss.detach()
            progress.position += share.num_windows
            progress.tokens += share.num_windows * training.sequence_length
        return total

    def _count(self, started: float, exposed: float) -> None:
        self.progress.step_s.append(time.perf_counter() - started)
        self.progress.trained_s += self.progress.step_s[-1]
        self.progress.exposed_s.append(self._exposed_s() - exposed)

    def _exposed_s(self) -> float:
        return stats(self.model).exposed_s or 0.0  # None on CUDA: a stream waits there, not the host
