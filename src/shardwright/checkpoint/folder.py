"""A folder of checkpoints, as it is read: its names, what is complete, and which is the newest of the line of
training that is going on; here as it is on a file system (``remote`` draws the one in an object store).

runs/
    step-000100/      complete: it has a manifest, renamed here in one step
    step-000200/
    latest            the text "step-000200"; moves last
    .lock             held by the one writer (flock: a killed writer frees it)
    damaged-step-000300/  was damaged when a run went back to an older one; kept to be looked at
    left-step-000400/     was newer than the one that a run was told to go back to
    .torn-1f3a/       being written, or left by a writer that was killed; removed by the next one

A line of training: a run that loads step 100 and goes on leaves 200 and 300 behind, though their numbers are
higher. So each manifest names the checkpoints that it descends from, and counts the saves of the folder.

    step-000100   save 1
    step-000200   save 2, after 100
    step-000300   save 3, after 100, 200     left behind: stays, isn't counted by ``keep``, isn't the latest
    step-000110   save 4, after 100          <- latest

``latest`` is the newest complete descendant of what the file ``latest`` names. So a kill between the rename
and the file loses no step; and where the file names what isn't there, the last save is the newest.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwright.checkpoint.format import MANIFEST, Manifest, loads
from shardwright.checkpoint.remote import RemoteStorage
from shardwright.checkpoint.storage import LATEST, TORN, LocalStorage, Storage, make_folder, sync_folder
from shardwright.checkpoint.url import Location, RemotePath
from shardwright.errors import CheckpointError, UnreadError
from shardwright.files import reason_of

_STEP = re.compile(r"step-(\d+)")
_local = LocalStorage()
Anywhere = TypeVar("Anywhere", Path, RemotePath, Location)


def storage_of(path: Location) -> Storage:
    """The storage that ``path`` is in. Raises: MissingExtra, InputError, for a URL."""
    return RemoteStorage(path) if isinstance(path, RemotePath) else _local


def step_folder(path: Anywhere, step: int) -> Anywhere:
    return path / f"step-{step:06d}"


def step_folders(path: Anywhere) -> list[tuple[int, Anywhere]]:
    """``(step, folder)`` of all published checkpoints in ``path``, by step; complete or not."""
    names = storage_of(path).names(path)
    return sorted((int(m[1]), path / name) for name in names if (m := _STEP.fullmatch(name)))


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A path beside ``out`` to write a file or a folder at: it becomes ``out`` when the block has ended well,
    all of it synced, and is removed if it has not.

    Raises:
        CheckpointError: ``out`` exists, or can't be written.
    """
    torn = out.with_name(f"{TORN}{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        if out.exists():
            raise CheckpointError(f"{out} exists already; nothing was written")
        if not out.parent.exists():
            make_folder(out.parent)
        yield torn
        for each in (torn, *torn.rglob("*")):
            sync_folder(each)
        os.rename(torn, out)
        sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(torn, ignore_errors=True)
        with suppress(OSError):
            torn.unlink()


def read_manifest(folder: Location) -> Manifest:
    """The manifest of the checkpoint in ``folder``; every file it lists is there and has its size.

    Raises:
        UnreadError: the manifest isn't there, or can't be read.
        CheckpointError: a damaged manifest, that of another step than the folder's name says, a missing or
            truncated file (all of them named).
    """
    try:
        manifest = _parsed(folder)
        if fault := _misnamed(manifest, folder):
            raise CheckpointError(fault)
        check_files(manifest, folder)
    except OSError as error:
        raise UnreadError(f"{folder / MANIFEST}: can't read the manifest: {error}") from error
    return manifest


def _parsed(folder: Location) -> Manifest:
    path, read_text = folder / MANIFEST, storage_of(folder).read_text
    try:
        with suppress(OSError):  # after a passing error nobody would know its line, and its number
            return loads(read_text(path), str(path))
        return loads(read_text(path), str(path))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a readable manifest ({reason_of(error)})") from error


def _misnamed(manifest: Manifest, folder: Location) -> str:
    """Why the checkpoint isn't the one that its folder's name says; empty where it is."""
    named = _STEP.fullmatch(folder.name)
    if named is None or int(named[1]) == manifest.step:
        return ""
    return (
        f"{folder / MANIFEST}: says that it is step {manifest.step}, in a folder that is named "
        f"{folder.name}: another step's files were put there; give the folder its own step's name, or a name "
        "without a step"
    )


def check_files(manifest: Manifest, folder: Location) -> None:
    """Raise CheckpointError unless each file of the manifest is in ``folder``, and has its size."""
    if faults := file_faults(manifest, folder):
        raise CheckpointError("the checkpoint is incomplete: " + "; ".join(faults))


def file_faults(manifest: Manifest, folder: Location) -> list[str]:
    """Which files of the manifest are not in ``folder``, or have another size."""
    sizes: Mapping[str, int] = storage_of(folder).sizes(folder)
    faults = []
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            found = f"has {sizes[name]} bytes, expected {size}" if name in sizes else "is missing"
            faults.append(f"{folder / name} {found} (it holds {_held(manifest, name)})")
    return faults


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


@dataclass(frozen=True)
class Found:
    """A checkpoint of a folder. ``fault``: why it can't be loaded, empty where it can; ``is_damaged``: the
    reason is what is in the folder, not that it can't be read now. ``after``: names of those it descends
    from."""

    step: int
    folder: Location
    fault: str
    is_damaged: bool
    number: int
    after: frozenset[str]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def order(self) -> tuple[int, int]:
        """What comes later was saved later."""
        return self.number, self.step


def survey(path: Location, least: int = 0) -> list[Found]:
    """What is in ``path``, from step ``least`` on, the last saved first. Their bytes are not read."""
    found, unnumbered = list[Found](), list[str]()
    for step, folder in step_folders(path):
        if step < least:
            continue
        fault, is_damaged, manifest = "", False, None
        try:
            manifest = _parsed(folder)
            if fault := _misnamed(manifest, folder):
                manifest = None
            else:
                check_files(manifest, folder)
        except CheckpointError as error:
            # Without a manifest it is another program's folder, or one that is just being removed.
            fault, is_damaged = str(error), MANIFEST in _sizes_or_none(folder)
        except OSError as error:
            fault = f"{folder}: can't be read now: {error.strerror or error}"
        line = manifest.state.get("line") if manifest is not None else None
        if line is None:  # of a release that wrote none: one line, in the order of steps
            line = {"number": 0, "after": tuple(unnumbered)}
            unnumbered.append(folder.name)
        found.append(Found(step, folder, fault, is_damaged, line["number"], frozenset(line["after"])))
    return sorted(found, key=lambda f: f.order, reverse=True)


def _sizes_or_none(folder: Location) -> Mapping[str, int]:
    try:
        return storage_of(folder).sizes(folder)
    except OSError:
        return {}


def latest_name(path: Location) -> str:
    """What the file ``latest`` of ``path`` says; nothing where it can't be read."""
    try:
        return storage_of(path).read_text(path / LATEST).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _newest(found: Sequence[Found], named: str) -> Found | None:
    """The newest complete one of ``found`` that is the one of that name or descends from it."""
    at = next((f.number for f in found if f.name == named), 0)

    def is_of(f: Found) -> bool:
        # What was saved before it came after another one of that name; 0 is no number, of an older release.
        return f.name == named or (named in f.after and (f.number > at or not at))

    return next((f for f in found if not f.fault and is_of(f)), None)


def by_line(path: Location) -> tuple[list[Found], list[Found]]:
    """The complete checkpoints of the line of training that is going on in ``path``, and all others; both
    the newest first.

    Raises: OSError, if there is no such folder.
    """
    found, named = survey(path), latest_name(path)
    newest = _newest(found, named)
    if newest is None:  # the named one is damaged or gone: what it came from, else what was saved last
        after = next((f.after for f in found if f.name == named), frozenset[str]())
        whole = [f for f in found if not f.fault]
        newest = next((f for f in whole if f.name in after), next(iter(whole), None))
    if newest is None:
        return [], found
    names = (newest.name, *newest.after)
    # One that was saved later has only the name of what it comes after.
    line = [f for f in found if not f.fault and f.name in names and f.order <= newest.order]
    return line, [f for f in found if f not in line]


def complete_steps(path: Location) -> list[int]:
    """Steps of the complete checkpoints in the folder ``path``, the newest first, those of other lines of
    training behind; none if there is no folder. Their bytes are not read: a damaged one counts, until
    ``load`` says so."""
    try:
        line, others = by_line(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [f.step for f in (*line, *others) if not f.fault]


def find(path: Location) -> tuple[Location, tuple[str, ...]]:
    """``(folder, skipped)``: ``path`` itself if it is a checkpoint, else its newest complete one, and why
    others that were saved later, or have a higher step, were skipped.

    Raises:
        CheckpointError: there is none, saying what was found instead.
    """
    storage = storage_of(path)
    if MANIFEST in _sizes_or_none(path) or _STEP.fullmatch(path.name):
        read_manifest(path)
        return path, ()
    named = latest_name(path)
    try:
        # Mostly nothing is newer than the named one: then one manifest is read, however many there are.
        is_step = _STEP.fullmatch(named)
        others = survey(path, int(is_step[1])) if is_step else []
        newest = _newest(others, named)
        if newest is None:
            line, others = by_line(path)
            newest = next(iter(line), None)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no such folder; give a checkpoint, or a folder of them") from None
    if newest is not None:
        later = [f for f in others if f.order > newest.order or f.step > newest.step]
        return newest.folder, tuple(f"{f.name}: {f.fault or _LEFT_BEHIND}" for f in later)
    reasons = "; ".join(f"{f.name}: {f.fault}" for f in others)
    reasons = reasons or f"no step-* folder, {len(storage.leftovers(path))} unfinished saves"
    raise CheckpointError(f"{path}: no complete checkpoint ({reasons})")


_LEFT_BEHIND = "of a line of training that was left behind"
