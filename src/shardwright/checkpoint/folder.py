"""A folder of checkpoints: its names, the lock of its one writer, atomic publication, and what is kept.

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
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.format import MANIFEST, Manifest, loads
from shardwright.checkpoint.lock import FolderLock, Held
from shardwright.errors import CheckpointError, InputError

LATEST = "latest"
_TORN = ".torn-"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints outlive a save.

    Args:
        last: how many of the newest ones, at least 1.
        every: besides these, every one whose step is a multiple of this number; None: no others.

    Raises:
        InputError: a number is below 1.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise InputError(f"Keep.last is {self.last}, expected at least 1 (None keeps all)")
        if self.every is not None and self.every < 1:
            raise InputError(f"Keep.every is {self.every}, expected at least 1, or None")


def step_folder(path: Path, step: int) -> Path:
    return path / f"step-{step:06d}"


def step_folders(path: Path) -> list[tuple[int, Path]]:
    """``(step, folder)`` of all published checkpoints in ``path``, by step; complete or not."""
    found = [(int(m[1]), p) for p in path.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir()]
    return sorted(found)


class Writer:
    """The one writer of a folder, on rank 0: takes the lock, offers a place to write, publishes it.

    Raises (from ``__init__``):
        CheckpointError: the folder can't be written, the step exists, or another process is writing.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.final = step_folder(path, step)
        self._lock: FolderLock | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path)
            if self.final.exists() and is_complete(self.final):
                raise CheckpointError(
                    f"{self.final} exists already; nothing was overwritten: remove it, or use another folder"
                )
            for torn in path.glob(_TORN + "*"):  # we hold the lock: no living writer owns them
                if torn.is_dir():
                    shutil.rmtree(torn)
                else:  # what was to become ``latest``
                    torn.unlink()
            self.torn = path / f"{_TORN}{uuid.uuid4().hex[:12]}"
            self.torn.mkdir()
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

    def publish(self, manifest_text: str) -> None:
        """Write the manifest, sync, rename into place, then move ``latest``. Every shard file is synced
        already."""
        try:
            _write_synced(self.torn / MANIFEST, manifest_text)
            sync_folder(self.torn)
            read_manifest(self.torn)  # every shard file is here, as large as its writer says
            if self.final.exists():  # a damaged one: a run that went back before it comes by here again
                os.rename(self.final, _unused(self.path / f"damaged-{self.final.name}"))
            os.rename(self.torn, self.final)  # fails, and loses nothing, if it came to exist meanwhile
            sync_folder(self.path)
            _name_latest(self.path, self.final)
        except OSError as error:
            raise CheckpointError(f"can't publish {self.final}: {error.strerror or error}") from error

    def prune(self, keep: Keep) -> None:
        """Remove the checkpoints that ``keep`` does not keep; first out of sight by a rename, then the
        files."""
        steps = [(step, folder) for step, folder in step_folders(self.path) if folder != self.final]
        old = steps[: len(steps) - (keep.last - 1)]
        for step, folder in old:
            if keep.every is None or step % keep.every:
                unseen = self.path / f"{_TORN}{uuid.uuid4().hex[:12]}"
                os.rename(folder, unseen)
                shutil.rmtree(unseen)

    def close(self) -> None:
        """Give the lock back and remove what was not published."""
        if self._lock is not None:
            torn = getattr(self, "torn", None)
            if torn is not None:
                shutil.rmtree(torn, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _name_latest(path: Path, newest: Path) -> None:
    temporary = path / f"{_TORN}latest"
    _write_synced(temporary, newest.name + "\n")
    os.replace(temporary, path / LATEST)
    sync_folder(path)


def set_aside_after(path: Path, step: int, why: str) -> list[Path]:
    """Rename what was saved in ``path`` after ``step`` to ``WHY-step-...``, because a run goes back to
    ``step`` and will come by there again. Returns the new names."""
    moved = []
    for newer, folder in step_folders(path):
        if newer > step:
            moved.append(_unused(path / f"{why}-{folder.name}"))
            os.rename(folder, moved[-1])
    if moved:
        _name_latest(path, step_folder(path, step))
    return moved


def _unused(path: Path) -> Path:
    """``path``, or with the first number behind it that no file has."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(p for p in (path, *itertools.islice(numbered, 1000)) if not p.exists())


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A path beside ``out`` to write a file or a folder at: it becomes ``out`` when the block has ended well,
    and is removed if it has not.

    Raises:
        CheckpointError: ``out`` exists, or can't be written.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; nothing was written")
    torn = out.with_name(f"{_TORN}{out.name}-{uuid.uuid4().hex[:8]}")
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


def sync_folder(path: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut; a file too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``; every file it lists is there and has its size.

    Raises:
        CheckpointError: no checkpoint, a damaged manifest, a missing or truncated file (all of them named).
    """
    path = folder / MANIFEST
    try:
        manifest = loads(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: can't read the manifest: {error}") from error
    faults = []
    for name, size in manifest.files.items():
        file = folder / name
        if not file.is_file():
            faults.append(f"{file} is missing (it holds {_held(manifest, name)})")
        elif file.stat().st_size != size:
            faults.append(
                f"{file} has {file.stat().st_size} bytes, expected {size} (it holds {_held(manifest, name)})"
            )
    if faults:
        raise CheckpointError("the checkpoint is incomplete: " + "; ".join(faults))
    return manifest


def is_complete(folder: Path) -> bool:
    """Whether ``read_manifest`` reads the checkpoint in ``folder``."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _held(manifest: Manifest, file: str) -> str:
    keys = [key for key, entry in manifest.tensors.items() if any(p.file == file for p in entry.pieces)]
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more tensors" if len(keys) > 3 else "")


def complete_steps(path: Path) -> list[int]:
    """Steps of the complete checkpoints in the folder ``path``, the newest first; none if there is no folder.
    Their bytes are not read: a damaged one counts, until ``load`` says so."""
    folders = reversed(step_folders(path)) if path.is_dir() else ()
    return [step for step, folder in folders if is_complete(folder)]


def find(path: Path) -> tuple[Path, Sequence[str]]:
    """``(folder, skipped)``: ``path`` itself if it is a checkpoint, else its newest complete one, and why
    newer ones were skipped.

    Raises:
        CheckpointError: there is none, saying what was found instead.
    """
    if (path / MANIFEST).exists() or _STEP.fullmatch(path.name):
        read_manifest(path)
        return path, ()
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a checkpoint, or a folder of them")
    skipped = []
    for _, folder in reversed(step_folders(path)):
        try:
            read_manifest(folder)
            return folder, tuple(skipped)
        except CheckpointError as error:
            skipped.append(f"{folder.name}: {error}")
    torn = len(list(path.glob(_TORN + "*")))
    found = "; ".join(skipped) or f"no step-* folder, {torn} unfinished saves"
    raise CheckpointError(f"{path}: no complete checkpoint ({found})")
