"""Every order in which the steps of ranks that meet can follow one another, and all that a store may hold."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from shardwright.transport import attempt as welcome
from shardwright.transport.attempt import met

ABSENT = ""


class Place(NamedTuple):
    """Where a rank is: in which meeting, whom it still waits for, and what its round has been told."""

    meeting: int = 0
    unmet: tuple[int, ...] = ()
    told: tuple[str, ...] = ()


class World(NamedTuple):
    """A moment: what is in the store, where each rank is, and what may still go wrong.

    late: writes of processes that have ended, which are still to arrive. written: what may arrive once more.
    losses, repeats, kills: how many times that may happen. killed: the ranks that were, as bits.
    """

    store: tuple[tuple[str, str], ...]
    places: tuple[Place, ...]
    late: tuple[tuple[str, str], ...] = ()
    written: frozenset[tuple[str, str]] = frozenset()
    losses: int = 0
    repeats: int = 0
    kills: int = 0
    killed: int = 0


def next_step(make: Callable[[], welcome.Round], told: tuple[str, ...]) -> tuple[tuple | None, object]:
    """What a round does after it was ``told`` so much, or what it has returned."""
    steps = make()
    try:
        step = next(steps)
        for each in told:
            step = steps.send(each)
    except StopIteration as end:
        return None, end.value
    return step, None


class Exploration:
    """All moments that ``ranks`` ranks can come to which meet ``meetings`` times.

    answer, ask: a round of the first rank, and of another.
    """

    def __init__(self, ranks: int, meetings: int, answer=welcome.answer, ask=welcome.ask) -> None:
        self.ranks, self.meetings, self.answer, self.ask = ranks, meetings, answer, ask
        self.steps: dict[tuple, tuple] = {}

    def all_from(self, *starts: World) -> int:
        """Look at every moment; return their number.

        In each a rank that has a token has the right one, and all ranks can still come to their end, if they
        live.
        """
        found, queue, came_from = set(starts), deque(starts), {}
        ends = []
        while queue:
            moment = queue.popleft()
            if all(place.meeting == self.meetings for place in moment.places):
                ends.append(moment)
            for after in self.after(moment):
                came_from.setdefault(after, []).append(moment)
                if after not in found:
                    found.add(after)
                    queue.append(after)
        lively = set(ends)
        while ends:
            for before in came_from.get(ends.pop(), ()):
                if before not in lively:
                    lively.add(before)
                    ends.append(before)
        stuck = [each for each in found if each not in lively and not each.killed]
        assert not stuck, f"they wait for ever: {min(stuck, key=lambda each: len(each.store))}"
        return len(found)

    def start(self, store: dict[str, str] | None = None, **may) -> World:
        others = tuple(range(1, self.ranks))
        places = (Place(0, others), *[Place()] * len(others))
        return World(tuple(sorted((store or {}).items())), places, **may)

    def after(self, moment: World) -> Iterator[World]:
        for rank in range(self.ranks):
            if moment.places[rank].meeting < self.meetings and not moment.killed >> rank & 1:
                yield from self.step_of(rank, moment)
                if moment.kills:
                    yield moment._replace(kills=moment.kills - 1, killed=moment.killed | 1 << rank)
        for index, each in enumerate(moment.late):
            rest = moment.late[:index] + moment.late[index + 1 :]
            yield write(moment, *each)._replace(late=rest)
        if moment.repeats:
            for each in moment.written:
                yield write(moment, *each)._replace(repeats=moment.repeats - 1)

    def step_of(self, rank: int, moment: World) -> Iterator[World]:
        place = moment.places[rank]
        step, returned = self.round_of(rank, place)
        if step is None:
            yield move(moment, rank, self.returned(rank, place, returned))
            return
        key, value = step
        if value is None:
            told = (*place.told, dict(moment.store).get(key, ABSENT))
            yield move(moment, rank, place._replace(told=told))
            return
        after = move(moment, rank, place._replace(told=(*place.told, ABSENT)))
        written = write(after, key, value)
        if moment.repeats:
            written = written._replace(written=moment.written | {(key, value)})
        yield written
        if moment.losses:
            yield after._replace(losses=moment.losses - 1)

    def round_of(self, rank: int, place: Place) -> tuple[tuple | None, object]:
        known = (rank, place)
        if known not in self.steps:
            self.steps[known] = next_step(lambda: self.begin(rank, place), place.told)
        return self.steps[known]

    def begin(self, rank: int, place: Place) -> welcome.Round:
        if rank == 0:
            return self.answer(place.unmet[0], f"T{place.meeting}")
        return self.ask(rank, f"N{rank}.{place.meeting}", "here")

    def returned(self, rank: int, place: Place, value: object) -> Place:
        """Where a rank is after a round."""
        if rank:
            if not value:
                return place._replace(told=())
            assert value == f"T{place.meeting}", f"rank {rank} took {value} in its meeting {place.meeting}"
            return Place(place.meeting + 1)
        first, *others = place.unmet
        if not value:
            return place._replace(unmet=(*others, first), told=())
        if others:
            return place._replace(unmet=tuple(others), told=())
        following = place.meeting + 1
        return Place(following, tuple(range(1, self.ranks)) if following < self.meetings else ())


def write(moment: World, key: str, value: str) -> World:
    return moment._replace(store=tuple(sorted({**dict(moment.store), key: value}.items())))


def move(moment: World, rank: int, place: Place) -> World:
    return moment._replace(places=(*moment.places[:rank], place, *moment.places[rank + 1 :]))


def left_by_another_attempt(ranks: int) -> Iterator[dict]:
    """All that an attempt before may have left in the store, and what each of its processes may have sent.

    Numbers and tokens that nobody has now are alike: of each key it matters only whether one is there.
    """
    others = range(1, ranks)
    hellos, welcomes = ([f"{what}/{rank}" for rank in others] for what in ("hello", "welcome"))
    old = {**dict.fromkeys(hellos, "old"), **dict.fromkeys(welcomes, "old T")}
    sent = itertools.product(*[(None, hello) for hello in hellos], (None, *welcomes))
    late = [tuple((key, old[key]) for key in keys if key) for keys in sent]
    for there, each in itertools.product(itertools.product((False, True), repeat=len(old)), late):
        yield {"store": dict(itertools.compress(old.items(), there)), "late": each}


def test_three_ranks_meet_three_times_whatever_the_order_of_their_steps():
    exploration = Exploration(3, 3)
    assert exploration.all_from(exploration.start()) > 30_000


@pytest.mark.parametrize(("ranks", "meetings"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.exhaustive)])
def test_what_another_attempt_left_or_sent_late_keeps_nobody_from_meeting(ranks, meetings):
    exploration = Exploration(ranks, meetings)
    starts = (exploration.start(**left) for left in left_by_another_attempt(ranks))
    assert exploration.all_from(*starts) > 1000


@pytest.mark.parametrize(
    ("ranks", "meetings", "may"),
    [
        (3, 1, {"losses": 1}),
        (3, 1, {"repeats": 1}),
        (2, 3, {"losses": 3}),
        (2, 2, {"losses": 1, "repeats": 1}),
        pytest.param(3, 3, {"losses": 1}, marks=pytest.mark.exhaustive),
        pytest.param(3, 2, {"repeats": 1}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_write_that_is_lost_or_arrives_once_more_later_keeps_nobody_from_meeting(ranks, meetings, may):
    exploration = Exploration(ranks, meetings)
    assert exploration.all_from(exploration.start(**may)) > 1000


def test_a_rank_that_is_killed_gives_no_other_a_token_that_is_not_of_its_meeting():
    exploration = Exploration(3, 2)
    assert exploration.all_from(exploration.start(kills=1)) > 30_000


def looks_before_it_reads(rank, token):
    """A hello of the next meeting may come between."""
    if (yield met(rank, token), None):
        return True
    if number := (yield f"hello/{rank}", None):
        yield f"welcome/{rank}", f"{number} {token}"
    return False


def leaves_unseen(rank, number, word):
    """It goes on without having seen that it can be known to have the token."""
    welcomed, _, token = (yield f"welcome/{rank}", None).partition(" ")
    if welcomed == number:
        yield met(rank, token), word
        return token
    if (yield f"hello/{rank}", None) != number:
        yield f"hello/{rank}", number
    return ""


def takes_any(rank, number, word):
    _, _, token = (yield f"welcome/{rank}", None).partition(" ")
    if not token:
        yield f"hello/{rank}", number
        return ""
    yield met(rank, token), word
    return token


@pytest.mark.parametrize(
    ("rounds", "may", "told"),
    [
        ({"answer": looks_before_it_reads}, {}, "took T0 in its meeting 1"),
        ({"ask": leaves_unseen}, {"losses": 1}, "they wait for ever|took T0 in its meeting 1"),
        ({"ask": takes_any}, {}, "took T0 in its meeting 1"),
    ],
)
def test_the_exploration_finds_what_goes_wrong_in_another_order(rounds, may, told):
    exploration = Exploration(2, 2, **rounds)
    with pytest.raises(AssertionError, match=told):
        exploration.all_from(exploration.start(**may))
