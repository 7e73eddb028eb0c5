"""Who asks the job's store can stop waiting: what is asked, by how many at once, and how long a silent store
is waited for."""

import gc
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore

from shardwright import clock
from shardwright.errors import RankLost
from shardwright.transport import jobstore
from shardwright.transport.jobstore import StoreSilent, batches, hasty, job_store, of_ranks, pause_s, values
from shardwright.transport.process import LaunchLog, process_state, start_thread
from tests.storm.few import Few


def lived(*scripts, silent=None, ended_s=None):
    """The ranks' scripts are run. silent: from when until when the store doesn't answer; the store ends at
    ``ended_s``. The simulation's clock begins at 1."""
    few = Few(*scripts)
    if silent is not None:
        few.sim.at(silent[0], partial(setattr, few.store, "silent_until", silent[1]))
        few.sim.at(silent[1], few.sim.look_at_all)
    if ended_s is not None:
        few.sim.at(ended_s, partial(few.job.agent.end, "ended"))
    for rank, outcome in few.run().outcomes.items():
        if isinstance(outcome, Exception):
            raise AssertionError(f"rank {rank}") from outcome


def until(when_s):
    clock.sleep(when_s - clock.monotonic())


def timed(call, *arguments):
    """What it returns or raises, and how many seconds it takes."""
    began = clock.monotonic()
    try:
        result = call(*arguments)
    except Exception as error:
        result = error
    return result, clock.monotonic() - began


def beside(call, *arguments):
    """Another thread of this rank calls, and its result is in the list that is returned once it has ended."""
    results = []
    start_thread("beside", lambda: results.append(timed(call, *arguments)))
    clock.sleep(0.01)
    return results


def test_each_call_does_what_the_jobs_own_store_does_below_its_prefix_or_without_one():
    def script():
        store, log = job_store(), LaunchLog([0])
        whole = store.bottom()
        until(5.0)
        assert store is job_store() and store.silent_s == 0.0
        with log.waiting(log.launch("own")):  # of which the store's waits are a part
            store.set("a", "1")
            store.multi_set(["b", "c"], ["2", "3"])
            assert (store.get("a"), store.multi_get(["c", "a"])) == (b"1", [b"3", b"1"])
            assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
            assert (store.check(["n", "a"]), store.check(["a", "x"])) == (True, False)
            assert (store.compare_set("e", "", "5"), store.compare_set("e", "4", "6")) == (b"5", b"5")
            assert (whole.get("job/a"), whole.check(["a"])) == (b"1", False)
            assert (store.delete_key("a"), store.deleteKey("a"), store.check(["a"])) == (True, False, False)
            with pytest.raises(DistStoreError):
                store.wait(["a"], timedelta(0))
            assert [wait.log for wait in process_state.waits.values()] == [log]
        assert process_state.waits == {} and store.silent_s == 0.0
        assert clock.monotonic() < 5.03

    lived(script)


def test_a_key_is_waited_for_while_other_threads_ask_and_the_watch_sees_who_waits():
    def script():
        store = job_store()
        process_state.phase, process_state.step = "forward", 7
        waiting = [beside(store.get, "late"), beside(store.multi_get, ["early", "late"])]
        assert [timed(store.add, "n", 1)[1] < 1e-3, store.silent_s] == [True, 0.0]
        waits = [*process_state.waits.values()]
        assert [wait.launch for wait in waits] == [(0, "the job's store", "forward", 7)] * 2
        assert {wait.log.name for wait in waits} == {"store 1 of 0,1"}
        until(5.06)
        [[(one, one_s)], [(both, both_s)]] = waiting
        assert (one, both) == (b"1", [b"0", b"1"]) and all(3.9 < s < 4.03 for s in (one_s, both_s))
        error, took_s = timed(store.wait, ["early", "never"], timedelta(seconds=2))
        assert "waited 2 s for the key ['never']" in str(error) and 2.0 <= took_s < 2.025
        error, took_s = timed(store.get, "never")
        assert isinstance(error, DistStoreError) and 300 <= took_s < 301 and process_state.waits == {}

    def other():
        job_store().set("early", "0")
        until(5.005)
        job_store().set("late", "1")

    lived(script, other)


def test_a_silent_store_is_waited_for_as_long_as_there_is_time_and_what_is_given_up_is_never_done():
    def script():
        store = job_store()
        assert store.add("n", 1) == 1
        until(2.0)
        held = beside(store.add, "n", 1)
        until(3.0)
        with hasty(0.5), hasty(1.5):
            error, took_s = timed(store.set, "hasty", "")
            assert isinstance(error, StoreSilent) and took_s == 1.5
            assert str(error) == "the job's store has not answered for 2.5 s"
        [wait] = process_state.waits.values()
        assert wait.launch.key == "the job's store" and wait.since_s == pytest.approx(2.05)
        assert store.silent_s == pytest.approx(2.5)
        error, took_s = timed(store.set, "patient", "")  # for 300 s: the time limit of the store
        assert str(error) == "the job's store has not answered 'set' for 300 s"
        assert isinstance(error, StoreSilent) and 300.0 <= took_s < 300.15
        assert isinstance(held[0][0], StoreSilent) and process_state.waits == {}
        behind = beside(store.add, "n", 1)
        until(400.2)
        assert behind[0][0] == 3 and store.check(["hasty"]) is store.check(["patient"]) is False

    lived(script, silent=(1.5, 400.0))


def test_who_waits_for_a_silent_store_gets_the_answer_or_the_diagnosis_at_once():
    def script():
        store = job_store()
        until(2.0)
        answered, lost = beside(store.add, "n", 1), beside(store.get, "key")
        until(4.0)
        process_state.diagnosis = RankLost("rank 1 is lost")
        until(4.06)
        [(error, _)] = lost
        assert str(error) == "rank 1 is lost" and str(answered[0][0]) == "rank 1 is lost"
        process_state.diagnosis = None
        assert timed(store.add, "n", 1) == (2, pytest.approx(5.94, abs=1e-3))

    lived(script, silent=(1.5, 10.0))


def test_that_the_store_has_ended_is_told_to_each_who_asks():
    def script():
        store = job_store()
        until(3.0)
        errors = [timed(store.check, ["x"]) for _ in range(2)]
        assert [(type(error), took_s < 0.1) for error, took_s in errors] == [(DistNetworkError, True)] * 2
        assert store.silent_s == 0.0 and process_state.waits == {}

    lived(script, lambda: until(3.0), ended_s=2.0)


@pytest.mark.parametrize(
    ("asked_s", "took_s"), [(None, 0.0), (2.0, 0.0), (7.99, 1.0)], ids=["at rest", "silent", "late"]
)
def test_a_store_that_is_closed_ends_its_thread_and_who_closes_it_does_not_wait_for_a_silent_one(
    asked_s, took_s
):
    def script():
        store = job_store()
        if asked_s is not None:
            until(asked_s - 0.01)
            beside(store.set, "x", "")
        until(8.0)
        assert timed(store.close) == (None, pytest.approx(took_s, abs=1e-3))
        assert store._line.thread.is_alive() == (asked_s is not None)
        error, took = timed(store.bottom().check, ["x"])
        assert "was destroyed" in str(error) and isinstance(error, DistStoreError) and took == 0.0
        until(100.1)
        assert not store._line.thread.is_alive()

    lived(script, silent=None if asked_s is None else (1.5, 100.0))


def test_threads_that_ask_first_at_once_share_a_connection(monkeypatch):
    connected = jobstore.default_store
    monkeypatch.setattr(jobstore, "default_store", lambda: clock.sleep(1.0) or connected())

    def script():
        other = beside(job_store)
        assert job_store() is other[0][0]

    lived(script)


def test_a_store_below_a_prefix_of_torchs_lives_as_long_as_that(monkeypatch):
    made, hashed = SimpleNamespace(store=None), HashStore()
    monkeypatch.setattr(process_state, "made_here", lambda: made)
    monkeypatch.setattr(jobstore, "default_store", lambda: PrefixStore("job", hashed))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    below = PrefixStore("x", job_store().bottom())
    gc.collect()
    below.set("a", "1")
    assert hashed.check(["x/a"])
    made.store.close()


class Counted:
    """A store of these keys. calls: the keys of each call."""

    def __init__(self, keys):
        self.keys, self.calls = set(keys), []

    def check(self, keys):
        self.calls.append(keys)
        return self.keys.issuperset(keys)

    def multi_get(self, keys):
        self.calls.append(keys)
        return [f"of {key}".encode() for key in keys]


@pytest.mark.parametrize("missing", [(), (77,), (0, 299), (5, 6, 7), range(300)])
def test_of_keys_those_that_are_there_are_read_in_order_and_few_missing_ones_cost_few_calls(missing):
    there = [rank for rank in range(300) if rank not in missing]
    store = Counted(f"at/{rank}" for rank in there)
    found = of_ranks(store, "at", range(300))
    assert [*found.items()] == [(rank, f"of at/{rank}".encode()) for rank in there]
    assert len(store.calls) <= 6 + 3 * 7 * len(missing)  # of 128 keys there are 7 halves of halves
    assert max(map(len, store.calls)) == 128 and not values(store, ["x"])


def test_a_store_is_asked_for_128_keys_at_a_time_and_by_all_ranks_together_10000_times_a_second():
    assert batches([*map(str, range(129))]) == [[*map(str, range(128))], ["128"]] and batches([]) == []
    assert (pause_s(0.25, 2500), pause_s(0.25, 10_000)) == (0.25, 1.0)
