"""One copy of a group's unsharded parameters for all ranks of a host, in an anonymous memory file.

    file   [ a word per rank: uses that it has left | bytes of the unsharded parameters ]

    each rank   writes its own part          through a mapping that is shared
                reads, and hands to modules  one that is private: what code writes there stays its own (the
                kernel copies the page first), and is gone once the rank leaves

An all-gather so moves nothing between ranks: each writes its part once, where all read it. A *use* is one
all-gather and what is computed with it, numbered alike on all ranks. A rank writes for the next use once all
have left the last one. A rank that stays in it while others go on takes a copy of its own (``detach``).

Who reads what is safe as in ``arena``: every word and every byte has one writer, and x86 keeps the order of
stores, and of loads before them.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwright.comm import futex
from shardwright.comm.arena import LOOK_S, MAP_NORESERVE, Arena
from shardwright.comm.base import Piece
from shardwright.comm.launches import Launch
from shardwright.comm.memfile import memory_file, opened_again
from shardwright.comm.pages import advise, can_tell_private_pages, has_private_pages

_LINE_NBYTES = 64  # words of different ranks lie in cache lines of their own


class HostCopy:
    """``nbytes`` that the ranks of an arena share, as one of them sees them.

    mine: uint8 [nbytes], where this rank writes its part. everything: uint8 [nbytes], what it reads.
    """

    def __init__(self, arena: Arena, fd: int, nbytes: int) -> None:
        head = _head_nbytes(arena.world)
        size = _size(arena.world, nbytes)
        shared = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
        private = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        self.mine = torch.frombuffer(shared, dtype=torch.uint8)[head:]
        self.everything = torch.frombuffer(private, dtype=torch.uint8)[head:]
        self._arena = arena
        self._left = memoryview(shared)[:head].cast("q")
        self._address = self.mine.data_ptr() - head
        self._uses = 0
        self._is_detached = False

    def enter(self, launch: Launch) -> None:
        """Begin one more use, in ``launch``: returns when every rank has left the last one.

        Raises: CommError where one has ended, or doesn't leave within the timeout; the watch's verdict.
        """
        last = self._uses
        self._uses += 1
        for peer in range(self._arena.world):
            if self._left_by(peer) < last and peer != self._arena.rank:
                self._arena.until(peer, self._has_left(peer, last), self._nap(peer), launch)

    def leave(self) -> None:
        """Others may write over what this rank has read; what was written here by itself is gone."""
        begin, nbytes = self.everything.data_ptr(), self.everything.numel()
        if self._is_detached or has_private_pages(begin, nbytes):
            advise(begin, nbytes, mmap.MADV_DONTNEED)
            self._is_detached = False
        self.pass_on()

    def pass_on(self) -> None:
        """Others may write over what is there: this rank has not read it, or has a copy of its own."""
        word = self._arena.rank * _LINE_NBYTES
        self._left[word // 8] = self._uses
        futex.wake(self._address + word)

    def detach(self) -> None:
        """Go on reading what is there now, in a copy of this rank's own, until it leaves."""
        if not self._is_detached:
            pages = self.everything[:: mmap.PAGESIZE]
            pages.copy_(pages.clone())  # a byte written to a page is a page copied
            self._is_detached = True
        self.pass_on()

    def _left_by(self, peer: int) -> int:
        return self._left[peer * _LINE_NBYTES // 8]

    def _has_left(self, peer: int, use: int) -> Callable[[], bool]:
        return lambda: self._left_by(peer) >= use

    def _nap(self, peer: int) -> Callable[[], None]:
        seen = self._left_by(peer)
        return lambda: futex.sleep_while(self._address + peer * _LINE_NBYTES, seen, LOOK_S)


@dataclass(frozen=True)
class HostPiece(Piece):
    """A group's part in an all-gather for which it has a ``HostCopy``: no byte of it has to be moved.

    write: puts this rank's part there. is_aside: the rank takes part for others, and reads nothing of it.
    """

    copy: HostCopy
    write: Callable[[], None]
    is_aside: bool

    @classmethod
    def of(cls, copy: HostCopy, world: int, write: Callable[[], None], is_aside: bool) -> "HostPiece":
        """Such a piece on a mesh axis of ``world`` ranks."""
        return cls(torch.empty(0, dtype=torch.uint8), ((0, 0),) * world, copy, write, is_aside)

    def put(self, launch: Launch) -> None:
        """Write this rank's part, in ``launch``, once every rank has left the last use.

        Raises: as ``enter``.
        """
        self.copy.enter(launch)
        self.write()
        if self.is_aside:
            self.copy.pass_on()


def open_host_copy(arena: Arena, nbytes: int, name: str) -> HostCopy | None:
    """Memory of ``nbytes`` that all ranks of the arena share; None on every rank where any can't have it.

    Every rank calls it at one place of its program; two small exchanges. name: of the group, for messages.
    """
    fd = _create(_size(arena.world, nbytes)) if arena.rank == 0 else -1
    key = f"share {name}, {nbytes} bytes"
    copy = None
    try:
        theirs = arena.exchange([fd], key)[0][0]
        copy = _map(arena, theirs, nbytes)
        # Also the barrier after which nobody needs the descriptor any more.
        agreed = arena.exchange([int(copy is not None)], key)
    finally:
        if fd >= 0:
            os.close(fd)
    return copy if all(row[0] for row in agreed) else None


def _create(nbytes: int) -> int:
    """A descriptor of such a file, or -1."""
    try:
        return memory_file(nbytes)
    except OSError:  # a limit on file sizes, or on open files
        return -1


def _map(arena: Arena, fd: int, nbytes: int) -> HostCopy | None:
    if fd < 0 or not can_tell_private_pages():
        return None
    try:
        with opened_again(arena.pids[0], fd) as ours:
            return HostCopy(arena, ours, nbytes)
    except OSError:  # no room in the address space
        return None


def _head_nbytes(world: int) -> int:
    return -(-world * _LINE_NBYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(world: int, nbytes: int) -> int:
    return _head_nbytes(world) + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
