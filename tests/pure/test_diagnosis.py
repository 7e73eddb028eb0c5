"""The diagnosis: from what ranks say of themselves to what is wrong. No ranks, no clock."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from shardwright import clock
from shardwright.errors import CommError, InputError, MissingExtra, StorageError
from shardwright.observe.ledger.lateness import Late, history
from shardwright.observe.watch.diagnosis import FOREIGN_S, diagnose, spans
from shardwright.observe.watch.findings import (
    ERRORS,
    Answer,
    Diagnosis,
    Fault,
    Findings,
    Launched,
    Note,
    Waits,
)
from shardwright.observe.watch.status import status
from shardwright.observe.watch.status_exchange import StatusExchange, answer_of, fields_of
from shardwright.observe.watch.table import table, tell
from shardwright.observe.watch.watchdog import Watch, _Known
from shardwright.policy import WatchPolicy
from shardwright.transport.process import process_state

POLICY = WatchPolicy()
ALL = (0, 1, 2)


def says(rank, keys, waits=None, since_s=2.0, ranks=ALL, **more):
    """A rank that has launched ``keys`` on one transport and waits for the last but ``waits`` (None: not)."""
    log = Launched(ranks, len(keys), tuple(keys))
    wait = None if waits is None else Waits("axis", waits, keys[waits - 1], since_s)
    return Answer(rank, "forward of pass 3", f"train.py:{rank} in main", wait, logs={"axis": log}, **more)


def found(*answers, world=3, **more):
    return Findings(world, {answer.rank: answer for answer in answers}, **more)


SAVE = "save(step=3)"
SAVES = Launched(ALL, 1, (SAVE,))


def one_saves(axis, since_s, in_flight=False, log=SAVES, **more):
    """Rank 0 waits for what rank 2 has launched, and rank 1, with ``axis`` behind it, for its save."""
    waits = Waits("save", 1, SAVE, since_s, in_flight)
    saves = dataclasses.replace(says(1, axis.keys), waits=waits, logs={"axis": axis, "save": log})
    return found(says(0, "ab", 2), saves, says(2, "ab"), **more)


def test_a_computing_rank_is_slow_and_named_with_its_line():
    diagnosis = diagnose(found(says(0, "ab", 2), says(1, "a"), says(2, "ab", 2)), POLICY)
    assert diagnosis.fault is Fault.SLOW
    assert diagnosis.ranks == (1,)
    assert "train.py:1 in main" in diagnosis.sentence
    assert not diagnosis.is_error


def test_all_waiting_for_what_all_have_launched_is_a_slow_network():
    diagnosis = diagnose(found(*(says(rank, "ab", 2, since_s=60) for rank in ALL)), POLICY)
    assert diagnosis.fault is Fault.SLOW
    assert "network" in diagnosis.remedy


def test_other_collectives_under_one_number_are_a_divergence_whoever_waits():
    diagnosis = diagnose(found(says(0, "ab", 2), says(1, "abc"), says(2, "ac")), POLICY)
    assert diagnosis.fault is Fault.DIVERGED
    assert "number 2" in diagnosis.sentence
    assert "ranks 0, 1 launched 'b'" in diagnosis.sentence
    assert "rank 2 launched 'c'" in diagnosis.sentence
    diagnosis = diagnose(found(says(0, "ab", 2), says(1, "cb"), says(2, "ab")), POLICY)
    assert diagnosis.fault is Fault.DIVERGED and "number 1" in diagnosis.sentence


def test_only_launches_that_both_remember_are_compared():
    old = dataclasses.replace(says(1, "yz"), logs={"axis": Launched(ALL, 64, tuple("yz"))})
    assert diagnose(found(says(0, "ab", 2), old, says(2, "ab", 2)), POLICY).fault is Fault.SLOW


def test_ranks_that_wait_for_each_other_have_diverged_even_while_a_third_computes():
    diagnosis = diagnose(one_saves(Launched(ALL, 1, ("a",)), 2.0), POLICY)
    assert diagnosis.fault is Fault.DIVERGED
    assert "save(step=3)" in diagnosis.sentence


@pytest.mark.parametrize(
    ("since_s", "in_flight", "fault"),
    [
        (0.1, False, Fault.SLOW),
        (0.3, False, Fault.SLOW),
        (0.5, False, Fault.DIVERGED),
        (FOREIGN_S, True, Fault.SLOW),
        (2 * FOREIGN_S, True, Fault.DIVERGED),
    ],
)
def test_a_wait_that_began_after_the_roll_was_called_proves_nothing(since_s, in_flight, fault):
    findings = one_saves(Launched(ALL, 1, ("a",)), since_s, in_flight, took_s=0.3)
    assert diagnose(findings, POLICY).fault is fault


@pytest.mark.parametrize(("ended", "fault"), [(1, Fault.DIVERGED), (2, Fault.SLOW)])
def test_a_rank_whose_device_is_elsewhere_is_waited_for_until_it_has_ended_what_others_wait_for(ended, fault):
    findings = one_saves(
        Launched(ALL, 2, ("a", "b"), 2, ended), 9.0, True, dataclasses.replace(SAVES, begun=1, ended=0)
    )
    assert diagnose(findings, POLICY).fault is fault


@pytest.mark.parametrize(
    ("call", "seconds", "fault"),
    [
        ("barrier", 2.5, Fault.DIVERGED),
        ("barrier", FOREIGN_S, Fault.DIVERGED),
        ("barrier", 1.5, Fault.SLOW),
        ("recv", 20.0, Fault.SLOW),  # may be a long transfer
        ("recv", 31.0, Fault.DIVERGED),
    ],
)
def test_a_collective_of_the_callers_own_counts_once_it_cannot_end(call, seconds, fault):
    foreign = says(1, "a", foreign=call, foreign_s=seconds)
    diagnosis = diagnose(found(says(0, "ab", 2), foreign, says(2, "ab", 2)), POLICY)
    assert diagnosis.fault is fault
    if fault is Fault.DIVERGED:
        assert f"torch.distributed.{call}" in diagnosis.sentence


def test_ranks_that_are_all_in_a_collective_of_the_callers_own_are_left_alone():
    answers = [says(rank, "a", foreign="barrier", foreign_s=100) for rank in ALL]
    assert diagnose(found(*answers), POLICY).fault is Fault.SLOW


def test_of_ranks_beside_one_in_a_call_of_its_own_four_are_said():
    answers = [says(0, "a", foreign="barrier", foreign_s=1.0), *(says(rank, "a") for rank in range(1, 6))]
    diagnosis = diagnose(found(*answers, world=6), POLICY)
    assert diagnosis.ranks == (1, 2, 3, 4, 5)
    assert "rank 4:" in diagnosis.sentence and "rank 5:" not in diagnosis.sentence


def test_what_was_raised_comes_before_everything_and_before_who_merely_left():
    notes = [Note(2, "", "", 1.0), Note(1, "ValueError: bad", "train.py:7 in main", 2.0)]
    diagnosis = diagnose(found(says(0, "ab", 2), notes=notes, ended=frozenset({1, 2})), POLICY)
    assert diagnosis.fault is Fault.FAILED
    assert diagnosis.ranks == (1,)
    assert "rank 1 raised ValueError: bad in train.py:7 in main" in diagnosis.sentence


def test_a_process_that_ended_without_a_word_is_lost():
    diagnosis = diagnose(found(says(0, "ab", 2), says(2, "ab", 2), ended=frozenset({1})), POLICY)
    assert (diagnosis.fault, diagnosis.ranks) == (Fault.LOST, (1,))


def test_silence_is_slow_until_lost_s():
    slow = found(says(0, "ab", 2), says(2, "ab", 2), silent={1: 29.0})
    assert diagnose(slow, POLICY).fault is Fault.SLOW
    assert diagnose(dataclasses.replace(slow, silent={1: POLICY.lost_s}), POLICY).fault is Fault.SLOW
    assert diagnose(dataclasses.replace(slow, silent={1: 31.0}), POLICY).fault is Fault.LOST


def test_idling_is_an_error_only_beyond_stall_s():
    answers = found(says(0, "ab", 2), says(1, "a", idle_s=5.0), says(2, "ab", 2))
    assert diagnose(answers, POLICY).fault is Fault.SLOW
    assert diagnose(answers, WatchPolicy(stall_s=6.0)).fault is Fault.SLOW
    assert diagnose(answers, WatchPolicy(stall_s=5.0)).fault is Fault.SLOW
    stalled = diagnose(answers, WatchPolicy(stall_s=2.0))
    assert (stalled.fault, stalled.ranks) == (Fault.STALLED, (1,))
    assert "train.py:1" in stalled.sentence


@pytest.mark.parametrize(
    ("since_s", "bound_s", "fault"),
    [
        ((60, 60, 60), None, Fault.SLOW),  # a slow link may take that long
        ((60, 60, 60), 90.0, Fault.SLOW),
        ((60, 60, 60), 30.0, Fault.STALLED),
        ((30, 30, 30), 30.0, Fault.SLOW),
        ((60, 60, 1), 30.0, Fault.SLOW),  # the last one has only just launched it
    ],
)
def test_what_all_have_launched_is_an_error_only_beyond_collective_s(since_s, bound_s, fault):
    answers = [says(rank, "ab", 2, since_s=since_s[rank]) for rank in ALL]
    diagnosis = diagnose(found(*answers), WatchPolicy(collective_s=bound_s))
    assert diagnosis.fault is fault
    if fault is Fault.STALLED:
        assert diagnosis.ranks == ALL
        assert "b (forward of pass 3) has not ended for 30 s" in diagnosis.sentence


@pytest.mark.parametrize(
    ("begun", "ranks", "remedy"), [(1, (1,), "the device of rank 1"), (2, ALL, "network")]
)
def test_of_a_stuck_collective_the_rank_is_named_whose_device_has_not_begun_it(begun, ranks, remedy):
    log = Launched(ALL, 2, ("a", "b"), begun)
    answers = [says(rank, "ab", 2, since_s=60) for rank in ALL]
    answers[1] = dataclasses.replace(answers[1], logs={"axis": log})
    diagnosis = diagnose(found(*answers), WatchPolicy(collective_s=30.0))
    assert (diagnosis.fault, diagnosis.ranks) == (Fault.STALLED, ranks)
    assert remedy in diagnosis.remedy


def test_a_rank_that_has_not_launched_is_never_called_a_stuck_collective():
    answers = [says(0, "ab", 2, since_s=60), says(1, "a"), says(2, "ab", 2, since_s=60)]
    assert diagnose(found(*answers), WatchPolicy(collective_s=30.0)).fault is Fault.SLOW


def test_nobody_waiting_is_nothing_wrong():
    assert "no rank waits" in diagnose(found(says(0, "a"), says(1, "a"), says(2, "a")), POLICY).sentence


counts = st.lists(st.tuples(st.integers(1, 70), st.booleans()), min_size=2, max_size=6)


@given(counts)
def test_ranks_that_follow_one_order_are_never_accused(ranks):
    """However far each has come, and whoever waits: equal launches never make an error."""
    order = [f"op {number}" for number in range(100)]
    answers = {}
    for rank, (count, waiting) in enumerate(ranks):
        keys = tuple(order[:count][-64:])
        wait = Waits("axis", count, order[count - 1], 50.0) if waiting else None
        log = Launched(tuple(range(len(ranks))), count, keys)
        answers[rank] = Answer(rank, "forward", "x.py:1", wait, logs={"axis": log})
    diagnosis = diagnose(Findings(len(ranks), answers), POLICY)
    assert diagnosis.fault is Fault.SLOW


def test_the_table_has_a_row_for_each_thing_that_ranks_do():
    answers = [says(rank, "ab", 2, ranks=tuple(range(64))) for rank in range(62)]
    same = [dataclasses.replace(answer, line="train.py:40 in main") for answer in answers]
    rows = table(found(*same, says(62, "a"), world=64)).splitlines()
    assert len(rows) == 4  # the head, 0-61, 62, 63
    assert rows[1].split()[:4] == ["0-61", "waits", "in", "b"]
    assert "train.py:40 in main" in rows[1]
    assert "has not come yet" in rows[3]
    notes = [Note(0, "ValueError", "a.py:1", 1.0)]
    rows = table(found(says(1, "a"), notes=notes, ended=frozenset({2}))).splitlines()
    assert [row.split()[-3:-1] for row in rows[1:2]] == [["0.0", "s"]] and rows[3].endswith("0.0 s")


def test_every_error_names_its_class_the_table_and_a_remedy():
    findings = found(says(0, "ab", 2), says(1, "ac", 2), says(2, "a", caught="ValueError: bad"))
    diagnosis = diagnose(findings, POLICY)
    text = tell(diagnosis, findings)
    assert text.startswith("diverged: ")
    assert "after ValueError: bad" in text
    assert "same order" in text.splitlines()[-1]
    assert issubclass(ERRORS[diagnosis.fault], CommError)


def test_an_answer_survives_the_store():
    answer = says(1, "abc", 2, caught="ValueError: x", foreign="", idle_s=1.5)
    assert answer_of(json.loads(json.dumps(fields_of(answer)))) == answer


OBEYED = "\x1b[2J\x07all is well\r\x9b1A\u202e\u200b"
"""What a terminal obeys: it clears the screen, rings, goes back, writes from right to left."""


def test_what_others_say_through_the_store_moves_no_cursor():
    exchange = StatusExchange(HashStore(), 2)
    exchange.leave(Note(1, f"ValueError: {OBEYED}", OBEYED, 0.0))
    exchange.answer(exchange.request(), says(1, OBEYED, 2, caught=OBEYED))
    late = Late(0.0, 1, OBEYED, 0.5, 20, OBEYED, OBEYED)
    exchange.note_late(late.to_json())
    diagnosis = Diagnosis(Fault.FAILED, (1,), OBEYED, OBEYED)
    said = [
        status(exchange.call(0.0), WatchPolicy()),
        exchange.publish(diagnosis, f"rank 1\n{OBEYED}").text,
        exchange.published().text,
        history([Late.from_json(text) for text in exchange.late()]),
    ]
    assert "rank 1\n\\x1b[2J\\x07all is well\\r\\x9b1A\\u202e\\u200b" in said[1]
    for text in said:
        assert "all is well" in text
        assert all(each.isprintable() or each == "\n" for each in text), text


@pytest.mark.parametrize("kind", [CommError, InputError, StorageError, MissingExtra])
def test_no_error_of_ours_moves_the_cursor(kind):
    shown = "rank 1:\n\t\\x1b[2J\\x07all is well\\r\\x9b1A\\u202e\\u200b é"
    assert str(kind(f"rank 1:\n\t{OBEYED} é")) == shown


@pytest.mark.parametrize(
    ("ranks", "words"), [((1,), "rank 1"), ((0, 1), "ranks 0, 1"), ((0, 2, 3, 4, 9), "ranks 0, 2-4, 9")]
)
def test_ranks_in_words(ranks, words):
    assert spans(ranks) == words


def test_the_policy_reads_its_text_form():
    assert WatchPolicy.from_text("") == WatchPolicy()
    assert WatchPolicy.from_text("off") == WatchPolicy(on=False)
    assert WatchPolicy.from_text("suspect_s=2, stall_s=600") == WatchPolicy(suspect_s=2.0, stall_s=600.0)
    for bad in ("suspect=2", "stall_s=soon", "stall_s=-1", "no"):
        with pytest.raises(InputError, match=r"stall_s|suspect_s"):
            WatchPolicy.from_text(bad)


def test_of_three_hosts_the_one_that_hears_of_no_other_is_cut_off_and_of_two_either_may_be():
    silent = dict.fromkeys((1, 2), 31.0)
    hosts = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3"}
    alone = dataclasses.replace(found(says(0, "a"), world=3), silent=silent, asker=0, hosts=hosts)
    assert diagnose(alone, POLICY).sentence.startswith("rank 0 is cut off: ranks 1, 2 on 2 other hosts")
    assert diagnose(alone, POLICY).remedy == "Look at the network of rank 0's host."
    beside = dataclasses.replace(alone, hosts=hosts | {2: "10.0.0.2"})
    assert "are lost, or rank 0 is cut off" in diagnose(beside, POLICY).sentence
    heard = found(says(0, "a"), says(2, "a"), world=3)
    heard = dataclasses.replace(heard, silent={1: 31.0}, asker=0, hosts=hosts)
    assert diagnose(heard, POLICY).sentence == "rank 1 is lost: the process has not answered for 30 s"


def test_no_network_is_slow_where_ranks_share_memory():
    answers = [says(rank, "ab", 2) for rank in ALL]
    for answer in answers:
        name = answer.waits.log
        logs = {name: dataclasses.replace(answer.logs[name], in_memory=True)}
        object.__setattr__(answer, "logs", logs)
    assert diagnose(found(*answers), POLICY).remedy == "The host is busy."


def test_a_rank_that_answers_each_call_too_late_is_not_silent(monkeypatch):
    now, answered = [0.0], [0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    watch = object.__new__(Watch)
    watch.rank, watch._known = 0, _Known()
    monkeypatch.setattr(process_state, "_logs", [])  # of tests before, in this process
    watch.reach = SimpleNamespace(answered=lambda ranks: dict.fromkeys(ranks, answered[0]), hosts=dict)

    def silent_s(lately: bool) -> float:
        for _ in range(10):
            now[0] += 5.0
            answered[0] += lately
            found = watch._heard(Findings(2, {}, silent={1: 0.7}))
        return found.silent[1]

    assert silent_s(lately=True) == 0.0
    assert silent_s(lately=False) == 50.0
