"""When ranks look for who is late: soon after their waits rise, seldom while they are as they were."""

import random
from types import SimpleNamespace

import pytest

from shardwright.observe.ledger import lateness
from shardwright.observe.ledger.lateness import STEPS, Late, Lateness, Looks, WaitChange, history, judged
from shardwright.transport.launches import process_state
from shardwright.transport.recorder import WAIT
from tests.pure import test_ledger

STEP_S, LINK_S, LATE_S = 0.2, 0.06, 0.03
SAVE_EVERY, SAVE_S = 50, 5.0


class Job:
    """Steps of ranks that all wait for a link, and of which some are late: ``late(step)`` is a rank and a
    cause, or None. Looks as the watchdog does; says: (step, rank, cause) of its lines, and over: (step, rank)
    of those that say that a rank no longer is."""

    def __init__(self, monkeypatch, late, world=3, link_s=LINK_S, late_s=lambda step: LATE_S):
        self.late, self.world, self.number = late, world, 0
        self.link_s, self.late_s, self.over = link_s, late_s, []
        self.own, self.looks = [Lateness() for _ in range(world)], Looks()
        self.looked, self.says, self.found = [], [], []
        self.monkeypatch = monkeypatch

    def waited(self, rank, step):
        late = self.late(step)
        save_s = SAVE_S if step % SAVE_EVERY == 0 and rank else 0.0
        return self.link_s + save_s + (self.late_s(step) if late and late[0] != rank else 0.0)

    def written(self, rank, step):
        return (step, STEP_S * step, [(WAIT, "", None, process_state.thread, 0.0, self.waited(rank, step))])

    def run(self, steps):
        for _ in range(steps):
            self.number += 1
            for rank, own in enumerate(self.own):
                first = max(1, self.number - 63)
                recorder = SimpleNamespace(
                    number=self.number,
                    steps=lambda first=first, rank=rank: [
                        self.written(rank, step) for step in range(first, self.number + 1)
                    ],
                )
                self.monkeypatch.setattr(lateness, "recorder", recorder)
                waits = own.waits()
                if (
                    waits is not None
                    and self.looks.is_due(own.window, waits)
                    and own.window not in self.looked
                ):
                    self.looked.append(own.window)
                    self.look(own.window, waits)

    def look(self, window, waits):
        steps = range(self.number - STEPS, self.number)
        of = [self.late(step) for step in steps]
        late = next((each for each in of if each and of.count(each) >= STEPS / 2), None)
        shares = {
            rank: sum(self.late_s(step) for step in steps if (self.late(step) or [None])[0] == rank)
            / (STEPS * STEP_S)
            for rank in range(self.world)
        }
        found = late and Late(0.0, late[0], "node", shares[late[0]], STEPS, late[1], "")
        if found is not None:
            self.found.append(found._replace(stands=self.looks.stands(window, found)))
        looks, lines = self.looks.then(window, waits, found, shares)
        for line in lines:
            if "no longer costs" in line:
                self.over.append((self.number, int(line.split()[1])))
            else:
                assert line == found.text()
                self.says.append((self.number, found.rank, found.cause))
        self.looks = Looks.from_json(looks.to_json())

    def said(self, since, what):
        return next(number - since for number, *late in self.says if number >= since and tuple(late) == what)


@pytest.mark.parametrize("begins", range(1295, 1318, 3))
def test_a_rank_that_becomes_late_is_said_within_40_steps_however_long_all_have_waited_for_the_link(
    monkeypatch, begins
):
    job = Job(monkeypatch, lambda step: (1, "data") if step >= begins else None)
    job.run(begins - 1)
    assert not job.says
    assert len(job.looked) <= 9  # 1, 2, 4, ... windows apart
    job.run(100)
    assert job.said(begins, (1, "data")) <= 2 * STEPS + 1


def test_another_rank_that_becomes_late_in_place_of_one_that_was_named_is_said_within_40_steps(monkeypatch):
    job = Job(monkeypatch, lambda step: (1, "data") if step < 1300 else (2, "compute"))
    job.run(1400)
    assert job.said(1300, (2, "compute")) <= 2 * STEPS + 1
    job.late = lambda step: (1, "data")  # it is late again
    job.run(100)
    assert job.said(1401, (1, "data")) <= 2 * STEPS + 1


def test_what_was_said_already_is_looked_for_more_and_more_seldom(
    monkeypatch,
):
    job = Job(monkeypatch, lambda step: (1, "data"))
    job.run(5000)
    apart = [after - before for before, after in zip(job.looked, job.looked[1:], strict=False)]
    assert apart == sorted(apart) and apart[:4] == [1, 2, 4, 8] and apart[-1] == 1280 // STEPS


def test_a_rank_and_its_cause_are_said_once_however_often_the_waits_for_it_rise_and_fall(monkeypatch):
    job = Job(monkeypatch, lambda step: (1, "data"), late_s=lambda step: LATE_S * (1 + (step // 40 % 2) / 3))
    job.run(3000)
    assert len(job.looked) > 5
    assert [late for _, *late in job.says] == [[1, "data"]] and not job.over


def test_a_cause_that_changes_at_the_same_rank_is_said_once(monkeypatch):
    causes = ("data", "compute")
    job = Job(monkeypatch, lambda step: (1, causes[step // 100 % 2]))
    job.run(3000)
    assert [late for _, *late in job.says] == [[1, "data"], [1, "compute"]]


def test_a_cost_that_has_doubled_is_said_again_once(monkeypatch):
    job = Job(monkeypatch, lambda step: (1, "data"), late_s=lambda step: LATE_S * (1 + (step >= 500)))
    job.run(2000)
    first, second = job.says
    assert first[0] < 100 and 500 <= second[0] <= 500 + 2 * STEPS + 1


@pytest.mark.parametrize("ends", range(1295, 1318, 3))
@pytest.mark.parametrize("link_s", [0.0, LINK_S])
def test_that_a_rank_is_late_no_more_is_said_and_so_is_that_it_is_late_again(monkeypatch, ends, link_s):
    job = Job(monkeypatch, lambda step: None if ends <= step < 3000 else (1, "data"), link_s=link_s)
    job.run(4000)
    ((over, rank),) = job.over
    assert rank == 1 and over >= ends
    if not link_s:  # else the others wait on, and look when their pause ends
        assert over <= ends + 3 * STEPS
        assert len([window for window in job.looked if ends + 4 * STEPS < STEPS * window < 3000]) == 0
    assert [late for _, *late in job.says] == [[1, "data"]] * 2
    assert 3000 <= job.says[1][0] <= 3000 + 2 * STEPS + 1


def test_a_rank_that_did_not_answer_is_no_reason_to_say_that_another_one_is_late_no_more():
    late = Late(0.0, 1, "node", 0.2, STEPS, "data", "")
    shares = {0: 0.0, 1: 0.2}
    looks, lines = Looks().then(1, WaitChange(True, True, False), late, shares)
    assert lines == [late.text()]
    looks, lines = looks.then(2, WaitChange(True, False, False), None, {})
    assert not lines and looks.told
    looks, lines = looks.then(4, WaitChange(False, False, True), None, {0: 0.0, 1: 0.01})
    assert lines == ["rank 1 on node no longer costs the others much: data has ended"] and not looks.told


def test_a_look_that_a_ring_was_missing_from_is_done_again_after_20_steps():
    before = Looks(window=10, pause=64)
    assert before.then(12, WaitChange(True, True, False), None, {})[0].pause == 1
    assert before.then(74, WaitChange(True, False, False), None, {})[0].pause == 64


def found_in(seed, world, late_ms, cause):
    """Who is said of 20 steps in which each rank is held up now and then, by up to as much as it computes;
    and one rank in every step besides, for ``late_ms``."""
    chance = random.Random(seed)
    extra = {
        (rank, step, what): chance.expovariate(1 / typical_ms)
        for rank in range(world)
        for step in range(1, STEPS + 2)
        for what, typical_ms in (("compute", 0.5), ("gc", 2.0), ("user", 8.0))
    }
    for step in range(1, STEPS + 2):
        extra[1, step, cause] = extra.get((1, step, cause), 0.0) + late_ms
    job = test_ledger.Job(world, STEPS + 1, extra, seed)
    return judged(job.rings(), world)[0]


def test_where_all_ranks_take_turns_at_being_last_none_is_named_in_95_of_100_windows():
    named = [found for seed in range(100) if (found := found_in(seed, 2 + seed % 3, 0.0, "data"))]
    assert len(named) <= 5, named


@pytest.mark.parametrize("cause", ["data", "user"])
def test_a_rank_that_is_late_in_each_step_is_named_also_where_all_take_turns_besides(cause):
    for seed in range(25):
        found = found_in(seed, 2 + seed % 3, 40.0, cause)
        assert found is not None and found.rank == 1, seed
        assert found.cause == {"user": "user code"}.get(cause, cause)


def test_the_history_counts_steps_and_not_looks(monkeypatch):
    job = Job(monkeypatch, lambda step: (1, "data") if step < 4000 else (2, "compute"))
    job.run(4500)
    first, second = history(job.found).splitlines()[1:]
    steps = {line.split()[2][:-2]: int(line.split(": ")[1].split()[0]) for line in (first, second)}
    assert 0.6 * 4000 < steps["1"] <= 4000 and 0.5 * 500 < steps["2"] <= 500
    assert "(rank 1)" in first and f"data in {steps['1']}" in first


def test_a_run_of_an_older_version_has_no_steps_that_a_finding_stands_for():
    old = '{"time": 1.0, "rank": 1, "host": "a", "share": 0.1, "steps": 20, "cause": "data", "detail": ""}'
    assert Late.from_json(old).stands == 20
