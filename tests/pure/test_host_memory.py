"""Memory of a process as its malloc and the kernel count it, and the budget of a container."""

import pytest
import torch

from shardwright.errors import ConfigError
from shardwright.transport.cpu import pages
from shardwright.transport.cpu.pages import allocated_nbytes, take_bytes
from shardwright.transport.host_memory import budget_of, resident_nbytes

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize("make", [lambda n: torch.empty(n, dtype=torch.uint8), take_bytes])
@pytest.mark.parametrize("nbytes", [3 * MIB, 50 * MIB])
def test_what_is_allocated_on_the_host_is_counted_and_what_is_freed_is_not(make, nbytes, monkeypatch):
    pool = pages.Pool()  # that of the process may have a free block of up to twice the bytes
    monkeypatch.setattr(pages, "POOL", pool)
    make(nbytes)
    before = allocated_nbytes(CPU)
    held = make(nbytes)
    assert allocated_nbytes(CPU) - before == pytest.approx(nbytes, rel=0.1, abs=2 * MIB)
    del held
    assert allocated_nbytes(CPU) - before < MIB


@pytest.mark.parametrize(
    ("text", "nbytes"), [("6GiB", 6 * 2**30), ("500MB", 5 * 10**8), ("4096", 4096), ("1.5 Gi", 3 * 2**29)]
)
def test_a_budget_is_written_as_people_write_bytes(text, nbytes):
    budget = budget_of(text)
    assert budget.nbytes == nbytes and not budget.container


@pytest.mark.parametrize("text", ["much", "-1GiB", "6 XB", "0"])
def test_another_budget_is_refused_with_what_it_may_be(text):
    with pytest.raises(ConfigError, match=rf"SHARDWRIGHT_MEMORY_BUDGET: got '{text}', expected bytes as"):
        budget_of(text)


def test_a_containers_bound_counts_all_that_is_in_it_but_files_that_the_kernel_can_drop(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 300000\nactive_file 0\n")
    budget = budget_of("container", tmp_path)
    assert (budget.nbytes, budget.held_nbytes()) == (1000000, 600000)
    assert budget.has_room(400000) and not budget.has_room(400001)
    said = str(budget.error(400001, 3, "unsharding layers.3"))
    assert said.startswith("rank 3, unsharding layers.3: its container holds 585.9 KiB and needs")


@pytest.mark.parametrize("says", ["max\n", None])
def test_a_container_without_a_bound_is_refused(tmp_path, says):
    if says is not None:
        (tmp_path / "memory.max").write_text(says)
    with pytest.raises(ConfigError, match="expected bytes; set the variable to a number"):
        budget_of("container", tmp_path)


def test_no_budget_is_the_default_and_what_is_resident_is_known():
    assert budget_of("") is None
    assert resident_nbytes() > 10 * MIB
