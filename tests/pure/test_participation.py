"""Ranks that skip, reorder and repeat groups launch the same collectives, and none waits for ever.

Each rank is a thread that runs the real ``Follower``; the world they meet in is simulated, and notices
when every rank waits for another.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.policy import SchedulePolicy
from shardwright.schedule import recorded
from shardwright.schedule.follower import Follower
from shardwright.schedule.following import Mode
from shardwright.schedule.recorded import bits, supersequence
from shardwright.schedule.schedule import Action, ActionKind, Event, EventKind, GroupSpec, Phase
from shardwright.schedule.sync import (
    AllReduceMin,
    Answer,
    Broadcast,
    ConsensusResult,
    Describe,
    Diverge,
    Inspect,
    Local,
    Recorded,
    Step,
    Sync,
    Synchronize,
    SyncPoint,
)

F_BEGIN, F_END = EventKind.FORWARD_BEGIN, EventKind.FORWARD_END
B_BEGIN, B_END = EventKind.BACKWARD_BEGIN, EventKind.BACKWARD_END


class Deadlock(Exception):
    """Every rank waits, and what each waits for can't come."""


class World:
    """What ranks share: their launches, and the rounds in which they exchange words."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.waiting = 0
        self.left = 0
        self.stuck = False
        self.logs: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(size)]
        self.sent: list[list[frozenset]] = [[] for _ in range(size)]
        self.rounds: dict[int, dict[int, object]] = defaultdict(dict)
        self.said = [0] * size

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready``. Raises: Deadlock on all ranks when all wait."""
        with self.changed:
            while not ready():
                self.waiting += 1
                if self.waiting + self.left == self.size or self.stuck:
                    self.stuck = True
                    self.changed.notify_all()
                    raise Deadlock
                self.changed.wait(5)
                if self.stuck:
                    raise Deadlock

    def progress(self) -> None:
        """Something has come: all look again."""
        with self.changed:
            self.waiting = 0
            self.changed.notify_all()

    def exchange(self, rank: int, word: object) -> list:
        """Every rank's word of the same round."""
        number = self.said[rank]
        self.said[rank] += 1
        self.rounds[number][rank] = word
        self.progress()
        self.wait(lambda: len(self.rounds[number]) == self.size)
        return [self.rounds[number][r] for r in range(self.size)]

    def launch(self, rank: int, kind: str, groups: tuple, tokens: frozenset = frozenset()) -> int:
        """Launch a collective; returns its number."""
        self.logs[rank].append((kind, groups))
        self.sent[rank].append(tokens)
        self.progress()
        return len(self.logs[rank]) - 1

    def finish(self, rank: int, number: int) -> frozenset:
        """Wait until all ranks have launched it; what they sent, together."""
        self.wait(lambda: all(len(log) > number for log in self.logs))
        assert len({log[number] for log in self.logs}) == 1, [log[number] for log in self.logs]
        return frozenset().union(*(sent[number] for sent in self.sent))


class SimulatedRank:
    """One simulated rank: a follower, and what it decides done in a world where gradients are sets of
    tokens."""

    def __init__(
        self, world: World, rank: int, policy: SchedulePolicy, facts: dict[int, GroupSpec], mode: Mode
    ) -> None:
        self.world, self.rank, self.num_groups = world, rank, len(facts)
        self.follower = Follower(policy, [facts[group] for group in range(len(facts))], mode)
        self.held: dict[int, int | None] = {}  # group -> launch that it waits for
        self.grads: dict[int, set] = defaultdict(set)
        self.aside: dict[int, frozenset] = {}
        self.reducing: dict[int, int] = {}
        self.totals: dict[int, frozenset] = {}
        self.result: dict[int, frozenset] = {}
        self.brought = 0
        self.asked: list[int] = []

    # ---- the loop, as the runtime has it

    def run(self, step: Step) -> None:
        while True:
            for action in step.actions:
                self.do(action)
            if step.sync is None:
                break
            step = self.follower.resume(self.exchange(step.sync))
        held = self.follower.groups.states.held if not self.follower._exact else None
        assert held is None or held == bits(self.held), "what was derived isn't what is so"

    @property
    def local(self) -> Local:
        return Local(held=bits(self.held), unreduced=bits(g for g, tokens in self.grads.items() if tokens))

    def begin(self, phase: Phase) -> None:
        self.run(self.follower.begin(phase, 0, self.local))

    def at(self, event: Event) -> None:
        before = self.follower.snapshot()
        assert copy.copy(self.follower).snapshot() == before
        assert hash(before) == hash(self.follower.snapshot())
        self.run(self.follower.on(event))

    def end(self) -> None:
        phases = len(self.follower.cursors)
        self.run(self.follower.end())
        assert len(self.follower.cursors) == phases - 1

    def rest(self) -> None:
        if self.follower.mode is Mode.AGREED:
            self.run(self.follower.join_evaluations(self.local))

    # ---- syncs

    def exchange(self, sync: Sync) -> Answer:
        if isinstance(sync, Inspect):
            return self.local
        if isinstance(sync, Describe):
            return Recorded((sync.order,), self.follower.recorded.specs)
        assert self.follower.mode is Mode.AGREED, f"a rank that follows alone asks others: {sync}"
        if isinstance(sync, AllReduceMin):
            self.asked.append(sync.code)
            return min(self.world.exchange(self.rank, sync.code))
        if isinstance(sync, Broadcast):
            told = {order for order in self.world.exchange(self.rank, sync.order) if order is not None}
            return Recorded(tuple(sorted(told)), self.follower.recorded.specs)
        if isinstance(sync, Diverge):
            raise AssertionError(f"ranks are in different calls; this one in {sync.point}")
        assert isinstance(sync, Synchronize)
        quiet = sync.point is SyncPoint.DEVIATES
        missing = bits(g for g in range(self.num_groups) if g not in self.held)
        word = (sync.point, 0 if quiet else missing, sync.used, self.brought)
        words = self.world.exchange(self.rank, (word, self.follower.recorded.digest))
        assert quiet or len({digest for _, digest in words}) == 1
        points, missing, used, brought = ([word[i] for word, _ in words] for i in range(4))
        union = [0, 0, 0, 0]
        for i, values in enumerate((points, missing, used, brought)):
            for value in values:
                union[i] |= value
        return ConsensusResult(SyncPoint(union[0]), 0, union[1], 2**self.num_groups - 1, union[2], union[3])

    # ---- actions

    def do(self, action: Action) -> None:
        kind, groups = action.kind, action.groups
        if kind is ActionKind.UNSHARD:
            assert self.follower.mode is Mode.AGREED or not self.held.keys() & set(groups)
            number = self.world.launch(self.rank, "all-gather", groups)
            for group in groups:
                self.held.setdefault(group, number)
        elif kind is ActionKind.PARTICIPATE:
            self.world.finish(self.rank, self.world.launch(self.rank, "all-gather", groups))
        elif kind is ActionKind.WAIT and self.held.get(action.group) is not None:
            self.world.finish(self.rank, self.held[action.group])
            self.held[action.group] = None
        elif kind is ActionKind.RESHARD and action.group in self.held:
            number = self.held.pop(action.group)
            if number is not None:
                self.world.finish(self.rank, number)
        elif kind is ActionKind.HOLD:
            self.hold(action.group)
        elif kind is ActionKind.REDUCE:
            for group in groups:
                if group not in self.aside:
                    self.hold(group)
            tokens = frozenset().union(*(self.aside.pop(group) for group in groups))
            number = self.world.launch(self.rank, "reduce-scatter", groups, tokens)
            for group in groups:
                self.reducing[group] = number
        elif kind is ActionKind.WAIT_REDUCE:
            for group in groups:
                total = self.world.finish(self.rank, self.reducing.pop(group))
                before = self.totals.get(group, frozenset())
                total = frozenset(token for token in total if token[0] == group)
                assert not total & before, "a gradient was added twice"
                self.totals[group] = before | total
        elif kind is ActionKind.FINALIZE and action.grads is not None:
            self.result = {g: total for g, total in self.totals.items() if action.grads >> g & 1}
            self.totals, self.brought = {}, 0

    def hold(self, group: int) -> None:
        assert group not in self.reducing
        assert group not in self.aside
        self.aside[group] = frozenset(self.grads.pop(group, ()))
        self.brought |= bool(self.aside[group]) << group

    def usable(self, group: int) -> bool:
        """Whether a module may read it now."""
        return group in self.held and self.held[group] is None


def forward(rank, phase, route):
    rank.begin(phase)
    root = rank.num_groups - 1
    rank.at(Event(F_BEGIN, root))
    for group in route:
        rank.at(Event(F_BEGIN, group))
        assert rank.usable(group)
        assert rank.usable(root), "the root was resharded while it runs"
        rank.at(Event(F_END, group))
    rank.at(Event(F_END, root))
    rank.end()


def backward(rank, route, token):
    """Brings one gradient per use, and returns those that this rank has."""
    rank.begin(Phase.BACKWARD)
    made = defaultdict(set)
    root = rank.num_groups - 1
    for number, group in enumerate((root, *reversed(route))):
        rank.at(Event(B_BEGIN, group))
        assert rank.usable(group)
        made[group].add((group, rank.rank, *token, number))
        rank.grads[group].add((group, rank.rank, *token, number))
        if group != root:
            rank.at(Event(EventKind.GRADS_READY, group))
            rank.at(Event(B_END, group))
    for group in [g for g, tokens in rank.grads.items() if tokens]:
        rank.at(Event(EventKind.GRADS_READY, group))
    rank.at(Event(EventKind.STEP_END))
    rank.end()
    return made


def run_world(program, plan, policy, facts, mode=Mode.AGREED) -> tuple[World, list]:
    """``program(rank, plan[number])`` on every rank; raises what a rank raised."""
    world = World(len(plan))
    outcomes: list = [None] * world.size

    def live(rank):
        try:
            outcomes[rank] = program(SimulatedRank(world, rank, policy, facts, mode), plan[rank])
        except BaseException as error:
            outcomes[rank] = error
            world.stuck = True
        with world.changed:
            world.left += 1
            if world.waiting + world.left >= world.size and world.waiting:
                world.stuck = True
            world.changed.notify_all()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, Deadlock)):
        raise error
    return world, outcomes


def train(rank, steps):
    """Each step: some evaluations, some forwards, one backward. What each step made, and what it settled."""
    history = []
    for number, (evaluations, forwards, used) in enumerate(steps):
        for route in evaluations:
            forward(rank, Phase.EVALUATION, route)
        for route in forwards:
            forward(rank, Phase.FORWARD, route)
        made = backward(rank, used, (number,))
        assert not rank.held, "the step left groups unsharded"
        history.append((made, rank.result))
    rank.rest()
    return history


def check_exact(world, history):
    """All launched the same; every step's gradients are those of all ranks, and none where nobody had one."""
    assert all(log == world.logs[0] for log in world.logs)
    for step in zip(*history, strict=True):
        expected = defaultdict(set)
        for made, _ in step:
            for group, tokens in made.items():
                expected[group] |= tokens
        for _, result in step:
            assert result == expected


POLICIES = st.builds(
    SchedulePolicy,
    backward_prefetch=st.sampled_from(["none", "pre", "post"]),
    forward_prefetch=st.booleans(),
    depth=st.integers(0, 3),
    max_reductions=st.integers(1, 3),
    keep_last=st.integers(0, 2),
    bucket_cap_mb=st.integers(0, 6).map(lambda nbytes: nbytes / 2**20),
)


@st.composite
def worlds(draw):
    """Routes of every rank and step: any subset of a few groups, any order, repeats."""
    num_groups = draw(st.integers(2, 5))
    routes = st.lists(st.integers(0, num_groups - 2), max_size=5)
    world = draw(st.integers(2, 4))
    num_steps = draw(st.integers(1, 4))
    num_forwards = [draw(st.integers(1, 2)) for _ in range(num_steps)]
    plan = []
    for _ in range(world):
        steps = []
        for number in num_forwards:
            forwards = [draw(routes) for _ in range(number)]
            # Any part of what ran: outputs that were detached; in an order of its own.
            used = draw(st.permutations([group for route in forwards for group in route]))
            steps.append((draw(st.lists(routes, max_size=2)), forwards, used[draw(st.integers(0, 2)) :]))
        plan.append(steps)
    facts = {
        group: GroupSpec(
            draw(st.none() | st.booleans()), group + 1, group + 1, draw(st.sampled_from([None, 7, 7]))
        )
        for group in range(num_groups)
    }
    return plan, draw(POLICIES), facts


@settings(max_examples=60)
@given(worlds())
def test_any_routes_are_exact_and_launched_alike(case):
    plan, policy, facts = case
    world, history = run_world(train, plan, policy, facts)
    check_exact(world, history)


@settings(max_examples=60)
@given(worlds())
def test_a_rank_alone_is_exact_whatever_it_runs_and_asks_nobody(case):
    plan, policy, facts = case
    world, history = run_world(train, plan[:1], policy, facts, Mode.LOCAL)
    check_exact(world, history)


FACTS = {group: GroupSpec(nbytes=1) for group in range(4)}


def begun_only(rank, _):
    """A forward in which a module of a group has begun, and its others don't run."""
    rank.begin(Phase.FORWARD)
    rank.at(Event(F_BEGIN, 0))
    rank.end()
    return dict(rank.held)


def test_a_group_of_which_not_all_modules_ran_is_at_rest_after_the_forward_of_a_rank_alone():
    _, held = run_world(begun_only, [None], SchedulePolicy(), FACTS, Mode.LOCAL)
    assert held == [{}]


A, B, C = 0, 1, 2


def same(*route):
    return ([], [list(route)], list(reversed(route)))


CASES = {
    "the same on all": [[same(A, B, C)] * 6] * 3,
    "one rank skips in turn": [
        [same(A, C) if (step + rank) % 3 else same(A, B, C) for step in range(6)] for rank in range(3)
    ],
    "nobody uses a group": [[same(A, B, C), same(A, C), same(A, C), same(A, B, C)] * 2] * 2,
    "late": [
        [same(A, C)] * 3 + [same(A, B, C) if (step + rank) % 2 else same(A, C) for step in range(6)]
        for rank in range(2)
    ],
    "other order": [[same(A, B, C)] * 6, [same(C, B, A)] * 6],
    "shared layers": [[same(A, B, A, B)] * 6, [same(A, C, B)] * 6],
    "detached": [
        [([], [[A, B, C]], [C, A] if (step + rank) % 2 else [C, B, A]) for step in range(6)]
        for rank in range(2)
    ],
}


def rounds_of(rank, steps):
    """How often each step asked, on this rank."""
    asked = rank.asked
    counts, history = [], []
    for step in steps:
        before = len(asked)
        history += train(rank, [step])
        counts.append(len(asked) - before)
    return counts, history


@pytest.mark.parametrize("name", CASES)
def test_ranks_stop_asking_once_the_schedule_has_all_their_orders(name):
    world, outcomes = run_world(rounds_of, CASES[name], SchedulePolicy(), FACTS)
    check_exact(world, [history for _, history in outcomes])
    for counts, _ in outcomes:
        assert counts[0] > 0
        assert counts[-1] == 0


def test_a_group_that_nobody_uses_any_more_is_gathered_until_it_is_forgotten():
    steps = [same(A, B, C), *[same(A, C)] * 6, same(A, B, C), same(A, B, C)]
    with mock.patch.object(recorded, "FORGET_AFTER", 4):
        world, outcomes = run_world(rounds_of, [steps] * 3, SchedulePolicy(bucket_cap_mb=0), FACTS)
    check_exact(world, [history for _, history in outcomes])
    for counts, _ in outcomes:
        assert [count > 0 for count in counts] == [True, *[False] * 6, True, False]
    with_b = [kind for kind, groups in world.logs[0] if B in groups and kind == "all-gather"]
    a_step = [kind for kind, groups in world.logs[0] if A in groups and kind == "all-gather"]
    assert len(a_step) - len(with_b) == 2 * 2  # two steps without it, in forward and backward


def resharded_between(rank, steps):
    """One rank reshards all between forward and backward; how often it asked in the last step."""
    asked = rank.asked
    for number, (_, forwards, used) in enumerate(steps):
        asked.clear()
        forward(rank, Phase.FORWARD, forwards[0])
        if rank.rank == 0:
            rank.held.clear()
        backward(rank, used, (number,))
    return len(asked)


def test_what_one_rank_no_longer_holds_is_gathered_by_all_without_asking():
    facts = {group: GroupSpec(reshard_after_forward=False, nbytes=1) for group in range(4)}
    world, asked = run_world(resharded_between, CASES["the same on all"], SchedulePolicy(), facts)
    assert all(log == world.logs[0] for log in world.logs)
    assert asked == [0, 0, 0]


def evaluated_unsharded(rank, route):
    """The first evaluation finds a group unsharded; what it leaves so."""
    rank.do(Action(ActionKind.UNSHARD, (B,)))
    forward(rank, Phase.EVALUATION, route)
    return rank.held


def test_an_evaluation_leaves_nothing_unsharded():
    _, held = run_world(evaluated_unsharded, [[A, B], [A, B]], SchedulePolicy(), FACTS)
    assert held == [{}, {}]


def test_what_nobody_uses_is_not_reduced():
    world, _ = run_world(train, CASES["nobody uses a group"], SchedulePolicy(), FACTS)
    assert world.logs[0].count(("reduce-scatter", (B,))) == 4
    assert world.logs[0].count(("reduce-scatter", (A,))) == 8


def diverging(rank, phase):
    rank.begin(phase)


def test_ranks_in_different_calls_are_told_so():
    with pytest.raises(AssertionError, match="different calls"):
        run_world(diverging, [Phase.FORWARD, Phase.BACKWARD], SchedulePolicy(), FACTS)


ITEMS = st.lists(st.integers(0, 4), max_size=9)


def contains(whole, part):
    left = iter(whole)
    return all(item in left for item in part)


@given(ITEMS, ITEMS)
def test_a_supersequence_has_both_and_is_the_shortest(first, second):
    merged = supersequence(first, second)
    assert contains(merged, first)
    assert contains(merged, second)
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, x in enumerate(first):
        for j, y in enumerate(second):
            both = lengths[i][j] + 1
            lengths[i + 1][j + 1] = both if x == y else max(lengths[i][j + 1], lengths[i + 1][j])
    assert len(merged) == len(first) + len(second) - lengths[-1][-1]


def test_orders_too_different_to_compare_are_put_end_to_end():
    first, second = list(range(2001)), list(range(3000, 5001))
    assert supersequence([-1, *first, -2], [-1, *second, -2]) == (-1, *first, *second, -2)


def test_orders_of_as_many_pairs_as_may_be_are_compared(monkeypatch):
    monkeypatch.setattr(recorded, "_MAX_CELLS", 12)
    assert supersequence([1, 2, 3], [4, 2, 5, 6]) == (1, 4, 2, 3, 5, 6)
    assert supersequence([1, 2, 3], [4, 2, 5, 6, 7]) == (1, 2, 3, 4, 2, 5, 6, 7)
