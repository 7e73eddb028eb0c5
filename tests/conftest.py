"""What holds for all tests: other work on the machine is no fault of the example that it slows down; and
which cases CI runs."""

import os
from itertools import groupby
from pathlib import Path
from zlib import crc32

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_collection_modifyitems(config, items):
    """Of the slow cases of a test that is marked ``sampled`` CI runs the first, the middle and the last: both
    ends of each option. The others become ``exhaustive``: ``make test-all`` runs them, and CI doesn't.

    Those that slow.txt lists are slow, too. With ``SHARDWRIGHT_TEST_PART=2/3`` of all slow cases the second
    third is run, by their names.
    """
    measured = {*Path(__file__).with_name("slow.txt").read_text().split("\n")}
    for item in items:
        if item.nodeid.removeprefix("tests/").partition("[")[0] in measured:
            item.add_marker("slow")
    sampled = [item for item in items if item.get_closest_marker("sampled")]
    slow = [item for item in sampled if item.get_closest_marker("slow")]
    for _, group in groupby(slow, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        kept = (cases[0], cases[len(cases) // 2], cases[-1])
        for case in cases:
            if not any(case is each for each in kept):
                case.add_marker("exhaustive")
    # Taken out of what tests' own processes get: a pytest that a document runs would leave out its only test.
    part = os.environ.pop("SHARDWRIGHT_TEST_PART", "")
    if part:
        which, of = map(int, part.split("/"))
        slow = [item for item in items if item.get_closest_marker("slow")]
        left = {item for item in slow if (crc32(item.nodeid.encode()) - which) % of}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
