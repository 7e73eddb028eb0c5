"""Verdicts by a clock that isn't real: nobody is accused in hours of slowness, and faults are told in time.

Three ranks run steps of host code, kernels, collectives of a device that no host waits in, words that hosts
wait for, and reads of a number (a host waits for its device). The clock is virtual, so that sleeps of 30 s
cost nothing; when a rank asks (`Backoff`) and what is judged (`diagnose`) is the package's own code. The same
faults with real processes, devices excepted, are in tests/ranks/test_watch.py and test_watch_random.py.
"""

import random
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest

from shardwright.observe.watch import watchdog
from shardwright.observe.watch.diagnosis import diagnose
from shardwright.observe.watch.findings import Answer, Fault, Findings, Launched, Note, Waits
from shardwright.observe.watch.flight_recorder import STANDS_S, InFlight
from shardwright.observe.watch.watchdog import Backoff
from shardwright.policy import WatchPolicy

POLICY = WatchPolicy()
WORLD = 3
RANKS = {"axis": (0, 1, 2), "words": (0, 1, 2), "pair": (0, 1), "barrier": (0, 1, 2)}
ON_DEVICE = ("axis", "pair")
LOOK_S = 0.25
NEVER = float("inf")


class Rank:
    """What one rank's host and device do, and when. program: ``(operation, seconds or key)``."""

    def __init__(self, number, program):
        self.number, self.program = number, program
        self.now = self.device_s = 0.0
        self.queue = []  # of the device: (log, number or None, launched, seconds)
        self.begun, self.came = {}, {}  # by (log, number)
        self.ended = {}
        self.keys = defaultdict(list)
        self.launched = defaultdict(list)
        self.parts = []  # of the host: (start, end, operation, log, number)
        self.place = self.device_place = 0

    def wants(self, log, key):
        self.keys[log].append(key)
        self.launched[log].append(self.now)
        return log, len(self.keys[log])

    def part(self, end, operation, of=("", 0)):
        self.parts.append((self.now, end, operation, *of))
        self.now = end

    def step_host(self, ended):
        """Do the next operation, if it can end; whether it did."""
        if self.place == len(self.program):
            return False
        operation, what = self.program[self.place]
        log = next((name for name in RANKS if name == operation), "")
        if log in ON_DEVICE:
            if self.number in RANKS[log]:
                self.queue.append((*self.wants(log, what), self.now, 0.001))
        elif log:
            if len(self.came) == 0 or self.came.get("place") != self.place:
                self.came = {"place": self.place, "of": self.wants(log, what)}
                self.begun[self.came["of"]] = self.now
            if self.came["of"] not in ended:
                return False
            self.part(ended[self.came["of"]], "waits" if log == "words" else "foreign", self.came["of"])
        elif operation == "kernel":
            self.queue.append(("", 0, self.now, what))
        elif operation == "reads":
            if self.device_place < len(self.queue):
                return False
            self.part(max(self.now, self.device_s), "reads")
        else:
            self.part(self.now + what, operation)
        self.place += 1
        return True

    def step_device(self, ended):
        if self.device_place == len(self.queue):
            return False
        log, number, launched, seconds = self.queue[self.device_place]
        begins = max(self.device_s, launched)
        if log:
            self.begun.setdefault((log, number), begins)
            if (log, number) not in ended:
                return False
            self.device_s = self.ended[log, number] = ended[log, number]
        else:
            self.device_s = begins + seconds
        self.device_place += 1
        return True

    def says(self, now):
        """What the rank says of itself at that time."""
        counts = {log: sum(at <= now for at in times) for log, times in self.launched.items()}
        pending = [
            (launched, log, number)
            for log, number, launched, _ in self.queue
            if log and launched <= now < self.ended.get((log, number), NEVER)
        ]
        logs = {}
        for log in RANKS:
            if self.number not in RANKS[log] or log == "barrier":
                continue
            waiting = [number for _, name, number in pending if name == log]
            on_device = log in ON_DEVICE
            begun = sum(1 for (name, _), at in self.begun.items() if name == log and at <= now)
            count = counts.get(log, 0)
            ended = min(waiting) - 1 if waiting else count
            device = (begun, ended) if on_device else (None, None)
            keys = tuple(self.keys[log][:count])
            logs[log] = Launched(RANKS[log], count, keys, *device, of_torch=log == "pair")
        start, operation, log, number = self.doing(now)
        answer = Answer(self.number, "forward", f"train.py:{self.number}", logs=logs, since_s=now - start)
        if operation == "foreign":
            return answer.__class__(**{**vars(answer), "foreign": "barrier", "foreign_s": now - start})
        waits = None
        if operation == "waits":
            waits = Waits(log, number, self.keys[log][number - 1], now - start)
        elif pending:
            moved = [*self.ended.values(), *(at for log in ON_DEVICE for at in self.launched[log])]
            since_s = now - max([start, *(at for at in moved if at <= now)])
            _, log, number = pending[0]
            if since_s >= STANDS_S:
                waits = Waits(log, number, self.keys[log][number - 1], since_s, in_flight=True)
        return answer.__class__(**{**vars(answer), "waits": waits})

    def doing(self, now):
        """Since when the host does what, and for which collective."""
        for start, end, operation, log, number in self.parts:
            if start <= now < end:
                return start, operation, log, number
        if self.place < len(self.program) and self.now <= now:
            operation = self.program[self.place][0]
            kind = {"words": "waits", "barrier": "foreign"}.get(operation, operation)
            return self.now, kind, *self.came.get("of", ("", 0))
        return now, "", "", 0


def ran(programs):
    """The ranks, once nothing goes on any more."""
    ranks = [Rank(number, program) for number, program in enumerate(programs)]
    ended, moves = {}, True
    while moves:
        moves = any([rank.step_host(ended) for rank in ranks] + [rank.step_device(ended) for rank in ranks])
        for log, of in RANKS.items():
            for number in range(1, 1 + max(len(rank.keys[log]) for rank in ranks)):
                times = [ranks[rank].begun.get((log, number)) for rank in of]
                keys = [ranks[rank].keys[log][number - 1 : number] for rank in of]
                alike = all(key == keys[0] for key in keys)
                if (log, number) not in ended and None not in times and alike:
                    ended[log, number], moves = max(times) + 0.001, True
    return ranks


def drawn(chance, slow):
    """One step of each rank: the same calls in the same order; now and then something takes up to 30 s."""
    calls = []
    for place in range(8):
        operation = chance.choice(("axis", "axis", "pair", "words", "reads", "kernel", "computes"))
        calls.append((operation, f"{operation} {place}"))
    calls += [("axis", "axis last"), ("reads", ""), ("barrier", "barrier"), ("words", "words last")]
    late = [(chance.randrange(WORLD), chance.randrange(len(calls))) for _ in range(2 if slow else 0)]

    def program(rank):
        found = []
        for place, (operation, key) in enumerate(calls):
            found.append(("computes", chance.random() * 0.02))
            if (rank, place) in late:
                found.append((chance.choice(("computes", "kernel")), chance.uniform(1.0, 30.0)))
            took_s = chance.random() * 0.05
            found.append((operation, took_s if operation in ("kernel", "computes") else key))
        return found

    return [program(rank) for rank in range(WORLD)]


def verdicts(ranks, chance, until_s, clock, notes=(), ended=(frozenset(), NEVER)):
    """Each diagnosis of a rank that asks, with its time and what is logged of it."""
    asking = [Backoff(POLICY.suspect_s) for _ in ranks]
    waited = [None] * WORLD
    now = 0.0
    while now < until_s:
        now += LOOK_S
        clock.now = now
        for rank in ranks:
            if rank.number in ended[0] and now >= ended[1]:
                continue
            said = rank.says(now)
            waits = said.waits or (Waits("", 0, "", said.foreign_s) if said.foreign else None)
            key = waits and (waits.log, waits.number, round(now - waits.since_s, 6))
            if key is None or waited[rank.number] is None or waited[rank.number][0] != key:
                waited[rank.number] = key and (key, InFlight("", 0, "", now - waits.since_s))
            if not asking[rank.number].is_due(waited[rank.number] and waited[rank.number][1]):
                continue
            took_s = chance.uniform(0.02, POLICY.answer_s)
            gone = ended[0] if now >= ended[1] else frozenset()
            there = [rank for rank in ranks if rank.number not in gone]
            answers = {rank.number: rank.says(now + chance.random() * took_s) for rank in there}
            told = [note for note in notes if now >= note.at_s]
            found = Findings(WORLD, answers, told, gone if not told else frozenset(), took_s=took_s)
            diagnosis = diagnose(found, POLICY)
            yield now + took_s, diagnosis, asking[rank.number].back_off(diagnosis, found)


@pytest.fixture
def clock(monkeypatch):
    virtual = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watchdog, "clock", SimpleNamespace(monotonic=lambda: virtual.now))
    return virtual


def test_nobody_is_accused_in_1000_steps_in_which_ranks_and_devices_take_up_to_30_s(clock):
    chance, asked, logged = random.Random(0), 0, []
    for step in range(1000):
        ranks = ran(drawn(chance, slow=step % 5 == 0))
        assert all(rank.place == len(rank.program) for rank in ranks)
        for _, diagnosis, line in verdicts(ranks, chance, max(rank.now for rank in ranks), clock):
            assert diagnosis.fault is Fault.SLOW, (step, diagnosis)
            asked += 1
            logged += [line] if line else []
    assert asked > 300  # it was looked at, while they were slow
    waited_s = [float(re.search(r"has (?:waited|been) ([0-9.]+) s", line)[1]) for line in logged]
    assert waited_s and min(waited_s) >= POLICY.suspect_s  # no line of a wait that has ended meanwhile


def left_out(program, chance):
    last = len(program) - 1  # without that its program would just end
    places = [place for place in range(last) if program[place][0] in ("axis", "words")]
    del program[chance.choice(places)]


def alone_in_a_barrier(program, chance):
    program.insert(chance.randrange(len(program) - 2), ("barrier", "barrier"))


@pytest.mark.parametrize("fault", ["left out", "turned round", "barrier", "killed", "raised"])
def test_a_fault_is_told_within_5_s_of_the_moment_from_which_nothing_goes_on(clock, fault):
    chance = random.Random(1)
    for _ in range(60):
        programs, culprit = drawn(chance, slow=False), chance.randrange(2)
        notes, gone = [], (frozenset(), NEVER)
        if fault == "turned round":
            place = chance.randrange(len(programs[0]) - 4)
            for rank, program in enumerate(programs):
                both = [("axis", "turned axis"), ("pair", "turned pair")]
                program[place:place] = both[::-1] if rank == culprit else both
        elif fault in ("left out", "barrier"):
            {"left out": left_out, "barrier": alone_in_a_barrier}[fault](programs[culprit], chance)
        else:
            del programs[culprit][chance.randrange(len(programs[culprit]) - 3) :]
        ranks = ran(programs)
        stuck_s = max(max(rank.now, rank.device_s) for rank in ranks)
        if fault == "killed":
            gone = frozenset({culprit}), ranks[culprit].now
        if fault == "raised":
            notes = [Note(culprit, "ValueError: bad", "train.py:1", ranks[culprit].now)]
            gone = frozenset({culprit}), ranks[culprit].now
        wanted = {"killed": Fault.LOST, "raised": Fault.FAILED}.get(fault, Fault.DIVERGED)
        said = verdicts(ranks, chance, stuck_s + 8, clock, notes, gone)
        told = [(at, d) for at, d, _ in said if d.is_error]
        assert told, (fault, [rank.doing(stuck_s + 8) for rank in ranks])
        at, diagnosis = told[0]
        assert diagnosis.fault is wanted, diagnosis
        assert culprit in diagnosis.ranks, diagnosis
        assert at - stuck_s < 5.0, (at, stuck_s, diagnosis)
