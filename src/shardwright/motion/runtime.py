"""The runtime of a model: follows the schedule, event by event. The only mutable whole-model object.

A *pass* is one phase as it runs: a forward, an evaluation, a backward. Its events are recorded as they
come. While they are those that the schedule foretells, the schedule's actions are taken; from the first
that isn't, the same planner decides without looking ahead (unshard on demand), which is always exact. A
pass that went another way than the schedule replaces it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwright.comm.base import Comm
from shardwright.comm.launches import here
from shardwright.errors import StageError
from shardwright.motion.costs import Stats, communication_s, stats
from shardwright.motion.passes import Book, Pass, StepPolicy
from shardwright.motion.table import GroupTable
from shardwright.observe.trace import Trace, TraceEntry
from shardwright.plan.planner import Planner, plan
from shardwright.plan.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupFacts,
    Phase,
    Schedule,
)
from shardwright.policy import SchedulePolicy
from shardwright.state.group import ParamGroup, Stage
from shardwright.state.param import ShardedParam

logger = logging.getLogger(__name__)


class Runtime:
    """Where the step of one model stands; ``table`` holds its groups.

    depth: sharded modules that are in their forward now, one inside the other.
    pass_number: counts forwards. successor: the runtime that has taken this one's groups in, if one has.
    """

    def __init__(self, policy: SchedulePolicy | None = None) -> None:
        self.policy = policy or SchedulePolicy()
        self.table = GroupTable()
        self.depth = 0
        self.pass_number = 0
        self.successor: Runtime | None = None
        self.step = StepPolicy()
        self._passes: list[Pass] = []
        self._book = Book()

    # ---- groups

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of the model, in the order in which they were sharded."""
        return self.table.groups

    def add(self, group: ParamGroup, reshard_after_forward: bool | None) -> None:
        """Take a group into the model. Forgets the schedule: the next step records a new one."""
        self.table.add(group, GroupFacts(reshard_after_forward))
        self._book = Book()

    def absorb(self, other: "Runtime") -> None:
        """Take in the groups of a model that became part of this one; both at rest."""
        other.rest()
        self.table.absorb(other.table)
        self._book = Book()
        other.successor = self

    def regroup(self, group: ParamGroup, params: Sequence[ShardedParam]) -> None:
        """Give ``group`` other parameters; all at rest. Forgets the schedule."""
        group.regroup(params)
        self.table.compare_again()
        self._book = Book()

    def set_facts(self, group: ParamGroup, **changes: Any) -> None:
        """Replace fields of what the planner knows of ``group``, from the next pass on."""
        self.table.change(group, **changes)
        self._replan()

    def settings(self, group: ParamGroup) -> GroupFacts:
        """What was asked of ``group``."""
        return self.table.settings(group)

    def facts(self, group: ParamGroup) -> GroupFacts:
        """What the planner knows of ``group``: ``settings``, with what follows for the root."""
        return self.table.facts(self.table.number(group))

    def do(self, kind: ActionKind, group: ParamGroup) -> None:
        """Take an action that the caller asks for; what is already so is left so."""
        self._take(Action(kind, self.table.number(group)))

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Follow another policy, from the next pass on."""
        self.policy = policy
        self.table.chosen = False
        self._replan()

    def set_ahead(self, group: ParamGroup, phase: Phase, ahead: Sequence[ParamGroup] | None) -> None:
        """Groups to gather when ``group`` begins in a phase, instead of the next ones; None: the next."""
        listed = None if ahead is None else tuple(map(self.table.number, ahead))
        name = "ahead_in_backward" if phase is Phase.BACKWARD else "ahead_in_forward"
        self.set_facts(group, **{name: listed})

    @property
    def schedule(self) -> Schedule:
        """Planned from the last recorded step; empty before one."""
        return self._book.schedule

    @property
    def trace(self) -> Trace:
        """What did happen in the last pass of each phase."""
        return Trace(dict(self._book.traces))

    def comms(self) -> list[Comm]:
        """The transports in use, each once."""
        return self.table.comms()

    def stats(self) -> Stats:
        """Bytes and seconds so far, on this rank; no communication."""
        return stats(self.table)

    def communication_s(self) -> float:
        """Seconds that the collectives of one step take alone: the median of three times."""
        if self._passes:
            raise StageError("communication_s was called inside a forward or backward; call it between steps")
        self.rest()
        return communication_s(self.table)

    def _replan(self) -> None:
        self._book.schedule = plan(self._book.orders, self.policy, self.table.facts)

    # ---- passes

    @property
    def phase(self) -> Phase | None:
        """The phase that is running, or None between phases."""
        return self._passes[-1].phase if self._passes else None

    def begin(self, phase: Phase) -> None:
        """Enter a phase. Inside another one (a backward within a forward) it unshards on demand."""
        self.pass_number += phase is not Phase.BACKWARD
        nested = bool(self._passes)
        planner = None
        if nested:
            planner = Planner(self.policy, self.table.facts)
        elif phase is not Phase.BACKWARD:
            self._start_afresh()
        self._passes.append(Pass(phase, [], [], planner, nested))
        self._say_where()

    def at(self, kind: EventKind, group: ParamGroup | None = None) -> None:
        """Take the actions of an event. After a begin event the group is unsharded, whatever was planned."""
        current = self._passes[-1]
        event = Event(kind, self.table.number(group) if group is not None else -1)
        actions = self._actions(current, event)
        if kind is EventKind.STEP_END and not self.step.is_last_backward:
            actions = tuple(action for action in actions if action.kind is not ActionKind.WAIT_REDUCE)
        start = time.perf_counter()
        for action in actions:
            self._take(action)
        if kind is EventKind.STEP_END and self.step.is_last_backward:
            self.table.settle()
        if kind in BEGINS and (
            kind is not EventKind.BACKWARD_BEGIN or self.table.facts(event.group).unshard_in_backward
        ):
            # The plan can be wrong about what other phases left behind; the weights must be there.
            self._take(Action(ActionKind.UNSHARD, event.group))
            self._take(Action(ActionKind.WAIT, event.group))
        took_s = time.perf_counter() - start
        current.order.append(event)
        current.trace.append(TraceEntry(event, actions, start - current.began_s, took_s))

    def end(self, failed: bool = False) -> None:
        """Leave the phase; a pass that departed from the schedule replaces it.

        failed: the pass was cut short by an exception. Nothing is waited for then, since the ranks that
        would have to take part may be gone: what is in flight stays so until its group is next used.
        """
        current = self._passes.pop()
        self._say_where()
        if failed:
            if not self._passes:
                self._reshard_unsharded()
            return
        departed = tuple(current.order) != self._book.orders.get(current.phase)
        if current.phase is not Phase.BACKWARD and (departed or current.planner is not None):
            planner = current.planner or self.table.planner(self.policy)
            for action in planner.end_forward(current.phase):
                self._take(action)
        if current.nested:
            return
        self._book.traces[current.phase] = tuple(current.trace)
        if departed:
            if current.phase in self._book.orders and not self._book.said:
                self._book.said = True
                logger.info(
                    "%s ran its groups in another order than the step before; it unsharded on demand "
                    "and the schedule is planned anew (said once)",
                    current.phase,
                )
            self._book.orders[current.phase] = tuple(current.order)
            self._replan()

    def _say_where(self) -> None:
        """Tell the launch log which phase is running."""
        here.enter(self.phase or "", self.pass_number)

    def abandon(self) -> None:
        """Forget a step that an exception ended: its passes, its unreduced gradients."""
        self._passes.clear()
        self._say_where()
        self.depth = 0
        for group in self.groups:
            group.drop_grads()
        self._reshard_unsharded()

    def rest(self) -> None:
        """Reshard every group, between phases (before parameters are saved, loaded, moved or cast)."""
        if not self._passes:
            for index in range(len(self.groups)):
                self._take(Action(ActionKind.RESHARD, index))

    def _reshard_unsharded(self) -> None:
        """Reshard what is unsharded; what is still being gathered stays so, since nothing is waited for."""
        for index, group in enumerate(self.groups):
            if group.stage is Stage.UNSHARDED:
                self._take(Action(ActionKind.RESHARD, index))

    def _start_afresh(self) -> None:
        if self.step.optimizer_event is not None:
            self.step.optimizer_event.wait()
            self.step = replace(self.step, optimizer_event=None)
        self.table.forget_stale()
        if not self.table.chosen:
            self.table.choose_row_wise(self.policy)
            self._replan()

    def _actions(self, current: Pass, event: Event) -> tuple[Action, ...]:
        if current.planner is None:
            stops = self.schedule.phases.get(current.phase, ())
            place = len(current.order)
            if place < len(stops) and stops[place].event == event:
                return stops[place].actions
            current.planner = self.table.planner(self.policy)
        return current.planner.at(current.phase, event)

    def _take(self, action: Action) -> None:
        self.table.take(action, nearby=self.phase is Phase.FORWARD)
