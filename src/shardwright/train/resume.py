"""Going on with a run: from which checkpoint, what must be as it was, and the same global batches on another
number of ranks.

    auto    the newest checkpoint, or an older one if its bytes are damaged; where there is none, a new run
    last    the newest checkpoint; there must be one
    STEP    the checkpoint of that step

What was saved after the checkpoint that is taken is renamed, since the run will come by there again.

A global batch is ``ranks x batch_size x accumulation`` sequences, taken from one shuffled order at one
position. So the same product, however it is split, is the same batches.
"""

from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint import Restored
from shardwright.checkpoint.folder import complete_steps, find, step_folder, storage_of
from shardwright.checkpoint.sources import open_source
from shardwright.checkpoint.storage import Held
from shardwright.checkpoint.url import Location
from shardwright.checkpoint.writer import set_aside_after
from shardwright.errors import CheckpointError, ConfigError, DamagedError, StorageError, UnreadError
from shardwright.recipe.config import Recipe
from shardwright.train.engine import TrainingProcess
from shardwright.train.folder import RunFolder
from shardwright.train.loop import Best, Loop
from shardwright.train.report import Screen
from shardwright.train.restart import this_rank_restarted


@dataclass(frozen=True)
class Start:
    """The checkpoint to go on from, by the steps that it has done, and how it was asked for."""

    step: int
    resume: str


def check_storage(folder: RunFolder, place: TrainingProcess) -> None:
    """Find out, before anything is trained, whether checkpoints can be written and read. Every process calls.

    Raises: ConfigError, saying what is missing.
    """
    try:
        storage_of(folder.checkpoint).check(folder.checkpoint, write=place.is_first)
    except Held as error:
        raise ConfigError(
            f"checkpoint.folder = {folder.checkpoints!r}: another process is saving there ({error}); give "
            "this run a folder of its own"
        ) from None
    except StorageError as error:
        raise ConfigError(f"checkpoint.folder = {folder.checkpoints!r}: {error}") from error


def choose(folder: RunFolder, place: TrainingProcess, resume: str) -> Start | None:
    """Where the run in ``folder`` goes on, as ``resume`` asks; None: it begins. Where a launcher has started
    the job again it is ``auto``, whatever was asked for. Every process calls; the first one's view is taken.

    Raises: CheckpointError, on every process, if there is no such checkpoint; ConfigError if a new run is to
        begin where there are checkpoints of another.
    """
    if place.largest(float(this_rank_restarted()))[0]:
        resume = "auto"  # a step that was asked for is where the first attempt began
    steps = complete_steps(folder.checkpoint) if resume or folder.checkpoints else []
    if not resume:
        if steps:  # those in the run's own folder are moved aside with it
            raise ConfigError(
                f"checkpoint.folder = {folder.checkpoints!r} holds a checkpoint of step {steps[0]}, and this "
                "is a new run: go on from it with --resume, or give another folder"
            )
        return None
    wanted = int(resume) if resume.isdecimal() else next(iter(steps), -1)
    step = _agreed(wanted if wanted in steps else -1, place)
    if step >= 0:
        return Start(step, resume)
    if resume == "auto":
        return None
    if steps and resume.isdecimal():
        raise CheckpointError(f"{folder.root} has no complete checkpoint of step {resume}; {_remedy(steps)}")
    raise CheckpointError(
        f"{folder.root} has no checkpoint to go on from: start without --resume, or with --resume auto, or "
        "give the folder of the run with --run.folder"
    )


def _agreed(step: int, place: TrainingProcess) -> int:
    return int(place.largest(float(step if place.is_first else -1))[0])


def _remedy(steps: list[int]) -> str:
    return f"there are steps {', '.join(map(str, steps))}: go on from one with --resume {steps[0]}"


def batch_of(recipe: Recipe, given: Recipe, world: int) -> dict[str, Any]:
    """How many sequences a step takes with ``recipe`` on ``world`` ranks, and what the ``given`` one says."""
    training, asked = recipe.training, given.training
    return {
        "sequences": world * training.batch_size * training.accumulation,
        "asked": [asked.batch_size, asked.accumulation],
    }


def with_saved_batch(recipe: Recipe, path: Location, world: int) -> Recipe:
    """``recipe`` with the global batch of the checkpoint ``path``, where only the number of ranks has
    changed.

    Each rank then takes at most ``batch_size`` sequences at once, as before, and more or fewer microbatches.
    Who gives another batch_size or accumulation gets what they ask for. Every rank reads the same file.
    Raises: ConfigError if the global batch can't be dealt out evenly.
    """
    saved = (open_source(path).manifest.state.get("extra") or {}).get("batch")
    training, now = recipe.training, batch_of(recipe, recipe, world)
    if saved is None or saved["asked"] != now["asked"] or saved["sequences"] == now["sequences"]:
        return recipe
    each, left = divmod(saved["sequences"], world)
    if left:
        raise ConfigError(
            f"{path} takes {saved['sequences']} sequences a step, which {world} ranks can't share "
            "evenly: use a number of ranks that divides it, or give another training.batch_size"
        )
    size = max(n for n in range(1, min(training.batch_size, each) + 1) if each % n == 0)
    update = {"batch_size": size, "accumulation": each // size}
    return recipe.model_copy(update={"training": training.model_copy(update=update)})


def restore(folder: RunFolder, loop: Loop, screen: Screen, identity: dict[str, Any], start: Start) -> None:
    """Put the checkpoint of ``start``, or an older one in its stead, into ``loop``; every rank calls.

    Raises: DamagedError if its bytes are damaged; ConfigError naming what is other than it was.
    """
    if loop.engine.place.is_first and not start.resume.isdecimal():
        for reason in find(folder.checkpoint)[1]:
            screen.say(f"passed over a newer checkpoint: {reason}")
    restored, damaged = _load(folder, loop, screen, start)
    before = restored.extra["identity"]
    changed = [
        f"  - {key}: was {before[key]!r}, is {identity[key]!r}"
        for key in identity
        if key in before and before[key] != identity[key]
    ]
    if changed:
        listed = "\n".join(changed)
        raise ConfigError(
            f"{folder.root} was begun with other settings, and would not be the same run:\n{listed}\n"
            "set them back, or begin a new run without --resume"
        )
    if loop.engine.place.is_first:
        for path in (folder.checkpoint, *([folder.best] if folder.best.is_dir() else [])):
            for aside in set_aside_after(path, restored.step, damaged):
                screen.say(f"what was saved after step {restored.step} is now in {aside}")
    loop.progress.step = loop.progress.saved_step = restored.step
    loop.progress.position = restored.extra["position"]
    loop.progress.best = Best(**restored.extra.get("best", {}))


def _load(folder: RunFolder, loop: Loop, screen: Screen, start: Start) -> tuple[Restored, set[int]]:
    """What was restored, and the steps that were found to be damaged before."""
    step, place, found_damaged = start.step, loop.engine.place, set[int]()
    while True:
        try:
            return loop.engine.restore(step_folder(folder.checkpoint, step)), found_damaged
        except CheckpointError as error:
            damaged, unread = place.largest(
                float(isinstance(error, DamagedError)), float(isinstance(error, UnreadError))
            )
            if not damaged and not (unread and start.resume == "auto"):
                raise
            older = [other for other in complete_steps(folder.checkpoint) if other < step]
            found = _agreed(next(iter(older), -1), place)
            if found < 0:
                raise
            if start.resume != "auto":
                raise DamagedError(
                    f"{error}\nwith older ones {_remedy(older)}; --resume auto takes the newest that is whole"
                ) from None
            fault = "DAMAGED" if damaged else "CAN'T BE READ"
            screen.say(f"{fault}, and not taken: {error}\ngoing on from step {found} instead of step {step}")
            if damaged:
                found_damaged.add(step)
            step = found
