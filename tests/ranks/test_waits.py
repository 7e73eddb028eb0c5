"""``bench/waits.py``: real ranks with links and quotas, and what the ledger says of what made them slow."""

import pytest

from bench import links
from bench.waits import CAUSES, Cause, started
from shardwright.observe.ledger.causes import CORES, DATA, LINK, QUOTA

pytestmark = pytest.mark.skipif(
    bool(links._lacking()) or not links._can_make_namespaces(), reason="needs root and iproute2"
)


@pytest.mark.slow
def test_each_cause_in_real_ranks_alone_and_two_at_once_are_the_first_losses():
    wrong = []
    with started() as bench:
        causes = [name for name in CAUSES if name != QUOTA or bench.quota is not None]
        trials = [(Cause(name, number % 3, 120.0),) for number, name in enumerate(causes)]
        trials.append((Cause(LINK, 1, 150.0), Cause(DATA, 2, 75.0)))
        for trial in map(bench.run, trials):
            assert trial.rest < 0.02
            if not trial.is_right(without=(CORES,)):
                wrong.append(str(trial))
    assert len(wrong) <= 1, wrong  # on a busy machine the figure is 95%
