"""Host memory for what arrives and is summed: huge pages, used again instead of mapped anew.

Received parts lie in blocks of our own, which come back by themselves when the last tensor over them dies,
whoever holds it. Kernels without huge pages on request ignore the advice.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import weakref

import torch

from shardwright.transport.process import process_is_ours

try:
    LIBC: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True)  # for calls that Python lacks
except TypeError:  # Windows has no such thing
    LIBC = None
HUGE_PAGE_NBYTES = 2 << 20
SMALL_NBYTES = 128 << 10  # below, malloc keeps memory by itself
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_madvise = getattr(LIBC, "madvise", None) if _ADVICE is not None else None
_OWN = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_MOST_BY_HEAP_NBYTES = 32 << 20  # the largest that glibc takes for it
_KEPT_NBYTES = 1 << 30
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def advise(begin: int, nbytes: int, advice: int) -> bool:
    """Tell the kernel what memory from the address ``begin``, of whole pages, is for; whether it took it."""
    # Unlike ``mmap.madvise`` a call by ctypes leaves the interpreter's lock to others meanwhile.
    return _madvise is not None and not _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), advice)


def advise_huge(storage: torch.UntypedStorage) -> None:
    """Ask that pages of a storage which were never touched be huge ones. No-op off the host.

    Only whole ones inside it: nothing beside it is changed, and it takes no more memory than its bytes.
    """
    if _ADVICE is None or storage.nbytes() < HUGE_PAGE_NBYTES or storage.device.type != "cpu":
        return
    begin = -(-storage.data_ptr() // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    end = (storage.data_ptr() + storage.nbytes()) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    # Whether it was taken is left unread: it is advice, and the memory is as good without it.
    advise(begin, max(0, end - begin), _ADVICE)


@functools.cache
def keep_freed_pages() -> bool:
    """Have glibc's malloc keep up to 1 GiB of what is freed, for this process; whether it does.

    Groups' buffers, and the gradients that autograd makes, are freed and taken again all the time, on the
    host from malloc. No-op after the first call, where the environment already chooses
    (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``), with another malloc, and where the process is to be left
    alone (``set_process``).
    """
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or not process_is_ours()
    if tuned or any(name in os.environ for name in _CHOICES):
        return False
    mallopt = getattr(LIBC, "mallopt", None)
    if mallopt is None:
        return False
    # malloc gives memory back to the kernel as soon as twice its largest chunk is free: up to 30,000 faults a
    # step more than without sharding, 2-3% of its time (docs/performance.md). Both are set, since setting one
    # of them ends glibc's own adjustment of both.
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_BY_HEAP_NBYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_NBYTES))


def give_back_freed_pages() -> None:
    """Have glibc's malloc give back to the kernel what is free between blocks in use, too; no-op elsewhere.

    Reading and quantising a model of 1.2 billion parameters leaves 0.7 GB of that in each of two processes.
    """
    trim = getattr(LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


class Pool:
    """Blocks of host memory that are used again. Never gives memory back: it holds at most what was in use at
    once, except where sizes don't fit each other.

    held_nbytes: of all blocks. free_nbytes: of those that no tensor uses.
    """

    def __init__(self) -> None:
        self.held_nbytes = 0
        # No lock: a tensor may die, and its block come back, at any moment of any thread.
        self._free: list[mmap.mmap] = []

    @property
    def free_nbytes(self) -> int:
        """Bytes of blocks that no tensor uses."""
        return sum(map(len, tuple(self._free)))

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, uint8 [nbytes], aligned to a page; small amounts come from malloc."""
        if nbytes < SMALL_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        # malloc gives large memory back to the kernel and maps it fresh the next time, page by page. Filling
        # 12.6 MB so takes 5 ms in 4 KiB pages (3000 faults), 1.7 ms in 2 MiB pages, and 1.0 ms where the
        # pages were used before (one core, measured).
        block = self._reuse(nbytes) or self._map(nbytes)
        bytes_of_block = (ctypes.c_ubyte * nbytes).from_buffer(block)
        taken = torch.frombuffer(bytes_of_block, dtype=torch.uint8)
        # The tensor's storage is all that holds the array: when it dies, the block is free.
        weakref.finalize(bytes_of_block, self._free.append, block).atexit = False
        return taken

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        """The smallest free block that fits and isn't mostly wasted."""
        fitting = [block for block in tuple(self._free) if nbytes <= len(block) <= 2 * nbytes]
        for block in sorted(fitting, key=len):
            with contextlib.suppress(ValueError):  # another thread was faster
                self._free.remove(block)
                return block
        return None

    def _map(self, nbytes: int) -> mmap.mmap:
        block = _mapped(nbytes)
        self.held_nbytes += len(block)
        return block


# Memory is the real process', of however many ranks it plays the part: not in ``process_state``.
POOL = Pool()


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``: ``uordblks`` are bytes in use in its heaps, ``hblkhd`` those in maps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


_mallinfo2 = getattr(LIBC, "mallinfo2", None)  # glibc from 2.33 on
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def allocated_nbytes(device: torch.device) -> int | None:
    """Bytes that this process has allocated on ``device`` and not freed; None where nothing counts them.

    Of an accelerator torch's allocator counts them; of the host glibc's malloc, from which torch takes
    memory, and our own pool for collectives. Where malloc has many free blocks it takes milliseconds.
    """
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    if _mallinfo2 is None:
        return None
    found = _mallinfo2()
    return found.uordblks + found.hblkhd + POOL.held_nbytes - POOL.free_nbytes


def take_bytes(nbytes: int) -> torch.Tensor:
    """Uninitialised host memory, uint8 [nbytes], in huge pages where they fit, from the process' pool."""
    return POOL.take(nbytes)


def pages_of_its_own(nbytes: int) -> torch.Tensor:
    """Uninitialised host memory, uint8 [nbytes], that goes back to the kernel with the last tensor over it:
    for large tensors that come and go one after another, between which malloc's memory would fall to pieces.
    """
    if nbytes < SMALL_NBYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    # Not of the pool, which never gives memory back.
    return torch.frombuffer(_mapped(nbytes), dtype=torch.uint8, count=nbytes)


def _mapped(nbytes: int) -> mmap.mmap:
    page = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else mmap.PAGESIZE
    block = mmap.mmap(-1, -(-nbytes // page) * page, **_OWN)
    if _ADVICE is not None and len(block) >= HUGE_PAGE_NBYTES:
        block.madvise(_ADVICE)
    return block
