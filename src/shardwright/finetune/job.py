"""The job of fine-tuning: what ``shardwright train`` does with a recipe that has [base].

runs/NAME/exported/step-000300/   the adapter in peft's form, or the model as transformers saves it: one
                                  after each epoch, and at the end
          checkpoint/             resumable; of adapters only these, the base stays in its folder
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from shardwright import hf
from shardwright.errors import DataError, InputError
from shardwright.finetune.engine import Feed, TunedEngine
from shardwright.finetune.records import Example, read_texts
from shardwright.finetune.windows import Windows, packed, stream
from shardwright.hf import library
from shardwright.train.config import Recipe
from shardwright.train.data import Order
from shardwright.train.engine import steps_of
from shardwright.train.folder import RunFolder
from shardwright.train.lora import save_adapter
from shardwright.train.ranks import RankPlace

_EDGE_NBYTES = 2**20


class FineTuning:
    """See ``Job``.

    Raises: InputError for a folder without a model or tokenizer; DataError for a corpus that is missing, too
    small, no text, or has a line that is no record.
    """

    unit = "token"

    def __init__(self, recipe: Recipe, place: RankPlace) -> None:
        training, data = recipe.training, recipe.data
        self.place = place
        self.tokenizer = library.tokenizer(Path(recipe.base.folder))
        self.texts = read_texts(data, self.tokenizer)
        (share,) = place.shares(training.batch_size)
        a_step = share.num_windows * training.accumulation
        self.packs = data.packing
        train = self._windows(recipe, self.texts.train)
        if len(train) < a_step and self.texts.are_records and self.packs:
            self.packs = False  # few short records: packed, they would be less than one step takes
            train = self._windows(recipe, self.texts.train)
        heldout = self._windows(recipe, self.texts.heldout)
        if len(train) < share.num_windows:
            raise DataError(
                f"the training text makes {len(train)} sequence(s) of {training.sequence_length} tokens, and "
                f"one microbatch takes {share.num_windows} ({share.world} ranks x batch_size "
                f"{share.batch_size}): use more text, or a smaller training.batch_size or "
                "training.sequence_length"
            )
        order = Order(len(train), share, recipe.run.seed)
        self.feed = Feed(train, order, heldout, heldout.spread(recipe.heldout.num_windows))
        self.epoch_steps = max(1, len(train) // a_step)
        self.recipe = recipe.model_copy(update={"training": steps_of(training, self.epoch_steps)})

    def _windows(self, recipe: Recipe, examples: list[Example]) -> Windows:
        length = recipe.training.sequence_length
        if not self.texts.are_records:
            return stream(examples, length)
        pad = pad_of(self.tokenizer, recipe.data.pad_token, recipe.base.folder)
        return packed(examples, length, pad, several=self.packs)

    @property
    def identity(self) -> dict[str, Any]:
        """See ``Job``."""
        recipe = self.recipe
        data = recipe.data.model_dump(include={"heldout_share", "mask_prompts"}, mode="json")
        return {
            "the base (its files)": fingerprint(Path(recipe.base.folder)),
            "base.quantise": recipe.base.quantise,
            "adapter": recipe.adapter.model_dump(mode="json"),
            "data": {**data, "packing": self.packs},
            "run.seed": recipe.run.seed,
            "training.sequence_length": recipe.training.sequence_length,
            "the corpus (sha256)": self.corpus_sha256,
        }

    @property
    def corpus_sha256(self) -> str:
        """See ``Job``."""
        return self.texts.sha256

    @property
    def unigram_entropy(self) -> float:
        """See ``Job``; of the learned tokens."""
        _, counts = np.unique(self.feed.train.targets(), return_counts=True)
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def opening(self) -> list[str]:
        """See ``Job``."""
        train, heldout, texts = self.feed.train, self.feed.heldout, self.texts
        apart = ", one in each" if self.packs != self.recipe.data.packing else ""
        lost = f", {train.cut} cut to fit, {train.dropped} left out (nothing to learn)" if train.cut else ""
        base, adapter = self.recipe.base, self.recipe.adapter
        return [
            f"corpus: {len(train.targets()):,} tokens to learn in {len(train):,} sequences{apart}, "
            f"{len(heldout):,} held out; {texts.num} {'record' if texts.are_records else 'file'}(s){lost}, "
            f"sha256 {texts.sha256[:16]}",
            f"base: {base.folder}"
            + ("" if base.quantise == "none" else f" in {base.quantise}")
            + (
                f", frozen; adapters of rank {adapter.rank} on {', '.join(adapter.targets)}"
                if adapter.rank
                else ", all of it is trained"
            ),
            *texts.left_out,
        ]

    def engine(self) -> TunedEngine:
        """See ``Job``."""
        return TunedEngine(self.recipe, self.place, self.feed)

    def export(self, engine: TunedEngine, folder: RunFolder, *, step: int, last: bool) -> str:
        """See ``Job``."""
        path, base = folder.exported(step), self.recipe.base.folder
        if self.recipe.adapter.rank:
            save_adapter(path, engine.model, base=base)
        else:
            if self.place.is_first:  # of a run that was stopped before it had logged this
                shutil.rmtree(path, ignore_errors=True)
            self.place.wait_for_all()
            hf.save_pretrained(engine.model, path, tokenizer_from=base)
        return engine.sample(self.tokenizer) if last else ""


def pad_of(tokenizer: Any, name: str, folder: str) -> int:
    """The token to pad with: the one of that name or, if it is "", the tokenizer's own. Many have none, and
    then any will do, since padding is neither learned from nor seen: the one that ends a text, or the first.

    Raises: InputError where there is none of that name.
    """
    if not name:
        return next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    token = tokenizer.get_vocab().get(name)
    if token is None:
        raise InputError(
            f"{folder}: the tokenizer has no token {name!r}; set data.pad_token to one of its tokens, or to "
            '"" (padding is never learned from)'
        )
    return token


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
