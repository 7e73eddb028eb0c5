"""What holds for all tests: other work on the machine is no fault of the example that it slows down; and
which cases of a large matrix CI runs."""

from itertools import groupby

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items):
    """Of the slow cases of a test that is marked ``sampled`` CI runs the first, the middle and the last: both
    ends of each option. The others become ``exhaustive``: ``make test-all`` runs them, and CI doesn't."""
    sampled = [item for item in items if item.get_closest_marker("sampled")]
    slow = [item for item in sampled if item.get_closest_marker("slow")]
    for _, group in groupby(slow, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        kept = (cases[0], cases[len(cases) // 2], cases[-1])
        for case in cases:
            if not any(case is each for each in kept):
                case.add_marker("exhaustive")
