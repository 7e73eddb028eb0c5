"""Going on with a run: what must be as it was, and the same global batches on another number of ranks.

A global batch is ``ranks x batch_size x accumulation`` sequences, taken from one shuffled order at one
position. So the same product, however it is split, is the same batches.
"""

from pathlib import Path
from typing import Any

from shardwright.checkpoint.sources import locate, open_source
from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.config import Recipe
from shardwright.train.folder import RunFolder
from shardwright.train.loop import Loop
from shardwright.train.report import Screen


def batch_of(recipe: Recipe, given: Recipe, world: int) -> dict[str, Any]:
    """How many sequences a step takes with ``recipe`` on ``world`` ranks, and what the ``given`` one says."""
    training, asked = recipe.training, given.training
    return {
        "sequences": world * training.batch_size * training.accumulation,
        "asked": [asked.batch_size, asked.accumulation],
    }


def with_saved_batch(recipe: Recipe, folder: RunFolder, world: int) -> Recipe:
    """``recipe`` with the global batch of the run in ``folder``, where only the number of ranks has changed.

    Each rank then takes at most ``batch_size`` sequences at once, as before, and more or fewer microbatches.
    Who gives another batch_size or accumulation gets what they ask for. Every rank reads the same file.
    Raises: ConfigError if the global batch can't be dealt out evenly.
    """
    saved, training = _saved_batch(folder.checkpoint), recipe.training
    now = batch_of(recipe, recipe, world)
    if saved is None or saved["asked"] != now["asked"] or saved["sequences"] == now["sequences"]:
        return recipe
    each, left = divmod(saved["sequences"], world)
    if left:
        raise ConfigError(
            f"{folder.root} takes {saved['sequences']} sequences a step, which {world} ranks can't share "
            "evenly: use a number of ranks that divides it, or give another training.batch_size"
        )
    size = max(n for n in range(1, min(training.batch_size, each) + 1) if each % n == 0)
    update = {"batch_size": size, "accumulation": each // size}
    return recipe.model_copy(update={"training": training.model_copy(update=update)})


def _saved_batch(path: Path) -> dict[str, Any] | None:
    if not path.is_dir():
        return None  # restore says so
    return (open_source(locate(path)[0]).manifest.state.get("extra") or {}).get("batch")


def restore(folder: RunFolder, loop: Loop, screen: Screen, identity: dict[str, Any]) -> None:
    """Put the newest complete checkpoint into ``loop``; every rank calls.

    Raises: CheckpointError if there is none; ConfigError naming what is other than it was.
    """
    if not folder.checkpoint.is_dir():
        raise CheckpointError(
            f"{folder.root} has no checkpoint to go on from: start without --resume, or give the folder of "
            "the run with --run.folder"
        )
    restored = loop.engine.restore(folder.checkpoint)
    before = restored.extra["identity"]
    changed = [
        f"  - {key}: was {before[key]!r}, is {identity[key]!r}"
        for key in identity
        if before[key] != identity[key]
    ]
    if changed:
        listed = "\n".join(changed)
        raise ConfigError(
            f"{folder.root} was begun with other settings, and would not be the same run:\n{listed}\n"
            "set them back, or begin a new run without --resume"
        )
    for reason in restored.skipped:
        screen.say(f"passed over a newer checkpoint: {reason}")
    loop.progress.step = loop.progress.saved_step = restored.step
    loop.progress.position = restored.extra["position"]
