"""Starts the server of ranks while tests are still being collected (see pool.py); says what is slow."""

from itertools import groupby

import pytest

from tests.ranks.pool import start_server

start_server()


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" looks
def pytest_collection_modifyitems(items):
    """``make test`` runs one case of each test of ranks: the middle one of its matrix (of two to four ranks
    three, whose shards are uneven). ``make test-all`` runs them all. Where each case is a promise of its own
    the test is marked ``each_case``, and ``make test`` runs all of them too."""
    ours = [item for item in items if item.path.is_relative_to(__file__.rpartition("/")[0])]
    for _, group in groupby(ours, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        for case in cases:
            if case is not cases[len(cases) // 2] and not case.get_closest_marker("each_case"):
                case.add_marker("slow")
