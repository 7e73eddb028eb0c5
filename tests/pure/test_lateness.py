"""When ranks look for who is late: soon after their waits rise, seldom while they are as they were."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

from shardwright.observe.ledger import lateness
from shardwright.observe.ledger.lateness import Late, Looks, NamedLate, history, judged
from shardwright.observe.ledger.ledger import Ledger, Line
from shardwright.observe.watch import waits as own_waits
from shardwright.observe.watch.waits import STEPS, OwnWaits, WaitChange
from shardwright.transport.process import process_state
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
        self.own, self.looks = [OwnWaits() for _ in range(world)], Looks()
        self.looked, self.says, self.found = [], [], []
        self.monkeypatch = monkeypatch

    def waited(self, rank, step):
        late = self.late(step)
        save_s = SAVE_S if step % SAVE_EVERY == 0 and rank else 0.0
        return self.link_s + save_s + (self.late_s(step) if late and late[0] != rank else 0.0)

    def written(self, rank, step):
        return (step, STEP_S * step, [(WAIT, "", None, process_state.thread, 0.0, self.waited(rank, step))])

    def written_since(self, first, rank):
        return [self.written(rank, step) for step in range(first, self.number + 1)]

    def run(self, steps):
        for _ in range(steps):
            self.number += 1
            for rank, own in enumerate(self.own):
                first = max(1, self.number - 63)
                recorder = SimpleNamespace(number=self.number, steps=partial(self.written_since, first, rank))
                self.monkeypatch.setattr(own_waits.process_state, "recorder", recorder)
                waits = own.change()
                is_due = waits is not None and self.looks.is_due(own.window, waits)
                if is_due and own.window not in self.looked:
                    self.looked.append(own.window)
                    self.look(own.window, waits)

    def look(self, window, waits):
        steps = range(self.number - STEPS, self.number)
        of = [self.late(step) for step in steps]
        late = next((each for each in of if each and of.count(each) >= STEPS / 2), None)
        shares = dict.fromkeys(range(self.world), 0.0)
        for step, each in zip(steps, of, strict=True):
            if each:
                shares[each[0]] += self.late_s(step) / (STEPS * STEP_S)
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


def test_what_was_said_already_is_looked_for_more_and_more_seldom(monkeypatch):
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


def changes(monkeypatch, windows, step_s=1.0, of=lambda waited: [waited] * STEPS):
    """What a rank notices at the end of each 20 steps, in which it waits for ``of`` a number of seconds."""
    own, found, steps = OwnWaits(), [], [(1, 0.0, [])]
    for waited in windows:
        for seconds in of(waited):
            number = len(steps) + 1
            waits = [(WAIT, "", None, process_state.thread, 5.0, 5.0 + seconds)]
            other = [("compute", "", None, process_state.thread, 0.0, 9.0), (WAIT, "", None, -1, 0.0, 9.0)]
            steps.append((number, step_s * number, [*waits, *other]))
        running = (len(steps) + 1, step_s * (len(steps) + 1), [])
        recorder = SimpleNamespace(number=running[0], steps=lambda kept=(*steps, running): kept)
        monkeypatch.setattr(own_waits.process_state, "recorder", recorder)
        change = own.change()
        found.append(" ".join(name for name, is_so in change._asdict().items() if is_so) or "-")
        assert own.change() is None
    return found


@pytest.mark.parametrize(
    ("windows", "noticed"),
    [
        ([0.046875, 0.0625, 0.0625], ["-", "much risen", "much"]),
        ([0.125, 0.1796875, 0.1796875], ["much risen", "much risen", "much"]),
        ([0.125, 0.15, 0.0625, 0.02, 0.03, 0, 0], ["much risen", *["much"] * 2, *["ended", "-"] * 2]),
        ([0.5, 0.1, 0.1, 0.1, 0.5], ["much risen", "much", "much", "much", "much"]),
        ([0.5, 0.1, 0.1, 0.1, 0.1, 0.5], ["much risen", "much", "much", "much", "much", "much risen"]),
    ],
)
def test_waits_are_much_and_risen_from_5_percent_of_a_step_on_and_ended_below_half_of_that(
    monkeypatch, windows, noticed
):
    assert changes(monkeypatch, windows) == noticed


def test_what_is_just_as_much_as_the_bar_is_much_and_neither_risen_nor_ended(monkeypatch):
    assert changes(monkeypatch, [2.0, 2.0, 1.0, 0.9], 40.0) == ["much", "much", "-", "ended"]


def test_a_rank_waits_much_in_steps_of_which_it_waits_in_half(monkeypatch):
    def of(waited):
        return [0.0] * (STEPS // 2) + [waited] * (STEPS // 2)

    assert changes(monkeypatch, [0.5, 0.5], of=of) == ["much risen", "much"]
    assert changes(monkeypatch, [0.5], of=lambda waited: [0.0, *of(waited)[:-1]]) == ["-"]


@pytest.mark.parametrize(("kept", "looks"), [(1, False), (2, True)])
def test_one_step_that_is_remembered_is_no_reason_to_look(monkeypatch, kept, looks):
    steps = [(number, float(number), []) for number in (21, 22)][-kept:]
    monkeypatch.setattr(own_waits.process_state, "recorder", SimpleNamespace(number=22, steps=lambda: steps))
    assert (OwnWaits().change() is not None) is looks


def test_a_look_is_due_when_waits_have_risen_or_ended_or_the_pause_has():
    facts = (False, False, False), (True, False, False), (True, True, False), (False, False, True)
    quiet, much, risen, ended = (WaitChange(*each) for each in facts)
    looks = Looks(window=10, pause=4)
    named = looks._replace(told=(NamedLate(1, "node", "data", 0.2),))
    assert [looks.is_due(11, each) for each in (quiet, much, risen, ended)] == [False, False, True, False]
    assert [named.is_due(11, each) for each in (quiet, much, risen, ended)] == [False, False, True, True]
    assert [looks.is_due(window, much) for window in (13, 14)] == [False, True]
    assert [named.is_due(window, quiet) for window in (13, 14)] == [False, True]
    assert not looks.is_due(14, quiet)


@pytest.mark.parametrize(
    ("pause", "cause", "share", "said", "after"),
    [
        (2, "data", 0.25, 0, 4),
        (2, "data", 0.375, 0, 4),
        (2, "data", 0.3828125, 1, 4),
        (2, "user code", 0.0625, 1, 1),
        (64, "data", 0.25, 0, 64),
    ],
)
def test_a_line_says_a_new_cause_or_half_as_much_again(pause, cause, share, said, after):
    looks = Looks(10, pause, (NamedLate(1, "node", "data", 0.25),))
    late = Late(0.0, 1, "node", share, STEPS, cause, "")
    looks, lines = looks.then(12, WaitChange(True, False, False), late, {1: share})
    assert (len(lines), looks.pause) == (said, after)


@pytest.mark.parametrize(("share", "over"), [(0.024, True), (0.025, False)])
def test_a_named_rank_is_late_no_more_below_half_of_the_bar(share, over):
    looks = Looks(10, 2, (NamedLate(1, "node", "data", 0.25),))
    _, lines = looks.then(12, WaitChange(False, False, True), None, {1: share})
    assert bool(lines) is over


def late_of(seconds, whose=1, other=0.0):
    """Who is late where rank 0 waits so long in each step of a second, for data; and for another rank."""
    lines = [Line(0, step, "data", whose, each) for step, each in enumerate(seconds) if each]
    lines += [Line(0, step, "data", 2, other) for step in range(len(seconds))]
    lasted = {(rank, step): 1.0 for rank in (0, whose) for step in range(len(seconds))}
    found = lateness._late_rank(Ledger(lines, lasted, {0: "a", whose: "b"}))
    return found and found.rank


@pytest.mark.parametrize(
    ("seconds", "late"),
    [
        ([0.0625] * 20, 1),
        ([0.04] * 20, None),
        ([3 / 32] * 10 + [1 / 32] * 2 + [0.0] * 8, None),  # just 5% of all
        ([3 / 32] * 10 + [1 / 32] * 3 + [0.0] * 7, 1),
        ([0.2] * 9 + [0.05] * 2 + [0.0] * 9, None),  # more than 5% in fewer than half
        ([0.2] * 10 + [0.0] * 10, 1),
        ([0.5] * 8 + [0.0] * 12, None),
    ],
)
def test_a_rank_is_late_that_costs_more_than_5_percent_in_all_and_in_half_of_the_steps(seconds, late):
    assert late_of(seconds) == late


@pytest.mark.parametrize(("other", "late"), [(0.125, None), (0.1, 1)])
def test_a_cause_is_a_ranks_own_where_it_costs_more_than_three_times_what_another_one_costs(other, late):
    assert late_of([0.375] * 20, other=other) == late


def test_a_rank_alone_costs_nobody_anything():
    assert lateness._share(Ledger([], {(0, 1): 1.0}, {0: "a"}), 0, {1}) == 0.0
