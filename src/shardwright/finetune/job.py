"""The job of fine-tuning: what ``shardwright train`` does with a recipe that has [base].

runs/NAME/exported/step-000300/   the adapter in peft's form, or the model as transformers saves it: one
                                  after each epoch, and at the end
          checkpoint/             resumable; of adapters only these, the base stays in its folder
"""

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright import hf
from shardwright.checkpoint import background
from shardwright.checkpoint.folder import is_complete, step_folder
from shardwright.checkpoint.shardfile import Reader
from shardwright.checkpoint.sources import open_source
from shardwright.checkpoint.tools import read_tensor
from shardwright.checkpoint.url import Location
from shardwright.data.feed import feed_of
from shardwright.data.windows import positions_for
from shardwright.errors import DataError
from shardwright.finetune.engine import TunedEngine, meta_model
from shardwright.finetune.expected import expected_peak
from shardwright.hf import library
from shardwright.hf.export import write_pretrained
from shardwright.lora import save_adapter
from shardwright.plan.memory import HeldBytes
from shardwright.recipe.config import Recipe
from shardwright.train.engine import steps_of
from shardwright.train.folder import RunFolder
from shardwright.train.ranks import RankPlace

_EDGE_NBYTES = 2**20

_log = logging.getLogger(__name__)


class FineTuning:
    """See ``Job``.

    Raises: InputError for a folder without a model or tokenizer; DataError for a corpus that is missing, too
    small, no text, or has a line that is no record.
    """

    def __init__(self, recipe: Recipe, place: RankPlace) -> None:
        self.place = place
        self.unit = "pair" if recipe.training.loss == "dpo" else "token"
        self.tokenizer = library.tokenizer(Path(recipe.base.folder))
        self._feed_by(recipe)
        place.meet("tokenised data")
        if self.feed.are_pairs != (recipe.training.loss == "dpo"):
            found = "preferences" if self.feed.are_pairs else "no preferences"
            raise DataError(
                f"the data has {found} (chosen, rejected), and training.loss is {recipe.training.loss!r}: "
                'set it to "dpo" for preferences, to "cross-entropy" for single answers, or give other data'
            )

    def _feed_by(self, recipe: Recipe) -> None:
        (share,) = self.place.shares(recipe.training.batch_size)
        self.feed = feed_of(recipe, self.tokenizer, share)
        self.corpus_sha256 = self.feed.sha256
        self.epoch_steps = max(1, self.feed.epoch // (share.num_windows * recipe.training.accumulation))
        self.recipe = recipe.model_copy(update={"training": steps_of(recipe.training, self.epoch_steps)})

    @property
    def identity(self) -> dict[str, Any]:
        """See ``Job``."""
        recipe = self.recipe
        data = recipe.data.model_dump(include={"heldout_share", "mask_prompts", "on_bad"}, mode="json")
        data["weights"] = [source.weight for source in recipe.data.sources]
        return {
            "the base (its files)": fingerprint(Path(recipe.base.folder)),
            "base.quantise": recipe.base.quantise,
            "adapter": recipe.adapter.model_dump(mode="json"),
            "data": {**data, "packing": self.feed.packs},
            "training.loss": recipe.training.loss,
            "run.seed": recipe.run.seed,
            "training.sequence_length": recipe.training.sequence_length,
            "the corpus (sha256)": self.corpus_sha256,
        }

    @property
    def unigram_entropy(self) -> float:
        """See ``Job``; of the learned tokens."""
        return self.feed.unigram_entropy

    def expected_peak(self) -> HeldBytes:
        """See ``Job``."""
        training = self.recipe.training
        longest = max(int(part.inputs.max()) for part in self.feed.train.parts)
        length = positions_for(longest, training.sequence_length)
        training = training.model_copy(update={"sequence_length": length})
        return expected_peak(self.recipe.model_copy(update={"training": training}), self.place)

    def opening(self) -> list[str]:
        """See ``Job``."""
        base, adapter = self.recipe.base, self.recipe.adapter
        layers = "all linear layers" if adapter.targets == "auto" else ", ".join(adapter.targets)
        encoded = "" if base.quantise == "none" else f" in {base.quantise}"
        adapters = f"frozen; adapters of rank {adapter.rank} on {layers}"
        trained = adapters if adapter.rank else "all of it is trained"
        return [*self.feed.opening(self.recipe), f"base: {base.folder}{encoded}, {trained}"]

    def engine(self) -> TunedEngine:
        """See ``Job``."""
        engine, records = TunedEngine(self.recipe, self.place, self.feed), self.feed.has_records
        if self.feed.packs and records and not engine.keeps_apart:
            data = self.recipe.data.model_copy(update={"packing": False})
            self._feed_by(self.recipe.model_copy(update={"data": data}))
            engine.feed, engine.recipe = self.feed, self.recipe
            _log.warning(
                "%s lets records that share a sequence see each other, also where positions count from 0 "
                "again. So each has a sequence of its own: %d, and an epoch is %d steps",
                *(type(engine.model).__name__, len(self.feed.train), self.epoch_steps),
            )
        return engine

    def export(self, engine: TunedEngine, folder: RunFolder, *, step: int, last: bool) -> str:
        """See ``Job``."""
        path, base = folder.exported(step), self.recipe.base.folder
        if self.recipe.adapter.rank:
            save_adapter(path, engine.model, base=base)
            return engine.sample(self.tokenizer) if last else ""
        if self.place.is_first:  # of a run that was stopped before it had logged this
            shutil.rmtree(path, ignore_errors=True)
        self.place.wait_for_all()
        if self.place.mesh.pp is not None:
            background.finish()
            if self.place.is_first:
                roots = (folder.checkpoint, folder.best)
                saved = next(at for root in roots if is_complete(at := step_folder(root, step)))
                self._write_saved(saved, path)
            self.place.meet(f"export of step {step}")
        else:
            hf.save_pretrained(engine.model, path, tokenizer_from=base)
        return engine.sample(self.tokenizer) if last else ""

    def _write_saved(self, saved: Location, path: Path) -> None:
        """Write the model of a checkpoint, which has all stages of a pipeline; one process."""
        source, base = open_source(saved), self.recipe.base
        entries = source.manifest.tensors
        with Reader(source.folder) as reader:

            def read(name: str) -> Tensor:
                return read_tensor(reader, f"model/{name}", entries[f"model/{name}"])

            write_pretrained(meta_model(base), path, read, base.folder)


def fingerprint(folder: Path) -> str:
    """SHA-256 over the model's files: of weights their sizes, first and last MiB, of JSON all bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.suffix in (".safetensors", ".json") and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                whole = path.suffix == ".json"
                digest.update(file.read(-1 if whole else _EDGE_NBYTES))
                file.seek(max(0, size - _EDGE_NBYTES))
                digest.update(file.read())
    return digest.hexdigest()
