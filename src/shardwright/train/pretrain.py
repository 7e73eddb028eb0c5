"""The job of training the byte-level model from scratch, on either backend."""

from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from shardwright.data.text import TrainBatches, heldout_windows, read_corpus
from shardwright.plan.memory import HeldBytes
from shardwright.recipe.config import Recipe
from shardwright.train.engine import Engine, TrainingProcess, steps_of
from shardwright.train.folder import RunFolder
from shardwright.train.models import Transformer
from shardwright.train.sample import generate, readable


class ByteEngine(Engine, Protocol):
    """An engine of the byte-level model."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model on the host of the first process, under plain names; elsewhere perhaps nothing."""
        ...


class Pretraining:
    """See ``Job``. Raises DataError for a corpus that is missing, empty or too small."""

    unit = "byte"

    def __init__(self, recipe: Recipe, place: TrainingProcess) -> None:
        training = recipe.training
        self.place = place
        self.corpus = read_corpus(recipe.data)
        self.corpus_sha256 = self.corpus.sha256
        self.batches = [
            TrainBatches(self.corpus.train, training.sequence_length, share, recipe.run.seed)
            for share in place.shares(training.batch_size)
        ]
        self.windows = heldout_windows(
            self.corpus.heldout, training.sequence_length, recipe.heldout.num_windows
        )
        sequences = place.num_samples * training.batch_size * training.accumulation
        self.epoch_steps = max(1, self.batches[0].num_windows // sequences)
        self.recipe = recipe.model_copy(update={"training": steps_of(training, self.epoch_steps)})

    @property
    def identity(self) -> dict[str, Any]:
        """See ``Job``."""
        return {
            "model": self.recipe.model.model_dump(mode="json"),
            "run.seed": self.recipe.run.seed,
            "training.sequence_length": self.recipe.training.sequence_length,
            "the corpus (sha256)": self.corpus_sha256,
        }

    @property
    def unigram_entropy(self) -> float:
        """See ``Job``."""
        return self.corpus.unigram_entropy

    def expected_peak(self) -> HeldBytes | None:
        """See ``Job``; of a plan what it says."""
        if self.recipe.launch.backend == "xla":
            return None
        return import_module("shardwright.train.expected").expected_of_bytes(self.recipe, self.place)

    def opening(self) -> list[str]:
        """See ``Job``."""
        corpus = self.corpus
        return [
            f"corpus: {len(corpus.train):,} bytes to train on, {len(corpus.heldout):,} held out, "
            f"{corpus.num_files} file(s), sha256 {corpus.sha256[:16]}",
            *corpus.left_out,
        ]

    def engine(self) -> ByteEngine:
        """See ``Job``. Only the backend's own modules are imported."""
        if self.recipe.launch.backend == "xla":
            kind = import_module("shardwright.train.compiled").CompiledEngine
        else:
            kind = import_module("shardwright.train.eager").EagerEngine
        return kind(self.recipe, self.place, self.batches, self.windows)

    def export(self, engine: Any, folder: RunFolder, *, step: int, last: bool) -> str:
        """See ``Job``: the whole model at the end."""
        if not last:
            return ""
        tensors = engine.full_state_dict()
        self.place.wait_for_all()
        if not self.place.is_first:  # no rank waits, under a time limit, for what only rank 0 does from here
            return ""
        folder.write_model(tensors)
        whole = Transformer(self.recipe.model)
        whole.load_state_dict(tensors)
        recipe = self.recipe
        return readable(generate(whole, recipe.sample, recipe.training.sequence_length, recipe.run.seed))
