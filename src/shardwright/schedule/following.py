"""How one rank follows its schedules, and what that makes of the groups. Nobody else is asked here. Pure.

A phase runs in one of three modes. AGREED: all ranks launch the same collectives. LOCAL asks nobody (a world
of one, or agreement off): where this rank leaves the schedule it gathers on demand, launches nothing that it
doesn't need, and the order that it went replaces the one before. HELD finds all that it needs unsharded by
the caller, and launches nothing.

Where an event is the next one of a schedule that was followed from its begin (``_exact``), the planned
actions are returned as they are, and the states stay what they were at the begin; ``_leave_exact`` brings
them up to date. All else takes the entries of a schedule one by one, in so far as they are still to be taken.
"""

import copy
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

from shardwright.policy import SchedulePolicy
from shardwright.schedule.recorded import UNPLANNED, PlannedPhase, RecordedSchedules, bits
from shardwright.schedule.schedule import (
    BEGINS,
    ENDS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupSpec,
    Phase,
    ScheduleEntry,
)
from shardwright.schedule.sync import Step


class Mode(StrEnum):
    """How a phase is followed (see above)."""

    AGREED = "agreed"
    LOCAL = "local"
    HELD = "held"


class Cursor(NamedTuple):
    """One phase as this rank goes through it.

    place: the next of ``planned.entries``. inner: it runs within another one. asking: the rest of it is asked
    for. busy: bits of the groups whose modules run now; a passed event doesn't reshard them. order: its
    events.
    """

    phase: Phase
    entry: int
    mode: Mode
    planned: PlannedPhase = UNPLANNED
    inner: bool = False
    place: int = 0
    asking: bool = False
    busy: int = 0
    order: tuple[Event, ...] = ()

    def find(self, event: Event) -> int | None:
        """Where ``event`` is, at the cursor or ahead. The end of a module is only looked for among ends: it
        needs no collective, so nothing is passed for it that may still be needed."""
        # Alone nothing is passed, since nobody needs what would be launched for it.
        until = None if self.mode is Mode.AGREED else self.place + 1
        for place, entry in enumerate(self.planned.entries[self.place : until], self.place):
            if entry.event == event:
                return place
            if event.kind in ENDS and entry.event.kind not in ENDS:
                return None
        return None


class GroupStates(NamedTuple):
    """Where the groups stand; bits of groups, except the last two.

    live: gathered by collectives that were agreed on, so that it is the same on all ranks. smaller: those
    that every rank can gather over the smaller world. held: those that this rank holds, more than
    ``live`` or the same. kept: those that this rank doesn't reshard before the end of the next backward.
    used_by_some: those that some rank may have gradients of; the others are not
    reduced. held_back: groups whose gradients wait for a collective to go with. in_flight: reductions in
    flight, of groups together.
    """

    live: int = 0
    smaller: int = 0
    held: int = 0
    kept: int = 0
    used_by_some: int = 0
    held_back: tuple[int, ...] = ()
    in_flight: tuple[tuple[int, ...], ...] = ()


class Groups:
    """What the agreed actions have made of the groups (``states``), and the ``actions`` that an event has led
    to so far.

    copied: bits of those whose shards have copies, over which gradients are summed too.
    ``states`` is replaced and never edited, so a shallow copy is a copy.
    """

    def __init__(self, copied: int) -> None:
        self.copied = copied
        self.states = GroupStates()
        self.actions: tuple[Action, ...] = ()

    def set(self, **changes: Any) -> None:
        """Replace fields of ``states``."""
        self.states = self.states._replace(**changes)

    def do(self, kind: ActionKind, groups: Sequence[int], smaller: bool = False) -> None:
        """Have one more action taken."""
        self.actions += (Action(kind, tuple(groups), smaller),)

    # ---- all-gathers

    def unshard(self, groups: Iterable[int]) -> None:
        """Launch the agreed all-gather of groups, of those that aren't live."""
        groups = [group for group in groups if not self.states.live >> group & 1]
        self.set(live=self.states.live | bits(groups))
        self.gather(groups)

    def gather(self, groups: Sequence[int]) -> None:
        """Launch an all-gather of groups; over the smaller world where all ranks have shards over that."""
        states, taken = self.states, bits(groups)
        others = [group for group in groups if not states.smaller >> group & 1]
        # Each by itself: only groups that are gathered over the whole axis share an all-gather.
        for group in groups:
            if group not in others:
                self.do(ActionKind.UNSHARD, (group,), smaller=True)
        if others:
            self.do(ActionKind.UNSHARD, others)
        self.set(held=states.held | taken, smaller=states.smaller & ~taken)

    def participate(self, group: int) -> None:
        """Launch an all-gather that other ranks need."""
        self.do(ActionKind.PARTICIPATE, (group,), bool(self.states.smaller >> group & 1))
        self.set(smaller=self.states.smaller & ~(1 << group))

    def drop_live(self, group: int) -> None:
        """The agreed actions reshard it."""
        self.set(live=self.states.live & ~(1 << group))

    def reshard(self, group: int, smaller: bool) -> None:
        """Reshard what this rank holds, if nobody keeps it. smaller: keep shards over the smaller world."""
        if (self.states.held & ~self.states.kept) >> group & 1:
            self.do(ActionKind.RESHARD, (group,), smaller)
            self.set(held=self.states.held & ~(1 << group))

    # ---- reductions

    def pass_reduction(self, action: Action) -> None:
        """An action of the schedule on gradients, of the groups that some rank may have gradients of."""
        groups = [group for group in action.groups if self.states.used_by_some >> group & 1]
        if action.kind in (ActionKind.STEP, ActionKind.ALL_REDUCE):
            self.actions += (action,)
        elif action.kind is ActionKind.WAIT_REDUCE:
            self.wait_reduce(action.groups, planned=True)
        elif action.kind is ActionKind.REDUCE:
            self.reduce(groups)
        elif groups and action.group not in self.states.held_back:
            self.wait_reduce(groups)
            self.do(ActionKind.HOLD, groups)
            self.set(held_back=(*self.states.held_back, *groups))

    def reduce(self, groups: Sequence[int], max_reductions: int | None = None) -> None:
        """Launch the reduce-scatter of groups together, after those of theirs that are in flight.

        max_reductions: after as many others, too, that no more than these are in flight; None: that is
        planned.
        """
        while max_reductions is not None and len(self.states.in_flight) >= max_reductions:
            self.wait_reduce(self.states.in_flight[0])
        # A group has one reduction in flight at most: the sums of the next one are added to those of this
        # one.
        if groups:
            self.wait_reduce(groups)
            self.do(ActionKind.REDUCE, groups)
            self.set(
                held_back=tuple(group for group in self.states.held_back if group not in groups),
                in_flight=(*self.states.in_flight, tuple(groups)),
            )

    def wait_reduce(self, groups: Sequence[int], planned: bool = False) -> None:
        """Wait for all reductions in flight that have any of these groups, and step with what they brought.

        planned: the schedule says itself where that is.
        """
        for together in self.states.in_flight:
            if not set(together).isdisjoint(groups):
                self.do(ActionKind.WAIT_REDUCE, together)
                copied = [group for group in together if self.copied >> group & 1]
                if not planned:
                    self.do(ActionKind.STEP, together)
                    if copied:
                        self.do(ActionKind.ALL_REDUCE, copied)
                self.set(in_flight=tuple(each for each in self.states.in_flight if each is not together))

    def finalize(self, grads: int | None) -> None:
        """Wait for all reductions in flight, and give the shards their gradients (see ``Action.grads``)."""
        for together in self.states.in_flight:
            self.wait_reduce(together)
        self.actions += (Action(ActionKind.FINALIZE, (), grads=grads),)


class Following:
    """One rank's way along the schedules of one model.

    recorded: its schedules. mode: of its phases, AGREED or LOCAL. used: bits of the groups that this rank's
    forwards have run since the last backward. cursors: the phases that run, one inside the other.
    What it holds is replaced and never edited, so that a shallow copy is a copy.
    """

    def __init__(self, policy: SchedulePolicy, specs: Sequence[GroupSpec], mode: Mode) -> None:
        self.recorded = RecordedSchedules(policy, tuple(specs))
        self.mode = mode
        self.used = 0
        self.cursors: tuple[Cursor, ...] = ()
        self.groups = Groups(_copied(specs))
        self._exact: tuple[Step, ...] = ()
        self._place = 0  # of ``_exact``
        self._taken: tuple[ScheduleEntry, ...] = ()

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        copied.recorded, copied.groups = copy.copy(self.recorded), copy.copy(self.groups)
        return copied

    def replan(self, policy: SchedulePolicy, specs: Sequence[GroupSpec]) -> None:
        """Plan anew: the policy or what is known of a group has changed; on every rank."""
        self._leave_exact()
        self.recorded.replan(policy, tuple(specs))
        self.groups.copied = _copied(specs)

    def _move(self, **changes: Any) -> None:
        self.cursors = (*self.cursors[:-1], self.cursors[-1]._replace(**changes))

    # ---- entering a phase, and leaving it

    def _enter(self, phase: Phase, entry: int) -> None:
        planned, states = self.recorded.planned(entry, phase), self.groups.states
        self.cursors += (Cursor(phase, entry, self.mode, planned),)
        is_begun = states.live == planned.live_after
        as_planned = (is_begun or states.live == planned.live) and not (
            states.smaller or states.kept or states.held_back or states.in_flight
        )
        # Planned actions are taken unseen only from the very state that the plan supposes. Else they would
        # gather a group twice, or reduce one that no rank has gradients of.
        if as_planned and not planned.reduced & ~states.used_by_some:
            self._exact, self._place = planned.steps_after if is_begun else planned.steps, 0

    def _leave_exact(self) -> None:
        """From here on the states are kept event by event: bring them up to where the schedule was followed
        to."""
        if not self._exact:
            return
        cursor, live, held, busy = self.cursors[-1], self.groups.states.live, self.groups.states.held, 0
        held_back: list[int] = []
        in_flight: list[tuple[int, ...]] = []
        for event, actions in cursor.planned.entries[: self._place]:
            for kind, groups, *_ in actions:
                if kind is ActionKind.REDUCE:
                    in_flight.append(groups)
                elif kind is ActionKind.WAIT_REDUCE:
                    in_flight.remove(groups)
                for group in groups:
                    bit = 1 << group
                    if kind is ActionKind.UNSHARD:
                        live, held = live | bit, held | bit
                    elif kind is ActionKind.RESHARD:
                        live, held = live & ~bit, held & ~bit
                    elif kind is ActionKind.HOLD:
                        held_back.append(group)
                    elif kind is ActionKind.REDUCE and group in held_back:
                        held_back.remove(group)
            if event.kind in ENDS:
                busy &= ~(1 << event.group)
            elif event.kind in BEGINS:
                bit = 1 << event.group
                if cursor.phase is Phase.FORWARD:
                    self.used |= bit
                if self.recorded.specs[event.group].reads(event.kind):
                    busy |= bit
        self.groups.set(live=live, held=held, held_back=tuple(held_back), in_flight=tuple(in_flight))
        self._move(place=self._place, order=cursor.planned.events[: self._place], busy=busy)
        self._exact, self._place = (), 0

    def _leave(self) -> None:
        """Leave the phase: reshard what it leaves unsharded, and nobody has asked to keep."""
        self._move(busy=0)
        cursor = self.cursors[-1]
        for group in numbers(self.groups.states.held):
            stays = self.groups.states.live >> group & 1 and cursor.mode is not Mode.HELD
            if not stays and not self.recorded.specs[group].keeps(cursor.phase):
                self._reshard(group)
        self.cursors = self.cursors[:-1]

    # ---- taking entries

    def _take_until(self, event: Event) -> bool:
        """Take the entries up to that of ``event``; False where it isn't ahead."""
        cursor = self.cursors[-1]
        found = cursor.find(event)
        if found is not None:
            self._take(cursor.planned.entries[cursor.place : found + 1])
        elif cursor.mode is Mode.LOCAL:
            self._drop_rest()
        return found is not None

    def _take_rest(self) -> None:
        cursor = self.cursors[-1]
        rest = cursor.planned.entries[cursor.place :]
        if cursor.mode is Mode.AGREED or (rest and rest[0].event.kind is EventKind.STEP_END):
            self._take(rest)
        elif rest:
            self._drop_rest()

    def _drop_rest(self) -> None:
        self._move(place=len(self.cursors[-1].planned.entries))
        self.groups.set(live=0)

    def _take(self, entries: Sequence[ScheduleEntry]) -> None:
        for entry in entries:
            # What the end of a step waits for is waited for once the ranks have met there.
            if entry.event.kind is not EventKind.STEP_END:
                self._pass(entry)
        self._move(place=self.cursors[-1].place + len(entries))
        self._taken += tuple(entries)

    def _pass(self, entry: ScheduleEntry) -> None:
        """Take the actions of an entry, in so far as they are still to be taken."""
        for action in entry.actions:
            if action.kind is ActionKind.UNSHARD:
                self.groups.unshard(action.groups)
            elif action.kind is ActionKind.RESHARD:
                self.groups.drop_live(action.group)
                self._reshard(action.group)
            elif action.kind is ActionKind.WAIT:
                self.groups.actions += (action,)
            else:
                self.groups.pass_reduction(action)
        event = entry.event
        # The plan can be wrong about what earlier phases left behind. Alone nobody needs what is held.
        is_needed = self.mode is Mode.AGREED or not self.groups.states.held >> event.group & 1
        if is_needed and event.kind in BEGINS and self.recorded.specs[event.group].reads(event.kind):
            self.groups.unshard((event.group,))

    def _reshard(self, group: int) -> None:
        """Reshard the group, unless its module runs, whose end will come."""
        if not any(cursor.busy >> group & 1 for cursor in self.cursors):
            self.groups.reshard(group, self._keeps_smaller(group))

    def _keeps_smaller(self, group: int) -> bool:
        return self.cursors[-1].phase is Phase.FORWARD and self.recorded.specs[group].smaller_world

    def _run_module(self, event: Event) -> None:
        """A module begins to run with the group."""
        cursor, bit = self.cursors[-1], 1 << event.group
        if cursor.phase is Phase.FORWARD:
            self.used |= bit
        if self.recorded.specs[event.group].reads(event.kind):
            self.groups.do(ActionKind.WAIT, (event.group,))
            self._move(busy=cursor.busy | bit)


def numbers(mask: int) -> list[int]:
    """The numbers whose bits are set, ascending."""
    return [group for group in range(mask.bit_length()) if mask >> group & 1]


def _copied(specs: Sequence[GroupSpec]) -> int:
    """Bits of the groups whose shards have copies."""
    return bits(group for group, spec in enumerate(specs) if spec.needs_copies_reduced)
