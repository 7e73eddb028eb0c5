"""Each row of the table (cases.py) trains as one process does."""

from collections.abc import Iterator

import pytest

from tests.ranks.cases import CASES, beside_one_process
from tests.ranks.pool import on_ranks


def runs() -> Iterator:
    """Of each row one run for ``make test``, and those that only CI or only ``make test-all`` has."""
    for name, case in CASES.items():
        middle = len(case.runs) // 2
        others = [run for number, run in enumerate(case.runs) if number != middle]
        in_ci = {others[0], others[len(others) // 2], others[-1]} if case.sampled else {*others}
        for number, (world, transport) in enumerate(case.runs):
            marks = [pytest.mark.slow] if case.slow or number != middle else []
            if number != middle and (world, transport) not in in_ci:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(name, world, transport, marks=marks, id=f"{name}, {world}, {transport}")


@pytest.mark.each_case
@pytest.mark.parametrize(("name", "world", "transport"), [*runs()])
@on_ranks()
def test_losses_gradients_and_weights_are_those_of_one_process_that_sees_all_inputs(
    rank, world, name, transport
):
    beside_one_process(rank, world, name, transport)
