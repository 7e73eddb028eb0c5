"""The follower: decides what is launched at each event of a step, alone or with other ranks. Pure.

An all-gather may be thrown away and a reduce-scatter may carry zeros, so a rank can participate in any
group's collective at any time; and an order that holds all ranks' orders (``supersequence``) serves each of
them. So an event that a rank leaves out is *passed*: its collectives are launched all the same. Only a need
that lies not ahead has to be asked for:

    follow   the event is at the cursor, or ahead of it: pass what lies between, take its actions (following)
    ask      it is neither. Pass the rest of the phase, and tell the others (``DEVIATES``). From now on all
             ranks say what they need next, all launch the smallest, until all have said that they are done.
             Then those that left the schedule tell their orders, and all plan the same wider one

A first step is the same with an empty schedule. Ranks synchronize at the begin of a phase and at its end: a
few words, combined by OR. Their sync points must be the same, except that a rank which is elsewhere
participates in another one's evaluation (launches its schedule and throws the results away), so that ranks
may evaluate different numbers of batches.

The follower is an explicit state machine. What it holds between two calls are values that are replaced and
never edited, so ``copy.copy`` copies it, and ``snapshot`` is hashable; it knows no groups, devices or
channels. What is still to be done for an event stands on ``_agenda``: questions, and what has to wait for
their answers (``Meet``, ``RunModule``). So an answer of other ranks may be waited for anywhere.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from shardwright.errors import StageError
from shardwright.policy import SchedulePolicy
from shardwright.schedule.following import Cursor, Following, Groups, Mode, numbers
from shardwright.schedule.recorded import bits
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
    PHASE_OF,
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


class Meet(NamedTuple):
    """Synchronize with all ranks at ``point``. Of what they compare, each says what is so by then."""

    point: SyncPoint
    entry: int


class RunModule(NamedTuple):
    """The module of a begin event runs, once what it needs is launched."""

    event: Event


class Follower(Following):
    """One rank's part in the collectives of one model.

    settles: False leaves reductions in flight at the end of a backward; the same on every rank.
    """

    def __init__(self, policy: SchedulePolicy, specs: Sequence[GroupSpec], mode: Mode) -> None:
        super().__init__(policy, specs, mode)
        self.settles = True
        self._forwards: tuple[int, ...] | None = ()  # entries since the last backward; None: it was the last
        self._begins: tuple[int, ...] = ()  # entry of the first forward that ranks met for since a backward
        self._before: tuple[int, ...] = ()  # and before that
        self._ahead: tuple[tuple[int, ...], ...] = ()
        """Groups that all ranks gather before they say their words where they meet next, whatever for: those
        that a forward like the last one begins with, agreed on as a backward ends. Not for a backward, whose
        forward the caller has unsharded all for."""
        self._launched = 0  # bits of those, up to the next meeting
        self._agenda: tuple[Meet | RunModule | Sync, ...] = ()  # the last first
        self._question: Sync | None = None
        self._event: Event | None = None
        self._given = 0  # actions of this event that were returned by now

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that its next decisions depend on, hashable: equal where those are."""
        said = (self.mode, self.settles, self.used, self.recorded.digest, self._forwards, self._question)
        met = (self._begins, self._before, self._ahead, self._launched)
        return (*said, *met, self.groups.states, self.cursors, self._agenda, bool(self._exact), self._place)

    # ---- events

    def begin(self, phase: Phase, entry: int, local: Local, held: bool) -> Step:
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
            # It gathers nothing: what it has found unsharded stays so, whatever runs inside of it.
            self.cursors += (Cursor(phase, entry, mode, busy=local.held),)
        elif inner:
            asks = mode is Mode.AGREED
            # No schedule has a phase inside of another: the rest of the outer one is launched, and from then
            # on what both need is asked for.
            if asks and self.cursors[-1].mode is Mode.AGREED and not self.cursors[-1].asking:
                self._deviate()
            self.cursors += (Cursor(phase, entry, mode, inner=True, asking=asks),)
        elif mode is Mode.AGREED:
            self._agenda = (Meet(BEGIN_OF[phase], entry),)
        else:
            # Nobody is asked here, so any group may have gradients.
            self.groups.set(smaller=local.smaller, used_by_some=-1)
            self._enter(phase, entry)
        return self._run()

    def on(self, event: Event) -> Step:
        """Take an event's actions, and those of the events before it that this rank leaves out.

        After a begin event the group is held and waited for.
        """
        place = self._place
        # The states aren't kept up here, but in ``_leave_exact``, when something asks for them: that saves
        # 150 Python calls per group and step, 600 in place of 750 (``bench/host.py``, a world of 8).
        if place < len(self._exact):
            step = self._exact[place]
            if step.taken[0].event == event:
                self._place = place + 1
                return step
        self._leave_exact()
        self._event, cursor = event, self.cursors[-1]
        self._move(order=(*cursor.order, event))
        if event.kind is EventKind.STEP_END:
            self._end_backward()
        elif cursor.mode is not Mode.HELD:
            self._follow(event)
        elif event.kind in BEGINS:
            self.groups.do(ActionKind.WAIT, (event.group,))
            if event.kind is EventKind.FORWARD_BEGIN and cursor.phase is Phase.FORWARD:
                self.used |= 1 << event.group
        return self._run()

    def end(self, failed: bool = False) -> Step:
        """Leave the phase; none of its rest is taken where it has failed.

        Ranks that agree leave a forward together: what one of them has to ask for, the others answer here,
        and not from wherever their programs go next (another model, a reduction of the loss).
        """
        self._leave_exact()
        cursor = self.cursors[-1]
        # In a backward ranks have met already (`_end_backward`), and an inner phase ends with the outer one.
        # After a failure nobody is waited for, since the others may be gone.
        if failed or (cursor.mode is Mode.AGREED and (cursor.inner or cursor.phase is Phase.BACKWARD)):
            self.cursors = self.cursors[:-1]
            return Step(())
        self._end_phase()
        return self._run()

    def join_evaluations(self, local: Local) -> Step:
        """Participate in the others' evaluations until every rank has come here."""
        self.groups.set(held=local.held)
        self._agenda = (Meet(SyncPoint.JOIN_EVALUATIONS, 0),)
        return self._run()

    def resume(self, answer: Answer) -> Step:
        """Go on with the answer to the last step's sync."""
        match self._question, answer:
            case Synchronize(SyncPoint.DEVIATES), _:
                pass  # the others have heard it
            case Synchronize(point, entry), ConsensusResult():
                self._synchronized(point, entry, answer)
            case AllReduceMin(ours), int(code):
                self._launch(ours, code)
            case Broadcast(), Recorded():
                self.recorded.widen(answer)
            case Describe(), Recorded():
                self.recorded.replace(answer)
            case Inspect(group, tries), Local():
                self._reduce_what_is_left(group, tries, answer)
            case _:
                raise TypeError(f"{answer} is no answer to {self._question}")
        return self._run()

    def call(self, kind: ActionKind, group: int) -> Step:
        """The caller unshards, waits for or reshards a group, on every rank."""
        self._leave_exact()
        bit, states = 1 << group, self.groups.states
        reshards = kind is ActionKind.RESHARD
        if reshards:
            self.groups.set(live=states.live & ~bit, held=states.held & ~bit)
        elif kind is ActionKind.UNSHARD:  # a late wait of a handle may find it resharded
            self.groups.set(live=states.live | bit, held=states.held | bit)
        smaller = reshards and bool(self.cursors) and self._keeps_smaller(group)
        return Step((Action(kind, (group,), smaller),))

    def hold(self, group: int) -> None:
        """Keep the group from the forward that runs to the end of the next backward, on this rank."""
        self._leave_exact()
        self.groups.set(kept=self.groups.states.kept | 1 << group)

    def abandon(self) -> None:
        """Forget the phases that an exception ended, and the gradients on their way."""
        self.cursors, self._agenda, self._exact, self._place = (), (), (), 0
        self._taken, self._event = (), None
        self.groups = Groups(self.groups.copied)

    # ---- the agenda

    def _run(self) -> Step:
        """Do what stands on the agenda, up to the next question."""
        question: Sync | None = None
        while self._agenda and question is None:
            item, self._agenda = self._agenda[-1], self._agenda[:-1]
            match item:
                case RunModule(event):
                    self._run_module(event)
                case Meet(point, entry):
                    ahead = self._ahead if point is not SyncPoint.BACKWARD else ()
                    for groups in ahead:
                        self.groups.gather(groups)
                    self._ahead, self._launched = (), bits(chain.from_iterable(ahead))
                    question = Synchronize(point, entry, self.used, self.recorded.digest)
                case _:
                    question = item
        self._question = question
        actions, self._given = self.groups.actions[self._given :], len(self.groups.actions)
        if question is not None:
            return Step(actions, question)
        taken = self._taken
        if self._event is not None and not taken:
            taken = (ScheduleEntry(self._event, self.groups.actions),)
        self._taken, self._event, self.groups.actions, self._given = (), None, (), 0
        return Step(actions, None, taken)

    def _follow(self, event: Event) -> None:
        cursor, group = self.cursors[-1], event.group
        spec = self.recorded.specs[group]
        if event.kind in ENDS:
            self._move(busy=cursor.busy & ~(1 << group))
        found = self._take_until(event)
        states = self.groups.states
        if event.kind in BEGINS:
            self._agenda += (RunModule(event),)
            if spec.reads(event.kind) and not states.held >> group & 1:
                if cursor.mode is Mode.LOCAL:
                    self.groups.gather((group,))
                else:
                    # All ranks launch the smallest code first. A reduction's is the number of its group
                    # alone, so that gathers come after all reductions.
                    self._ask(1 << 32 | group)
        elif event.kind is EventKind.GRADS_READY:
            self._agenda += (Inspect(group),)
        # What is live, and so on all ranks the same, is resharded by agreed actions; the rest is this rank's
        # alone.
        elif not found and not states.live >> group & 1 and not spec.keeps(cursor.phase):
            self._reshard(group)

    # ---- synchronizing

    def _synchronized(self, point: SyncPoint, entry: int, result: ConsensusResult) -> None:
        points = result.points
        others = SyncPoint.BACKWARD | SyncPoint.BACKWARD_END | SyncPoint.FORWARD_END
        # Kept since an evaluation. A rank that hasn't may have a new shard; once all have joined, it would be
        # the only one to launch an all-gather that the caller asks for on all ranks.
        if not points & (others | SyncPoint.DEVIATES):
            for group in numbers(self.groups.states.held & result.missing):
                self.groups.reshard(group, smaller=False)
        # This rank needs nothing more: it says so until none does, hears the orders of those that left their
        # schedule, and comes to this point again (the last entry is the first to be done).
        if SyncPoint.DEVIATES in points:
            self._agenda += (Meet(point, entry), Broadcast(None), AllReduceMin(DONE))
        # Between two steps a rank can take part in another one's evaluation, inside of a step it can't.
        elif points != point and (SyncPoint.EVALUATION not in points or points & others):
            self._agenda += (Diverge(point, entry, self.recorded.digest),)
        elif points != point and point is not SyncPoint.EVALUATION:  # participate in it
            self._agenda += (Meet(point, entry),)
            self._start(Phase.EVALUATION, result.entry, result)
            self._end_phase()
        elif point in PHASE_OF:
            if point is SyncPoint.FORWARD:
                self._begins = self._begins or (entry,)
            self._start(PHASE_OF[point], entry, result)
        elif point is SyncPoint.FORWARD_END:
            self._leave()
        elif point is SyncPoint.BACKWARD_END:
            # By the masks of all ranks: so all of them forget a group in the same backward.
            self.recorded.note_used(self.groups.states.used_by_some)
            self._settle(result.grad_mask)
            # Two steps have begun with a forward of one module: the next one is likely to.
            if self._begins and self._begins == self._before:
                self._ahead = self.recorded.planned(self._begins[0], Phase.FORWARD).ahead
            self._before, self._begins = self._begins, ()

    def _start(self, phase: Phase, entry: int, result: ConsensusResult) -> None:
        every = (1 << len(self.recorded.specs)) - 1
        # What was gathered for another phase is this rank's own, and resharded as its module ends.
        strange = self._launched & ~self.recorded.planned(entry, phase).live_after
        live = every & ~(result.missing | strange)
        self.groups.set(live=live, smaller=every & ~result.not_smaller, used_by_some=result.used)
        self._enter(phase, entry)

    # ---- asking

    def _deviate(self) -> None:
        """Launch the rest of the phase, and have all ranks ask."""
        self._take_rest()
        self._move(asking=True)
        self.groups.set(live=0)  # what is left of it is this rank's own, from here on
        self._agenda += (Synchronize(SyncPoint.DEVIATES, 0, 0, 0),)

    def _ask(self, code: int) -> None:
        """Ask for what the schedule doesn't have; the ranks are told so first, where they weren't."""
        self._agenda += (AllReduceMin(code),)
        if not self.cursors[-1].asking:
            self._deviate()

    def _launch(self, ours: int, code: int) -> None:
        """Launch what ranks need, smallest first, until it was this rank's need; DONE: until none has any."""
        if code == DONE:
            return
        if code != ours:
            self._agenda += (AllReduceMin(ours),)
        group = code & 0xFFFFFFFF
        if not code >> 32:
            self.groups.reduce([group], self.recorded.policy.max_reductions)
        elif code == ours:
            self.groups.gather((group,))
        else:
            self.groups.participate(group)

    def _reduce_what_is_left(self, group: int, tries: int, local: Local) -> None:
        """Reduce the gradients that were held back, and those that came since; all ranks together."""
        if local.accumulating >> group & 1:
            self.groups.do(ActionKind.REDUCE, (group,))  # they stay on this rank: nothing is in flight
        elif local.unreduced >> group & 1 and self.cursors[-1].mode is Mode.LOCAL:
            self.groups.reduce([group], self.recorded.policy.max_reductions)
        elif local.unreduced >> group & 1:
            if tries == 2:  # all ranks would ask again, for ever, and none would wait long in any exchange
                raise StageError(
                    f"group {group} (the number in FSDPModule.schedule) still holds gradients after two "
                    "reductions in one backward; please report this as a defect of Shardwright"
                )
            self._agenda += (Inspect(group, tries + 1),)
            self._ask(group)

    # ---- the end of a phase

    def _end_phase(self) -> None:
        self._leave_exact()
        self._take_rest()
        cursor = self.cursors[-1]
        if cursor.mode is Mode.AGREED:
            self._meet_at_end(SyncPoint.FORWARD_END)
            return
        if cursor.phase is Phase.BACKWARD:
            self.cursors = self.cursors[:-1]
        else:
            self._leave()
        # Alone a rank needs no order that also serves others: the one that it went is planned next.
        if cursor.mode is Mode.LOCAL and not cursor.inner and cursor.order != cursor.planned.events:
            self._agenda += (Describe(RecordedOrder(cursor.entry, cursor.phase, cursor.order)),)

    def _end_backward(self) -> None:
        self._take_rest()
        cursor = self.cursors[-1]
        if cursor.mode is not Mode.AGREED:
            self._settle(-1)
        elif cursor.inner:
            self.groups.finalize(None)  # which parameters have gradients is known at the outer phase's end
            self._reshard_after_backward()
        else:
            self._meet_at_end(SyncPoint.BACKWARD_END)

    def _meet_at_end(self, point: SyncPoint) -> None:
        """All ranks do; before that those that left the schedule say that they need nothing more, and tell
        their orders."""
        cursor = self.cursors[-1]
        self._agenda += (Meet(point, cursor.entry),)
        if cursor.asking:
            order = RecordedOrder(cursor.entry, cursor.phase, cursor.order)
            self._agenda += (Broadcast(order), AllReduceMin(DONE))

    def _settle(self, grads: int) -> None:
        """Reduce what is held back, and give the shards their gradients. grads: see ``Action``."""
        if not self.cursors[-1].inner:
            self._forwards = None
        self.groups.reduce(self.groups.states.held_back)
        if self.settles:
            self.groups.finalize(grads)
        self._reshard_after_backward()

    def _reshard_after_backward(self) -> None:
        self.groups.set(kept=0)
        self._move(busy=0)
        for group in numbers(self.groups.states.held):
            if not self.recorded.specs[group].keeps(Phase.BACKWARD):
                self.groups.drop_live(group)
                self._reshard(group)
