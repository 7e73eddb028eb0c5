"""Taking part: every rank launches the agreed collectives in the agreed order, whether it uses them or not.

An all-gather may be thrown away and a reduce-scatter may carry zeros, so a rank can take part in any group's
collective at any time; and an order that holds all ranks' orders (``supersequence``) serves each of them. So
an event that a rank leaves out is *passed*: its collectives are launched all the same. Only a need that lies
not ahead has to be asked for:

    follow   the event is at the cursor, or ahead of it: pass what lies between, take its actions
    ask      it is neither. Pass the rest of the phase, and tell the others (``DEVIATES``). From now on all
             ranks say what they need next, all launch the smallest, until all have said that they are done.
             Then those that left the plan tell their orders, and all plan the same wider one

A first step is the same with an empty schedule. Ranks meet at the begin of a phase and at the end of a
backward: a few words, combined by OR. What they meet for must be the same, except that a rank which is
elsewhere takes part in another one's evaluation (launches its schedule and throws the results away), so that
ranks may evaluate different numbers of batches.

``live`` and ``reductions`` follow from the agreed collectives alone, so they are the same on all ranks; a
rank may hold more than ``live``, never less. Pure: ``Hands`` does what touches devices and other ranks.
"""

from collections.abc import Sequence

from shardwright.errors import StageError
from shardwright.schedule.hands import CALLS, ENDS, Call, Hands, Leg, Said, keeps, reads
from shardwright.schedule.recorded import Orders
from shardwright.schedule.reductions import Reductions
from shardwright.schedule.schedule import BEGINS, Action, ActionKind, Event, EventKind, Phase, Stop

DONE = 2**63 - 1
"""Said by a rank that needs nothing more."""


class Participant:
    """One rank's part in the collectives of one model.

    live: groups that the agreed collectives have gathered. near: those that every rank can gather from
    neighbours. used: bits of the groups that this rank's forwards have run since the last backward.
    settles: False leaves reductions in flight at the end of a backward; the same on every rank.
    """

    def __init__(self, hands: Hands, orders: Orders) -> None:
        self.hands = hands
        self.orders = orders
        self.legs: list[Leg] = []
        self.live: set[int] = set()
        self.near: set[int] = set()
        self.reductions = Reductions(hands)
        self.used = 0
        self.settles = True
        self._after_backward = False

    # ---- phases

    def begin(self, phase: Phase, entry: int = 0) -> None:
        """Enter a phase; every rank does, for the same module. Inside of another one all is asked for."""
        if self.legs:
            self._deviate(self.legs[-1])
            self.legs.append(Leg(phase, entry, (), inner=True, asking=True))
            return
        if phase is Phase.FORWARD and self._after_backward:
            self.used, self._after_backward = 0, False
        self._start(self._meet(CALLS[phase], entry), phase, entry)

    def at(self, event: Event) -> list[Stop]:
        """Take an event's actions, and those of the events before it that this rank leaves out.

        After a begin event the group is held. Returns the stops that were taken, for the trace.
        """
        leg, group = self.legs[-1], event.group
        leg.order.append(event)
        if event.kind is EventKind.STEP_END:
            return self._end_backward(leg)
        if event.kind in ENDS:
            leg.busy.discard(group)
        taken = self._follow(leg, event)
        if event.kind in BEGINS:
            if leg.phase is Phase.FORWARD:
                self.used |= 1 << group
            if reads(self.hands.facts(event.group), event):
                if not self.hands.holds(group):
                    self._need(leg, Action(ActionKind.UNSHARD, group))
                self.hands.take(Action(ActionKind.WAIT, group))
            leg.busy.add(group)
        elif event.kind is EventKind.GRADS_READY:
            self._reduce_what_is_left(leg, group)
        elif not taken and group not in self.live and not keeps(self.hands.facts(group), leg.phase):
            self._reshard(leg, group)
        return taken or [Stop(event, ())]

    def end(self, failed: bool = False) -> list[Stop]:
        """Leave the phase. Returns the stops that were left to pass; none where the pass has failed.

        The ranks leave a forward together: what one of them has to ask for, the others answer here, and not
        from wherever their programs go next (another model, a reduction of the loss).
        """
        leg = self.legs.pop()
        if failed or leg.inner or leg.phase is Phase.BACKWARD:
            return []
        passed = self._pass_rest(leg)
        self._finish_asking(leg)
        self._meet(Call.END, leg.entry)
        for group in self._holding():
            if group not in self.live and not keeps(self.hands.facts(group), leg.phase):
                self._reshard(leg, group)
        return passed

    def rest(self, entry: int = 0) -> None:
        """Take part in the others' evaluations until every rank has come here."""
        self._meet(Call.REST, entry)

    def abandon(self) -> None:
        """Forget the phases that an exception ended."""
        self.legs.clear()
        self.reductions = Reductions(self.hands)

    # ---- meeting

    def _meet(self, call: Call, entry: int) -> Said:
        while True:
            said = self.hands.meet(call, entry, self.used)
            if Call.DEVIATES in said.calls:
                self._ask(None)
                self.orders.widen(self.hands.tell(None))
            elif said.calls == call:
                return said
            elif Call.EVALUATION not in said.calls or said.calls & (Call.BACKWARD | Call.SETTLE | Call.END):
                self.hands.diverged(call, entry)
            elif call is Call.EVALUATION:
                return said
            else:
                self._shadow(said)

    def _start(self, said: Said, phase: Phase, entry: int) -> Leg:
        groups = range(self.orders.num_groups)
        self.live = {group for group in groups if not said.missing >> group & 1}
        for group in self._holding() if phase is not Phase.BACKWARD else ():
            if group not in self.live:  # kept since an evaluation; a rank that hasn't may have a new shard
                self.hands.take(Action(ActionKind.RESHARD, group))
        self.near = {group for group in groups if not said.far >> group & 1}
        self.reductions.used = said.used
        self.legs.append(Leg(phase, entry, self.orders.stops(entry, phase)))
        return self.legs[-1]

    def _shadow(self, said: Said) -> None:
        """Launch what other ranks' evaluation needs, and drop it."""
        self._start(said, Phase.EVALUATION, said.entry)
        self.end()

    def _holding(self) -> list[int]:
        return [group for group in range(self.orders.num_groups) if self.hands.holds(group)]

    # ---- following

    def _follow(self, leg: Leg, event: Event) -> list[Stop]:
        place = leg.place
        if place >= len(leg.stops) or leg.stops[place].event != event:
            found = leg.find(event)
            if found is None:
                return []
            place = found
        taken = list(leg.stops[leg.place : place + 1])
        leg.place = place + 1
        for stop in taken:
            self._take(leg, stop)
        return taken

    def _pass_rest(self, leg: Leg) -> list[Stop]:
        rest = list(leg.stops[leg.place :])
        leg.place = len(leg.stops)
        for stop in rest:
            self._take(leg, stop)
        return rest

    def _take(self, leg: Leg, stop: Stop) -> None:
        event = stop.event
        if event.kind is EventKind.STEP_END:
            return  # what it waits for is waited for once the ranks have met there
        for action in stop.actions:
            if action.kind is ActionKind.UNSHARD:
                self._unshard(action.groups)
            elif action.kind is ActionKind.RESHARD:
                self.live.discard(action.group)
                self._reshard(leg, action.group)
            elif action.kind is ActionKind.WAIT:
                self.hands.take(action)
            else:
                self.reductions.take(action)
        if event.kind in BEGINS and reads(self.hands.facts(event.group), event):
            self._unshard([event.group])  # the plan can be wrong about what earlier phases left behind

    def _unshard(self, groups: Sequence[int]) -> None:
        groups = [group for group in groups if group not in self.live]
        if groups:
            self.live.update(groups)
            self._launch(groups)

    def _launch(self, groups: Sequence[int]) -> None:
        near = self.near.intersection(groups)
        self.near -= near
        self.hands.unshard(groups, near)

    def _reshard(self, leg: Leg, group: int) -> None:
        busy = any(group in each.busy for each in (leg, *self.legs))
        if leg.phase is Phase.FORWARD:
            if self.hands.holds(group):
                self.hands.keep_near(group, reshard=not busy)
        elif not busy:
            self.hands.take(Action(ActionKind.RESHARD, group))

    # ---- asking

    def _need(self, leg: Leg, action: Action) -> None:
        self._deviate(leg)
        self._ask(action)

    def _reduce_what_is_left(self, leg: Leg, group: int) -> None:
        """Ask for its reduction: of the gradients that were held back, and of those that came since."""
        asked = 0
        while self.hands.must_reduce(group):
            if asked == 2:  # all ranks would ask again, for ever, and none would wait long in any exchange
                raise StageError(
                    f"group {group} (the number in FSDPModule.schedule) still holds gradients after two "
                    "reductions in one backward; please report this as a defect of Shardwright"
                )
            self._need(leg, Action(ActionKind.REDUCE, group))
            asked += 1

    def _deviate(self, leg: Leg) -> None:
        """Launch the rest of the phase, and have all ranks ask."""
        if leg.asking:
            return
        self._pass_rest(leg)
        leg.asking = True
        self.live.clear()  # what is left of it is this rank's own, from here on
        self.hands.meet(Call.DEVIATES, 0, 0)

    def _ask(self, need: Action | None) -> None:
        """Launch what ranks need, smallest first, until it was this rank's need; None: until none has any."""
        ours = DONE if need is None else (need.kind is ActionKind.UNSHARD) << 32 | need.group
        while True:
            code = self.hands.least(ours)
            if code == DONE:
                return
            group = code & 0xFFFFFFFF
            if not code >> 32:
                self.reductions.make_room(self.orders.policy.max_reductions)
                self.reductions.reduce([group])
            elif code == ours:
                self._launch([group])
            else:
                self.hands.join(group, group in self.near)
                self.near.discard(group)
            if code == ours:
                return

    def _finish_asking(self, leg: Leg) -> None:
        if leg.asking:
            self._ask(None)
            self.orders.widen(self.hands.tell((leg.entry, leg.phase, tuple(leg.order))))

    # ---- the end of a backward

    def _end_backward(self, leg: Leg) -> list[Stop]:
        passed = self._pass_rest(leg)
        if not leg.inner:
            self._finish_asking(leg)
            said = self._meet(Call.SETTLE, leg.entry)
            self.orders.note_used(self.reductions.used)
            self._after_backward = True
            self.reductions.release()
            if self.settles:
                self.reductions.finish(said.brought)
        else:
            self.reductions.finish(None)
        for group in self._holding():
            if not keeps(self.hands.facts(group), Phase.BACKWARD):
                leg.busy.discard(group)
                self.live.discard(group)
                self._reshard(leg, group)
        return passed or [Stop(leg.order[-1], ())]
