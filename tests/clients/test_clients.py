"""Clients that import torch.distributed.fsdp by themselves train with our names as with torch's own."""

import importlib.util

import pytest

from tests.clients import cases
from tests.clients.table import ROOT, ROWS, TABLE
from tests.ranks.pool import run_ranks

PACKAGES = {"lightning-fabric": "lightning_fabric"}


@pytest.mark.parametrize("case", cases.CASES)
def test_a_client_trains_with_our_names_as_with_torchs_own(case, tmp_path):
    if importlib.util.find_spec(PACKAGES.get(case, case)) is None:
        pytest.skip(f"needs {case}, in an environment of its own: make clients")
    found = {}
    for ours in (False, True):
        folder = tmp_path / ("ours" if ours else "torchs")
        folder.mkdir()
        found[ours] = run_ranks(2, cases.run, case, ours, folder, limit_s=150.0, timeout_s=60.0)
    for (theirs, count, none), (mine, same, all_of_them) in zip(found[False], found[True], strict=True):
        assert len(theirs) > 3
        assert mine == pytest.approx(theirs, rel=1e-4)
        assert none == 0
        assert same == all_of_them == count > 1


def test_the_table_names_the_versions_that_are_installed_for_it():
    makefile = (ROOT / "Makefile").read_text()
    rows = [
        line for line in TABLE.read_text().splitlines() if line.startswith("| ") and "client |" not in line
    ]
    assert len(rows) == len(ROWS)
    for row, (client, package, what, _) in zip(rows, ROWS, strict=True):
        shown, version, said, result = (cell.strip() for cell in row.strip("|").split(" | "))
        assert (shown, said, result) == (client, what, "passes")
        assert package == "torch" or f"{version.replace(' ', '==')}" in makefile
