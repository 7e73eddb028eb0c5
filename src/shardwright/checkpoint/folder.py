"""A folder of checkpoints: its names, the one writer, publication, and what is kept; here as it is on a
file system (``remote`` draws the one in an object store).

runs/
    step-000100/      complete: it has a manifest, renamed here in one step
    step-000200/
    latest            the text "step-000200"; moves last
    .lock             held by the one writer (flock: a killed writer frees it)
    damaged-step-000300/  was damaged when a run went back to an older one; kept to be looked at
    left-step-000400/     was newer than the one that a run was told to go back to
    .torn-1f3a/       being written, or left by a writer that was killed; removed by the next one
"""

import itertools
import operator
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardwright.checkpoint.format import MANIFEST, Manifest, loads
from shardwright.checkpoint.lock import Held
from shardwright.checkpoint.remote import RemoteStorage
from shardwright.checkpoint.storage import TORN, LocalStorage, Lock, Storage, sync_folder
from shardwright.errors import CheckpointError, InputError, StorageError
from shardwright.files import reason_of
from shardwright.storage import Location, RemotePath

_STEP = re.compile(r"step-(\d+)")
_local = LocalStorage()
Anywhere = TypeVar("Anywhere", Path, RemotePath, Location)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept after a save.

    Args:
        last: how many of the newest ones, at least 1.
        every: also every checkpoint whose step is a multiple of this number; None: no others.

    Raises:
        InputError: a number is below 1.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        whole_number(self.last, "Keep.last", "at least 1 (None keeps all)", 1)
        if self.every is not None:
            whole_number(self.every, "Keep.every", "at least 1, or None", 1)


def keep_of(keep: int | Keep | None) -> Keep | None:
    """What ``save`` takes for ``keep``. Raises: InputError."""
    if keep is None or isinstance(keep, Keep):
        return keep
    return Keep(whole_number(keep, "keep", "at least 1, a Keep, or None", 1))


def whole_number(value: Any, name: str, expected: str, least: int) -> int:
    """An argument as an integer, NumPy's too. Raises: InputError for anything else, or one out of range."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # torch's, of a tensor of several elements
        number = least - 1
    if not least <= number < 2**63:
        raise InputError(f"{name} is {repr(value)[:40]}, expected {expected}")
    return number


def storage_of(path: Location) -> Storage:
    """The storage that ``path`` is in. Raises: MissingExtra, InputError, for a URL."""
    return RemoteStorage(path) if isinstance(path, RemotePath) else _local


def step_folder(path: Anywhere, step: int) -> Anywhere:
    return path / f"step-{step:06d}"


def step_folders(path: Anywhere) -> list[tuple[int, Anywhere]]:
    """``(step, folder)`` of all published checkpoints in ``path``, by step; complete or not."""
    names = storage_of(path).names(path)
    return sorted((int(m[1]), path / name) for name in names if (m := _STEP.fullmatch(name)))


class Writer:
    """The one writer of a folder, on rank 0: takes the lock, offers a place to write, publishes it.

    Raises (from ``__init__``):
        CheckpointError: the folder can't be written, the step exists, or another process is writing.
    """

    def __init__(self, path: Location, step: int) -> None:
        self.path = path
        self.storage = storage_of(path)
        self.final = step_folder(path, step)
        self._lock: Lock | None = None
        try:
            self._lock = self.storage.lock(path)
            if self._is_there() and is_complete(self.final):
                raise CheckpointError(
                    f"{self.final} exists already; nothing was overwritten: remove it, or use another folder"
                )
            for left in self.storage.leftovers(path):  # we hold the lock: no living writer owns them
                self.storage.remove(left)
            self.attempt = self.storage.begin(self.final)
        except Held as error:
            raise CheckpointError(
                f"{path}: another process is saving here ({error}); nothing was written"
            ) from None
        except OSError as error:
            self.close()
            raise CheckpointError(f"can't write to {path}: {error.strerror or error}") from error
        except CheckpointError:
            self.close()
            raise

    def _is_there(self) -> bool:
        return self.final.name in self.storage.names(self.path)

    def publish(self, manifest_text: str) -> None:
        """Publish what all ranks have sent, then move ``latest``. Every file is synced already."""
        try:
            check_files(loads(manifest_text, str(self.final)), self.attempt.at)
            assert self._lock is not None
            self._lock.check()
            if self._is_there():  # a damaged one: a run that went back before it comes by here again
                self.storage.move(self.final, _unused(self.path, f"damaged-{self.final.name}"))
            self.storage.publish(self.attempt, manifest_text)
            self.storage.name_latest(self.path, self.final.name)
        except OSError as error:
            raise CheckpointError(f"can't publish {self.final}: {error.strerror or error}") from error

    def prune(self, keep: Keep) -> None:
        """Remove the checkpoints that ``keep`` does not keep."""
        steps = [(step, folder) for step, folder in step_folders(self.path) if folder != self.final]
        old = steps[: len(steps) - (keep.last - 1)]
        for step, folder in old:
            if keep.every is None or step % keep.every:
                self.storage.remove(folder)

    def close(self) -> None:
        """Give the lock back and remove what was not published."""
        if self._lock is not None:
            if (attempt := getattr(self, "attempt", None)) is not None:
                with suppress(OSError):  # the next writer removes it
                    self.storage.abandon(attempt)
            self._lock.close()
            self._lock = None


def set_aside_after(path: Location, step: int, why: str) -> list[Location]:
    """Rename what was saved in ``path`` after ``step`` to ``WHY-step-...``, because a run goes back to
    ``step`` and will come by there again. Returns the new names."""
    moved, storage = [], storage_of(path)
    for newer, folder in step_folders(path):
        if newer > step:
            moved.append(_unused(path, f"{why}-{folder.name}"))
            storage.move(folder, moved[-1])
    if moved:
        storage.name_latest(path, step_folder(path, step).name)
    return moved


def _unused(path: Location, name: str) -> Location:
    """``path / name``, or with the first number behind it that no folder has."""
    names = set(storage_of(path).names(path))
    numbered = (f"{name}.{number}" for number in itertools.count(1))
    return path / next(n for n in itertools.chain([name], numbered) if n not in names)


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A path beside ``out`` to write a file or a folder at: it becomes ``out`` when the block has ended well,
    and is removed if it has not.

    Raises:
        CheckpointError: ``out`` exists, or can't be written.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; nothing was written")
    torn = out.with_name(f"{TORN}{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield torn
        sync_folder(torn)
        os.rename(torn, out)
        sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        if torn.is_dir():
            shutil.rmtree(torn, ignore_errors=True)
        torn.unlink(missing_ok=True)


def read_manifest(folder: Location) -> Manifest:
    """The manifest of the checkpoint in ``folder``; every file it lists is there and has its size.

    Raises:
        CheckpointError: no checkpoint, a damaged manifest, a missing or truncated file (all of them named).
    """
    path = folder / MANIFEST
    try:
        manifest = loads(storage_of(folder).read_text(path), str(path))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a readable manifest ({reason_of(error)})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't read the manifest: {error}") from error
    if (named := _STEP.fullmatch(folder.name)) and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"{path}: says that it is step {manifest.step}, in a folder that is named {folder.name}: another "
            "step's files were put there; give the folder its own step's name, or a name without a step"
        )
    check_files(manifest, folder)
    return manifest


def check_files(manifest: Manifest, folder: Location) -> None:
    """Raise CheckpointError unless each file of the manifest is in ``folder``, and has its size."""
    sizes: Mapping[str, int] = storage_of(folder).sizes(folder)
    faults = []
    for name, size in manifest.files.items():
        if name not in sizes:
            faults.append(f"{folder / name} is missing (it holds {_held(manifest, name)})")
        elif sizes[name] != size:
            faults.append(
                f"{folder / name} has {sizes[name]} bytes, expected {size} (it holds {_held(manifest, name)})"
            )
    if faults:
        raise CheckpointError("the checkpoint is incomplete: " + "; ".join(faults))


def is_complete(folder: Location) -> bool:
    """Whether ``read_manifest`` reads the checkpoint in ``folder``."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _held(manifest: Manifest, file: str) -> str:
    keys = [key for key, entry in manifest.tensors.items() if any(p.file == file for p in entry.pieces)]
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more tensors" if len(keys) > 3 else "")


def complete_steps(path: Location) -> list[int]:
    """Steps of the complete checkpoints in the folder ``path``, the newest first; none if there is no folder.
    Their bytes are not read: a damaged one counts, until ``load`` says so."""
    try:
        folders = step_folders(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [step for step, folder in reversed(folders) if is_complete(folder)]


def find(path: Location) -> tuple[Location, Sequence[str]]:
    """``(folder, skipped)``: ``path`` itself if it is a checkpoint, else its newest complete one, and why
    newer ones were skipped.

    Raises:
        CheckpointError: there is none, saying what was found instead.
    """
    storage = storage_of(path)
    if MANIFEST in storage.sizes(path) or _STEP.fullmatch(path.name):
        read_manifest(path)
        return path, ()
    skipped = []
    try:
        folders = step_folders(path)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise CheckpointError(f"{path}: no such folder; give a checkpoint, or a folder of them") from None
    for _, folder in reversed(folders):
        try:
            read_manifest(folder)
            return folder, tuple(skipped)
        except CheckpointError as error:
            skipped.append(f"{folder.name}: {error}")
    found = "; ".join(skipped) or f"no step-* folder, {len(storage.leftovers(path))} unfinished saves"
    raise CheckpointError(f"{path}: no complete checkpoint ({found})")
