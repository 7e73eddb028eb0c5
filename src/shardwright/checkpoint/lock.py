"""A folder that one process at a time may write to: whoever holds ``flock`` on its file ``.lock``.

The kernel gives the lock back when its holder ends, however it ends; a file that is left behind means
nothing. Between hosts that share the folder it holds where the file system carries ``flock`` to its server:
NFS since Linux 2.6.12 (after the loss of a whole host the server waits for its lease to run out, 90 s by
default), Lustre mounted with ``flock``, GPFS, CephFS. Where it is kept on each host only (Lustre with
``localflock``) a second host isn't refused; where there are no locks at all, we say so once and go on.
"""

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from shardwright.errors import warn
from shardwright.files import open_regular, read_regular

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

LOCK = ".lock"
_HOLDER_NBYTES = 300
_HOLDER = b"pid "
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Held(Exception):
    """The lock is another process'; the text says which, as "pid 17 on host"."""


class FolderLock:
    """The lock of the folder ``path``, held from here on, until ``close`` or the end of this process.

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
            os.write(
                self._file, f"pid {os.getpid()} on {socket.gethostname()}".encode().ljust(_HOLDER_NBYTES)
            )

    def check(self) -> None:
        """Nothing: the kernel gives nobody else a lock that is held."""

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _opened(file: Path) -> int:
    """The file, which is made if it isn't there; no other file than a lock is written to."""
    if file.is_symlink():
        raise OSError(errno.ELOOP, f"{file} is a symbolic link, which isn't followed; remove it")
    found = open_regular(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
    if os.read(found, len(_HOLDER)).strip(b"\0") not in (b"", _HOLDER):  # zeros: of a power cut
        os.close(found)
        raise OSError(errno.EEXIST, f"{file} is another program's file; remove it")
    os.lseek(found, 0, os.SEEK_SET)
    return found


def holder(path: Path) -> str:
    """Who holds the lock of ``path``, or held it last. In a new folder its first holder may be about to say
    so."""
    for _ in range(100):
        if said := read_regular(path / LOCK)[:_HOLDER_NBYTES].decode(errors="replace").strip():
            return said
        time.sleep(0.01)
    return "unknown"
