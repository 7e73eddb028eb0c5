"""Memory that the ranks of one host share, and the flags that say what may be read in it.

Each rank owns one segment, an anonymous memory file that the others map: nothing appears in ``/dev/shm``
(which containers often limit to 64 MiB), and nothing is left behind however a rank ends.

    segment of rank r   [ records: one per operation | read flags | bytes of operations ... ]

    record   number, offset, bytes, and the operation's key: what rank r has issued; written by r only
    read     per owner and operation: that r has read it; written by r only
"""

import ctypes
import errno
import functools
import mmap
import os
import platform
import select
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright import clock
from shardwright.errors import CommError
from shardwright.schedule.layout import align
from shardwright.transport.cpu.pages import LIBC
from shardwright.transport.liveness import boot_id
from shardwright.transport.process import Launch, LaunchLog, process_state

# Linux' futexes, which Python lacks, put a process to sleep until a word in shared memory changes. Only for
# x86-64, as shared memory is.
_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_EXPECTED = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)
_NAP_S = 1e-4  # where the kernel refuses

_syscall: Any = getattr(LIBC, "syscall", None)
if _syscall is not None:
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Return when the 32-bit word at ``address`` isn't ``value``, was woken, or after ``seconds`` (below 1).

    It may return early for no reason. Other threads of this process run meanwhile.
    """
    limit = (ctypes.c_long * 2)(0, int(seconds * 1e9))
    failed = _syscall(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(limit), None, 0)
    if failed and ctypes.get_errno() not in _EXPECTED:
        clock.sleep(_NAP_S)


def wake(address: int) -> None:
    """Wake all, of any process, that sleep on the word at ``address``; after it was changed."""
    _syscall(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


# No step fills it, so that a segment never grows; pages that were never written take no memory.
RESERVED_NBYTES = 64 << 30
NUM_RECORDS = 256  # operations that may be issued and not yet read by all; a schedule keeps below ten
_RECORD_NBYTES = 256
_KEY_NBYTES = _RECORD_NBYTES - 4 * 8
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_LOOK_S = 0.02  # how often who waits looks whether the peer lives, and what the watch has found
_SPINS = 40  # times to yield before sleeping: a peer that is nearly there is seen within 2 us (measured)


@dataclass(frozen=True)
class Host:
    """What ranks must have in common to share memory, and where this rank's segment is found."""

    machine: str
    boot: str
    pids: int
    network: int
    pid: int
    fd: int

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Equal for ranks of one host. Ranks in network namespaces of their own count as apart: they stand
        for hosts (containers of different jobs, or a test of a slow link)."""
        return self.machine, self.boot, self.pids, self.network


class MemorySegment:
    """One rank's segment as this process maps it."""

    def __init__(self, fd: int, world: int) -> None:
        self._map = mmap.mmap(fd, RESERVED_NBYTES, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.view = memoryview(self._map)
        self._words = self.view[: header_nbytes(world)].cast("q")
        self._reads = NUM_RECORDS * _RECORD_NBYTES // 8
        self._address = self.bytes.data_ptr()

    def write_record(self, number: int, offset: int, nbytes: int, key: str) -> None:
        """Announce an operation whose bytes are written, and wake who sleeps for it."""
        place = number % NUM_RECORDS * _RECORD_NBYTES
        text = key.encode()[:_KEY_NBYTES].ljust(_KEY_NBYTES, b"\0")
        self._map[place + 32 : place + _RECORD_NBYTES] = text
        self._words[place // 8 + 1] = offset
        self._words[place // 8 + 2] = nbytes
        # Every word has one writer, so no lock is needed: x86 keeps the order of stores, and who reads the
        # number finds all that was stored before it. Other processors need a fence for that, which Python
        # doesn't have: there ranks talk through sockets (``shm.py``).
        self._words[place // 8] = number
        wake(self._address + place)

    def sleep(self, number: int, seconds: float) -> None:
        """Return when the operation is announced, or after ``seconds``; maybe earlier."""
        place = number % NUM_RECORDS * _RECORD_NBYTES
        seen = self._words[place // 8]
        # The word as it was seen: where it has changed since, the kernel doesn't sleep, so that no wake is
        # missed.
        if seen != number:
            sleep_while(self._address + place, seen, seconds)

    def has(self, number: int) -> bool:
        """Whether the operation has been announced."""
        return self._words[number % NUM_RECORDS * _RECORD_NBYTES // 8] == number

    def record(self, number: int) -> tuple[str, slice]:
        """The key of an announced operation, and where its bytes are."""
        place = number % NUM_RECORDS * _RECORD_NBYTES
        key = self._map[place + 32 : place + _RECORD_NBYTES].rstrip(b"\0").decode(errors="replace")
        offset = self._words[place // 8 + 1]
        return key, slice(offset, offset + self._words[place // 8 + 2])

    def mark_read(self, owner: int, number: int) -> None:
        """Say (in one's own segment) that ``owner``'s operation has been read."""
        self._words[self._reads + owner * NUM_RECORDS + number % NUM_RECORDS] = number

    def has_read(self, owner: int, number: int) -> bool:
        """Whether the segment's rank has read ``owner``'s operation."""
        return self._words[self._reads + owner * NUM_RECORDS + number % NUM_RECORDS] == number


def header_nbytes(world: int) -> int:
    """Bytes of a segment's records and read flags."""
    return align(NUM_RECORDS * (_RECORD_NBYTES + 8 * world))


def this_host(fd: int) -> Host:
    """This process' ``Host``, for the ranks to compare. Raises: OSError, where there is no /proc."""
    pids, network = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    return Host(platform.machine(), boot_id(), pids, network, os.getpid(), fd)


class Arena:
    """All ranks' segments, as one of them sees them. Operations are numbered from 1, the same on all ranks.

    log: where operations are written down when published. own: this rank's segment.
    trouble: why a wait is in vain for other reasons than peers; "" while it isn't.
    open: operations that are to read the peers' bytes; their ``complete`` does at the latest when their
        record is needed, and gives the bytes back.
    """

    def __init__(
        self, rank: int, segments: list[MemorySegment], pids: list[int], timeout_s: float, log: LaunchLog
    ) -> None:
        self.rank = rank
        self._pids = pids
        self.log = log
        log.in_memory = True
        self.segments, self.own = segments, segments[rank]
        self._others = [(peer, each) for peer, each in enumerate(segments) if peer != rank]
        self._first = header_nbytes(len(segments))
        self._timeout_s = timeout_s
        self.trouble: Callable[[], str] = str
        self._announced = 0
        self._held: dict[int, tuple[int, int]] = {}  # operation -> (offset, end) in the own segment
        self.open: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # A descriptor of a process becomes readable when that ends, also where its id is used again.
        self._ends = [os.pidfd_open(pid) for pid in pids]
        weakref.finalize(self, _close_all, self._ends).atexit = False

    def reserve(self, nbytes: int) -> int:
        """Where in the own segment the next launch of the log may put so many bytes; then ``announce``.

        Raises: CommError where a peer has not read the operation of 256 ago within the timeout.
        """
        number = self.log.launched + 1
        oldest = number - NUM_RECORDS
        # An unshard that nobody waited for, say: every rank has come to this operation, and none goes beyond
        # it before all have read that one. Or one that was interrupted.
        if (forgotten := self.open.pop(oldest, None)) is not None:
            forgotten.complete()
        for peer in range(len(self.segments)) if oldest > 0 else ():
            self.own.mark_read(peer, oldest)
        if oldest in self._held:
            launch = Launch(oldest, f"operation {oldest}", process_state.phase, process_state.step)
            for peer, segment in self._others:
                read = functools.partial(segment.has_read, self.rank, oldest)
                self._until(peer, read, lambda: clock.sleep(1e-3), launch)
        offset = self._first_fit(nbytes)
        self._held[number] = (offset, offset + align(nbytes))
        return offset

    def break_off(self) -> None:
        """An exception (Ctrl-C) came before an operation was announced: where it was launched announce that,
        since no peer that waits for it would hear otherwise. Where all were broken off there, they go on."""
        if self.log.launched > self._announced:
            launch = self.log.ring[-1]
            launch = self.log.ring[-1] = launch._replace(key=f"interrupted by an exception: {launch.key}")
            # No bytes were written. Nobody reads any: peers find another key than theirs, and raise.
            self._held[launch.number] = (0, 0)
            self.announce(launch, 0)

    def announce(self, launch: Launch, nbytes: int) -> None:
        """The bytes of an operation are in place: peers may read them."""
        # Until every peer has read them the bytes stay, so that no rank waits for another one to write.
        offset = self._held[launch.number][0]
        self.own.write_record(launch.number, offset, nbytes, launch.key)
        self._announced = launch.number

    def find(self, peer: int, launch: Launch) -> slice:
        """Where ``peer``'s bytes of an operation are, once they are there. ``own.mark_read`` gives them back.

        Raises: CommError where the peer is in another operation, has ended, or doesn't come in time; the
            watch's diagnosis, where there is one.
        """
        number, key, segment = launch.number, launch.key, self.segments[peer]
        if not segment.has(number):
            self._until(peer, lambda: segment.has(number), lambda: segment.sleep(number, _LOOK_S), launch)
        theirs, span = segment.record(number)
        if theirs != key[:_KEY_NBYTES]:
            with self.log.waiting(launch):
                raise CommError(
                    f"ranks are in different collectives (number {number} of this mesh): rank "
                    f"{self.log.ranks[self.rank]} is in {key!r}, rank {self.log.ranks[peer]} in {theirs!r}. "
                    "Every rank must run the same modules in the same order"
                )
        return span

    def _first_fit(self, nbytes: int) -> int:
        """The first place that is free, once all that has been read by everybody is."""
        for number in tuple(self._held):
            if all(segment.has_read(self.rank, number) for _, segment in self._others):
                del self._held[number]
        # Low places first: they were written before, so that a steady state touches no fresh page.
        offset = self._first
        for start, end in sorted(self._held.values()):
            if start - offset >= align(nbytes):
                break
            offset = max(offset, end)
        if offset + nbytes > RESERVED_NBYTES:
            raise CommError(
                f"one collective needs {nbytes} bytes, more than the {RESERVED_NBYTES} that are shared"
            )
        return offset

    def _until(self, peer: int, ready: Callable[[], bool], sleep: Callable[[], None], launch: Launch) -> None:
        """Return when ``peer`` is ``ready`` for what ``launch`` waits for. sleep: takes below a second.

        Raises: CommError where the peer has ended, or isn't ready within the timeout; the watch's diagnosis.
        """
        start = checked = clock.monotonic()
        with self.log.waiting(launch):
            turns = 0
            while not ready():
                turns += 1
                if turns <= _SPINS:
                    os.sched_yield()
                    continue
                sleep()
                now = clock.monotonic()
                if now - checked > _LOOK_S:
                    checked = now
                    process_state.raise_diagnosis()
                    self._check(peer, launch.key, now - start)

    def _check(self, peer: int, what: str, waited_s: float) -> None:
        if trouble := self.trouble():
            raise CommError(f"{trouble} (rank {self.log.ranks[self.rank]} was in {what!r})")
        if select.select([self._ends[peer]], [], [], 0)[0]:
            raise CommError(
                f"rank {self.log.ranks[peer]} (pid {self._pids[peer]}) has ended while rank "
                f"{self.log.ranks[self.rank]} waited for it in {what!r}; its own error says why"
            )
        if waited_s > self._timeout_s:
            raise CommError(
                f"rank {self.log.ranks[self.rank]} waited {self._timeout_s:.0f} s for rank "
                f"{self.log.ranks[peer]} (pid {self._pids[peer]}) in {what!r}; it runs but did not come there"
            )


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
