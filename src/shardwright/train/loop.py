"""The training loop: one optimizer step after another, and when to evaluate, log and save.

    for each step:  the engine's step: microbatches, clip, AdamW
                    every log_every / heldout.every / checkpoint.every steps: a row, an evaluation, a
                    checkpoint; the last two also after an epoch, where the recipe counts in epochs

Everything that a step depends on is the weights, the optimizer's state and two integers (step, position in
the data): the learning rate follows from the step, and the random numbers of dropout from (seed, step, rank).
So a resumed run is the same run.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from shardwright import clock
from shardwright.checkpoint import StopRequest
from shardwright.errors import NonFinite
from shardwright.recipe.config import OptimizerConfig, Recipe
from shardwright.train.engine import Engine, Reading
from shardwright.train.flops import peak_flops
from shardwright.transport.host_memory import resident_nbytes


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step ``step`` (from 1) of ``steps``: linear up to the peak, then by the schedule.

    Warm-up, stable, decay: Hu et al., arXiv:2404.06395, with a line for the decay.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    left = 1.0  # of the way from the last rate up to the peak
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        left = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "wsd":
        decays = max(1.0, min(config.decay_share * steps, steps - config.warmup_steps))
        left = min(1.0, (steps - step) / decays)
    return config.lr * (config.final_share + (1 - config.final_share) * left)


@dataclass(frozen=True)
class Best:
    """The lowest held-out loss so far, after which step it was, and how many evaluations came since."""

    loss: float = math.inf
    step: int = 0
    since: int = 0

    def after(self, loss: float, step: int) -> "Best":
        """The same after one more evaluation. NaN is no lower loss."""
        return Best(loss, step) if loss < self.loss else Best(self.loss, self.step, self.since + 1)


@dataclass
class Progress:
    """Where a run is (``step``, ``position`` and ``best`` are kept in checkpoints), and what this process
    measured."""

    step: int = 0
    position: int = 0
    best: Best = Best()
    saved_step: int | None = None
    trained_s: float = 0.0
    tokens: int = 0
    exposed_s: list[float] = field(default_factory=list)  # of each step
    step_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepReport:
    """One step: a row of ``metrics.jsonl``. What has no value is None.

    time: seconds since 1970. loss: nats per byte, or token, the mean over ranks; grad_norm: before clipping.
    tokens: that all ranks have seen since the run began, without padding. Since the last report: tokens_per_s
    of all ranks; mfu (``train.flops``); and of this rank, by step, data_s: seconds in which it got its
    batches ready, and exposed_s: in which its host, or its device's compute stream, waited for collectives
    (None: not known). Of the largest rank: host_nbytes, which its process has now, and device_nbytes, which
    its tensors took there at most. figures: what the objective has besides its loss, by key.
    """

    step: int
    time: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    data_s: float
    exposed_s: float | None
    host_nbytes: int
    device_nbytes: int | None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """The row, in which the figures are keys like any other."""
        row = asdict(self)
        return row | row.pop("figures")


class _Clock(NamedTuple):
    """What this process had done by the last report: steps, tokens of all ranks, and seconds."""

    steps: int = 0
    tokens: int = 0
    trained_s: float = 0.0
    data_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True)
class Listener:
    """Whom the loop tells: a logged step, an evaluation (step, loss), that a checkpoint is due, that an
    epoch has ended, whose checkpoint is saved, that one step was made which didn't warm up, and that a
    held-out loss was the lowest, of a model that is to be kept."""

    stepped: Callable[[StepReport], None]
    evaluated: Callable[[int, float], None]
    save: Callable[[Progress], None]
    epoch_ended: Callable[[int], object]
    warm: Callable[[Progress], None]
    best: Callable[[Progress], None]


WARM_UP_STEPS = 2
"""Steps that plan what later ones follow, and touch memory for the first time."""


class Loop:
    """Trains the engine's model from ``progress`` to the last step; every process makes one and calls
    ``run``."""

    def __init__(self, recipe: Recipe, engine: Engine, epoch_steps: int) -> None:
        self.recipe = recipe
        self.engine = engine
        self._epoch_steps = epoch_steps if recipe.training.epochs else 0
        self.progress = Progress()
        self._since_report, self._tokens_before = _Clock(), 0
        self._unchecked: Reading | None = None
        is_half = recipe.training.dtype == "bf16" or (recipe.base.folder and recipe.base.dtype != "fp32")
        dtype = torch.bfloat16 if is_half else torch.float32  # files of a base are nearly always in 16 bits
        self._peak_flops = peak_flops(engine.place.device_type, recipe.track.peak_tflops, dtype)

    def run(self, listener: Listener, stop: StopRequest) -> bool:
        """Train to the end or until a stop is asked for, and save. Returns whether it is the end."""
        training, progress, heldout = self.recipe.training, self.progress, self.recipe.heldout
        self._tokens_before = self.engine.tokens(0, progress.position)
        if heldout.at_start and progress.step == 0:
            listener.evaluated(0, self.engine.heldout_loss())
        while not self.is_done and not self.engine.place.largest(float(bool(stop.reason)))[0]:  # of any
            report = self._step()
            step, last = progress.step, progress.step == training.steps
            if report is not None:
                listener.stepped(report)
            if len(progress.step_s) == WARM_UP_STEPS + 1:
                listener.warm(progress)
            epoch = bool(self._epoch_steps) and step % self._epoch_steps == 0
            evaluates = last or epoch or step % heldout.every == 0
            saves = last or epoch or step % self.recipe.checkpoint.every == 0
            if evaluates or saves:
                self._check(step)
            if evaluates:
                self._evaluate(listener)
            if saves:
                self._save(listener)
            if epoch and not last:
                listener.epoch_ended(step)
        if progress.saved_step != progress.step:
            self._check(progress.step)
            self._save(listener)
        return self.is_done

    @property
    def is_done(self) -> bool:
        """Whether all steps are made, or the held-out loss has not gone down for as long as ``patience``."""
        patience = self.recipe.heldout.patience
        ended = 0 < patience <= self.progress.best.since
        return ended or self.progress.step >= self.recipe.training.steps

    def _evaluate(self, listener: Listener) -> None:
        progress, loss = self.progress, self.engine.heldout_loss()
        progress.best = progress.best.after(loss, progress.step)
        listener.evaluated(progress.step, loss)
        if self.recipe.heldout.keep_best and progress.best.step == progress.step:
            listener.best(progress)

    def _save(self, listener: Listener) -> None:
        listener.save(self.progress)
        self.progress.saved_step = self.progress.step

    def _step(self) -> StepReport | None:
        """One optimizer step; a report when one is due."""
        training, progress = self.recipe.training, self.progress
        started, exposed_s = clock.perf_counter(), self.engine.exposed_s or 0.0
        step = progress.step + 1
        reading = self.engine.step(step, progress.position)
        windows = self.engine.place.num_samples * training.batch_size * training.accumulation
        progress.step = step
        progress.tokens += self.engine.tokens(progress.position, progress.position + windows)
        progress.position += windows
        self._check(step - 1)  # one step late, so that the device isn't waited for
        self._unchecked = reading
        due = step % training.log_every == 0 or step == training.steps
        loss, grad_norm, figures = reading.values() if due else (0.0, 0.0, {})
        progress.step_s.append(clock.perf_counter() - started)  # the reading has waited for the device
        progress.trained_s += progress.step_s[-1]
        progress.exposed_s.append((self.engine.exposed_s or 0.0) - exposed_s)
        if not due:
            return None
        return self._report(loss, grad_norm, figures)

    def _check(self, step: int) -> None:
        """Raises: NonFinite, on every process, where the gradients of ``step`` weren't finite and the recipe
        doesn't say otherwise."""
        reading, self._unchecked = self._unchecked, None
        if reading is None or self.recipe.training.on_nonfinite != "stop":
            return
        norm = reading.norm()
        if not math.isfinite(norm):
            first = reading.first_nonfinite()
            where = f", first in {first!r}" if first else ""
            raise NonFinite(
                f"the norm of the gradients of step {step} is {norm}{where}, so the run stops (the "
                f"checkpoints before it are kept). optimizer.lr was {self._rate(step):g}: lower it, raise "
                'optimizer.warmup_steps, or look at the data of that step; training.on_nonfinite = "skip" '
                'leaves such steps out, "go on" doesn\'t look'
            )

    def _rate(self, step: int) -> float:
        return learning_rate(self.recipe.optimizer, step, self.recipe.training.steps)

    def _report(self, loss: float, grad_norm: float, figures: dict[str, float]) -> StepReport:
        """The row of the step that was made."""
        progress, engine = self.progress, self.engine
        exposed_s = engine.exposed_s
        now = _Clock(
            len(progress.step_s), progress.tokens, progress.trained_s, engine.data_s, exposed_s or 0.0
        )
        last, self._since_report = self._since_report, now
        steps = now.steps - last.steps
        speed = (now.tokens - last.tokens) / (now.trained_s - last.trained_s)
        could = None if self._peak_flops is None else self._peak_flops * engine.place.world
        accelerator = torch.accelerator.current_accelerator()
        # Beside XLA torch has an accelerator, too: torchax's, which counts no memory.
        counts = accelerator is not None and accelerator.type == engine.place.device_type
        device = torch.accelerator.max_memory_allocated() if counts else 0
        host_nbytes, device_nbytes = engine.place.largest(resident_nbytes(), device)
        return StepReport(
            step=progress.step,
            time=clock.time(),
            loss=loss,
            lr=self._rate(progress.step),
            grad_norm=grad_norm,
            tokens=self._tokens_before + progress.tokens,
            tokens_per_s=speed,
            mfu=None if could is None else speed * engine.flops_per_token / could,
            data_s=(now.data_s - last.data_s) / steps,
            exposed_s=None if exposed_s is None else (now.exposed_s - last.exposed_s) / steps,
            host_nbytes=int(host_nbytes),
            device_nbytes=int(device_nbytes) or None,
            figures=figures,
        )
