"""When ranks look for who is late: soon after their waits rise, seldom while they are as they were."""

from types import SimpleNamespace

import pytest

from shardwright.observe.ledger import lateness
from shardwright.observe.ledger.lateness import STEPS, Late, Lateness, Looks, history
from shardwright.transport.launches import process_state
from shardwright.transport.recorder import WAIT

STEP_S, LINK_S, LATE_S = 0.2, 0.06, 0.03
SAVE_EVERY, SAVE_S = 50, 5.0


class Job:
    """Steps of ranks that all wait for a link, and of which some are late: ``late(step)`` is a rank and a
    cause, or None. Looks as the watchdog does; says: (step, rank, cause) of its lines."""

    def __init__(self, monkeypatch, late, world=3):
        self.late, self.world, self.number = late, world, 0
        self.own, self.looks = [Lateness() for _ in range(world)], Looks()
        self.looked, self.says, self.found = [], [], []
        self.monkeypatch = monkeypatch

    def waited(self, rank, step):
        late = self.late(step)
        save_s = SAVE_S if step % SAVE_EVERY == 0 and rank else 0.0
        return LINK_S + save_s + (LATE_S if late and late[0] != rank else 0.0)

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
                risen = own.rise()
                if (
                    risen is not None
                    and self.looks.is_due(own.window, risen)
                    and own.window not in self.looked
                ):
                    self.looked.append(own.window)
                    self.look(own.window, risen)

    def look(self, window, risen):
        of = [self.late(step) for step in range(self.number - STEPS, self.number)]
        late = next((each for each in of if each and of.count(each) >= STEPS / 2), None)
        found = None if late is None else Late(0.0, late[0], "node", 0.1, STEPS, late[1], "")
        if found is not None:
            self.says.append((self.number, found.rank, found.cause))
            self.found.append(found._replace(stands=self.looks.stands(window, found)))
        self.looks = Looks.from_json(self.looks.then(window, risen, found).to_json())

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


def test_a_look_that_a_ring_was_missing_from_is_done_again_after_20_steps():
    before = Looks(window=10, pause=64)
    assert before.then(12, True, None).pause == 1
    assert before.then(74, False, None).pause == 64


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
