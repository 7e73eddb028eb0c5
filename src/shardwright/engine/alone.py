"""Each rank for itself: a pass follows the schedule of the one before, which all ranks must have run alike.

While the events are those that the schedule foretells, its actions are taken; from the first that isn't, the
same planner decides without looking ahead (unshard on demand). A pass that went another way than the schedule
replaces it.
"""

import logging
from dataclasses import dataclass, field

from shardwright.engine.executor import GroupTable
from shardwright.engine.passes import Entry, Pass, StepPolicy
from shardwright.policy import SchedulePolicy
from shardwright.schedule.planner import Planner, plan
from shardwright.schedule.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    Phase,
    Schedule,
    Stop,
)

logger = logging.getLogger(__name__)

_LANDING = (ActionKind.WAIT_REDUCE, ActionKind.STEP)


@dataclass
class Book:
    """What was recorded and what was planned from it. ``said``: a departure has been logged."""

    orders: dict[Phase, tuple[Event, ...]] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    said: bool = False


class Alone:
    """The ``Way`` of a world of one, and of ranks that don't agree."""

    def __init__(self, table: GroupTable, policy: SchedulePolicy) -> None:
        self.table = table
        self.policy = policy
        self._book = Book()

    @property
    def schedule(self) -> Schedule:
        """See ``Way.schedule``."""
        return self._book.schedule

    def replan(self, policy: SchedulePolicy) -> None:
        """See ``Way.replan``."""
        self.policy = policy
        self._book.schedule = plan(self._book.orders, policy, self.table.facts)

    def abandon(self) -> None:
        """See ``Way.abandon``."""

    def begin(self, current: Pass, entry: Entry) -> None:
        """Inside another pass (a backward within a forward) unshard on demand."""
        if current.nested:
            current.planner = Planner(self.policy, self.table.facts)

    def at(self, current: Pass, event: Event, step: StepPolicy) -> list[Stop]:
        """See ``Way.at``."""
        actions = self._actions(current, event)
        if event.kind is EventKind.STEP_END and not step.is_last_backward:
            actions = tuple(action for action in actions if action.kind not in _LANDING)
        for action in actions:
            self._take(current, action)
        if event.kind is EventKind.STEP_END and step.is_last_backward:
            self.table.settle()
            self.table.step(tuple(self.table.due))
        if event.kind in BEGINS and (
            event.kind is not EventKind.BACKWARD_BEGIN or self.table.wishes(event.group).unshard_in_backward
        ):
            # The plan can be wrong about what other phases left behind; the weights must be there.
            self._take(current, Action(ActionKind.UNSHARD, event.group))
            self._take(current, Action(ActionKind.WAIT, event.group))
        return [Stop(event, actions)]

    def end(self, current: Pass, failed: bool) -> tuple[Stop, ...]:
        """See ``Way.end``."""
        if failed:
            return ()
        departed = tuple(current.order) != self._book.orders.get(current.phase)
        if current.phase is not Phase.BACKWARD and (departed or current.planner is not None):
            planner = current.planner or self.table.planner(self.policy)
            for action in planner.end_forward(current.phase):
                self._take(current, action)
        if departed and not current.nested:
            if current.phase in self._book.orders and not self._book.said:
                self._book.said = True
                logger.info(
                    "%s ran its groups in another order than the step before; it unsharded on demand "
                    "and the schedule is planned anew (said once)",
                    current.phase,
                )
            self._book.orders[current.phase] = tuple(current.order)
            self.replan(self.policy)
        return ()

    def _actions(self, current: Pass, event: Event) -> tuple[Action, ...]:
        if current.planner is None:
            stops = self.schedule.phases.get(current.phase, ())
            place = len(current.order)
            if place < len(stops) and stops[place].event == event:
                return stops[place].actions
            current.planner = self.table.planner(self.policy)
        return current.planner.at(current.phase, event)

    def _take(self, current: Pass, action: Action) -> None:
        self.table.take(action, nearby=current.phase is Phase.FORWARD)
