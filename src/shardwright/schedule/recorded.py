"""Recorded schedules: the order of each phase's events as it happened, and what is planned from it. Pure."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwright.policy import SchedulePolicy
from shardwright.schedule.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupSpec,
    Phase,
    Schedule,
    ScheduleEntry,
)
from shardwright.schedule.scheduler import scheduled
from shardwright.schedule.sync import Recorded, Step

T = TypeVar("T")
Orders = dict[Phase, tuple[Event, ...]]

_TRAINING = {Phase.FORWARD, Phase.BACKWARD}
FORGET_AFTER = 100  # backwards: long enough for what is used now and then, such as an expert
_MAX_CELLS = 4_000_000  # of the table below; a larger middle (two wholly different orders) is put end to end


@dataclass(frozen=True)
class PlannedPhase:
    """The schedule of a phase, ready to be followed.

    live: bits of the groups that it supposes to be unsharded at its begin. reduced: of those that it reduces.
    steps: of each entry, up to the end of a backward, what the follower answers its event with.
    events: the order that it was planned from. ahead: of a forward or evaluation, groups that its first
    all-gathers gather together, of those that may be launched before ranks have met. live_after, steps_after:
    ``live`` and ``steps``, once these are launched.
    """

    entries: tuple[ScheduleEntry, ...] = ()
    live: int = 0
    reduced: int = 0
    steps: tuple[Step, ...] = ()
    events: tuple[Event, ...] = ()
    ahead: tuple[tuple[int, ...], ...] = ()
    live_after: int = 0
    steps_after: tuple[Step, ...] = ()


UNPLANNED = PlannedPhase()


class RecordedSchedules:
    """The schedules by *entry*: a number for the outermost module that runs (a model's parts may run alone).

    specs: what the scheduler knows of each group. digest: 63 bits that are equal on two ranks where their
    schedules are. What it holds is replaced as a whole and never edited, so that a shallow copy is a copy.
    """

    def __init__(self, policy: SchedulePolicy, specs: tuple[GroupSpec, ...]) -> None:
        self.policy = policy
        self.specs = specs
        self.digest = 0
        self._orders: dict[int, Orders] = {}
        self._schedules: dict[int, Schedule] = {}
        self._planned: dict[tuple[int, Phase], PlannedPhase] = {}
        self._idle = (0,) * len(specs)  # backwards since some rank last used the group
        self.replan(policy, specs)

    def planned(self, entry: int, phase: Phase) -> PlannedPhase:
        """The schedule of a phase; empty before it is known."""
        return self._planned.get((entry, phase), UNPLANNED)

    def schedule(self, entry: int) -> Schedule:
        """The schedule of all phases that begin in one module; empty before one is known."""
        return self._schedules.get(entry, Schedule())

    def widen(self, recorded: Recorded) -> None:
        """Plan anew, so that the orders that were told are served too."""
        self._record(recorded, replace=False)

    def replace(self, recorded: Recorded) -> None:
        """Plan anew from these orders, in the place of those that were known of their phases."""
        self._record(recorded, replace=True)

    def _record(self, recorded: Recorded, replace: bool) -> None:
        every = dict(self._orders)
        for entry, phase, order in recorded.orders:
            known = every.get(entry, {}).get(phase)
            order = order if known is None or replace else supersequence(known, order)
            every[entry] = {**every.get(entry, {}), phase: order}
        self._orders = every
        self.replan(self.policy, recorded.specs)

    def note_used(self, used: int) -> None:
        """A backward has ended, of the groups that have a bit in ``used`` on some rank; every rank says so.

        Those that no rank has used for ``FORGET_AFTER`` backwards leave the forwards and backwards (not the
        evaluations: what those have used no exchange tells).
        """
        self._idle = tuple(0 if used >> group & 1 else idle + 1 for group, idle in enumerate(self._idle))
        if max(self._idle, default=0) < FORGET_AFTER:
            return
        gone = {group for group, idle in enumerate(self._idle) if idle >= FORGET_AFTER}
        every = {
            entry: {
                phase: tuple(e for e in order if phase not in _TRAINING or e.group not in gone)
                for phase, order in orders.items()
            }
            for entry, orders in self._orders.items()
        }
        # Who is gone stays idle: without this question each backward from here on would plan anew.
        if every != self._orders:
            self._orders = every
            self.replan(self.policy, self.specs)

    def replan(self, policy: SchedulePolicy, specs: tuple[GroupSpec, ...]) -> None:
        """Plan every order anew, by the policy and what is known of the groups now."""
        self.policy, self.specs = policy, specs
        self._schedules = {
            # Sorted, so that the digest doesn't depend on the order in which a rank came to know them.
            entry: scheduled(orders, policy, specs.__getitem__)
            for entry, orders in sorted(self._orders.items())
        }
        self._planned = {
            (entry, phase): _planned(schedule, phase, specs)
            for entry, schedule in self._schedules.items()
            for phase in schedule.phases
        }
        texts = [
            repr(policy),
            str(len(specs)),
            *(f"{e}\n{schedule}" for e, schedule in self._schedules.items()),
        ]
        # It travels as an int64, whose highest bit is the sign.
        self.digest = int.from_bytes(hashlib.sha256("\n".join(texts).encode()).digest()[:8], "big") >> 1


def _planned(schedule: Schedule, phase: Phase, specs: tuple[GroupSpec, ...]) -> PlannedPhase:
    entries = schedule.phases[phase]
    before = schedule.phases.get(Phase.FORWARD, ()) if phase is Phase.BACKWARD else ()
    live = reduced = 0
    for action in (action for entry in before for action in entry.actions):
        if action.kind is ActionKind.UNSHARD:
            live |= bits(action.groups)
        elif action.kind is ActionKind.RESHARD:
            live &= ~bits(action.groups)
    for action in (action for entry in entries for action in entry.actions):
        if action.kind in (ActionKind.HOLD, ActionKind.REDUCE):
            reduced |= bits(action.groups)
    # At the end of a step ranks ask each other, so that no answer to it can be made beforehand.
    until = entries[:-1] if entries and entries[-1].event.kind is EventKind.STEP_END else entries
    steps = tuple(Step((*entry.actions, *_late_wait(entry, specs)), None, (entry,)) for entry in until)
    ahead, live_after = list[tuple[int, ...]](), live
    for action in steps[0].actions if steps and phase is not Phase.BACKWARD else ():
        # Of what a group is gathered, and of one with rows in use how many, ranks say as they meet; one that
        # stays after a backward needs no gather.
        of = [specs[group] for group in action.groups]
        untold = any(s.smaller_world or s.no_prefetch or s.words_wait or s.keeps(Phase.BACKWARD) for s in of)
        if untold or action.kind is not ActionKind.UNSHARD:
            break
        ahead.append(action.groups)
        live_after |= bits(action.groups)
    after = (steps[0]._replace(actions=steps[0].actions[len(ahead) :]), *steps[1:]) if ahead else steps
    events = tuple(entry.event for entry in entries)
    return PlannedPhase(entries, live, reduced, steps, events, tuple(ahead), live_after, after)


def _late_wait(entry: ScheduleEntry, specs: tuple[GroupSpec, ...]) -> tuple[Action, ...]:
    """For what should have stayed unsharded: the caller may have resharded it, and have it gathered again."""
    event, waited = entry.event, {g for a in entry.actions if a.kind is ActionKind.WAIT for g in a.groups}
    reads = event.kind in BEGINS and specs[event.group].reads(event.kind)
    return (Action(ActionKind.WAIT, (event.group,)),) if reads and event.group not in waited else ()


def bits(groups: Iterable[int]) -> int:
    """One bit for each of the numbers."""
    total = 0
    for group in groups:
        total |= 1 << group
    return total


def supersequence(first: Sequence[T], second: Sequence[T]) -> tuple[T, ...]:
    """The shortest sequence that has both as subsequences; the same for the same arguments.

    Where they differ the part of ``first`` comes first. What is the same at the beginning and the end is cut
    off beforehand; what lies between costs the product of its lengths, and is put end to end where that is
    too much.
    """
    start = 0
    while start < min(len(first), len(second)) and first[start] == second[start]:
        start += 1
    tail = 0
    while tail < min(len(first), len(second)) - start and first[-1 - tail] == second[-1 - tail]:
        tail += 1
    ours, theirs = first[start : len(first) - tail], second[start : len(second) - tail]
    return (*first[:start], *_merged(ours, theirs), *first[len(first) - tail :])


def _merged(first: Sequence[T], second: Sequence[T]) -> list[T]:
    if not first or not second or len(first) * len(second) > _MAX_CELLS:
        return [*first, *second]
    shared = _shared_lengths(first, second)
    merged: list[T] = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] == second[j]:
            merged.append(first[i])
            i, j = i + 1, j + 1
        elif shared[i + 1][j] >= shared[i][j + 1]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return [*merged, *first[i:], *second[j:]]


def _shared_lengths(first: Sequence[T], second: Sequence[T]) -> list[list[int]]:
    """Return the lengths of the longest common subsequences of ``first[i:]`` and ``second[j:]``."""
    rows = [[0] * (len(second) + 1)]
    for item in reversed(first):
        below, row, best = rows[-1], [0] * (len(second) + 1), 0
        for j in range(len(second) - 1, -1, -1):
            best = below[j + 1] + 1 if item == second[j] else max(below[j], best)
            row[j] = best
        rows.append(row)
    return rows[::-1]
