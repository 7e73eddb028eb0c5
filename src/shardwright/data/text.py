"""A corpus of bytes, held out by file, and batches whose position is one plain integer.

    train bytes   |--window 0--|--window 1--|--window 2--|--window 3--| ...      a window: sequence_length + 1
    epoch e       a permutation of the windows, made from (seed, e) alone
    position p    how many windows of that endless order all ranks together have taken

    one microbatch, 2 ranks, batch 3:   p | rank 0: p, p+1, p+2 | rank 1: p+3, p+4, p+5 |   then p += 6

No rank sees another's windows within an epoch, nothing is kept but ``p``, and a run that stops at ``p`` goes
on from there exactly, also with another number of ranks.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardwright.checkpoint.url import local_copy
from shardwright.data.kinds import kind_of
from shardwright.errors import DataError
from shardwright.recipe.config import DataConfig

FILE_START = b"\0"
"""Stands before every file: what a sample without a prompt begins with. Text holds no NUL."""

_SOURCES = {"stdlib": sysconfig.get_path("stdlib"), "torch": str(Path(torch.__file__).parent)}
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes (1-D uint8 arrays), how many files they are, and the hash of all of it.

    left_out: files of the folder that are no text, as a line to show.
    """

    train: np.ndarray
    heldout: np.ndarray
    num_files: int
    sha256: str
    left_out: tuple[str, ...]

    @property
    def unigram_entropy(self) -> float:
        """Loss, in nats per byte, of a model that knows only how frequent each training byte is."""
        return entropy(np.bincount(self.train, minlength=256))


def entropy(counts: np.ndarray) -> float:
    """Of how often each token comes, in nats per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def read_corpus(config: DataConfig) -> Corpus:
    """Read the corpus whole (each rank does: 11 MB for the standard library) and hold out whole files.

    Files are sorted by path; the ones held out are chosen in the order of their paths' hashes, so that they
    come from everywhere and stay the same from run to run. Of a single file, the end is held out.

    Raises:
        DataError: no such path, no text in it, or data that isn't text.
    """
    files, left_out = corpus_files(config)
    train, heldout = hold_out(files, config.heldout_share)
    return Corpus(_join(train), _join(heldout), len(files), hash_of(files), left_out)


def corpus_files(config: DataConfig) -> tuple[list[tuple[str, bytes]], tuple[str, ...]]:
    """(path relative to the root, content) of each file of the corpus, sorted by path; and what was left out,
    as a line to show, or nothing.

    What was asked for by its name or suffix, and whatever holds data, is refused if it isn't text. Pictures
    and the like, that lie in a folder of text, are left out.

    Raises:
        DataError: no such path, no text in it, or data that isn't text.
    """
    files: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    for name, path in corpus_paths(config):
        content = path.read_bytes()
        if is_text(config, name, content):
            files.append((name, content))
        else:
            left_out.append(name)
    told = (told_of(NO_TEXT, left_out),) if left_out else ()
    check_found(config, "text files", [len(content) for _, content in files], told)
    taken = drawn(config, [(name, len(content)) for name, content in files])
    return [file for file in files if file[0] in taken], told


NO_TEXT = "as they are no text"
"""Why files are left out."""


def check_found(config: DataConfig, what: str, sizes: Sequence[int], left_out: Iterable[str]) -> None:
    """Raise DataError where the files of those sizes hold nothing. what: they were to be. left_out: lines."""
    if not any(sizes):
        wanted = f" with the suffixes {list(config.suffixes)}" if config.suffixes else ""
        found = f"{len(sizes)} file(s), all empty" if sizes else f"found no {what}{wanted}"
        raise DataError(
            f"data.path = {config.path!r}: {found}; point it at {what}"
            + "".join(f" ({line})" for line in left_out)
        )


def is_text(config: DataConfig, name: str, content: bytes, what: str = "text") -> bool:
    """Whether a file that begins so is text; if not, it can be left out.

    Raises: DataError where it can't: it was asked for by its name or suffix, or holds somebody's data.
    """
    kind, alone = kind_of(content), corpus_root(config).is_file()
    if kind is not None and (kind.holds_data or config.suffixes or alone):
        choose = "" if alone else ", or choose the files by data.suffixes"
        raise DataError(
            f"data.path = {config.path!r}: {name} is {kind.name}, expected {what}; {kind.remedy}{choose}"
        )
    return kind is None


def hash_of(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 of names and contents, in order."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def told_of(why: str, names: Sequence[str]) -> str:
    """A line about files that are left out."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"left out, {why}: {', '.join(names[:3])}{more}"


def corpus_paths(config: DataConfig) -> Iterator[tuple[str, Path]]:
    """(path relative to the root, path) of each file that is asked for, sorted; nothing is read.

    Raises: DataError where there is no such file or folder.
    """
    root = corpus_root(config)
    if root.is_file():
        yield root.name, root
        return
    if not root.is_dir():
        raise DataError(
            f"data.path = {config.path!r}: no such file or folder; give an existing one, 'stdlib' or 'torch'"
        )
    source = config.path in _SOURCES
    suffixes = (".py",) if source else config.suffixes
    for path in sorted(_walk(root, _LEFT_OUT if source else frozenset()), key=lambda p: p.as_posix()):
        if not suffixes or path.suffix in suffixes:
            yield path.relative_to(root).as_posix(), path


def corpus_root(config: DataConfig) -> Path:
    """The file or folder that ``data.path`` says; of a URL, a copy on this host, which its processes share.

    Raises: DataError where nothing is at a URL. StorageError. MissingExtra.
    """
    if "://" in config.path:
        return _copy_of(config.path)
    return Path(_SOURCES.get(config.path, config.path))


@functools.cache  # a process that asks again reads the same bytes, though an object was replaced meanwhile
def _copy_of(url: str) -> Path:
    try:
        return local_copy(url)
    except FileNotFoundError:
        raise DataError(
            f"data.path = {url!r}: no such object, and none below it; give the URL of an existing one"
        ) from None


def drawn(config: DataConfig, sizes: Sequence[tuple[str, int]]) -> set[str]:
    """Names of files, of (name, bytes), in the order of their paths' hashes while they fit into
    ``data.limit_nbytes``; the same ones every time. Raises: DataError where not one fits."""
    if not config.limit_nbytes:
        return {name for name, _ in sizes}
    taken, left = set[str](), config.limit_nbytes
    for name, size in sorted(sizes, key=lambda file: hashlib.sha256(file[0].encode()).digest()):
        if size <= left:
            taken.add(name)
            left -= size
    if left == config.limit_nbytes and any(size for _, size in sizes):
        smallest = min(size for _, size in sizes if size)
        raise DataError(
            f"data.path = {config.path!r}: the smallest file has {smallest:,} bytes, and whole files are "
            f"taken up to data.limit_nbytes = {config.limit_nbytes:,}: set it to more, or to 0 for all"
        )
    return taken


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[Path]:
    """Every file below ``root`` that is not hidden, and not below a folder in ``left_out``."""
    for folder, subfolders, names in os.walk(root, onerror=_unread):
        subfolders[:] = [name for name in subfolders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _unread(error: OSError) -> None:
    raise DataError(
        f"{error.filename} can't be read ({error.strerror}), and its files would be missing: make it "
        "readable, or point data.path at another folder"
    ) from error


def hold_out(files: Sequence[tuple[str, bytes]], share: float) -> tuple[list[bytes], list[bytes]]:
    """(training contents, held-out contents): whole files, about ``share`` of the bytes; or one file's end"""
    wanted = sum(len(content) for _, content in files) * share
    if len(files) == 1:
        content = files[0][1]
        cut = len(content) - max(1, round(wanted))
        return [content[:cut]], [content[cut:]]
    by_hash = sorted(range(len(files)), key=lambda i: hashlib.sha256(files[i][0].encode()).digest())
    chosen = chosen_to(wanted, by_hash, [len(content) for _, content in files])
    train = [content for i, (_, content) in enumerate(files) if i not in chosen]
    return train, [files[i][1] for i in sorted(chosen)]


def chosen_to(wanted: float, order: Sequence[int], sizes: Sequence[int]) -> set[int]:
    """Numbers, in that order, whose sizes are ``wanted`` together, or less: at least one that isn't 0."""
    # One that overshoots is passed over: one big file (the standard library has one of 757 KB, all prose)
    # would be most of the held-out text, and make it another text than the one that is learned from.
    chosen: set[int] = set()
    taken = 0
    for i in order:
        if taken + sizes[i] <= wanted:
            chosen.add(i)
            taken += sizes[i]
    if taken == 0:  # all are bigger than the share: hold out the smallest that has text
        chosen = {min((i for i in order if sizes[i]), key=lambda i: sizes[i])}
    return chosen


def _join(contents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(FILE_START + content for content in contents), dtype=np.uint8)


@dataclass(frozen=True)
class Share:
    """Which part of every microbatch is ours: ``rank`` of ``world``, ``batch_size`` sequences each."""

    rank: int
    world: int
    batch_size: int

    @property
    def num_windows(self) -> int:
        """Windows that all ranks together take per microbatch."""
        return self.world * self.batch_size


class Order:
    """The endless, shuffled order of ``num_windows`` windows; ``at(position)`` are those of one rank there"""

    def __init__(self, num_windows: int, share: Share, seed: int) -> None:
        self.num_windows = num_windows
        self.share = share
        self._seed = seed
        self._epoch = (-1, np.empty(0, dtype=np.int64))

    def at(self, position: int) -> list[int]:
        """Numbers of the windows of our next microbatch, below ``num_windows``."""
        first = position + self.share.rank * self.share.batch_size
        return self.between(first, first + self.share.batch_size).tolist()

    def between(self, first: int, end: int) -> np.ndarray:
        """Numbers of the windows of all ranks, int64, from one position up to another."""
        found = [np.empty(0, dtype=np.int64)]
        while first < end:
            epoch, begin = divmod(first, self.num_windows)
            if epoch != self._epoch[0]:
                self._epoch = (epoch, self._order_of(epoch))
            found.append(self._epoch[1][begin : begin + end - first])
            first += len(found[-1])
        return np.concatenate(found)

    def _order_of(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_windows)


class TrainBatches:
    """Batches of bytes: ``at(position)`` is the batch of one rank there."""

    def __init__(self, data: np.ndarray, sequence_length: int, share: Share, seed: int) -> None:
        """Raises DataError when ``data`` has fewer windows than one microbatch of all ranks takes."""
        self.num_windows = (len(data) - 1) // sequence_length
        if self.num_windows < share.num_windows:
            raise DataError(
                f"the training bytes ({len(data)}) hold {max(0, self.num_windows)} sequences of "
                f"{sequence_length}, and one microbatch takes {share.num_windows} ({share.world} ranks x "
                f"batch_size {share.batch_size}): use more text, or a smaller "
                "training.batch_size or training.sequence_length"
            )
        self._data = data
        self._length = sequence_length
        self._order = Order(self.num_windows, share, seed)
        self.share = share

    def at(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each int64 of shape (batch_size, sequence_length), of our windows there."""
        starts = [window * self._length for window in self._order.at(position)]
        return split_targets(_gather(self._data, starts, self._length))


def heldout_windows(data: np.ndarray, sequence_length: int, num_windows: int) -> torch.Tensor:
    """``num_windows`` windows (fewer if the text is short) spread evenly over ``data``.

    Returns int64 of shape (windows, sequence_length + 1), the same on every rank.

    Raises:
        DataError: not one window fits.
    """
    fits = (len(data) - 1) // sequence_length
    if fits < 1:
        raise DataError(
            f"the held-out bytes ({len(data)}) hold no sequence of {sequence_length}: use more text, "
            "a larger data.heldout_share or a smaller training.sequence_length"
        )
    chosen = np.linspace(0, fits - 1, num=min(num_windows, fits)).round().astype(np.int64)
    return _gather(data, [int(i) * sequence_length for i in chosen], sequence_length)


def split_targets(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of windows (n, sequence_length + 1): each byte's target is the next byte."""
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``; from the host through pinned memory: else the host would wait for the copy,
    which comes after all that the device has queued."""
    leaves_host = tensor.device.type == "cpu" != device.type
    return tensor.pin_memory().to(device, non_blocking=True) if leaves_host else tensor.to(device)


def _gather(data: np.ndarray, starts: list[int], length: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([data[i : i + length + 1] for i in starts]).astype(np.int64))
