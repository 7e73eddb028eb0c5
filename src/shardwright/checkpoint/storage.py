"""What checkpoints ask of the place that they are in, and the one of a local file system: rename and fsync.

    rank 0     lock, begin ------------------------> check sizes, publish, name_latest, remove old ones
    all ranks                write a file, send it                                               keep

The other implementation is of object stores, which have neither: ``remote``.
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwright.checkpoint.format import MANIFEST
from shardwright.checkpoint.lock import FolderLock
from shardwright.files import read_regular

LATEST = "latest"
TORN = ".torn-"


@dataclass(frozen=True)
class Unpublished:
    """One save that may yet fail: it will be the checkpoint ``final``; its files lie in ``at`` until then,
    and have ``tag`` in their names."""

    final: Any
    at: Any
    tag: str


class Lock(Protocol):
    """A folder that is this process's to write to."""

    def check(self) -> None:
        """Raises: OSError if another process has it now."""

    def close(self) -> None:
        """Give it back; a second call does nothing."""


class Storage(Protocol):
    """Where checkpoints are. What can't be read or written raises OSError.

    Folders and files are ``Path`` or ``RemotePath``, as the implementation takes them. It inherits from here
    what it has nothing to do for.
    """

    copies = False
    """Whether files are read from copies on this host, which ``forget`` removes."""

    def check(self, path: Any, write: bool) -> None:
        """Nothing, if ``path`` can be reached and, if asked, written to."""

    def lock(self, path: Any) -> Lock:
        """The lock of the folder ``path``, which needn't be there yet. Raises: Held."""
        ...

    def names(self, path: Any) -> list[str]:
        """Names of the folders in ``path`` that are published. Raises: OSError if it is no folder."""
        ...

    def sizes(self, folder: Any) -> Mapping[str, int]:
        """Bytes of each file in ``folder``; none where it isn't there."""
        ...

    def read_text(self, file: Any) -> str:
        """The text of ``file``."""
        ...

    def readable(self, file: Any) -> Path:
        """A local file with the bytes of ``file``."""
        ...

    def forget(self, folder: Any) -> None:
        """Remove the copies on this host of what is in ``folder``."""

    def leftovers(self, path: Any) -> list[Any]:
        """What killed writers have left in ``path``."""
        ...

    def begin(self, final: Any) -> Unpublished:
        """A place for the files of a checkpoint that will be ``final``. Rank 0; it has the lock."""
        ...

    def scratch(self, attempt: Unpublished) -> Path:
        """The local folder in which this rank writes its file."""
        ...

    def send(self, attempt: Unpublished, file: Path) -> None:
        """Put a file that was written in ``scratch``, and synced, to the others in ``attempt.at``."""

    def publish(self, attempt: Unpublished, manifest_text: str) -> None:
        """Make it ``attempt.final``, whose files are all there, in one step. Raises: FileExistsError."""

    def keep(self, attempt: Unpublished, file: Path) -> None:
        """It is published: on each rank, what was written in ``scratch`` serves the next load."""

    def discard(self, attempt: Unpublished) -> None:
        """Whatever came of it: remove what this rank alone has made for it."""

    def abandon(self, attempt: Unpublished) -> None:
        """Remove what was sent, unless it is published. Rank 0; it has the lock."""

    def name_latest(self, path: Any, name: str) -> None:
        """Replace the text of ``path/latest``."""

    def move(self, folder: Any, to: Any) -> None:
        """Give a checkpoint another name."""

    def remove(self, what: Any) -> None:
        """Remove a checkpoint, or one of ``leftovers``; out of sight first."""


class LocalStorage(Storage):
    """See ``Storage``: a folder that is written beside, synced, and renamed."""

    def lock(self, path: Path) -> FolderLock:
        """See ``Storage``: ``flock``."""
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)

    def names(self, path: Path) -> list[str]:
        """See ``Storage``."""
        return [each.name for each in path.iterdir() if each.is_dir()]

    def sizes(self, folder: Path) -> dict[str, int]:
        """See ``Storage``."""
        if not folder.is_dir():
            return {}
        return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}

    def read_text(self, file: Path) -> str:
        """See ``Storage``."""
        return read_regular(file).decode()

    def readable(self, file: Path) -> Path:
        """See ``Storage``."""
        return file

    def leftovers(self, path: Path) -> list[Path]:
        """See ``Storage``."""
        return list(path.glob(TORN + "*"))

    def begin(self, final: Path) -> Unpublished:
        """See ``Storage``."""
        torn = final.with_name(f"{TORN}{uuid.uuid4().hex[:12]}")
        torn.mkdir()
        return Unpublished(final, torn, "")

    def scratch(self, attempt: Unpublished) -> Path:
        """See ``Storage``: where the others' files are."""
        return attempt.at

    def publish(self, attempt: Unpublished, manifest_text: str) -> None:
        """See ``Storage``: fails, and loses nothing, if ``final`` came to exist meanwhile."""
        _write_synced(attempt.at / MANIFEST, manifest_text)
        sync_folder(attempt.at)
        os.rename(attempt.at, attempt.final)
        sync_folder(attempt.final.parent)

    def abandon(self, attempt: Unpublished) -> None:
        """See ``Storage``: what was published has another name."""
        shutil.rmtree(attempt.at, ignore_errors=True)

    def name_latest(self, path: Path, name: str) -> None:
        """See ``Storage``."""
        temporary = path / f"{TORN}latest"
        temporary.unlink(missing_ok=True)  # left by a killed writer; where it is a link, that isn't followed
        _write_synced(temporary, name + "\n")
        os.replace(temporary, path / LATEST)
        sync_folder(path)

    def move(self, folder: Path, to: Path) -> None:
        """See ``Storage``."""
        os.rename(folder, to)

    def remove(self, what: Path) -> None:
        """See ``Storage``."""
        if what.is_symlink() or not what.is_dir():
            what.unlink()
            return
        unseen = what
        if not what.name.startswith(TORN):
            unseen = what.with_name(f"{TORN}{uuid.uuid4().hex[:12]}")
            os.rename(what, unseen)
        shutil.rmtree(unseen)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut; a file too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
