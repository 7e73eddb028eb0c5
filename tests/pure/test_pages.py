"""Fresh buffers ask for huge pages; memory is used again."""

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.params.binding import Buffer
from shardwright.transport.cpu.pages import HUGE_PAGE_NBYTES, Pool, take_bytes

CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds ``address``: ``hg`` where huge pages were asked for."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not CHOICE.exists(), reason="no huge pages on this kernel")
@pytest.mark.parametrize("of_a_buffer", [False, True], ids=["taken", "buffer"])
def test_fresh_memory_asks_for_huge_pages_before_it_is_filled(of_a_buffer):
    nbytes = 48 * HUGE_PAGE_NBYTES  # more than malloc keeps, so that it maps it fresh
    buffer = Buffer(nbytes, torch.device("cpu"))
    if of_a_buffer:
        buffer.alloc()
        memory = buffer.tensor(torch.uint8, 0, (nbytes,), (1,))
    else:
        memory = take_bytes(nbytes)
    # How many the kernel then gives depends on what else the machine holds.
    assert "hg" in flags(memory.data_ptr() + nbytes // 2)


def test_small_and_empty_memory_is_left_alone():
    assert take_bytes(0).numel() == 0
    assert take_bytes(HUGE_PAGE_NBYTES + 1).fill_(3).sum() == 3 * (HUGE_PAGE_NBYTES + 1)
    buffer = Buffer(0, torch.device("cpu"))
    buffer.alloc()
    assert buffer.allocated_nbytes == 0


def test_memory_is_used_again_when_the_last_tensor_over_it_dies():
    pool = Pool()
    taken = pool.take(3 << 20)
    address, view = taken.data_ptr(), taken[4:8].view(torch.float32)
    del taken
    assert pool.take(3 << 20).data_ptr() != address  # the view still reads it
    assert pool.held_nbytes == 8 << 20  # two blocks of whole huge pages
    assert pool.free_nbytes == 4 << 20
    del view
    assert pool.free_nbytes == pool.held_nbytes
    assert pool.take(2 << 20).data_ptr() % mmap.PAGESIZE == 0  # half of a free block is enough to take it
    assert pool.held_nbytes == 8 << 20
    assert pool.take(1 << 20).numel() == 1 << 20  # less than half of one would waste it
    assert pool.held_nbytes == 9 << 20


ROUNDS = """
import resource, torch
from shardwright.params.binding import Buffer
buffer = Buffer(12 << 20, torch.device("cpu"))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        gradients = [torch.full((3 << 20,), 1.0) for _ in range(4)]
        gradients.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def number_from(script: str, **environment: str) -> int:
    """What a script prints in a new process, with malloc as it is by default."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    env = clean | environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    return int(subprocess.check_output(command, env=env, text=True, timeout=60))


def faults_of_rounds(**environment: str) -> int:
    """Minor faults of eight rounds of 48 MiB taken and freed, after as many to warm up, in a new process."""
    return number_from(ROUNDS, **environment)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_a_step_frees_and_takes_again_stays_with_the_process():
    assert faults_of_rounds() < 200  # 48 MiB a round are 12288 pages


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_the_environment_chooses_of_malloc_is_left_alone():
    assert faults_of_rounds(MALLOC_TRIM_THRESHOLD_="131072") > 10_000


HOLES = """
import torch
from shardwright.transport.host_memory import resident_nbytes
from shardwright.params.binding import Buffer
from shardwright.transport.cpu.pages import give_back_freed_pages
Buffer(1 << 20, torch.device("cpu")).alloc()
blocks = [torch.ones(1 << 18) for _ in range(200)]
kept = blocks[9::10]
del blocks
before = resident_nbytes()
give_back_freed_pages()
print(before - resident_nbytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_loading_has_freed_between_what_stays_goes_back_to_the_kernel():
    assert number_from(HOLES) > 150 << 20  # of 180 MiB that are free
