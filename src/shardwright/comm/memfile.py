"""Anonymous memory files, which processes of one host share by each other's descriptors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def memory_file(nbytes: int) -> int:
    """A descriptor of a new one of ``nbytes``. Raises: OSError, where nothing is left open."""
    fd = os.memfd_create("shardwright")
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def opened_again(pid: int, fd: int) -> Iterator[int]:
    """Another process' descriptor, as one of this process' own for a while.

    Raises: OSError for a process of another user, or one that has ended.
    """
    ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        yield ours
    finally:
        os.close(ours)
