"""What checkpoints ask of the place that they are in, and the one of a local file system: rename and fsync.

    rank 0     lock, begin ------------------------> check sizes, publish, name_latest, remove old ones
    all ranks                write a file, send it                                               keep

The other implementation is of object stores, which have neither: ``remote``.
"""

import errno
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwright import clock
from shardwright.checkpoint.format import MANIFEST
from shardwright.errors import warn
from shardwright.files import fcntl, open_regular, read_regular

LATEST = "latest"
TORN = ".torn-"
LOCK = ".lock"
_HOLDER_NBYTES = 300
_HOLDER = b"pid "
_NO_SYNC = {errno.EACCES, errno.EINVAL}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


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
        """Bytes of each file in ``folder``; none, or an OSError, where it isn't there."""
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


class Held(Exception):
    """The lock is another process'; the text says which, as "pid 17 on host"."""


class FolderLock:
    """The lock of the folder ``path``, held from here on, until ``close`` or the end of this process:
    ``flock`` on its file ``.lock``.

    The kernel gives the lock back when its holder ends, however it ends; a file that is left behind means
    nothing. Between hosts that share the folder it holds where the file system carries ``flock`` to its
    server: NFS since Linux 2.6.12 (after the loss of a whole host the server waits for its lease to run out,
    90 s by default), Lustre mounted with ``flock``, GPFS, CephFS. Where it is kept on each host only (Lustre
    with ``localflock``) a second host isn't refused; where there are no locks at all, we say so once and go
    on.

    Raises: Held, if another process holds it; OSError, if the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._file = _opened(path / LOCK)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "Python has no fcntl here")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise Held(holder(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.close()
                raise
            warn(
                f"{path}: this file system has no locks ({error.strerror}): nothing keeps a second job out "
                "of this folder",
            )
        # Of one length, in one write: whoever is refused reads a whole name, of this holder or the last. On a
        # full disk nobody reads it, and what is saved has its own error.
        with suppress(OSError):
            os.write(self._file, this_process().encode().ljust(_HOLDER_NBYTES))

    def check(self) -> None:
        """Nothing: the kernel gives nobody else a lock that is held."""

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):  # the kernel has freed it all the same
                os.close(file)


def _opened(file: Path) -> int:
    """The file, which is made if it isn't there; no other file than a lock is written to."""
    if file.is_symlink():
        raise OSError(errno.ELOOP, f"{file} is a symbolic link, which isn't followed; remove it")
    found = open_regular(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
    try:
        # A power cut leaves the beginning of what was written, or zeros.
        if not _HOLDER.startswith(os.read(found, len(_HOLDER)).rstrip(b"\0")):
            raise OSError(errno.EEXIST, f"{file} is another program's file; remove it")
        os.lseek(found, 0, os.SEEK_SET)
    except OSError:
        os.close(found)
        raise
    return found


def this_process() -> str:
    """What a lock's holder is called."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def holder(path: Path) -> str:
    """Who holds the lock of ``path``, or held it last. In a new folder its first holder may be about to say
    so."""
    for _ in range(100):
        if said := read_regular(path / LOCK)[:_HOLDER_NBYTES].decode(errors="replace").strip():
            return said
        clock.sleep(0.01)
    return "unknown"


class LocalStorage(Storage):
    """See ``Storage``: a folder that is written beside, synced, and renamed."""

    def lock(self, path: Path) -> FolderLock:
        """See ``Storage``: ``flock``."""
        if not (path / LOCK).exists():
            make_folder(path)
        return FolderLock(path)

    def names(self, path: Path) -> list[str]:
        """See ``Storage``. One that can't be looked at is there all the same."""
        with os.scandir(path) as found:
            return [each.name for each in found if each.is_dir(follow_symlinks=False) or each.is_symlink()]

    def sizes(self, folder: Path) -> dict[str, int]:
        """See ``Storage``. Raises: OSError, also where it isn't there: it has just been removed."""
        with os.scandir(folder) as found:
            return {file.name: file.stat().st_size for file in found if file.is_file()}

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


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, so that a power cut doesn't take them with all that is
    published in them. What is there may have been made by a writer that was killed before it was synced."""
    if not path.exists():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
    try:
        sync_folder(path.parent)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # somebody else's, or an automounter's, which aren't ours to sync
            raise


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
