"""The ledger of waits on simulated ranks, whose causes are known: each is booked, to its rank, and first."""

import random
from collections import defaultdict

import pytest

from shardwright.observe.ledger.causes import CAUSES, NOBODY, REMEDIES, REST
from shardwright.observe.ledger.ledger import Ledger, Line, _holdups, _usual_rates, booked, table
from shardwright.observe.ledger.slow_links import _longer, slow_links
from shardwright.observe.steps.rings import CoreUse, Record, RecordedStep, Ring

BLOCKS, MS = 4, 1e-3
TRANSPORT = "cpu1 of all"
USUAL = {"data": 0.5, "compute": 4.0, "runtime": 0.1, "optimizer": 1.0, "link": 0.4}


def program():
    """One step as (what, argument), alike on all ranks: gathers one block ahead, reductions at the end."""
    ops = [("data", ""), ("issue", "g0"), ("begin", "forward")]
    for block in range(BLOCKS):
        ops += [("wait", f"g{block}")]
        ops += [("issue", f"g{block + 1}")] if block + 1 < BLOCKS else []
        ops += [("compute", f"blocks.{block}")]
    ops += [("loss", ""), ("begin", "backward")]
    for block in reversed(range(BLOCKS)):
        ops += [("compute", f"blocks.{block}"), ("issue", f"r{block}")]
    return [*ops, *(("wait", f"r{block}") for block in reversed(range(BLOCKS))), ("optimizer", "")]


class Job:
    """Ranks that run ``program`` again and again. extra: more milliseconds by (rank, step, what)."""

    def __init__(self, world, steps, extra, seed=0):
        self.world, self.extra, self.chance = world, extra, random.Random(seed)
        self.now = [1.0 + self.chance.random() * MS for _ in range(world)]
        self.records = [[] for _ in range(world)]
        self.steps = [[] for _ in range(world)]
        self.number = 0
        self.gathered = {}
        for step in range(1, steps + 1):
            begun = list(self.now)
            issued, numbers = defaultdict(dict), {}
            for what, which in program():
                for rank in range(world):
                    if what == "issue":
                        if which not in numbers:
                            self.number += 1
                            numbers[which] = self.number
                        issued[which][rank] = self.spend(rank, step, "runtime", which)
                for rank in range(world):
                    self.take(rank, step, what, which, issued, numbers)
            for rank in range(world):
                self.steps[rank].append(RecordedStep(step, begun[rank], self.now[rank]))

    def more(self, rank, step, what):
        return self.extra.get((rank, step, what), 0.0)

    def record(self, rank, step, kind, action, start, end, **fields):
        groups = fields.pop("groups", ())
        times = (fields.pop("issue", start), start, end)
        self.records[rank].append(Record(kind, action, groups, step, "forward", 1000, *times, **fields))

    def spend(self, rank, step, what, which=""):
        """Time of a rank in something that it does by itself; returns when that ended."""
        start = self.now[rank]
        usual = USUAL.get(what, 0.0) * self.chance.uniform(0.97, 1.03)
        self.now[rank] = start + (usual + (0 if what == "runtime" else self.more(rank, step, what))) * MS
        known = {"data": ("span", "data"), "optimizer": ("span", "optimizer"), "runtime": (what, "E")}
        kind, action = known.get(what, (what, ""))
        if what in ("checkpoint", "user"):
            kind, action = ("span", "save") if what == "checkpoint" else ("outside", "user")
        if self.now[rank] > start:
            groups = (which,) if what == "compute" else ()
            self.record(rank, step, kind, action, start, self.now[rank], groups=groups)
        return self.now[rank]

    def take(self, rank, step, what, which, issued, numbers):
        if what == "compute":
            start = self.now[rank]
            self.spend(rank, step, what, which)
            collected = self.more(rank, step, "gc") if which == "blocks.1" else 0.0
            if collected:
                middle = (start + self.now[rank]) / 2
                self.now[rank] += collected * MS
                self.records[rank][-1] = self.records[rank][-1]._replace(end=self.now[rank])
                self.record(rank, step, "gc", "", middle, middle + collected * MS)
        elif what == "wait":
            start = self.now[rank]
            took = {peer: self.link_s(peer, rank, step) for peer in range(self.world) if peer != rank}
            came = [(max(issued[which][peer], issued[which][rank]) + took[peer], peer) for peer in took]
            (before, _), (end, last) = sorted([(start, rank), *came])[-2:]
            end, link = max(end, start), (last, rank) if last != rank else ()
            longest, *others = sorted(took, key=took.__getitem__, reverse=True)
            alone = not others or took[longest] > 2 * took[others[0]]
            ends = (longest, rank) if alone else (rank,)
            self.now[rank] = end + 0.02 * MS
            self.record(rank, step, "runtime", "F+", start, self.now[rank])
            verb = "all-gather" if which[0] == "g" else "reduce-scatter"
            place = {"transport": TRANSPORT, "number": numbers[which]}
            issue = issued[which][rank]
            more = {"link": link, "link_s": end - max(before, start)} if link else {}
            self.record(rank, step, "wait", verb, start, end, issue=issue, **more, **place)
            more = {"link": ends, "link_s": took[longest], "met": True}
            self.record(rank, step, "collective", verb, issue, end, issue=issue, **more, **place)
        elif what in ("data", "optimizer"):
            self.spend(rank, step, what)
            if what == "optimizer":
                self.spend(rank, step, "checkpoint")
                self.spend(rank, step, "user")

    def link_s(self, source, to, step):
        places = ((source, "sends"), (to, "receives"), (to, "link"))
        more = sum(self.more(rank, step, what) for rank, what in places)
        return (USUAL["link"] * self.chance.uniform(0.9, 1.1) + more) * MS

    def rings(self):
        return [self.ring(rank) for rank in range(self.world)]

    def ring(self, rank):
        everyone, now = {TRANSPORT: tuple(range(self.world))}, self.now[rank]
        steps = [*self.steps[rank], RecordedStep(len(self.steps[rank]) + 1, now, now)]
        records = sorted(self.records[rank], key=lambda each: each.start)
        return Ring(rank, self.world, f"node{rank}", everyone, steps, records, [])


def test_the_lines_of_a_step_add_up_to_it_and_nothing_is_booked_twice():
    ledger = booked(Job(3, 5, {(1, 3, "data"): 20.0}).rings())
    assert sorted(ledger.seconds) == [(rank, step) for rank in range(3) for step in range(2, 6)]
    for (rank, step), seconds in ledger.seconds.items():
        lines = ledger.of(rank, step)
        assert sum(line.seconds for line in lines) == pytest.approx(seconds, rel=1e-6)
        assert sum(line.seconds for line in lines if line.cause == REST) < 0.02 * seconds
        assert {line.cause for line in lines} <= set(CAUSES)


def test_a_late_rank_is_named_with_what_it_did_also_where_others_wait_long_after_it():
    ledger = booked(Job(3, 6, {(1, 4, "data"): 30.0}).rings())
    for rank in (0, 2):
        late = ledger.of(rank, 4)[0] if ledger.of(rank, 4)[0].whose == 1 else ledger.of(rank, 4)[1]
        assert (late.cause, late.whose) == ("data", 1)
        assert late.seconds == pytest.approx(30 * MS, rel=0.1)
    # The rank itself has its time under its own name, and waits for nobody.
    own = next(line for line in ledger.of(1, 4) if line.cause == "data")
    assert (own.whose, own.seconds) == (1, pytest.approx(30.5 * MS, rel=0.1))
    assert ledger.losses()[0][:2] == ("data", 1)
    assert max(ledger.late(), key=ledger.late().get) == 1


def test_of_a_chain_of_waits_the_rank_at_its_end_is_named():
    """Rank 2 is late for 0 and 1 with compute; on a transport of 0 and 1 alone nobody is to blame but 2."""
    ledger = booked(Job(4, 6, {(2, 5, "compute"): 3.0}).rings())
    for rank in (0, 1, 3):
        blamed = {line.whose for line in ledger.of(rank, 5) if line.whose != rank and line.seconds > MS}
        assert blamed == {2}


def test_a_slow_transfer_is_the_links_and_a_late_gather_with_nothing_to_hide_behind_the_schedules():
    job = Job(2, 8, {(rank, 6, "link"): 10.0 for rank in range(2)})
    ledger = booked(job.rings())
    (first, *_) = ledger.losses([6])
    assert first.cause == "link" and first.seconds > 2 * 8 * 4 * MS
    usual = {line.cause: line.seconds for line in ledger.of(0, 3)}
    assert usual["launches and copies"] > USUAL["link"] * MS / 2  # the first gather of a step
    assert usual.get("link", 0.0) < MS


@pytest.mark.parametrize("direction", ["sends", "receives"])
@pytest.mark.parametrize("world", [3, 4, 8])
def test_a_slow_link_is_its_ranks_whatever_way_it_is_slow(world, direction):
    extra = {(1, step, direction): 10.0 for step in range(4, 8)}
    ledger = booked(Job(world, 9, extra).rings())
    cause, whose, seconds, detail, _ = ledger.losses(range(4, 8))[0]
    assert (cause, whose, detail) == ("link", 1, f"what it {direction}")
    assert seconds > 0.8 * 4 * world * 2 * BLOCKS * 10 * MS / 2  # at most half of it is hidden
    if direction == "sends":
        assert max(ledger.late(), key=ledger.late().get) == 1
    assert "link of rank 1" in table(ledger, 5)


def test_a_link_that_is_slow_all_the_time_is_its_ranks_too():
    extra = {(2, step, "sends"): 10.0 for step in range(1, 10)}
    assert booked(Job(3, 9, extra).rings()).losses()[0][:2] == ("link", 2)


def test_two_links_that_are_slow_one_after_the_other_are_both_named():
    extra = {(1 if step < 6 else 5, step, "sends"): 10.0 for step in range(4, 8)}
    found = booked(Job(8, 9, extra).rings()).losses(range(4, 8))
    assert {loss[:2] for loss in found[:2]} == {("link", 1), ("link", 5)}


def test_where_all_links_are_slow_nobodys_is_named():
    extra = {(rank, step, "sends"): 10.0 for rank in range(4) for step in range(4, 8)}
    found = booked(Job(4, 9, extra).rings()).losses(range(4, 8))
    assert {loss.whose for loss in found if loss.cause == "link"} == {NOBODY}
    assert found[0].cause == "link"


def test_of_two_ranks_the_way_that_is_slow_is_said():
    found = booked(Job(2, 9, {(1, step, "sends"): 10.0 for step in range(4, 8)}).rings()).losses(range(4, 8))
    assert (found[0].cause, found[0].whose, found[0].detail) == ("link", NOBODY, "rank 1 to rank 0")


def test_clocks_that_differ_are_no_lateness():
    assert booked(Job(3, 6, {}).rings()).losses() is not None
    for loss in booked(Job(3, 6, {}).rings()).losses():
        assert loss.seconds < 6 * 3 * 1.2 * MS, loss


@pytest.mark.parametrize(("late_us", "whose"), [(40, set()), (75, {1}), (200, {1})])
def test_lateness_of_more_than_clocks_differ_by_is_the_late_ranks(late_us, whose):
    late_s, place = late_us * 1e-6, {"transport": TRANSPORT, "number": 1}

    def ring(rank, issue, start):
        met = {"met": True, **place}
        own = [
            Record("compute", "", ("g",), 2, "forward", 0, 1.0, 1.0, start),
            Record("runtime", "F+", (), 2, "forward", 0, start, start, 1.02),
            Record("wait", "all-gather", ("g",), 2, "forward", 0, issue, start, 1.02, **place),
            Record("collective", "all-gather", ("g",), 2, "forward", 0, issue, issue, 1.02, **met),
        ]
        steps = [RecordedStep(2, 1.0, 1.02), RecordedStep(3, 1.02, 1.02)]
        return Ring(rank, 2, f"node{rank}", {TRANSPORT: (0, 1)}, steps, own, [])

    ledger = booked([ring(0, 1.01, 1.01), ring(1, 1.01 + late_s, 1.01 + late_s)])
    found = [line for line in ledger.of(0, 2) if line.whose == 1]
    assert {line.whose for line in found} == whose
    assert sum(line.seconds for line in found) == pytest.approx(late_s if whose else 0.0)


def collective(issue, end, number=1, **more):
    place = {"transport": TRANSPORT, "number": number, "met": True}
    return Record("collective", "all-gather", ("g",), 2, "forward", 64, issue, issue, end, **place, **more)


def ring_of(rank, records, cores=(), end=1.1):
    steps = [RecordedStep(2, 1.0, end), RecordedStep(3, end, end)]
    return Ring(rank, 2, f"node{rank}", {TRANSPORT: (0, 1)}, steps, records, [], [], cores)


def test_a_rank_that_launches_two_at_once_was_not_in_step_at_the_first_of_them():
    wait = Record("wait", "all-gather", ("g",), 2, "forward", 64, 1.005, 1.01, 1.02, "", 2)
    wait = wait._replace(transport=TRANSPORT)
    around = Record("runtime", "F+", (), 2, "forward", 0, 1.01, 1.01, 1.02)
    own = [collective(1.0, 1.02), collective(1.005, 1.02, 2), around, wait]
    save = Record("span", "save", (), 2, "forward", 0, 1.0, 1.0, 1.012)
    data = Record("span", "data", (), 2, "forward", 0, 1.012, 1.012, 1.02)
    theirs = [save, data, collective(1.02, 1.02), collective(1.02, 1.02, 2)]
    ledger = booked([ring_of(0, own), ring_of(1, theirs)])
    found = {line.cause: line.seconds for line in ledger.of(0, 2) if line.whose == 1}
    assert found == {"checkpoint": pytest.approx(0.006), "data": pytest.approx(0.004)}


def test_what_holds_up_the_threads_of_a_rank_takes_more_than_a_millisecond():
    took = {1.0: 0.0009, 1.02: 0.002}
    collections = [Record("gc", "", (), 2, "", 0, at, at, at + seconds) for at, seconds in took.items()]
    cores = [CoreUse(at, at + 0.01, 0.0, 0.0, 0, 0.0, stopped) for at, stopped in ((1.0, 1e-3), (1.01, 2e-3))]
    found = _holdups(ring_of(0, collections, tuple(cores)))
    causes = [(cause, start) for cause, start, *_ in found]
    assert causes == [("CPU quota", 1.01), ("garbage collection", 1.02)]


def test_what_a_transfer_usually_takes_is_that_of_the_fastest_tenth():
    records = [collective(1.0, 1.0 + number / 100, number) for number in range(1, 21)]
    issues = {(TRANSPORT, number): {0: 1.0} for number in range(1, 21)}
    (usual,) = _usual_rates([ring_of(0, records)], issues).values()
    assert usual == pytest.approx(0.03)


def sent(source, to, link_s, alone=False):
    """A message that took so long; alone: another one to the same rank took as long."""
    return collective(1.0, 1.1, link=(to,) if alone else (source, to), link_s=link_s)


USUAL_S, SLOW_S = 2.0**-10, 2.0**-5


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ([], {}),
        ([(0, sent(1, 0, SLOW_S))], {1: "what it sends"}),
        ([(0, sent(1, 0, SLOW_S)), (2, sent(1, 2, SLOW_S))], {1: "what it sends"}),
        ([(1, sent(0, 1, SLOW_S, alone=True))], {1: "what it receives"}),
        ([(0, sent(1, 0, SLOW_S)), (1, sent(0, 1, SLOW_S, alone=True))], {1: "what it receives"}),
        ([(0, sent(1, 0, 1.5 * USUAL_S))], {}),
    ],
)
def test_a_link_is_slow_one_way_or_the_other(slow, named):
    usual = {rank: [sent((rank + 1) % 3, rank, USUAL_S)] * 8 for rank in range(3)}
    rings = [ring_of(rank, own + [each for to, each in slow if to == rank]) for rank, own in usual.items()]
    assert slow_links(rings) == named


def test_a_message_is_slow_beside_the_fastest_tenth_of_those_like_it():
    longer = _longer([ring_of(0, [sent(1, 0, number / 100) for number in range(1, 21)])])
    assert longer == {(1, 0): pytest.approx(sum(number - 3 for number in range(5, 21)) / 100)}


def test_a_table_has_a_column_for_each_of_eight_ranks_and_no_numbers_that_round_to_nothing():
    hosts = {rank: f"node{rank}" for rank in range(9)}
    lines = [Line(rank, 1, "data", rank, 5e-5 if rank else 4e-5) for rank in hosts]
    rows = table(Ledger(lines, {(rank, 1): 0.1 for rank in hosts}, hosts), 1).splitlines()
    assert rows[0].split()[4:] == [word for rank in range(8) for word in ("rank", str(rank))]
    assert rows[1].split() == ["data", "-", *["0.1"] * 7]


def test_a_collection_of_garbage_beside_all_that_the_thread_does_is_in_the_rest():
    compute = Record("compute", "", ("g",), 2, "forward", 0, 1.0, 1.0, 1.05)
    ledger = booked([ring_of(0, [compute, Record("gc", "", (), 2, "", 0, 1.05, 1.05, 1.06)])])
    assert {line.cause: round(line.seconds, 6) for line in ledger.lines} == {"compute": 0.05, REST: 0.05}


def spent(kind, action, *, ran, queued=0.0, faults=0, others=0.0, throttled=0.0):
    """Milliseconds by cause of one slice of 100 ms, in which the kernel counted that."""
    record = Record(kind, action, (), 2, "", 0, 1.0, 1.0, 1.1, note="train.py:7 in main")
    steps = [RecordedStep(2, 1.0, 1.1), RecordedStep(3, 1.1, 1.1)]
    counted = CoreUse(1.0, 1.1, ran * MS, queued * MS, faults, others * MS, throttled * MS)
    ring = Ring(0, 1, "node0", {}, steps, [record], [], [], (counted,))
    ledger = booked([ring])
    assert sum(line.seconds for line in ledger.lines) == pytest.approx(0.1)
    lost = [line for line in ledger.lines if line.seconds > 0]
    return {line.cause: (round(line.seconds / MS, 1), line.detail) for line in lost}


def test_what_a_rank_did_not_compute_has_a_cause_of_its_own():
    line = "train.py:7 in main"
    assert spent("compute", "", ran=100) == {"compute": (100.0, "loss")}
    # In line for a core, and in line because of a quota, which is counted once for each core.
    assert spent("compute", "", ran=60, queued=40) == {"compute": (60.0, "loss"), "busy cores": (40.0, "")}
    found = spent("span", "data", ran=10, queued=90, throttled=60)
    assert found == {"data": (10.0, line), "CPU quota": (60.0, ""), "busy cores": (30.0, "")}
    assert spent("compute", "", ran=60, queued=40, throttled=200)["CPU quota"] == (40.0, "")
    assert spent("compute", "", ran=99.85, queued=0.15).keys() == {"compute", "busy cores"}
    assert spent("compute", "", ran=99.95, queued=0.05).keys() == {"compute"}
    # Blocked: pages from disk, with the kernel's work for them; or asleep, which isn't computing either.
    assert spent("compute", "", ran=40, faults=1000) == {"compute": (10.0, "loss"), "paging": (90.0, line)}
    assert spent("compute", "", ran=20) == {"compute": (20.0, "loss"), "user code": (80.0, line)}
    # A sleep with one page is no paging; threads that compute for a waiting one, and devices, do compute.
    assert spent("compute", "", ran=20, faults=1)["user code"][0] == 70.0
    assert spent("compute", "", ran=20, others=80) == {"compute": (100.0, "loss")}
    assert spent("compute", "", ran=20, others=float("inf")) == {"compute": (100.0, "loss")}
    # What reads files has its time, whoever reads its pages.
    assert spent("span", "data", ran=5, faults=1000) == {"data": (100.0, line)}
    assert set(CAUSES) == {*REMEDIES, REST}


@pytest.mark.parametrize(
    ("seen_ms", "where"),
    [
        ({"": 100.0, "backward of 0": 0.2}, ""),  # a quarter of the seconds are to be somewhere
        ({"": 60.0, "train.py:7 in main": 40.0}, "train.py:7 in main"),
        ({"backward of 0": 2.0, "train.py:7 in main": 98.0}, "train.py:7 in main"),
        ({f"backward of {group}": 10.0 for group in range(10)}, ""),
    ],
)
def test_a_place_is_said_of_a_loss_if_much_of_it_was_there(seen_ms, where):
    lines = [Line(0, 1, "user code", 0, ms * MS, detail) for detail, ms in seen_ms.items()]
    (loss,) = Ledger(lines, {(0, 1): 0.1}, {0: "node0"}).losses()
    assert loss.detail == where


INJECTED = {
    "data": ("data", 1.0),
    "compute": ("compute", 1.0 / (2 * BLOCKS)),
    "gc": ("garbage collection", 0.5),
    "checkpoint": ("checkpoint", 1.0),
    "user": ("user code", 1.0),
    "sends": ("link", 1.0 / BLOCKS),
}
"""What is made longer, the cause that is to be found, and each place's share of its time."""


def trial(seed):
    """One or two causes at random ranks; whether they are the first of the losses, the larger one first.

    Which is larger isn't asked of a slow link: how much of it compute hides depends on the other cause.
    """
    chance = random.Random(seed)
    world = chance.choice((2, 3, 4))
    pair = chance.random() < 0.5
    kinds = sorted(kind for kind in INJECTED if world > 2 or kind != "sends")  # of two it isn't known whose
    kinds = chance.sample(kinds, 2 if pair else 1)
    sizes = sorted((chance.uniform(8, 40) for _ in kinds), reverse=True)
    if pair:
        sizes[0] = max(sizes[0], 1.5 * sizes[1])
    extra, wanted = {}, []
    for kind, size in zip(kinds, sizes, strict=True):
        rank = chance.randrange(world)
        cause, share = INJECTED[kind]
        for step in range(3, 9):
            extra[rank, step, kind] = size * share
        wanted.append((cause, rank))
    found = [loss[:2] for loss in booked(Job(world, 10, extra, seed).rings()).losses()]
    first = found[: len(wanted)]
    is_right = sorted(first) == sorted(wanted) if "sends" in kinds else first == wanted
    return is_right, (seed, wanted, found[:3])


def test_of_200_random_jobs_with_one_or_two_causes_at_least_95_percent_have_them_first():
    missed = [told for right, told in map(trial, range(200)) if not right]
    assert len(missed) <= 10, missed
