"""What a job of many ranks asks of its store and its network, counted; and the verdicts of random faults."""

from math import ceil, log2

import pytest

from tests.storm.scale import Scale
from tests.storm.verdicts import KINDS, Case, judge


@pytest.fixture(scope="module", params=[16, 96])
def scale(request):
    made = Scale(request.param, watched_s=4.0)
    made.run()
    return made


def test_a_start_asks_the_store_a_number_of_times_that_grows_slower_than_the_ranks(scale):
    assert scale.costs["start"].calls / scale.world < 40 * log2(scale.world)
    assert scale.costs["start"].seconds < 1.5
    assert scale.costs["start"].messages <= 2 * scale.world + 2  # each rank opens a connection to a neighbour


def test_while_all_is_well_a_look_is_one_call_of_the_store(scale):
    watch, looks = scale.costs["watch"], scale.world * 4 / 0.25
    assert watch.calls <= looks + 2 * 4 / 0.25  # the first rank also looks for lines of its log
    assert watch.nbytes < 60 * watch.calls


def test_ranks_agree_in_log2_of_the_ranks_messages(scale):
    assert scale.costs["agreement"].messages == scale.world * ceil(log2(scale.world))


@pytest.mark.parametrize("world", [64, 512])
def test_random_faults_are_named_rightly_and_in_time(world):
    found = list(judge(world, range(14)))
    assert [each for each in found if not each.is_right] == []
    assert len({each.kind for each in found}) > len(KINDS) // 2


def test_a_call_takes_few_calls_of_the_store_however_many_ranks_there_are():
    calls = {}
    for world in (64, 1024):
        case = Case(world, 1)  # a rank is in another call
        assert case.run().is_right
        calls[world] = case.store.calls
    assert calls[1024] < 2 * calls[64] + 1024 / 8
