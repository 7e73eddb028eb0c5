"""What a run is fed with: its sources tokenised, in windows, in an order; and what is said of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.mixture import MixedOrder, Mixture
from shardwright.data.store import Tokenised, tokenised
from shardwright.data.text import Order, Share, entropy
from shardwright.data.windows import Windows, packed, paired, stream
from shardwright.errors import DataError, InputError
from shardwright.recipe.config import Recipe


@dataclass(frozen=True)
class Feed:
    """Windows to train on, in ``order``, and those ``heldout`` to evaluate. ``packs``: whether records share
    windows. Where ``sources`` are preferences, a number stands for two windows (see ``Mixture``)."""

    train: Mixture
    order: Order | MixedOrder
    heldout: Mixture
    heldout_rows: Sequence[int]
    sources: tuple[Tokenised, ...]
    packs: bool

    @property
    def are_pairs(self) -> bool:
        """Whether they are preferences."""
        return self.train.per == 2

    @property
    def has_records(self) -> bool:
        """Whether some are records, which could share windows."""
        return any(source.kind == "records" for source in self.sources)

    @property
    def epoch(self) -> int:
        """Numbers of ``train`` that an epoch takes."""
        return self.order.num_windows

    @property
    def largest_token(self) -> int:
        """In all of the data."""
        return max(len(source.counts) for source in self.sources) - 1

    @property
    def sha256(self) -> str:
        """Of all files; of several sources, of theirs."""
        hashes = [source.sha256 for source in self.sources]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    @property
    def unigram_entropy(self) -> float:
        """Loss, in nats per token, of a model that knows only how frequent each learned token is."""
        counts = np.zeros(self.largest_token + 1, np.int64)
        for source in self.sources:
            counts[: len(source.counts)] += source.counts
        return entropy(counts)

    def opening(self, recipe: Recipe) -> list[str]:
        """Lines for people."""
        sources, parts = self.sources, self.train.parts
        cut, dropped = (sum(getattr(part, name) for part in parts) for name in ("cut", "dropped"))
        lost = f", {cut} cut to fit, {dropped} left out (nothing to learn)" if cut or dropped else ""
        too_few = self.packs != recipe.data.packing
        apart = ", one record in each (packed, they are fewer than a step takes)" if too_few else ""
        counted = ", ".join(f"{source.num:,} {_UNITS[source.kind]}" for source in sources)
        lines = [
            f"corpus: {self.train.num_targets:,} tokens to learn in {len(self.train):,} "
            f"{'pairs' if self.are_pairs else 'sequences'} (of {self.train.inputs.mean():,.0f} tokens, on "
            f"average){apart}, {len(self.heldout):,} held out; {counted}{lost}, sha256 {self.sha256[:16]}"
        ]
        if isinstance(self.order, MixedOrder):
            shares = zip(recipe.data.sources, self.order.counts, parts, strict=True)
            lines += [
                f"  {source.path}: {count:,} of {self.epoch:,} sequences of an epoch; it has {len(part):,}"
                for source, count, part in shares
            ]
        for source in sources:
            made = f"made in {source.seconds:.1f} s" if source.seconds else "found, made by an earlier start"
            lines.append(f"tokens: {source.folder} ({made})")
            if source.skipped:
                lines.append(
                    f"left out {source.skipped:,} of {source.num + source.skipped:,} records, which can't be "
                    f"used: {'; '.join(source.reasons)}{'; ...' if source.skipped > 3 else ''}"
                )
            if source.num_split:
                lines.append(
                    f"the chat template writes earlier turns in another way once more follow: of "
                    f"{source.num_split:,} chats each answer is a record of its own"
                )
            lines += source.left_out
        return lines


_UNITS = {"text": "file(s)", "records": "record(s)", "pairs": "pair(s)"}


def feed_of(recipe: Recipe, tokenizer: Any, share: Share) -> Feed:
    """The data of ``recipe`` for one rank, tokenised by one process of its host.

    Raises: DataError for data that is missing, too small, or can't be used; InputError for a ``pad_token``
    that the tokenizer doesn't have.
    """
    training, data, base = recipe.training, recipe.data, Path(recipe.base.folder)
    pad = pad_of(tokenizer, data.pad_token, recipe.base.folder)
    sources = tuple(tokenised(each, tokenizer, base) for each in data.each())
    if len({source.kind == "pairs" for source in sources}) > 1:
        raise DataError(
            "data.sources: some hold preferences (chosen, rejected) and some don't; give one kind"
        )
    a_step, packs = share.num_windows * training.accumulation, data.packing
    train = _mixture(sources, False, training.sequence_length, pad, packs)
    if len(train) < a_step and packs and sources[0].kind == "records":
        packs = False  # few short records: packed, they would be less than one step takes
        train = _mixture(sources, False, training.sequence_length, pad, packs)
    heldout = _mixture(sources, True, training.sequence_length, pad, packs)
    weights = [source.weight for source in data.sources]
    order = (
        MixedOrder([len(part) // train.per for part in train.parts], weights, share, recipe.run.seed)
        if any(weights)
        else Order(len(train), share, recipe.run.seed)
    )
    if order.num_windows < share.num_windows:
        raise DataError(
            f"the training text makes {order.num_windows} sequence(s) of {training.sequence_length} tokens, "
            f"and one microbatch takes {share.num_windows} ({share.world} ranks x batch_size "
            f"{share.batch_size}): use more text, or a smaller training.batch_size or "
            "training.sequence_length"
        )
    return Feed(train, order, heldout, heldout.spread(recipe.heldout.num_windows), sources, packs)


def _mixture(sources: Sequence[Tokenised], heldout: bool, length: int, pad: int, packs: bool) -> Mixture:
    parts = [_windows(source, heldout, length, pad, packs) for source in sources]
    return Mixture(tuple(parts), 2 if sources[0].kind == "pairs" else 1)


def _windows(source: Tokenised, heldout: bool, length: int, pad: int, packs: bool) -> Windows:
    chosen = np.flatnonzero(source.heldout if heldout else ~source.heldout)
    if source.kind == "text":
        return stream(source.examples, chosen, length)
    if source.kind == "pairs":
        return paired(source.examples, chosen, length, pad)
    return packed(source.examples, chosen, length, pad, several=packs)


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
