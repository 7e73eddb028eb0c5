"""Tokenised data, made once per host and mapped into memory by all who use it.

    CACHE/data/KEY/.lock         who holds it builds, the others wait
                  /part/         being built; of a process that was killed, it is removed by the next
                  /data/tokens   int32, example after example; a token that isn't learned as its complement
                       /index.npy, counts.npy, meta.json

KEY is the SHA-256 of what the tokens depend on: the files (path, size, time of change), the tokenizer with
its chat template, and the settings. What has another key is built anew; folders that are no longer wanted can
be removed at any time.
"""

import hashlib
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardwright import clock
from shardwright.checkpoint.storage import FolderLock, Held
from shardwright.data.encode import Encoder, Example
from shardwright.data.formats import BadRecord, Preference, parse
from shardwright.data.sources import DataSource, Row, find, pieces
from shardwright.data.text import chosen_to
from shardwright.errors import DataError
from shardwright.recipe.config import DataConfig

_FORMAT = 2  # 2: records of which the chat template leaves out calls of tools are refused
_AT_ONCE = 512  # records given to the tokenizer, which works on them in parallel
_PIECES_AT_ONCE = 32
_REASONS = 3
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.model", "*.tiktoken", "*.jinja",
)  # fmt: skip
_MIXED = "of a data set either all records are preferences (chosen, rejected) or none; the first is otherwise"
_FIRST_WORD_S, _NEXT_WORD_S = 5.0, 15.0


@dataclass(frozen=True)
class Examples:
    """``tokens`` int32 (total,) of examples one after another, each as itself where it is learned, else as
    its complement; ``ends`` int64 (n,), where each ends; ``targets`` int64 (n,), how many tokens of each are
    learned, without its first, which nothing predicts."""

    tokens: np.ndarray
    ends: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def begins(self) -> np.ndarray:
        """Where each begins, int64 (n,)."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def example(self, number: int) -> Example:
        """One of them."""
        coded = self.tokens[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]
        return Example(np.where(coded < 0, ~coded, coded), coded >= 0)

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Examples":
        """The same in memory."""
        coded = [np.where(e.learned, e.tokens, ~e.tokens) for e in examples]
        ends = np.cumsum([len(e.tokens) for e in examples], dtype=np.int64)
        targets = np.array([np.count_nonzero(e.learned[1:]) for e in examples], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int32), *coded]), ends, targets)


@dataclass(frozen=True)
class Tokenised:
    """One source. ``examples``, which of them are ``heldout`` (bool (n,)), and how often each token is to be
    predicted in the others (``counts``, int64, as long as the largest token needs).

    kind: "text", "records", or "pairs": examples 2 i and 2 i + 1 are the chosen and the rejected answer.
    num: of records, or files of text. skipped, reasons: of records that can't be used. num_split: chats of
    which each answer is an example. seconds: that it took to build, 0 where it was found in ``folder``.
    """

    examples: Examples
    heldout: np.ndarray
    counts: np.ndarray
    folder: Path
    kind: str
    num: int
    sha256: str
    skipped: int
    reasons: tuple[str, ...]
    num_split: int
    left_out: tuple[str, ...]
    seconds: float = 0.0


def tokenised(config: DataConfig, tokenizer: Any, base: Path) -> Tokenised:
    """The data of ``config``, one source, by the tokenizer of the folder ``base``: found, or built while
    other processes of this host that want the same wait.

    Raises: DataError for data that isn't there or can't be used, and a cache that can't be written to.
    """
    source = find(config)
    home = _home(source, base)
    try:
        home.mkdir(parents=True, exist_ok=True)
        if (found := _opened(home / "data")) is not None:
            return found
        lock = _held(home)
        try:
            if (found := _opened(home / "data")) is not None:
                return found
            began = clock.perf_counter()
            _build(source, Encoder(tokenizer, masked=config.mask_prompts), home)
            seconds = clock.perf_counter() - began
        finally:
            lock.close()
    except OSError as error:
        if error.filename and not str(error.filename).startswith(str(home)):
            raise DataError(f"data.path = {config.path!r} can't be read: {error}") from None
        raise DataError(
            f"{home}: tokenised data can't be kept there ({error}); give another folder in data.cache"
        ) from None
    found = _opened(home / "data", seconds)
    assert found is not None
    return found


def _home(source: DataSource, base: Path) -> Path:
    config = source.config
    cache = Path(config.cache or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    files = [(str(f.path.resolve()), f.nbytes, f.path.stat().st_mtime_ns) for f in source.files]
    settings = config.model_dump(
        include={"split", "subset", "columns", "on_bad", "heldout_share", "mask_prompts"}, mode="json"
    )
    key = json.dumps([_FORMAT, files, settings, tokenizer_key(base)], sort_keys=True)
    own = cache if config.cache else cache / "shardwright"
    return own / "data" / hashlib.sha256(key.encode()).hexdigest()[:32]


def tokenizer_key(base: Path) -> str:
    """What a tokenizer's tokens and template depend on: its files, and the versions of what reads them."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in base.rglob(pattern)}):
        if path.is_file():
            digest.update(f"{path.relative_to(base).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    for package in ("transformers", "tokenizers"):
        try:
            digest.update(version(package).encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()


def _held(home: Path) -> FolderLock:
    """The lock of ``home``, once its holder has given it back or ended."""
    while True:
        try:
            return FolderLock(home)
        except Held:
            clock.sleep(0.1)


def _opened(folder: Path, seconds: float = 0.0) -> Tokenised | None:
    """What is kept there; None where it isn't whole."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        index = np.load(folder / "index.npy", mmap_mode="r")
        counts = np.load(folder / "counts.npy", mmap_mode="r")
        tokens = np.asarray(np.memmap(folder / "tokens", dtype=np.int32, mode="r"))
    except (OSError, ValueError):
        return None
    if len(tokens) != index[0, -1]:
        return None
    meta |= {key: tuple(meta[key]) for key in ("reasons", "left_out")}
    examples = Examples(tokens, index[0], index[1])
    return Tokenised(examples, index[2].astype(bool), counts, folder, **meta, seconds=seconds)


@dataclass
class _Units:
    """What is held out or not as one: a file, or a record with all its examples."""

    digests: array = field(default_factory=lambda: array("Q"))
    sizes: array = field(default_factory=lambda: array("q"))

    def add(self, name: str, nbytes: int) -> int:
        """Its number."""
        self.digests.append(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def heldout(self, share: float) -> np.ndarray:
        """Which are held out, bool: about ``share`` of the bytes, by the hashes of the names."""
        order = np.argsort(np.frombuffer(self.digests, np.uint64), kind="stable")
        chosen = chosen_to(sum(self.sizes) * share, order.tolist(), self.sizes)
        return np.isin(np.arange(len(self.sizes)), list(chosen))


class _Writer:
    """Writes the files of a folder that is being built."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, (folder / "tokens").open("wb")
        self.ends, self.targets, self.units = array("q"), array("q"), array("q")
        self._at = 0

    def add(self, example: Example, unit: int, joins: bool = False) -> None:
        """One more example or, if it ``joins``, more of the last one."""
        self._file.write(np.where(example.learned, example.tokens, ~example.tokens).tobytes())
        self._at += len(example.tokens)
        if joins:
            self.ends[-1] = self._at
            self.targets[-1] += int(example.learned.sum())
        else:
            self.ends.append(self._at)
            self.targets.append(int(example.learned[1:].sum()))
            self.units.append(unit)

    def close(self, heldout_units: np.ndarray, meta: dict[str, Any]) -> None:
        """All files, as they are to stay."""
        self._file.close()
        heldout = heldout_units[np.frombuffer(self.units, np.int64)]
        ends, targets = (np.frombuffer(each, np.int64) for each in (self.ends, self.targets))
        np.save(self._folder / "index.npy", np.stack([ends, targets, heldout.astype(np.int64)]))
        tokens = np.asarray(np.memmap(self._folder / "tokens", dtype=np.int32, mode="r"))
        np.save(self._folder / "counts.npy", _counts(Examples(tokens, ends, targets), heldout))
        (self._folder / "meta.json").write_text(json.dumps(meta))
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _counts(examples: Examples, heldout: np.ndarray) -> np.ndarray:
    """How often each token is a target in what is not held out; as long as the largest token needs."""
    counts = np.zeros(1, np.int64)
    ends, begins = examples.ends, examples.begins
    for first in range(0, len(ends), _AT_ONCE):
        last = min(first + _AT_ONCE, len(ends)) - 1
        coded = np.asarray(examples.tokens[begins[first] : ends[last]])
        lengths = ends[first : last + 1] - begins[first : last + 1]
        counted = (coded >= 0) & ~np.repeat(heldout[first : last + 1], lengths)
        counted[(begins[first : last + 1] - begins[first])[lengths > 0]] = False  # nothing predicts it
        largest = int(np.where(coded < 0, ~coded, coded).max(initial=0))
        if largest >= len(counts):
            counts = np.concatenate([counts, np.zeros(largest + 1 - len(counts), np.int64)])
        counts += np.bincount(coded[counted], minlength=len(counts))
    return counts


def _build(source: DataSource, encoder: Encoder, home: Path) -> None:
    """All of ``home / "data"``, or nothing."""
    part = home / "part"
    for folder in (part, home / "data"):
        shutil.rmtree(folder, ignore_errors=True)
    part.mkdir()
    writer, units = _Writer(part), _Units()
    write = _write_text if source.is_text else _write_records
    meta, heldout = write(source, encoder, writer, units)
    if not writer.ends or not writer.ends[-1]:
        raise DataError(f"data.path = {source.config.path!r}: its text makes no tokens; give some text")
    meta |= {"sha256": source.sha256(), "num_split": encoder.num_split, "left_out": source.left_out}
    writer.close(heldout, meta)
    part.rename(home / "data")


def _write_text(
    source: DataSource, encoder: Encoder, writer: _Writer, units: _Units
) -> tuple[dict[str, Any], np.ndarray]:
    share, files = source.config.heldout_share, source.files
    spans = [(file, 0, file.nbytes) for file in files]
    if len(files) == 1:
        (file,) = files
        cut = file.nbytes - max(1, round(file.nbytes * share))
        spans = [(file, 0, cut), (file, cut, file.nbytes)]
    say = _Progress("files")
    parts = (
        (unit, piece)
        for file, begin, end in spans
        for unit in [units.add(file.name, end - begin)]
        for piece in say.each(pieces(file, begin, end))
    )
    while batch := list(islice(parts, _PIECES_AT_ONCE)):
        for (unit, piece), example in zip(batch, encoder.text([piece for _, piece in batch]), strict=True):
            writer.add(example, unit, joins=not piece.is_first)
    heldout = np.array([False, True]) if len(files) == 1 else units.heldout(share)
    return {"kind": "text", "num": len(files), "skipped": 0, "reasons": []}, heldout


def _write_records(
    source: DataSource, encoder: Encoder, writer: _Writer, units: _Units
) -> tuple[dict[str, Any], np.ndarray]:
    config, kind, num, reasons = source.config, "", 0, []
    rows = _Progress("records").each(source.rows())
    while batch := list(islice(rows, _AT_ONCE)):
        for row, found in zip(batch, _encoded(batch, encoder), strict=True):
            num += 1
            if not isinstance(found, BadRecord):
                is_pair, examples = found
                kind = kind or ("pairs" if is_pair else "records")
                if (kind == "pairs") == is_pair:
                    unit = units.add(row.where, row.nbytes)
                    for example in examples:
                        writer.add(example, unit)
                    continue
                found = BadRecord(_MIXED)
            if config.on_bad == "error":
                raise DataError(f"{row.where}: {found}")
            reasons.append(f"{row.where}: {found}") if len(reasons) < _REASONS else None
    used = len(units.sizes)
    if used < 2:
        raise DataError(
            f"data.path = {config.path!r}: {used} record(s), expected 2 or more to hold one out"
            + "".join(f"\n  - left out: {reason}" for reason in reasons)
        )
    meta = {"kind": kind, "num": used, "skipped": num - used, "reasons": reasons}
    return meta, units.heldout(config.heldout_share)


def _encoded(rows: Sequence[Row], encoder: Encoder) -> Iterator[tuple[bool, list[Example]] | BadRecord]:
    """Return of each row whether it is a pair, and its examples; or why there are none."""
    parsed = []
    for row in rows:
        try:
            parsed.append(BadRecord(row.problem) if row.problem else parse(row.record))
        except BadRecord as error:
            parsed.append(error)
    encoded = iter(encoder.encode([each for each in parsed if not isinstance(each, BadRecord)]))
    for each in parsed:
        found = each if isinstance(each, BadRecord) else next(encoded)
        yield found if isinstance(found, BadRecord) else (isinstance(each, Preference), found)


class _Progress:
    """Says now and then, on stderr, how far it is."""

    def __init__(self, unit: str) -> None:
        self._unit, self._began = unit, clock.monotonic()
        self._next = self._began + _FIRST_WORD_S

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """``items``, which are counted."""
        for number, item in enumerate(items, 1):
            if (now := clock.monotonic()) >= self._next:
                self._next = now + _NEXT_WORD_S
                text = f"tokenising, once on this host: {number:,} {self._unit} in {now - self._began:.0f} s"
                print(text, file=sys.stderr, flush=True)
            yield item
