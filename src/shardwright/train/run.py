"""One process of one training run, from the recipe to the table at the end.

    join -> folder -> corpus -> engine: sharded model, optimizer -> (resume) -> loop -> whole model, summary,
    sample

``summary.json``: parameters, ranks, steps, at_rest_nbytes (the largest rank's shards), full_nbytes (all
parameters unsharded), peak_unsharded_nbytes (the largest rank's), tokens_per_s (all ranks, evaluation and
saving left out), communication_s (of one step, alone), exposed_s (of the median step: spent waiting for it,
or for a slower rank), communication_hidden_share (1 - exposed_s / communication_s, within 0 and 1; null on
one rank, and on CUDA, where no host waits; ranks of one host copy each other's parts themselves, so there it
is near 0 and small all the same), communication_share_of_step (exposed_s over the median step), heldout_loss
and unigram_entropy (nats per byte), corpus_sha256, trained_s, sample.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import StopRequest
from shardwright.train.config import LaunchConfig, Recipe
from shardwright.train.data import Corpus, TrainBatches, heldout_windows, read_corpus
from shardwright.train.engine import Engine, Place
from shardwright.train.folder import RunFolder
from shardwright.train.loop import Listener, Loop, Progress, StepReport
from shardwright.train.models import Transformer
from shardwright.train.ranks import LaunchedStop, life_of_a_rank
from shardwright.train.report import Screen
from shardwright.train.resolve import Resolved
from shardwright.train.resume import batch_of, identity_of, restore, with_saved_batch
from shardwright.train.sample import generate, readable


def train_rank(resolved: Resolved, *, resume: bool) -> None:
    """Train as one rank of the job that this process belongs to; every rank calls.

    Ends the process: with code 0 when training is done, or stopped and saved, and 1 when it failed.
    """
    with life_of_a_rank():
        stop = LaunchedStop()
        with _joined(resolved.recipe.launch) as place:
            screen = Screen(resolved.recipe.training.steps, shown=place.is_first)
            try:
                _train(resolved, place, screen, stop, resume)
            finally:
                screen.stop()


def _joined(config: LaunchConfig) -> AbstractContextManager[Place]:
    """The ranks of the backend, joined. Only the backend's own modules are imported."""
    if config.backend == "xla":
        return import_module("shardwright.train.devices").joined(config)
    return import_module("shardwright.train.ranks").joined(config)


def _engine(recipe: Recipe, place: Place, batches: Sequence[TrainBatches]) -> Engine:
    if recipe.launch.backend == "xla":
        return import_module("shardwright.train.compiled").CompiledEngine(recipe, place, batches)
    return import_module("shardwright.train.eager").EagerEngine(recipe, place, batches)


def _train(resolved: Resolved, place: Place, screen: Screen, stop: StopRequest, resume: bool) -> None:
    folder = RunFolder(resolved.folder)
    recipe = with_saved_batch(resolved.recipe, folder, place.world) if resume else resolved.recipe
    training = recipe.training
    corpus = read_corpus(recipe.data)
    batches = [
        TrainBatches(corpus.train, training.sequence_length, share, recipe.run.seed)
        for share in place.shares(training.batch_size)
    ]
    windows = heldout_windows(corpus.heldout, training.sequence_length, recipe.heldout.num_windows)
    _announce(screen, recipe, place, corpus, batches[0])
    loop = Loop(recipe, _engine(recipe, place, batches))
    identity = identity_of(recipe, corpus)
    kept = {"identity": identity, "batch": batch_of(recipe, resolved.recipe, place.world)}
    if resume:
        restore(folder, loop, screen, identity)
        if loop.progress.step >= training.steps and folder.summary.exists():
            screen.say(
                f"{folder.root} is at step {loop.progress.step} of {training.steps}: nothing is left to do"
            )
            return
        screen.say(f"goes on after step {loop.progress.step} of {training.steps}")
    if place.is_first:
        if resume:
            folder.forget_after(loop.progress.step)
        elif aside := folder.start_afresh():
            screen.say(
                f"{folder.root} held an earlier run, which is now in {aside} (to continue a run: --resume)"
            )
        folder.write_config(resolved.to_toml())
    place.wait_for_all()
    screen.start(loop.progress.step)
    with folder.open_to_top(place.store_address if place.is_first else ""):
        finished = loop.run(windows, _listener(folder, loop, screen, kept), stop)
    screen.stop()
    if not finished:
        screen.say(
            f"stopped after step {loop.progress.step}, which is saved in {folder.checkpoint}; go on: --resume"
        )
        return
    _finish(folder, loop, corpus, windows, screen)


def _announce(screen: Screen, recipe: Recipe, place: Place, corpus: Corpus, batches: TrainBatches) -> None:
    training = recipe.training
    screen.say(
        f"corpus: {len(corpus.train):,} bytes to train on, {len(corpus.heldout):,} held out, "
        f"{corpus.num_files} file(s), sha256 {corpus.sha256[:16]}"
    )
    global_batch = place.world * training.batch_size * training.accumulation
    screen.say(
        f"ranks: {place.world} on {place.device_type}, {torch.get_num_threads()} thread(s) each; global "
        f"batch: {place.world} ranks x {training.batch_size} x {training.accumulation} microbatch(es) = "
        f"{global_batch} sequences of {training.sequence_length}; an epoch is "
        f"{batches.num_windows / global_batch:.0f} steps"
    )


def _listener(folder: RunFolder, loop: Loop, screen: Screen, kept: dict[str, Any]) -> Listener:
    first = loop.engine.place.is_first

    def stepped(report: StepReport) -> None:
        if first:
            folder.log(asdict(report))
            progress = loop.progress
            left = (loop.recipe.training.steps - report.step) * progress.trained_s / len(progress.exposed_s)
            screen.stepped(report, left)

    def evaluated(step: int, loss: float) -> None:
        if first:
            folder.log({"step": step, "heldout_loss": loss})
            screen.say(f"step {step}  held-out loss {loss:.3f} nats per byte")

    def save_progress(progress: Progress) -> None:
        extra = {"position": progress.position, **kept}
        loop.engine.save(folder.checkpoint, extra, progress.step)

    return Listener(stepped, evaluated, save_progress)


def _finish(folder: RunFolder, loop: Loop, corpus: Corpus, windows: Tensor, screen: Screen) -> None:
    """Write the whole model and the summary; every process calls."""
    recipe, engine, progress = loop.recipe, loop.engine, loop.progress
    place = engine.place
    loss, sizes = engine.heldout_loss(windows), engine.sizes()
    exposed_s = place.total(median(progress.exposed_s or [0.0]))[0] / place.world
    tensors = engine.full_state_dict()
    place.wait_for_all()
    if not place.is_first:  # no rank waits, under a time limit, for what only rank 0 does from here
        return
    folder.write_model(tensors)
    whole = Transformer(recipe.model)
    whole.load_state_dict(tensors)
    text = generate(whole, recipe.sample, recipe.training.sequence_length, recipe.run.seed)
    alone_s = sizes.communication_s
    known = alone_s if place.world > 1 and progress.exposed_s and sizes.exposed_is_known else None
    summary = {
        "parameters": sizes.parameters,
        "ranks": place.world,
        "steps": progress.step,
        "at_rest_nbytes": sizes.at_rest_nbytes,
        "full_nbytes": sizes.full_nbytes,
        "peak_unsharded_nbytes": sizes.peak_unsharded_nbytes,
        "tokens_per_s": progress.tokens / progress.trained_s if progress.tokens else None,
        "communication_s": alone_s,
        "exposed_s": exposed_s if sizes.exposed_is_known else None,
        "communication_hidden_share": min(1.0, max(0.0, 1 - exposed_s / known)) if known else None,
        "communication_share_of_step": exposed_s / median(progress.step_s) if known else None,
        "heldout_loss": loss,
        "unigram_entropy": corpus.unigram_entropy,
        "corpus_sha256": corpus.sha256,
        "trained_s": progress.trained_s,
        "sample": readable(text),
    }
    folder.write_summary(summary)
    screen.summary(summary, text)
    screen.say(f"in {folder.root}: {', '.join(sorted(p.name for p in folder.root.iterdir()))}")
