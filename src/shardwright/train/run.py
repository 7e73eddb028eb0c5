"""One process of one training run, from the recipe to the table at the end.

    join -> folder -> job: corpus, engine (sharded model, optimizer) -> (resume) -> loop -> model, summary,
    sample

``summary.json``: parameters, ranks, steps, exported_step (after which the model was as it is left),
at_rest_nbytes (the largest rank's shards), full_nbytes (all parameters unsharded), peak_unsharded_nbytes (the
largest rank's), expected_peak_nbytes and peak_nbytes (what a rank was expected to hold at most in a step,
``train.expected``, and what the largest one did, ``Engine.peak_nbytes``), peak_process_nbytes (of the host,
by the largest process, with Python, libraries and data), tokens_per_s (all ranks, evaluation and saving left
out), communication_s (of one step, alone), exposed_s (of the median step: spent waiting for
it, or for a slower rank), communication_hidden_share (1 - exposed_s / communication_s, within 0 and 1; null
on one rank, and where nothing counts it; ranks of one host copy each other's parts themselves, so there
it is near 0 and small all the same), communication_share_of_step (exposed_s over the median step),
heldout_loss and unigram_entropy (nats per unit: "byte", "token" or "pair"; the
entropy per token then), corpus_sha256, trained_s, sample.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from statistics import median
from typing import Any

import torch

from shardwright import clock
from shardwright.checkpoint import StopRequest, background
from shardwright.checkpoint.folder import is_complete, step_folder
from shardwright.checkpoint.storage import Held, holder
from shardwright.checkpoint.url import Location
from shardwright.columns import in_words
from shardwright.errors import ConfigError
from shardwright.extras import require
from shardwright.observe.steps.recording import ring
from shardwright.observe.watch.lifecycle import late_over_the_run
from shardwright.plan.file import Plan
from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import Resolved
from shardwright.train.engine import Job, TrainingProcess
from shardwright.train.folder import RunFolder
from shardwright.train.loop import WARM_UP_STEPS, Listener, Loop, Progress, StepReport
from shardwright.train.ranks import LaunchedStop, life_of_a_rank
from shardwright.train.report import Screen, beside_prediction, figures, written
from shardwright.train.resume import batch_of, check_storage, choose, restore, with_saved_batch
from shardwright.train.trackers import Row, TrackedRun, tracking
from shardwright.transport.host_memory import peak_resident_nbytes, resident_nbytes
from shardwright.transport.process import process_state

Prepare = Callable[[Recipe, TrainingProcess], Job]
"""Makes the job of this process."""


def train_rank(resolved: Resolved, prepare: Prepare, in_json: bool = False) -> None:
    """Train as one rank of the job that this process belongs to; every rank calls.

    in_json: rank 0 prints rows and the summary as objects. Ends the process: with code 0 when training is
    done, or stopped and saved, and 1 when it failed.
    """
    with life_of_a_rank():
        stop = LaunchedStop()
        with _joined(resolved.recipe) as place:
            screen = Screen(shown=place.is_first, in_json=in_json)
            try:
                _train(resolved, place, screen, stop, prepare)
            finally:
                screen.stop()


def _joined(recipe: Recipe) -> AbstractContextManager[TrainingProcess]:
    """The ranks of the backend, joined. Only the backend's own modules are imported."""
    if recipe.launch.backend == "xla":
        return import_module("shardwright.train.devices").joined(recipe)
    return import_module("shardwright.train.ranks").joined(recipe)


def _train(
    resolved: Resolved, place: TrainingProcess, screen: Screen, stop: StopRequest, prepare: Prepare
) -> None:
    require("track", *resolved.recipe.track.to)
    folder = RunFolder(resolved.folder, resolved.recipe.checkpoint.folder)
    _claim(folder, place, make=False)
    check_storage(folder, place)
    recipe, start = resolved.recipe, choose(folder, place, resolved.recipe.run.resume)
    if start:
        recipe = with_saved_batch(recipe, step_folder(folder.checkpoint, start.step), place.num_samples)
    job = prepare(recipe, place)
    _announce(screen, job, place)
    expected = _expected_peak(screen, job) if place.is_first else None
    engine = job.engine()  # which may change the recipe, where its model can't do what that says
    loop, training = Loop(job.recipe, engine, job.epoch_steps), job.recipe.training
    kept = {"identity": job.identity, "batch": batch_of(recipe, resolved.recipe, place.num_samples)}
    if start:
        restore(folder, loop, screen, job.identity, start)
        if loop.is_done and folder.summary.exists():
            screen.say(
                f"{folder.root} is at step {loop.progress.step} of {training.steps}: nothing is left to do"
            )
            return
        screen.say(f"goes on after step {loop.progress.step} of {training.steps}")
    _claim(folder, place, make=True)  # not before: what can't be trained leaves no folder
    if place.is_first:
        if start:
            folder.forget_after(loop.progress.step)
        elif aside := folder.start_afresh():
            screen.say(
                f"{folder.root} held an earlier run, which is now in {aside} (to continue a run: --resume)"
            )
        folder.write_config(resolved.to_toml())
    place.wait_for_all()
    screen.start(loop.progress.step, training.steps)
    to = resolved.recipe.track.to if place.is_first else ()
    settings = job.recipe.model_dump(mode="json")
    run = TrackedRun(folder.root, resolved.recipe.track.project, settings, step=loop.progress.step)
    log_late = _history(folder, place)
    try:
        with folder.open_to_top(place.store_address if place.is_first else ""), tracking(to, run) as track:
            finished = loop.run(_listener(folder, job, loop, (screen, track, log_late), kept), stop)
            background.finish()
    finally:
        folder.leave_ring(ring())
        log_late()
    screen.stop()
    if not finished:
        screen.say(
            f"stopped after step {loop.progress.step}, which is saved in {folder.checkpoint}; go on: --resume"
        )
        return
    if loop.progress.step < training.steps:
        screen.say(
            f"training ends: the held-out loss was lowest after step {loop.progress.best.step}, and none of "
            f"{loop.progress.best.since} evaluation(s) since was lower (heldout.patience)"
        )
    _finish(folder, job, loop, (screen, expected))


def _claim(folder: RunFolder, place: TrainingProcess, *, make: bool) -> None:
    """Refuse, on every process, to train where another job does; see ``RunFolder.claim``."""
    refused = False
    try:
        if place.is_first:
            folder.claim(make=make)
    except Held:
        refused = True
    if place.largest(float(refused))[0]:
        raise ConfigError(
            f"{folder.root}: another job trains in this folder ({holder(folder.root)}); nothing was changed. "
            "Wait for it, end it, or give this one a folder of its own (--run.folder)"
        )


def _announce(screen: Screen, job: Job, place: TrainingProcess) -> None:
    for line in job.opening():
        screen.say(line)
    training, samples = job.recipe.training, place.num_samples
    ranks = "ranks" if samples == place.world else "set(s) of ranks"
    global_batch = samples * training.batch_size * training.accumulation
    screen.say(
        f"ranks: {place.world} on {place.device_type}, {torch.get_num_threads()} thread(s) each; global "
        f"batch: {samples} {ranks} x {training.batch_size} x {training.accumulation} microbatch(es) = "
        f"{global_batch} sequences of up to {training.sequence_length}; an epoch is {job.epoch_steps} steps"
    )


def _expected_peak(screen: Screen, job: Job) -> int | None:
    """Say what a step is expected to hold at most; it is told before weights are read, and stops nothing."""
    try:
        held = job.expected_peak()
    except Exception as error:  # a model's own code, run without data; what is really wrong is told later
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        screen.say(f"expected peak of memory: not known ({why})")
        return None
    if held is None:
        return None
    parts = sorted(held.nbytes.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {in_words(nbytes)}" for name, nbytes in parts if nbytes > 0.01 * held.total)
    beside = f"; the process itself holds {in_words(own)} of the host's" if (own := resident_nbytes()) else ""
    screen.say(f"expected peak of memory: {in_words(held.total)} on each rank ({listed}){beside}")
    return held.total


def _history(folder: RunFolder, place: TrainingProcess) -> Callable[[], None]:
    """What keeps, when it is called, in the run's folder what the store has of ranks that were late."""
    kept = 0

    def log_late() -> None:
        nonlocal kept
        if place.is_first:
            found = late_over_the_run()
            folder.log_late(found[kept:])
            kept = max(kept, len(found))

    return log_late


def _listener(
    folder: RunFolder,
    job: Job,
    loop: Loop,
    shown: tuple[Screen, Callable[[Row], None], Callable[[], None]],
    kept: dict[str, Any],
) -> Listener:
    first, (screen, track, log_late) = loop.engine.place.is_first, shown

    def log(row: dict[str, Any]) -> None:
        folder.log(row)
        screen.row(row)
        track(row)

    def stepped(report: StepReport) -> None:
        steps = loop.recipe.training.steps
        process_state.progress = f"step {report.step} of {steps}, {figures(report)}"  # for who asks the ranks
        if first:
            log(report.row)
            log_late()
            progress = loop.progress
            left = (steps - report.step) * progress.trained_s / len(progress.exposed_s)
            screen.stepped(report, left)

    def evaluated(step: int, loss: float) -> None:
        if first:
            log({"step": step, "time": clock.time(), "heldout_loss": loss})
            screen.say(f"step {step}  held-out loss {loss:.3f} nats per {job.unit}")

    def save_in(path: Location, progress: Progress) -> None:
        best = asdict(progress.best) if progress.best.step else {}
        extra = {"position": progress.position, "best": best, **kept}
        loop.engine.save(path, extra, progress.step)

    def warm(progress: Progress) -> None:
        beside = beside_prediction(_beside_the_plan(loop, progress)) if first else []
        if beside:
            screen.say(f"step {progress.step}  " + "; ".join(f"{name}: {value}" for name, value in beside))

    return Listener(
        stepped,
        evaluated,
        save=lambda progress: save_in(folder.checkpoint, progress),
        epoch_ended=lambda step: job.export(loop.engine, folder, step=step, last=False),
        warm=warm,
        best=lambda progress: save_in(folder.best, progress),
    )


def _finish(folder: RunFolder, job: Job, loop: Loop, shown: tuple[Screen, int | None]) -> None:
    """Leave the model and the summary; every process calls. shown: with the expected peak of memory."""
    engine, progress, (screen, expected) = loop.engine, loop.progress, shown
    place, step = engine.place, progress.step
    if job.recipe.heldout.keep_best and is_complete(step_folder(folder.best, progress.best.step)):
        step = engine.restore(step_folder(folder.best, progress.best.step)).step
        screen.say(f"the lowest held-out loss was after step {step}: that model is exported")
    loss, sizes = engine.heldout_loss(), engine.sizes()
    peak, process = place.largest(engine.peak_nbytes or 0, peak_resident_nbytes())
    exposed_s = place.total(median(progress.exposed_s or [0.0]))[0] / place.world
    most = job.recipe.sample.num_bytes
    screen.say(
        f"writing the model, then a sample of at most {most} {written(job.unit)}s (--sample.num_bytes)"
    )
    text = job.export(engine, folder, step=step, last=True)
    if not place.is_first:
        return
    alone_s = sizes.communication_s
    known = alone_s if place.world > 1 and progress.exposed_s and sizes.exposed_is_known else None
    summary = {
        "parameters": sizes.parameters,
        "ranks": place.world,
        "steps": progress.step,
        "exported_step": step,
        "at_rest_nbytes": sizes.at_rest_nbytes,
        "full_nbytes": sizes.full_nbytes,
        "peak_unsharded_nbytes": sizes.peak_unsharded_nbytes,
        "expected_peak_nbytes": expected,
        "peak_nbytes": int(peak) or None,
        "peak_process_nbytes": int(process) or None,
        "tokens_per_s": progress.tokens / progress.trained_s if progress.tokens else None,
        "communication_s": alone_s,
        "exposed_s": exposed_s if sizes.exposed_is_known else None,
        "communication_hidden_share": min(1.0, max(0.0, 1 - exposed_s / known)) if known else None,
        "communication_share_of_step": exposed_s / median(progress.step_s) if known else None,
        "predicted": _beside_the_plan(loop, progress),
        "unit": job.unit,
        "heldout_loss": loss,
        "unigram_entropy": job.unigram_entropy,
        "corpus_sha256": job.corpus_sha256,
        "trained_s": progress.trained_s,
        "sample": text,
    }
    folder.write_summary(summary)
    screen.summary(summary, most)
    screen.say(f"in {folder.root}: {', '.join(sorted(p.name for p in folder.root.iterdir()))}")


def _beside_the_plan(loop: Loop, progress: Progress) -> dict[str, float | None] | None:
    """Seconds of a step that the plan has, and what was measured on this rank: the median after the first two
    steps, which plan and warm up; what was exposed only where that is counted. None without a plan, or
    where no other step was made."""
    path, step_s = loop.recipe.training.plan, progress.step_s[WARM_UP_STEPS:]
    if not path or not step_s:
        return None
    plan, waits = Plan.load(path), loop.engine.exposed_s is not None
    return {
        "step_s": plan.step_s,
        "exposed_s": plan.exposed_s,
        "measured_step_s": median(step_s),
        "measured_exposed_s": median(progress.exposed_s[WARM_UP_STEPS:]) if waits else None,
    }
