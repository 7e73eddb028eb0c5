"""Who was late for a wait, and what it did meanwhile; of records made by hand."""

import pytest

from shardwright.observe.ledger.late import called, late_ranks
from shardwright.observe.steps.rings import Record, Ring

PLACE = {"transport": "cpu1 of all", "number": 1}


def record(kind, start, end, action="", groups=(), **more):
    return Record(kind, action, groups, 2, "forward", 0, more.pop("issue", start), start, end, **more)


def late(did, came=1.5, waits=(1.0, 2.0)):
    """The wait of rank 0 for rank 1, which ``did`` that."""
    wait = record("wait", *waits, "all-gather", ("g",), **PLACE)
    records = [record("collective", 1.0, 2.0, "all-gather", ("g",), **PLACE), wait]
    theirs = [*did, record("collective", came, 2.0, "all-gather", ("g",), **PLACE)]
    rings = [Ring(rank, 2, f"node{rank}", {}, [], own, []) for rank, own in enumerate((records, theirs))]
    [found] = [each for each in late_ranks(rings) if each.rank == 0]
    return found


FORWARD = record("compute", 0.9, 1.3, groups=("blocks.0",))
LOAD = record("span", 1.3, 1.5, "data")


@pytest.mark.parametrize(
    ("did", "most"),
    [
        ([FORWARD, LOAD], "its forward of blocks.0"),
        ([FORWARD], "its forward of blocks.0"),
        ([FORWARD._replace(end=1.1), LOAD._replace(start=1.1)], "data"),
        ([FORWARD._replace(end=1.2), LOAD._replace(start=1.2)], "data"),
        ([FORWARD._replace(end=1.25), LOAD._replace(start=1.25)], "data"),  # as long: the later one
        ([FORWARD, LOAD, record("span", 1.5, 9.0, "save")], "its forward of blocks.0"),
        ([record("span", 0.1, 0.9, "save"), FORWARD, LOAD], "its forward of blocks.0"),
    ],
)
def test_a_wait_is_for_the_rank_that_came_last_and_what_it_did_most_of_the_time(did, most):
    found = late(did)
    assert (found.late, found.came_s, found.fault_s) == (1, 1.5, 0.5)
    waits = "rank 0 waits 1000.00 ms in all-gather g, 500.00 ms of them for rank 1"
    assert found.text() == f"{waits}, which was in {most}"


@pytest.mark.parametrize("came", [0.5, 1.0])
def test_where_all_had_come_the_link_is_at_work(came):
    found = late([], came)
    assert found.fault_s == 0
    assert found.text() == "rank 0 waits 1000.00 ms in all-gather g: all had come, the link is at work"


@pytest.mark.parametrize(("length", "kept"), [(48, 48), (49, 44)])
def test_names_that_do_not_fit_into_a_line_are_cut(length, kept):
    name = "n" * length
    assert called([name]) == (name if kept == length else f"{name[:kept]} ...")
