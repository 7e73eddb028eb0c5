"""The follower: decides what is launched at each event of a step, alone or with other ranks. Pure.

An all-gather may be thrown away and a reduce-scatter may carry zeros, so a rank can participate in any
group's collective at any time; and an order that holds all ranks' orders (``supersequence``) serves each of
them. So an event that a rank leaves out is *passed*: its collectives are launched all the same. Only a need
that lies not ahead has to be asked for:

    follow   the event is at the cursor, or ahead of it: pass what lies between, take its actions
    ask      it is neither. Pass the rest of the phase, and tell the others (``DEVIATES``). From now on all
             ranks say what they need next, all launch the smallest, until all have said that they are done.
             Then those that left the schedule tell their orders, and all plan the same wider one

A first step is the same with an empty schedule. Ranks synchronize at the begin of a phase and at its end: a
few words, combined by OR. Their sync points must be the same, except that a rank which is elsewhere
participates in another one's evaluation (launches its schedule and throws the results away), so that ranks
may evaluate different numbers of batches.

A phase runs in one of three modes. AGREED is the above. LOCAL asks nobody (a world of one, or agreement off):
where this rank leaves the schedule it gathers on demand, launches nothing that it doesn't need, and the order
that it went replaces the one before. HELD finds all that it needs unsharded by the caller, and launches
nothing.

The follower is an explicit state machine. What it holds between two calls are values that are replaced and
never edited, so ``copy.copy`` copies it, and ``snapshot`` is hashable; it knows no groups, devices or
channels. What is still to be done for an event stands in ``_agenda``, so that an answer of other ranks may be
waited for anywhere. Where an event is the next one of a schedule that was followed from its begin
(``_exact``), the planned actions are returned as they are: everything that they lead to was planned.
"""

import copy
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from shardwright.errors import StageError
from shardwright.policy import SchedulePolicy
from shardwright.schedule.group_states import Groups
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
from shardwright.schedule.sync import (
    BEGIN_OF,
    AllReduceMin,
    Answer,
    Broadcast,
    ConsensusResult,
    Describe,
    Diverge,
    Inspect,
    Local,
    Recorded,
    RecordedOrder,
    Step,
    Sync,
    Synchronize,
    SyncPoint,
)

DONE = 2**63 - 1
"""Said by a rank that needs nothing more."""

_MOST_PASSED = 16


class Mode(StrEnum):
    """How a phase is followed (see above)."""

    AGREED = "agreed"
    LOCAL = "local"
    HELD = "held"


class Cursor(NamedTuple):
    """One phase as this rank goes through it.

    place: the next of ``plan.entries``. inner: it runs within another one. asking: the rest of it is asked
    for. busy: bits of the groups whose modules run now; a passed event doesn't reshard them. order: its
    events.
    """

    phase: Phase
    entry: int
    mode: Mode
    plan: PlannedPhase = UNPLANNED
    inner: bool = False
    place: int = 0
    asking: bool = False
    busy: int = 0
    order: tuple[Event, ...] = ()

    def find(self, event: Event) -> int | None:
        """Where ``event`` is, at the cursor or ahead. The end of a module is only looked for among ends: it
        needs no collective, so nothing is passed for it that may still be needed."""
        entries = self.plan.entries
        for place in range(self.place, len(entries) if self.mode is Mode.AGREED else self.place + 1):
            if place == len(entries):
                return None
            found = entries[place].event
            if found == event:
                return place
            if event.kind in ENDS and found.kind not in ENDS:
                return None
        return None


class Follower:
    """One rank's part in the collectives of one model.

    recorded: its schedules. mode: of its phases, AGREED or LOCAL. settles: False leaves reductions in flight
    at the end of a backward; the same on every rank. used: bits of the groups that this rank's forwards have
    run since the last backward. cursors: the phases that run, one inside the other.
    """

    def __init__(self, policy: SchedulePolicy, specs: Sequence[GroupSpec], mode: Mode) -> None:
        self.recorded = RecordedSchedules(policy, tuple(specs))
        self.mode = mode
        self.settles = True
        self.used = 0
        self.cursors: tuple[Cursor, ...] = ()
        self.groups = Groups(_copied(specs))
        self._forwards: tuple[int, ...] | None = ()  # entries since the last backward; None: it was the last
        self._exact: tuple[Step, ...] = ()
        self._place = 0  # of ``_exact``
        self._passed: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # see ``_leave_exact``
        self._agenda: tuple[tuple[Any, ...], ...] = ()
        self._answer: Answer = 0
        self._taken: tuple[ScheduleEntry, ...] = ()
        self._event: Event | None = None
        self._given = 0  # actions of this event that were returned by now

    def __copy__(self) -> "Follower":
        copied = Follower.__new__(Follower)
        copied.__dict__ |= self.__dict__
        copied.recorded, copied.groups = copy.copy(self.recorded), copy.copy(self.groups)
        return copied

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that its next decisions depend on, hashable: equal where those are."""
        said = (self.mode, self.settles, self.used, self.recorded.digest, self._forwards, self._answer)
        return (*said, self.groups.states, self.cursors, self._agenda, bool(self._exact), self._place)

    # ---- events

    def begin(self, phase: Phase, entry: int, local: Local, held: bool = False) -> Step:
        """Enter a phase; where ranks agree every rank does, for the same module.

        Inside of another one all is asked for. held: the caller has unsharded what it needs (``Mode.HELD``).
        """
        self._leave_exact()
        mode = Mode.HELD if held else self.mode
        inner = any(cursor.mode is not Mode.HELD for cursor in self.cursors)
        if phase is Phase.FORWARD and not inner:
            if self._forwards is None:
                self.used, self._forwards = 0, ()
            self._forwards = tuple(dict.fromkeys((*self._forwards, entry)))
        elif mode is Mode.LOCAL and phase is Phase.BACKWARD and len(self._forwards or ()) > 1:
            entry = hash(self._forwards)  # what a backward runs depends on what has run before it
        self.groups.set(held=local.held, live=self.groups.states.live if inner else local.held)
        if held:
            self.cursors += (Cursor(phase, entry, mode),)
        elif inner:
            if mode is Mode.AGREED:
                return self._begin_asking(phase, entry)
            self.cursors += (Cursor(phase, entry, mode, inner=True),)
        elif mode is Mode.AGREED:
            self._agenda = (("_start", phase, entry), ("_synchronize", BEGIN_OF[phase], entry))
            return self._run(None)
        else:
            self.groups.set(smaller=local.smaller, used_by_some=-1)
            self._enter(phase, entry)
        return Step(())

    def on(self, event: Event) -> Step:
        """Take an event's actions, and those of the events before it that this rank leaves out.

        After a begin event the group is held and waited for.
        """
        place = self._place
        if place < len(self._exact):
            step = self._exact[place]
            if step.taken[0].event == event:
                self._place = place + 1
                return step
        self._leave_exact()
        cursor = self.cursors[-1]
        self._move(order=(*cursor.order, event))
        if event.kind is EventKind.STEP_END:
            self._agenda = (("_end_backward",),)
        elif cursor.mode is Mode.HELD:
            self._pass_held(event)
        else:
            self._follow(event)
        return self._run(event)

    def end(self, failed: bool = False) -> Step:
        """Leave the phase; none of its rest is taken where it has failed.

        Ranks that agree leave a forward together: what one of them has to ask for, the others answer here,
        and not from wherever their programs go next (another model, a reduction of the loss).
        """
        self._leave_exact()
        cursor = self.cursors[-1]
        if failed or (cursor.mode is Mode.AGREED and (cursor.inner or cursor.phase is Phase.BACKWARD)):
            self.cursors = self.cursors[:-1]
            return Step(())
        self._agenda = (("_end_phase",),)
        return self._run(None)

    def join_evaluations(self, local: Local) -> Step:
        """Participate in the others' evaluations until every rank has come here."""
        self.groups.set(held=local.held)
        self._agenda = (("_synchronize", SyncPoint.JOIN_EVALUATIONS, 0),)
        return self._run(None)

    def resume(self, answer: Answer) -> Step:
        """Go on with the answer to the last step's sync."""
        self._answer = answer
        return self._run(self._event)

    def call(self, kind: ActionKind, group: int) -> Step:
        """The caller unshards, waits for or reshards a group, on every rank."""
        self._leave_exact()
        bit, states = 1 << group, self.groups.states
        if kind is ActionKind.RESHARD:
            self.groups.set(live=states.live & ~bit, held=states.held & ~bit)
            smaller = bool(self.cursors) and self._keeps_smaller(group)
        else:
            smaller = False
            self.groups.set(live=states.live | bit, held=states.held | bit)
        return Step((Action(kind, (group,), smaller),))

    def hold(self, group: int) -> None:
        """Keep the group from the forward that runs to the end of the next backward, on this rank."""
        self._leave_exact()
        self.groups.set(kept=self.groups.states.kept | 1 << group)

    def abandon(self) -> None:
        """Forget the phases that an exception ended, and the gradients on their way."""
        self.cursors, self._agenda, self._exact, self._place = (), (), (), 0
        self._taken, self._event, self._given = (), None, 0
        self.groups = Groups(self.groups.copied)

    def replan(self, policy: SchedulePolicy, specs: Sequence[GroupSpec]) -> None:
        """Plan anew: the policy or what is known of a group has changed; on every rank."""
        self._leave_exact()
        self.recorded.replan(policy, tuple(specs))
        self.groups.copied = _copied(specs)

    # ---- the agenda

    def _run(self, event: Event | None) -> Step:
        """Do what stands on the agenda, its last first, up to the next sync."""
        self._event = event
        sync: Sync | None = None
        while self._agenda and sync is None:
            (name, *args), self._agenda = self._agenda[-1], self._agenda[:-1]
            sync = getattr(self, name)(*args)
        actions, self._given = self.groups.actions[self._given :], len(self.groups.actions)
        if sync is not None:
            return Step(actions, sync)
        taken = self._taken
        if event is not None and not taken:
            taken = (ScheduleEntry(event, self.groups.actions),)
        self._taken, self._event, self.groups.actions, self._given = (), None, (), 0
        return Step(actions, None, taken)

    def _push(self, name: str, *args: Any) -> None:
        self._agenda += ((name, *args),)

    def _move(self, **changes: Any) -> None:
        self.cursors = (*self.cursors[:-1], self.cursors[-1]._replace(**changes))

    # ---- synchronizing

    def _synchronize(self, point: SyncPoint, entry: int) -> Sync:
        self._push("_synchronized", point, entry)
        return Synchronize(point, entry, self.used, self.recorded.digest)

    def _synchronized(self, point: SyncPoint, entry: int) -> Sync | None:
        points = self._result.points
        others = SyncPoint.BACKWARD | SyncPoint.BACKWARD_END | SyncPoint.FORWARD_END
        if SyncPoint.DEVIATES in points:
            self._push("_synchronize", point, entry)
            self._push("_tell", None)
            self._push("_ask", DONE)
        elif points == point:
            pass
        elif SyncPoint.EVALUATION not in points or points & others:
            return Diverge(point, entry, self.recorded.digest)
        elif point is not SyncPoint.EVALUATION:  # participate in it
            self._push("_synchronize", point, entry)
            self._push("_end_phase")
            self._start(Phase.EVALUATION, self._result.entry)
        return None

    @property
    def _result(self) -> ConsensusResult:
        assert isinstance(self._answer, ConsensusResult)
        return self._answer

    def _start(self, phase: Phase, entry: int) -> None:
        result, every = self._result, (1 << len(self.recorded.specs)) - 1
        live = every & ~result.missing
        self.groups.set(live=live, smaller=every & ~result.not_smaller, used_by_some=result.used)
        if phase is not Phase.BACKWARD:  # kept since an evaluation; a rank that hasn't may have a new shard
            for group in _numbers(self.groups.states.held & ~live):
                self.groups.reshard(group, smaller=False)
        self._enter(phase, entry)

    def _enter(self, phase: Phase, entry: int) -> None:
        plan, states = self.recorded.planned(entry, phase), self.groups.states
        self.cursors += (Cursor(phase, entry, self.mode, plan),)
        as_planned = states.live == plan.live and not (states.smaller or states.held_back or states.in_flight)
        if as_planned and not plan.reduced & ~states.used_by_some:
            self._exact, self._place = plan.steps, 0

    # ---- following

    def _leave_exact(self) -> None:
        """From here on the state is kept event by event: bring it up to where the schedule was followed to.

        Phases that were followed to their end lead from the same state to the same one: those are remembered.
        """
        if not self._exact:
            return
        plan, place = self.cursors[-1].plan, self._place
        whole = place == len(self._exact)
        self._exact, self._place = (), 0
        key = (id(plan), self.groups.states, self.used)
        if whole and key in self._passed:
            _, self.groups.states, self.used, busy = self._passed[key]
        else:
            self._replay(plan.entries[:place])
            busy = self.cursors[-1].busy
            if whole:
                self._passed = {key: (plan, self.groups.states, self.used, busy)} | (
                    self._passed if len(self._passed) < _MOST_PASSED else {}
                )
        self._move(place=place, order=plan.events[:place], busy=busy)

    def _replay(self, entries: Sequence[ScheduleEntry]) -> None:
        actions = self.groups.actions
        for entry in entries:
            if entry.event.kind in ENDS:
                self._move(busy=self.cursors[-1].busy & ~(1 << entry.event.group))
            self._pass(entry)
            if entry.event.kind in BEGINS:
                self._run_module(entry.event)
        self.groups.actions = actions

    def _follow(self, event: Event) -> None:
        cursor, group = self.cursors[-1], event.group
        bit = 1 << group
        if event.kind in ENDS:
            self._move(busy=cursor.busy & ~bit)
        found = cursor.find(event)
        if found is not None:
            self._take(cursor.plan.entries[cursor.place : found + 1])
        elif cursor.mode is Mode.LOCAL:
            self._move(place=len(cursor.plan.entries))
            self.groups.set(live=0)
        spec = self.recorded.specs[group]
        if event.kind in BEGINS:
            self._push("_run_module", event)
            if spec.reads(event.kind):
                self._need(group)
        elif event.kind is EventKind.GRADS_READY:
            self._push("_reduce_what_is_left", group, 0)
            self._push("_inspect", group)
        elif found is None and not self.groups.states.live & bit and not spec.keeps(cursor.phase):
            self._reshard(group)

    def _pass_held(self, event: Event) -> None:
        if event.kind in BEGINS:
            self.groups.do(ActionKind.WAIT, (event.group,))
            if event.kind is EventKind.FORWARD_BEGIN and self.cursors[-1].phase is Phase.FORWARD:
                self.used |= 1 << event.group

    def _run_module(self, event: Event) -> None:
        """A module begins to run with the group."""
        cursor, bit = self.cursors[-1], 1 << event.group
        if cursor.phase is Phase.FORWARD:
            self.used |= bit
        if self.recorded.specs[event.group].reads(event.kind):
            self.groups.do(ActionKind.WAIT, (event.group,))
            self._move(busy=cursor.busy | bit)

    def _take(self, entries: Sequence[ScheduleEntry]) -> None:
        for entry in entries:
            self._pass(entry)
        self._move(place=self.cursors[-1].place + len(entries))
        self._taken += tuple(entries)

    def _take_rest(self) -> None:
        cursor = self.cursors[-1]
        rest = cursor.plan.entries[cursor.place :]
        if cursor.mode is Mode.AGREED or (rest and rest[0].event.kind is EventKind.STEP_END):
            self._take(rest)
        elif rest:
            self._move(place=len(cursor.plan.entries))
            self.groups.set(live=0)

    def _pass(self, entry: ScheduleEntry) -> None:
        """Take the actions of an entry, in so far as they are still to be taken."""
        event = entry.event
        if event.kind is EventKind.STEP_END:
            return  # what it waits for is waited for once the ranks have met there
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
        if event.kind in BEGINS and self.recorded.specs[event.group].reads(event.kind):
            self.groups.unshard((event.group,))  # the plan can be wrong about what earlier phases left behind

    def _reshard(self, group: int) -> None:
        """Unless its module runs: then its own end comes."""
        if not any(cursor.busy >> group & 1 for cursor in self.cursors):
            self.groups.reshard(group, self._keeps_smaller(group))

    def _keeps_smaller(self, group: int) -> bool:
        return self.cursors[-1].phase is Phase.FORWARD and self.recorded.specs[group].smaller_world

    # ---- asking

    def _begin_asking(self, phase: Phase, entry: int) -> Step:
        """A phase inside of another one."""
        self._agenda = (("_enter_inner", phase, entry),)
        if self.cursors[-1].mode is Mode.AGREED and not self.cursors[-1].asking:
            self._push("_deviate")
        return self._run(None)

    def _enter_inner(self, phase: Phase, entry: int) -> None:
        self.cursors += (Cursor(phase, entry, self.mode, inner=True, asking=True),)

    def _need(self, group: int) -> None:
        if self.groups.states.held >> group & 1:
            return
        if self.cursors[-1].mode is Mode.LOCAL:
            self.groups.gather((group,))
        else:
            self._push_ask(1 << 32 | group)

    def _push_ask(self, code: int) -> None:
        """Ask for what the schedule doesn't have; the ranks are told so first, where they weren't."""
        self._push("_ask", code)
        if not self.cursors[-1].asking:
            self._push("_deviate")

    def _deviate(self) -> Sync:
        """Launch the rest of the phase, and have all ranks ask."""
        self._take_rest()
        self._move(asking=True)
        self.groups.set(live=0)  # what is left of it is this rank's own, from here on
        return Synchronize(SyncPoint.DEVIATES, 0, 0, 0)

    def _ask(self, ours: int) -> Sync:
        """Launch what ranks need, smallest first, until it was this rank's need; DONE: until none has any."""
        self._push("_asked", ours)
        return AllReduceMin(ours)

    def _asked(self, ours: int) -> None:
        code = self._answer
        assert isinstance(code, int)
        if code == DONE:
            return
        if code != ours:
            self._push("_ask", ours)
        group = code & 0xFFFFFFFF
        if not code >> 32:
            self.groups.reduce([group], self.recorded.policy.max_reductions)
        elif code == ours:
            self.groups.gather((group,))
        else:
            self.groups.participate(group)

    def _tell(self, order: RecordedOrder | None) -> Sync:
        self._push("_widen")
        return Broadcast(order)

    def _widen(self) -> None:
        assert isinstance(self._answer, Recorded)
        self.recorded.widen(self._answer)

    def _finish_asking(self, cursor: Cursor) -> None:
        if cursor.asking:
            self._push("_tell", RecordedOrder(cursor.entry, cursor.phase, cursor.order))
            self._push("_ask", DONE)

    # ---- reductions

    def _inspect(self, group: int) -> Sync:
        return Inspect(group)

    def _reduce_what_is_left(self, group: int, asked: int) -> None:
        """Reduce the gradients that were held back, and those that came since; all ranks together."""
        assert isinstance(self._answer, Local)
        bit = 1 << group
        if self._answer.accumulating & bit:
            self.groups.do(ActionKind.REDUCE, (group,))  # they stay on this rank: nothing is in flight
        elif self._answer.unreduced & bit:
            if self.cursors[-1].mode is Mode.LOCAL:
                self.groups.reduce([group], self.recorded.policy.max_reductions)
                return
            if asked == 2:  # all ranks would ask again, for ever, and none would wait long in any exchange
                raise StageError(
                    f"group {group} (the number in FSDPModule.schedule) still holds gradients after two "
                    "reductions in one backward; please report this as a defect of Shardwright"
                )
            self._push("_reduce_what_is_left", group, asked + 1)
            self._push("_inspect", group)
            self._push_ask(group)

    # ---- the end of a phase

    def _end_phase(self) -> None:
        self._leave_exact()
        self._take_rest()
        cursor, self.cursors = self.cursors[-1], self.cursors[:-1]
        if cursor.mode is Mode.AGREED:
            self._push("_leave", cursor)
            self._push("_synchronize", SyncPoint.FORWARD_END, cursor.entry)
            self._finish_asking(cursor)
            return
        if cursor.phase is not Phase.BACKWARD:
            self._leave(cursor._replace(busy=0))
        if cursor.mode is Mode.LOCAL and not cursor.inner and cursor.order != cursor.plan.events:
            self._push("_record", RecordedOrder(cursor.entry, cursor.phase, cursor.order))
            self._push("_describe")

    def _leave(self, cursor: Cursor) -> None:
        """Reshard what a phase that has ended leaves unsharded, and nobody has asked to keep."""
        outer = self.cursors
        self.cursors = (*outer, cursor)
        for group in _numbers(self.groups.states.held):
            kept = self.groups.states.live >> group & 1 and cursor.mode is not Mode.HELD
            if not kept and not self.recorded.specs[group].keeps(cursor.phase):
                self._reshard(group)
        self.cursors = outer

    def _describe(self) -> Sync:
        return Describe()

    def _record(self, order: RecordedOrder) -> None:
        assert isinstance(self._answer, Recorded)
        self.recorded.replace(self._answer._replace(orders=(order,)))

    def _end_backward(self) -> None:
        cursor = self.cursors[-1]
        self._take_rest()
        self._push("_reshard_after_backward")
        if cursor.mode is Mode.AGREED and not cursor.inner:
            self._push("_settle")
            self._push("_synchronize", SyncPoint.BACKWARD_END, cursor.entry)
            self._finish_asking(self.cursors[-1])
        elif cursor.mode is Mode.AGREED:
            self.groups.finalize(None)  # which parameters have gradients is known at the outer phase's end
        else:
            self._forwards = None if not cursor.inner else self._forwards
            self.groups.reduce(self.groups.states.held_back)
            if self.settles:
                self.groups.finalize(-1)

    def _settle(self) -> None:
        self.recorded.note_used(self.groups.states.used_by_some)
        self._forwards = None
        self.groups.reduce(self.groups.states.held_back)
        if self.settles:
            self.groups.finalize(self._result.grad_mask)

    def _reshard_after_backward(self) -> None:
        self.groups.set(kept=0)
        for group in _numbers(self.groups.states.held):
            if not self.recorded.specs[group].keeps(Phase.BACKWARD):
                self._move(busy=self.cursors[-1].busy & ~(1 << group))
                self.groups.drop_live(group)
                self._reshard(group)


def _numbers(mask: int) -> list[int]:
    """The numbers whose bits are set, ascending."""
    return [group for group in range(mask.bit_length()) if mask >> group & 1]


def _copied(specs: Sequence[GroupSpec]) -> int:
    """Bits of the groups whose shards have copies."""
    return bits(group for group, spec in enumerate(specs) if spec.needs_copies_reduced)
