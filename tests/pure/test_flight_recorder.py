"""What is read from dumps of torch's flight recorder, format 2.10. Whole hangs: tests/device, tests/ranks."""

import time
from types import SimpleNamespace

import pytest

from shardwright.observe.watch import flight_recorder
from shardwright.observe.watch.diagnosis import diagnose
from shardwright.observe.watch.findings import Answer, Fault, Findings, Launched, Waits
from shardwright.observe.watch.flight_recorder import FlightRecorder, parsed, remembers_all
from shardwright.policy import WatchPolicy
from shardwright.transport.process import process_state


def entry(number, name="nccl:all_reduce", group="0", record=None, **more):
    """One collective, as torch dumps it."""
    record = number - 1 if record is None else record
    of_group = {"record_id": record, "pg_id": 0, "process_group": (group, "default_pg")}
    numbers = {"collective_seq_id": number, "p2p_seq_id": 0, "profiling_name": name, "is_p2p": False}
    times = {"time_created_ns": number, "time_discovered_started_ns": None}
    return {**of_group, **numbers, **times, "state": "completed", "retired": True, **more}


@pytest.fixture(autouse=True)
def _none_destroyed(monkeypatch):
    """Tests before these have ended process groups."""
    monkeypatch.setattr(process_state, "destroyed_ns", 0.0)


RUNS = {"state": "scheduled", "retired": False}


def dump(*entries):
    count, ended = len(entries), sum(each["retired"] for each in entries)
    status = {"0": {"last_enqueued_collective": count, "last_completed_collective": ended or -1}}
    return [{"version": "2.10", "pg_status": status, "entries": list(entries)}]


def test_of_each_group_the_count_the_keys_and_the_oldest_that_has_not_ended_are_read():
    group = parsed(dump(entry(1), entry(2, **RUNS), entry(3, "nccl:barrier", **RUNS)))["0"]
    assert (group.count, group.ended, group.begun, group.pending) == (3, 1, None, (2, 2))
    names = ("all_reduce", "all_reduce", "barrier")
    assert group.last_keys == tuple(f"nccl:{name} in group default_pg" for name in names)


def test_what_has_begun_is_known_only_where_torch_times_it():
    timed = parsed(dump(entry(1, time_discovered_started_ns=5), entry(2, **RUNS)))["0"]
    assert timed.begun == 1
    started = {**RUNS, "state": "started", "time_discovered_started_ns": 9}
    assert parsed(dump(entry(1, time_discovered_started_ns=5), entry(2, **started)))["0"].begun == 2


def test_of_a_name_that_was_used_again_the_newest_group_counts():
    both = dump(entry(1), entry(2), entry(1, "gloo:barrier", record=2, pg_id=1))
    assert parsed(both)["0"].last_keys == ("gloo:barrier in group default_pg",)


def test_nothing_counts_of_groups_that_were_destroyed(read, monkeypatch):
    """Else who has launched something in the new group of that name, and who has not yet, seem to differ."""
    monkeypatch.setattr(flight_recorder, "process_groups", lambda: [SimpleNamespace(group_name="0")])
    monkeypatch.setattr(process_state, "destroyed_ns", 3.0)
    [launched] = read(dump(entry(1), entry(2, "gloo:barrier"))).launched().values()
    assert (launched.count, launched.keys) == (0, ())
    [launched] = (
        read(dump(entry(2), entry(1, "gloo:broadcast", record=2, time_created_ns=4))).launched().values()
    )
    assert (launched.count, launched.keys) == (1, ("gloo:broadcast in group default_pg",))


def test_whether_anything_is_forgotten_is_known(monkeypatch):
    assert remembers_all(dump(entry(1)))
    assert remembers_all([{"pg_status": {}}])
    assert not remembers_all(dump(entry(8)))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert not remembers_all([{"pg_status": {}}])


@pytest.fixture
def read(monkeypatch):
    """A recorder that has looked long ago, at what the caller's group 0 of ranks 0 and 1 did."""
    monkeypatch.setattr(flight_recorder, "_ranks_of", lambda name: (0, 1))
    monkeypatch.setattr(flight_recorder, "_own_logs", dict)

    def reader(dumps):
        recorder = FlightRecorder(lambda entries: dumps)
        recorder.look()
        recorder.changed_s -= 9.0
        return recorder

    return reader


def test_what_is_in_flight_is_named_once_the_thread_has_stood_for_half_a_second(read):
    recorder, now = read(dump(entry(1), entry(2, **RUNS))), time.monotonic()
    assert recorder.in_flight(now) is None
    found = recorder.in_flight(now - 3.0)
    assert (found.log, found.number) == ("group 0 of 0,1", 2)
    assert found.since_s == now - 3.0
    assert recorder.in_flight(now - 3.0) is found  # the same wait for who counts its time


def test_groups_with_sends_and_receives_are_left_out(read):
    recorder = read(dump(entry(1), entry(2, **RUNS), entry(2, "nccl:send 0->1", is_p2p=True, **RUNS)))
    assert recorder.in_flight(time.monotonic() - 3.0) is None


def test_a_recorder_that_fails_is_left_alone(caplog):
    recorder = FlightRecorder(lambda entries: {}["no such name"])
    for _ in range(3):
        recorder.look()
    assert recorder.in_flight(0.0) is None
    assert len(caplog.records) == 1


def caller(rank, keys, waits=None):
    log = {"group 0 of 0,1": Launched((0, 1), len(keys), tuple(keys), ended=0, of_torch=True)}
    wait = waits and Waits("group 0 of 0,1", waits, keys[waits - 1], 3.0, in_flight=True)
    return Answer(rank, "", f"train.py:{rank}", wait, logs=log)


def test_other_collectives_of_the_callers_own_under_one_number_are_a_divergence():
    answers = {0: caller(0, ["all_reduce"], 1), 1: caller(1, ["broadcast"], 1)}
    diagnosis = diagnose(Findings(2, answers), WatchPolicy())
    assert diagnosis.fault is Fault.DIVERGED
    assert "as number 1, rank 0 launched 'all_reduce', rank 1 launched 'broadcast'" in diagnosis.sentence


def test_a_rank_whose_recorder_says_nothing_is_not_said_to_have_launched_nothing():
    silent = Answer(1, "", "train.py:1")
    diagnosis = diagnose(Findings(2, {0: caller(0, ["all_reduce"], 1), 1: silent}), WatchPolicy())
    assert diagnosis.fault is Fault.SLOW
    assert "whether rank 1 launched it, torch's flight recorder doesn't say" in diagnosis.sentence
