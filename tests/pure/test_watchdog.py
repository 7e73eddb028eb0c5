"""When a waiting rank asks the others, what it then says to whom, and when it says nothing."""

import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardwright import clock
from shardwright.errors import CommError, Diverged, RankFailed, RankLost
from shardwright.observe.ledger import lateness
from shardwright.observe.steps import recording
from shardwright.observe.steps.rings import Ring
from shardwright.observe.watch import delivery, lifecycle, watchdog
from shardwright.observe.watch.findings import Answer, Diagnosis, Fault, Findings, Waits
from shardwright.observe.watch.waits import WaitChange
from shardwright.observe.watch.watchdog import Backoff, Watch
from shardwright.policy import WatchPolicy
from shardwright.transport.attempt import this_attempt
from shardwright.transport.jobstore import job_store
from shardwright.transport.process import Launch, LaunchLog, Wait, process_state
from shardwright.transport.recorder import LINE
from tests.storm.few import Few

SLOW = Diagnosis(Fault.SLOW, (), "rank 0 waits", "Wait.")


# ---- when it asks, and what it writes into the log


class Asking:
    """A rank that waits since the second 0, and whose watch looks all the time; the clock is simulated."""

    def __init__(self, monkeypatch, suspect_s):
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        self.now, self.backoff = 0.0, Backoff(suspect_s)
        self.wait = Wait(None, Launch(1, "gather", "forward", 1), 0.0)  # type: ignore[arg-type]
        self.asked, self.lines = [], []

    def look(self, until_s, found=None):
        while self.now < until_s:
            if self.backoff.is_due(self.wait):
                self.asked.append(self.now)
                waits = Waits("cpu", 1, "gather", self.now - self.wait.since_s)
                heard = found or Findings(2, {0: Answer(0, "", "", waits), 1: Answer(1, "", "")})
                line = self.backoff.back_off(SLOW, heard, 30.0)
                assert line in ("", "rank 0 waits. Wait.")
                self.lines += [self.now] * bool(line)
            self.now += 1 / 64
        return self.asked


@pytest.mark.parametrize(
    ("suspect_s", "asked", "lines"),
    [
        (0.5, [0.5, 1, 2, 4, 8, 13, 18, 23, 28], [4, 8, 18, 38, 78, 138, 198]),
        (1.0, [1, 2, 4, 8, 13, 18, 23, 28, 33], [8, 18, 38, 78, 138, 198]),
        (5.0, [5, 10, 15, 20, 25, 30, 35, 40, 45], [25, 50, 100, 160]),
    ],
)
def test_who_waits_asks_again_and_again_but_the_log_has_few_lines(suspect_s, asked, lines, monkeypatch):
    asking = Asking(monkeypatch, suspect_s)
    assert asking.look(200.0)[:9] == asked and asking.lines == lines
    assert not asking.backoff.is_due(None)
    asking.wait = asking.wait._replace(since_s=asking.now)
    assert asking.look(200.25 + suspect_s)[-1] == 200.0 + suspect_s, "each wait is one of its own"


@pytest.mark.parametrize(("silent_s", "next_s"), [(0.7, 13.0), (28.0, 9.6), (29.3, 8.3), (90.0, 8.3)])
def test_who_has_not_answered_for_nearly_too_long_is_asked_again_just_then(silent_s, next_s, monkeypatch):
    asking = Asking(monkeypatch, 1.0)
    asking.look(7.0)
    asked = asking.look(14.0, Findings(2, {}, silent={0: 0.1, 1: silent_s}, took_s=0.7))
    assert asked[3:5] == [8.0, pytest.approx(next_s, abs=1 / 64)]
    assert bool(asking.lines) == (silent_s > 5.0), "of who hasn't answered the log has a line, too"


def test_a_rank_that_does_not_wait_is_no_reason_for_a_line_and_one_in_a_call_of_its_own_is(monkeypatch):
    for foreign_s in (0.0, 0.6):
        asking = Asking(monkeypatch, 0.1)
        asking.look(1.0, Findings(1, {0: Answer(0, "", "", foreign_s=foreign_s)}))
        assert bool(asking.lines) == (foreign_s > 0.5)


def test_what_a_transport_meets_is_asked_about_at_once_and_three_times(monkeypatch):
    asking = Asking(monkeypatch, 1.0)
    asking.now, asking.wait, backoff = 0.5, None, asking.backoff
    backoff.not_before_s = 99.0  # another rank asks
    backoff.heard.set()
    backoff.ask_now("a connection is closed")
    assert not backoff.heard.is_set()
    found = Findings(1, {})
    while backoff.error:
        if backoff.is_due(None):
            asking.asked.append(asking.now)
            assert backoff.heard.is_set() is False and backoff.back_off(SLOW, found) == ""
        asking.now += 1 / 64
    assert asking.asked == pytest.approx([0.5, 0.8, 1.1], abs=1 / 32)
    assert backoff.heard.is_set() and not backoff.is_due(None)


# ---- jobs of few ranks


class Watched(Few):
    """Each rank watches and does its part, given a log of its launches, from the second 2 on, when all have
    met. said: of each rank what it raised ("": nothing), and when. done: whose part ended without an error.
    lines: what watches wrote into logs."""

    def __init__(self, *parts, hosts="abc", **policy):
        self.policy, self.said, self.lines, self.done = WatchPolicy(**policy), {}, [], set()
        super().__init__(*[partial(self._take, part) for part in parts], hosts=hosts)

    def _take(self, part):
        rank = dist.get_rank()
        if part is hello:
            this_attempt()
        elif part is not comes_never:
            lifecycle.set_watch(self.policy)
            lifecycle.keep_watch()
        sleeps(None, 2.0)
        error: object = ""
        try:
            part(LaunchLog(range(dist.get_world_size()), "cpu"))
            self.done.add(rank)
            process_state.raise_diagnosis()
        except CommError as raised:
            error = raised
        self.said[rank] = error, clock.monotonic()
        sleeps(None, clock.monotonic() + 0.1)
        if error and process_state.diagnosis is not None:  # all is said
            assert process_state.delivered and not watch()._thread.is_alive()

    def live(self, *stand_ins):
        def warn(text, *values):
            self.lines.append((self.sim.now, dist.get_rank(), text % values))

        def failed(*_):
            raise

        logger = SimpleNamespace(warning=warn, exception=failed)
        limit = (lifecycle, "timeout_of", lambda group: timedelta(minutes=10))
        self.run((watchdog, "logger", logger), limit, *stand_ins)
        for outcome in self.outcomes.values():
            if isinstance(outcome, Exception) and "bad batch" not in str(outcome):
                raise outcome
        return self


def watch():
    return lifecycle._lifecycle.watch


def timed(call, *arguments):
    began = clock.monotonic()
    return call(*arguments), clock.monotonic() - began


def waits(log, key="gather", since_s=2.0, until_s=60.0, closed_s=1e9, closed=2):
    """Waits for the others; from ``closed_s`` on the connection to one of them is closed."""
    sleeps(log, since_s)
    with log.waiting(log.launch(key)):
        while clock.monotonic() < until_s:
            process_state.raise_diagnosis()
            if clock.monotonic() > closed_s:
                log.ended.add(closed)
                raise CommError("a connection is closed")
            clock.sleep(0.02)


def sleeps(log, until_s=60.0):
    clock.sleep(max(0.0, until_s - clock.monotonic()))


def raises(log):
    raise ValueError("bad batch")


def waits_for_one(log):
    waits(LaunchLog([0, 1]))


hello, comes_never = partial(sleeps), partial(sleeps)  # who has begun, and doesn't watch; who doesn't begin
scatters = partial(waits, key="scatter")


def killed(job):
    job.ranks[2].end("killed")


def dark(job):
    job.ranks[2].end("dark", is_dark=True)
    job.network.part("c", {"a", "b"})


def stopped(job, rank=2, seconds=40.0):
    job.ranks[rank].stop(seconds)


def store_ends(job):
    job.job.agent.end("ended")


def store_is_silent(job):
    job.store.silent_until = 1e9


def first_holds_store(job):
    job.store.process = job.ranks[0]


def lost(after_s, before_s, text="rank 2 is lost"):
    return RankLost, text, after_s, before_s


NONE, APART = (str, "", 0, 99), (Diverged, "ranks are in different collectives: as number 1", 3.0, 4.5)
FAILED, RAISED = "rank 2 raised ValueError: bad batch", "rank 0 raised ValueError: bad batch"
AWAY = lost(43.0, 61.0, "rank 2 was itself away for 40 s (stopped, suspended, or held by native code)")
GONE = "so the process that holds it (rank 0's, or the launcher's) has ended: Connection was likely"
ENDED = "lost: rank 2 is lost: the process ended without a word\n"
EARLY = "store at agent:29500 has not answered for 30 s, since before the ranks had met"
breaks, late = partial(waits, closed_s=4.0), partial(waits, since_s=20.0)
closed, silent = (CommError, "is closed", 4, 8), (2.1, store_is_silent)
# fmt: off
FAULTS = {
    "one sleeps": ([waits, waits, sleeps], "abc", [], [NONE] * 3),
    "one is killed": ([waits, waits, sleeps], "aaa", [(3.5, killed)], [lost(3.5, 5.0)] * 2),
    "one is killed and nobody waits": ([sleeps] * 3, "aaa", [(3.5, killed)], [NONE, NONE]),
    "one raises": ([waits, waits, raises], "abc", [], [(RankFailed, FAILED, 3, 5)] * 2),
    "one does something else": ([waits, waits, scatters], "abc", [], [APART] * 3),
    "a host goes dark": ([waits, waits, sleeps], "abc", [(3.5, dark)], [lost(33, 36)] * 2),
    "one is stopped": ([waits, waits, sleeps], "abc", [(3, stopped)], [lost(33, 36)] * 2 + [AWAY]),
    "the store ends": (
        [late, waits, sleeps], "abc", [(2.2, store_ends)], [lost(21, 21.4, GONE), lost(3, 3.4, GONE), NONE]),
    "who holds the store raises": (
        [raises, waits, late], "abc", [(0, first_holds_store)],
        [(str, "", 0, 0), (RankFailed, RAISED, 3, 5), (RankFailed, RAISED, 20, 22)]),
    "a connection closes": ([breaks, waits, sleeps], "abc", [(3.9, killed)], [lost(4, 5)] * 2),
    "a connection closes, and all are there": (
        [partial(breaks, closed=0), sleeps, sleeps], "abc", [], [closed, NONE, NONE]),
    "one has never begun": ([waits, waits, comes_never], "abc", [], [NONE] * 3),
    "one has begun and doesn't watch": ([waits, waits, hello], "abc", [], [lost(32, 36)] * 2),
    "one who was there before is in no transport of who waits": (
        [waits_for_one, sleeps, hello], "abc", [], [NONE] * 3),
    "the store is silent": ([waits, waits, sleeps], "abc", [silent], [NONE] * 3),
    "the store is silent and one does something else": (
        [waits, waits, scatters], "abc", [silent], [APART] * 3),
    "the store is silent and a host goes dark": (
        [waits, sleeps, sleeps], "abc", [silent, (2.5, dark)], [lost(32, 36), lost(60, 61)]),
    "the store is silent before all have met": (
        [waits, sleeps, comes_never], "abc", [silent], [lost(32, 40, EARLY), NONE, NONE]),
    "one answers once, and late": (
        [waits, sleeps, sleeps], "abc", [(2.9, partial(stopped, seconds=1.3)), (4.3, stopped)],
        [lost(34.4, 37)]),
    "who asks was away as long as the other": (
        [waits, sleeps, sleeps], "abc", [(3, stopped), (10, partial(stopped, rank=0, seconds=27))],
        [NONE] * 3),
    "who asks was away for a moment": (
        [waits, sleeps, sleeps], "abc", [(3, stopped), (10, partial(stopped, rank=0, seconds=12))],
        [lost(33, 36), lost(60, 61), AWAY]),
}
# fmt: on


def lived(job, *events):
    for at_s, call in events:
        job.sim.at(at_s, partial(call, job))
    return job.live()


def first_is_done(job, *events):
    assert 0 in lived(job, *events).done
    return job


@pytest.mark.parametrize(("parts", "hosts", "events", "told"), FAULTS.values(), ids=FAULTS)
def test_who_waits_hears_what_is_wrong_in_time_and_who_is_well_is_not_accused(parts, hosts, events, told):
    job = lived(Watched(*parts, hosts=hosts), *events)
    assert job.lines or parts[0] is not waits or job.said[0][1] < 20, "the log has said who waits for whom"
    assert not any("/ring/" in key for key in job.store.keys)
    for rank, (kind, text, after_s, before_s) in enumerate(told):
        error, at_s = job.said.get(rank, ("", 0))
        told = isinstance(error, kind) and text in str(error) and after_s <= at_s <= before_s
        assert told, (rank, error, at_s)


def test_of_ranks_that_wait_one_writes_a_line_and_rank_0_what_others_have_for_it(capsys):
    def says(log):
        for until_s, line in ((2.0, "one"), (2.0, "two"), (5.0, "three"), (5.5, "four")):
            sleeps(log, until_s)
            watch().exchange.say(line)
        sleeps(log)

    def waits_and_is_asked(log):
        own = watch()
        job.sim.at(2.5, lambda: setattr(own._requests, "_asked", True))  # by SIGUSR1
        waits(log, until_s=14.0)

    parts = partial(sleeps, until_s=20.0), waits_and_is_asked, partial(waits, since_s=4.0, until_s=14.0), says
    job = Watched(*parts, hosts="abcd")
    lived(job)
    *said, (at_s, rank, line) = job.lines
    assert [each[1:] for each in said] == [(0, "one"), (0, "two"), (0, "three"), (0, "four")]
    assert rank == 1 and line.startswith("rank 1: slow: ") and 7.0 < at_s < 14.0
    assert capsys.readouterr().err.count("waits in gather") == 1


def test_who_waits_much_looks_who_is_late_unless_another_does_and_all_hear_of_it():
    asked, looked, noted, late = [], [], [], lateness.Late(0.0, 2, "c", 0.1, 20, "data", "")

    def waits_much(log):
        own = watch()
        # At a time: the window, whether this rank waits much, and whether that has risen or ended.
        changes = {5: (1, False, False, False), 6: (2, True, True, False), 15: (5, False, False, True)}
        if own.rank == 0:
            changes |= {8: (3, True, False, False), 12: (4, True, False, False)}

        def change():
            own._own_waits.window, *now = changes.pop(int(clock.monotonic()), (0,))
            return WaitChange(*now) if now else None

        own._own_waits = SimpleNamespace(window=0, change=change)
        sleeps(log, 19.0)
        if own.rank == 0:
            assert len(own.exchange.rings(1, 0.7)) == 3
            noted.extend(own.exchange.late())

    def ring(last):
        asked.append(last)
        return Ring(dist.get_rank(), 3, "", {}, [], [], [])

    def judged(rings, world):
        looked.append((len(rings), world, round(clock.monotonic())))
        return (late, {2: 0.1}) if len(looked) < 3 else (None, {2: 0.0})

    job = Watched(waits_much, waits_much, partial(sleeps, until_s=20.0))
    job.live((lateness, "judged", judged), (recording, "ring", ring))
    assert looked == [(3, 3, 6), (3, 3, 8), (3, 3, 15)] and set(asked) == {22, 2}
    assert noted == [late.to_json()] * 2
    assert [line[1:] for line in job.lines] == [
        (0, late.text()),
        (0, "rank 2 on c no longer costs the others much: data has ended"),
    ]


@pytest.mark.parametrize(
    ("event", "other", "told"),
    [
        (None, sleeps, ""),
        (killed, sleeps, f"{ENDED}Look for what ended rank 2"),
        (killed, partial(waits, until_s=9.0), f"{ENDED}  rank "),
        (killed, "last word", ""),
        (None, raises, "failed: rank 2 raised ValueError: bad batch"),
        (None, partial(sleeps, until_s=3.0), ""),
        (store_is_silent, sleeps, ""),
    ],
    ids=["all are there", "killed", "published", "told to end", "raised", "has ended", "silent"],
)
def test_a_rank_that_is_told_to_end_says_who_failed_or_is_lost_by_then_if_one_is(event, other, told, capsys):
    def ends(log):
        sleeps(log, 6.0)
        took_s = 0.25 if event is store_is_silent else 0.0
        assert timed(watch().last_word)[1] == pytest.approx(took_s, abs=0.02)
        assert capsys.readouterr().err.startswith(f"rank 0, ended by SIGTERM: {told}" if told else "")

    def is_told_too(log):
        watch().last_word()
        sleeps(log)

    parts = [is_told_too if other == "last word" else sleeps if event is killed else other, other]
    at_s = 5.9 if event is store_is_silent else 3.5
    waiting = [other, sleeps] if getattr(other, "func", None) is waits else [sleeps, parts[0]]
    job = first_is_done(Watched(ends, *waiting, hosts="aaa"), *[(at_s, event)] if event else ())
    assert bool(told) == any(key.endswith("/diagnosis") for key in job.store.keys)


def test_what_a_transport_met_is_raised_itself_within_5_s_where_nothing_explains_it():
    met = CommError("a connection is closed")

    def part(log):
        sleeps(log, 5.0)
        result, took_s = timed(watch().explain, met)
        assert result is met and took_s == pytest.approx(4.5, abs=0.01)
        own = watch()
        assert timed(own.stop)[1] == pytest.approx(2.0)  # it asks still
        sleeps(log, 30.0)
        assert timed(own.explain, met) == (met, 0.0) and process_state.explain is process_state.look is None

    first_is_done(Watched(part, sleeps, sleeps, answer_s=9.0), (3.0, stopped))


def test_a_watch_that_is_stopped_ends_at_once_and_a_policy_is_followed_from_then_on():
    def part(log):
        own, closed, ended = watch(), [], []
        own._requests.close = lambda: closed.append("signals")
        own.reach.close = lambda close=own.reach.close: closed.append("reach") or close()
        lifecycle.set_watch(WatchPolicy(suspect_s=3.0))
        assert own._backoff.suspect_s == 3.0 and own.policy.suspect_s == 3.0 and not closed
        lifecycle.set_watch(WatchPolicy(signal=False))
        assert closed == ["signals"] and own._thread.is_alive() and own._thread.daemon
        assert timed(own.stop) == (None, 0.0) and not own._thread.is_alive() and own._backoff.heard.is_set()
        assert closed == ["signals", "signals", "reach"]
        Watch(WatchPolicy(), 0, this_attempt(), job_store(), int).stop()  # has never begun
        stop = lambda: ended.append(timed(inside.stop))  # noqa: E731
        inside = Watch(WatchPolicy(), 0, this_attempt(), job_store(), stop)
        inside.start()
        sleeps(log, 3.0)
        assert ended == [(None, 0.0)] and not inside._thread.is_alive()

    first_is_done(Watched(part, sleeps, sleeps))


def test_a_rank_that_looks_hears_at_once_of_what_was_found_unless_its_watch_has_ended():
    def part(log):
        watch().exchange.publish(Diagnosis(Fault.LOST, (2,), "", ""), "rank 2 is lost")
        timed(process_state.look)
        assert str(process_state.diagnosis) == "rank 2 is lost"

    def ended(log):
        own = watch()
        own.look()
        assert process_state.diagnosis is None
        own.stop()
        sleeps(log, 9.0)
        own.look()
        assert process_state.diagnosis is None

    assert 1 in first_is_done(Watched(part, ended, sleeps)).done


def test_a_rank_that_looks_waits_for_a_silent_store_no_longer_than_a_second():
    def part(log):
        sleeps(log, 5.0)
        assert timed(process_state.look) == (None, pytest.approx(1.0, abs=0.05))

    first_is_done(Watched(part, sleeps, sleeps), (4.95, store_is_silent))


@pytest.mark.parametrize(
    ("back_s", "fault"), [(50.0, Fault.LOST), (50.0, Fault.DIVERGED), (70.0, Fault.FAILED)]
)
def test_who_was_away_says_so_of_what_was_found_within_a_minute_and_might_come_of_that(back_s, fault):
    def part(log):
        sleeps(log, 45.0 + back_s)
        watch().exchange.publish(Diagnosis(fault, (1,), "", ""), "rank 1 is at fault")
        sleeps(log, clock.monotonic() + 5.0)
        assert ("was itself away" in str(process_state.diagnosis)) == (back_s < 60 and fault is Fault.LOST)

    first_is_done(Watched(part, sleeps, sleeps), (5.0, partial(stopped, rank=0)))


def test_each_rank_joins_once_all_can_meet_and_while_all_is_well_a_look_is_one_call_and_a_line_is_seen():
    joined, calls = [], []

    def part(log):
        written, write = [], process_state.recorder.write
        process_state.recorder.write = lambda record: written.append(record[0]) or write(record)
        for until_s in (5.0, 15.0):
            sleeps(log, until_s)
            calls.append(job.store.calls)
        assert written.count(LINE) >= 4 * 10

    job = Watched(part, sleeps, partial(sleeps, until_s=30.0))
    job.live((lifecycle, "_hook_exceptions", lambda: joined.append((dist.get_rank(), clock.monotonic()))))
    assert sorted(rank for rank, _ in joined) == [0, 1, 2] and max(when_s for _, when_s in joined) < 1.17
    assert calls[1] - calls[0] <= 10 * 4 * (3 + 2)  # rank 0 looks for late ranks and lines, too


@pytest.mark.parametrize(("rank", "pause_s"), [(0, 0.05), (1, 8.0)])
def test_until_ranks_have_met_the_store_is_asked_no_more_often_than_it_can_answer(rank, pause_s):
    pauses = []
    wake = SimpleNamespace(wait=pauses.append, clear=int)
    stop = SimpleNamespace(is_set=lambda: bool(pauses))
    reach = SimpleNamespace(world=10_000, has_met=False)
    Watch._run(SimpleNamespace(rank=rank, reach=reach, _wake=wake, _stop=stop), int)  # type: ignore[arg-type]
    assert pauses == [pause_s]


@pytest.mark.parametrize("world", [64, 65])
def test_of_up_to_64_ranks_all_ask_and_of_more_one_for_all(world, monkeypatch):
    monkeypatch.setattr(clock, "monotonic", lambda: 100.0)
    many, asked, lines = world > 64, [], []
    for number in (8, 0):
        request = lambda number=number, **after: asked.append(after) or number  # noqa: E731
        watch = SimpleNamespace(
            reach=SimpleNamespace(world=world), exchange=SimpleNamespace(request=request),
            policy=WatchPolicy(),
            _known=SimpleNamespace(answered=7), _backoff=Backoff(1.0), _look_s=1.0, _pause_s=0.5, rank=3,
            _answer=lambda: asked.append("answers"), _wake=threading.Event(),
            _thread=threading.current_thread(), _diagnosed=lambda found: (SLOW, ""),
        )  # fmt: skip
        assert Watch._turn(watch) == number
        assert watch._pause_s == (0.5 if not many else 0.25 if number else 1.0)
    assert asked == ([{"after": 7}, {"after": 7}, "answers"] if many else [{}, {}])
    for error, next_s in (("", 106.7), ("closed", 102.0)):
        watch._backoff.error = error
        Watch._leave_it(watch)
        assert watch._backoff.not_before_s == pytest.approx(next_s if many else 0.0)
    assert watch._pause_s == (1.0 if many else 0.5)
    watch._backoff.heard = SimpleNamespace(clear=int, wait=lines.append)
    log = LaunchLog([0, 3])
    for ended in (set(), {1}):
        log.ended, watch._wake = ended, threading.Event()
        monkeypatch.setattr(process_state, "_logs", [lambda: log])
        assert str(Watch.explain(watch, CommError("closed"))) == "closed"
        assert watch._wake.is_set() == (bool(ended) or not many)
    assert lines == [4.5 + 2 * 0.75] * 2, "two looks of the others"
    watch._backoff = SimpleNamespace(back_off=lambda *_: "one waits")
    monkeypatch.setattr(watchdog, "logger", SimpleNamespace(warning=lambda *said: lines.append(said)))
    waits = Waits("cpu", 1, "gather", 9.0)
    Watch._judge(watch, Findings(world, {2: Answer(2, "", "", waits), 3: Answer(3, "", "", waits)}))
    assert len(lines) == 2 + many


def test_of_many_ranks_that_wait_one_asks_and_another_once_that_has_ended():
    job = Watched(waits, waits, partial(sleeps, until_s=70.0), waits, hosts="aaaa")
    numbers = []

    def count():
        numbers.extend(int(value.split()[0]) for key, value in job.store.keys.items() if "/latest" in key)

    job.sim.at(40.0, count)
    job.sim.at(40.5, partial(killed, job))
    job.live((watchdog, "_ALL_ASK", 2))
    assert numbers[0] <= 14
    assert [type(job.said[rank][0]) for rank in (0, 1, 3)] == [RankLost] * 3


def test_a_few_seconds_without_a_look_are_no_time_in_which_others_were_silent():
    job = Watched(waits, sleeps, sleeps, lost_s=4.0)
    lived(job, (3, stopped), (5, partial(stopped, rank=0, seconds=7)))
    error, at_s = job.said[0]
    assert "rank 0 was itself away for 7 s" in str(error) and 16.0 < at_s < 18.0


class Link:
    """Stands in for a process group of a transport."""

    def __init__(self, name):
        self.group_name = name


def test_whose_connection_is_closed_is_lost_and_all_groups_of_the_transports_are_closed_then():
    probed, closed, links = set(), [], [Link("first"), Link("second")]

    def is_closed(group, place):
        probed.add((group.group_name, place))
        return place == 2 and clock.monotonic() > 4.5

    def close(link):
        closed.append(link.group_name)

    def travels(log):
        for link in links:
            log.travels_on(link)
        LaunchLog([0, 1])  # of another transport
        waits(log)

    job = Watched(travels, sleeps, sleeps)
    job.sim.at(2.5, partial(killed, job))
    job.live((watchdog, "is_closed", is_closed), (delivery, "close", close))
    error, at_s = job.said[0]
    assert "rank 2 is lost" in str(error) and at_s < 7.0
    assert probed == {("first", 2)} and sorted(closed) == ["first", "second"]
    assert {key[-1] for key in job.store.keys if "/heard/" in key} == {"0", "1"}


@pytest.mark.parametrize(("does", "stalled"), [(sleeps, {1}), (scatters, set())])
def test_only_who_does_nothing_is_interrupted_where_it_stands(does, stalled):
    seen = []

    def see_it_raised(own, stalled, text):
        seen.append((own._rank, stalled))

    job = Watched(waits, does, stall_s=10.0, hosts="ab")
    job.live((delivery.Delivery, "see_it_raised", see_it_raised))
    assert sorted(seen) == [(rank, rank in stalled) for rank in (0, 1)]
