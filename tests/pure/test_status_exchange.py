"""Ranks ask each other what they do through the job's store: who hears what, for how long, and what stays."""

from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardwright import clock
from shardwright.observe.watch.findings import Answer, Diagnosis, Fault, Launched, Note, Status, Waits
from shardwright.observe.watch.status_exchange import (
    SharedDiagnosis,
    StatusExchange,
    address_of,
    find_exchange,
    open_exchange,
    store_at,
)
from shardwright.transport import liveness

LOG = Launched((0, 1, 2, 3), 7, ("gather", "scatter"), begun=6, in_memory=True)
ANSWER = Answer(0, "forward", "train.py:4", Waits("cpu", 7, "scatter", 1.5), logs={"cpu": LOG}, gone=(2,))
ROOM = timedelta(seconds=3)


def answer_by(rank):
    return Answer(**{**vars(ANSWER), "rank": rank, "waits": None, "status": Status("step 3", 5, 6)})


class Time(list):
    """Seconds that were slept. meanwhile: called after each sleep."""

    meanwhile = staticmethod(int)

    def sleep(self, seconds):
        self.append(seconds)
        self.meanwhile()


@pytest.fixture(autouse=True)
def slept(monkeypatch):
    pauses = Time()
    monkeypatch.setattr(clock, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(clock, "sleep", pauses.sleep)
    return pauses


def later(events):
    """Called again and again, does each so many seconds from now."""
    began, pending = clock.monotonic(), sorted(events, key=lambda event: event[0])

    def meanwhile():
        while pending and pending[0][0] <= clock.monotonic() - began:
            pending.pop(0)[1]()

    return meanwhile


def hash_store():
    """Where what isn't there is not waited for."""
    made = HashStore()
    made.set_timeout(timedelta(milliseconds=1))
    return made


class Ranks:
    """Exchanges over one store: of who is no rank, and of all ranks, which have registered. gone: those whose
    process has ended since."""

    def __init__(self, world, monkeypatch, gone=()):
        self.store, own = hash_store(), liveness.identity()
        self.reader = StatusExchange(self.store, world)
        self.all = [StatusExchange(self.store, world) for _ in range(world)]
        for rank, each in enumerate(self.all):
            with monkeypatch.context() as patch:
                patch.setattr(liveness, "identity", lambda rank=rank: f"{own}1" if rank in gone else own)
                assert self.reader.places() == {}, "some are still to come"
                each.register(rank, f"host{rank} 80")

    def answer(self, rank, call, at=0.0):
        return at, lambda: self.all[rank].answer(call, answer_by(rank))


def test_who_calls_hears_each_rank_until_none_has_answered_for_as_long_as_it_waits(monkeypatch):
    ranks = Ranks(5, monkeypatch)
    note = Note(3, "ValueError: bad", "train.py:1", 2.0)
    assert ranks.reader.request() == 1
    ranks.all[2].answer(1, answer_by(2))  # of which the next call hears nothing
    ranks.all[3].leave(note)
    ranks.store.delete_key("at/4")  # who has never come
    said = [ranks.answer(0, 2, 3.0), ranks.answer(1, 2, 7.0), ranks.answer(3, 3, 8.0)]
    found = ranks.reader.call(5.0, later(said))
    assert (found.world, found.notes, found.ended) == (5, [note], frozenset())
    assert found.answers == {0: answer_by(0), 1: answer_by(1), 3: answer_by(3)} and found.silent == {2: 5.0}
    assert found.took_s == pytest.approx(12.0, abs=0.1)
    assert ranks.reader.answered(range(5)) == {0: 2, 1: 2, 2: 1, 3: 3}


def test_a_call_ends_once_all_that_live_have_answered_and_its_own_rank_answers_at_once(monkeypatch):
    ranks = Ranks(3, monkeypatch, gone=[2])
    first, number = ranks.all[0], ranks.all[1].request()
    assert first.latest() == (1, 0, True)
    told = [(0.0, lambda: first.answer(number, ANSWER)), ranks.answer(1, number, 0.5)]
    found = first.call(5.0, later(told), number)
    assert found.answers == {0: ANSWER, 1: answer_by(1)} and found.ended == {2} and found.silent == {2: 5.0}
    assert found.took_s == pytest.approx(0.5, abs=0.05) and first.latest()[0] == number
    assert {*first.call(0.0, lambda: first.answer(2, ANSWER)).answers} == {0}
    assert (first.ended([2]), first.ended([0, 1])) == ({2}, set())


def test_a_host_that_tells_nothing_of_its_processes_takes_part_and_nobody_counts_as_ended(monkeypatch):
    monkeypatch.setattr(liveness, "identity", lambda: None)
    ranks = Ranks(2, monkeypatch)
    assert ranks.all[0].places() == {0: "host0 80", 1: "host1 80"} and ranks.reader.come([1, 2]) == {1}
    assert ranks.all[0].ended([0, 1]) == set()


def test_two_that_call_at_once_have_two_numbers_and_only_another_ranks_question_counts_as_that(monkeypatch):
    ranks, made = Ranks(3, monkeypatch), []
    first, second, reader = ranks.all[0], ranks.all[1], ranks.reader
    assert (first.latest(), first.request(after=3), first.request(after=0)) == ((0, 0, False), 0, 1)
    assert [each.latest() for each in (first, second, reader)] == [(1, 0, False), (1, 0, True), (1, 0, True)]

    class Slow(StatusExchange):
        def _latest(self):
            before = super()._latest()
            if not made:  # another one asks between the two calls of the store
                made.append(second.request())
            return before

    assert (Slow(ranks.store, 3).request(), made) == (3, [2])
    assert first.latest() == (3, 0, False), "who is no rank only looks"
    assert (second.request(20), first.latest()) == (4, (4, 20, False))
    assert first.publish(Diagnosis(Fault.LOST, (2,), "", ""), "gone").text == "gone"
    assert second.latest() == (5, -1, False)


def test_what_calls_leave_in_the_store_does_not_grow(monkeypatch):
    ranks, sizes = Ranks(2, monkeypatch), []

    def leave_ring(rank, call):
        ranks.all[rank].leave_ring(call, rank, f"of {rank} in {call}".encode())
        ranks.all[rank].answer(call, answer_by(rank))

    for call in range(1, 41):
        rings = [(0.5 * rank, partial(leave_ring, rank, call)) for rank in (0, 1)]
        found = ranks.reader.rings(20, 2.0, later(rings))
        assert found == [f"of {rank} in {call}".encode() for rank in (0, 1)]
        sizes.append(ranks.store.num_keys())
    assert sizes[10:] == sizes[10:11] * 30
    assert ranks.reader.rings(20, 0.0, partial(leave_ring, 0, 41)) == [b"of 0 in 41"]


def test_what_is_left_for_all_is_read_by_all_in_its_order(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    first, second, reader = *ranks.all, ranks.reader
    assert [first.asks_first(3), second.asks_first(3), second.asks_first(4)] == [True, False, True]
    assert (first.looks(), first.late(), first.said(0), first.notes()) == ("", [], [], [])
    first.note_looks("known")
    notes = [Note(rank, "", "", rank, held_store=rank == 0) for rank in (0, 1)]
    for each, note in zip(ranks.all, notes, strict=True):
        each.note_late(f"late {note.rank}")
        each.say(f"line {note.rank}")
        each.leave(note)
    second.dismiss(1)
    assert (reader.looks(), reader.late(), reader.notes()) == ("known", ["late 0", "late 1"], notes)
    assert (reader.said(0), reader.said(1), reader.said(2)) == (["line 0", "line 1"], ["line 1"], [])
    assert reader.dismissed([0, 1]) == {1}


@pytest.mark.parametrize(
    ("ends", "after_s"), [("answers", 1.0), ("leaves", 1.0), ("has ended", 0.0), ("does nothing", 3.0)]
)
def test_the_store_stays_until_each_other_rank_knows_that_it_goes(ends, after_s, monkeypatch, slept):
    ranks = Ranks(3, monkeypatch, gone=[2, 1] if ends == "has ended" else [2])
    note = Note(1, "", "", 0.0)
    does = {"answers": ranks.answer(1, 1)[1], "leaves": lambda: ranks.all[1].leave(note)}
    slept.meanwhile = later([ranks.answer(0, 1), (1.0, does.get(ends, int))])
    ranks.all[0].part(3.0)
    assert sum(slept) == pytest.approx(after_s, abs=0.05)


def test_the_first_diagnosis_counts_and_who_holds_the_store_waits_until_all_know_it(monkeypatch, slept):
    ranks = Ranks(3, monkeypatch, gone=[1])
    assert ranks.reader.published() is None
    first = SharedDiagnosis(Fault.DIVERGED, (0, 2), "two calls")
    published = [
        ranks.all[0].publish(Diagnosis(Fault.DIVERGED, (0, 2), "", ""), "two calls"),
        ranks.all[2].publish(Diagnosis(Fault.LOST, (1,), "", ""), "one is lost"),
    ]
    assert published == [first, first] and ranks.reader.published() == first
    ranks.all[0].acknowledge(0)
    slept.meanwhile = later([(1.0, lambda: ranks.all[2].acknowledge(2))])
    ranks.all[0].linger(3.0)
    assert sum(slept) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("other", [None, hash_store()], ids=["its own clone", "another way"])
def test_an_exchange_is_found_by_who_is_no_rank_and_each_attempt_has_keys_of_its_own(other):
    bottom = hash_store()
    assert find_exchange(bottom) is None
    if other is None:
        bottom.set("shardwright/watch/old/looks", "of another attempt")
    opened = [open_exchange(PrefixStore("job", bottom), 3, token, other) for token in ("old", "new")]
    found = find_exchange(other or bottom)
    opened[1].note_looks("of this one")
    assert (found.looks(), found.world, found.holds_store) == ("of this one", 3, False)
    assert opened[0].looks() == ("" if other else "of another attempt") and not opened[0].holds_store
    assert bottom.check(["shardwright/job"]) == (other is None)


def test_a_store_is_reached_by_its_address_and_the_process_that_serves_it_is_known(tmp_path, monkeypatch):
    server = TCPStore("localhost", 0, None, True, ROOM, wait_for_workers=False)
    client = store_at(address_of(PrefixStore("x", server)), ROOM)
    server.set("a", "1")
    assert (client.get("a"), client.timeout, address_of(client)) == (b"1", ROOM, f"localhost:{server.port}")
    assert [open_exchange(store, 1, "").holds_store for store in (server, client)] == [True, False]
    monkeypatch.chdir(tmp_path)
    for path in ("4567", "no:port", str(tmp_path / "file")):
        FileStore(path, -1).set("b", "2")
        store = store_at(path, ROOM)
        assert (store.get("b"), store.timeout, address_of(store)) == (b"2", ROOM, path)
    assert address_of(HashStore()) == ""
