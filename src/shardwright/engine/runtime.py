"""The runtime of a model: every event of a step goes through it. The only mutable whole-model object.

A *pass* is one phase as it runs: a forward, an evaluation, a backward. What is launched at its events is
decided in one of three ways: by all ranks ``Together`` (where agreement is strict), by each rank
``Alone`` (a world of one, or where agreement is off), or not at all, where the caller has unsharded all that
a forward needs (``Private``).
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwright.engine.alone import Alone
from shardwright.engine.consensus import channel_of
from shardwright.engine.costs import Stats, communication_s, stats
from shardwright.engine.executor import GroupTable, end_pass, tables
from shardwright.engine.group import ParamGroup, Stage
from shardwright.engine.passes import NO_ENTRY, Entry, Pass, StepPolicy, Way
from shardwright.engine.together import Private, Together
from shardwright.engine.transforms import beneath_transforms
from shardwright.errors import StageError
from shardwright.observe.trace import Trace, TraceEntry
from shardwright.params.param import ShardedParam
from shardwright.policy import Agreement, SchedulePolicy
from shardwright.schedule.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupFacts,
    Phase,
    Schedule,
    Stop,
)
from shardwright.transport.base import Comm
from shardwright.transport.launches import here


class Runtime:
    """Where the step of one model stands; ``table`` holds its groups.

    depth: sharded modules that are in their forward now, one inside the other.
    pass_number: counts forwards. successor: the runtime that has taken this one's groups in, if one has.
    """

    def __init__(self, policy: SchedulePolicy | None = None) -> None:
        self.policy = policy or SchedulePolicy()
        self.table = GroupTable()
        tables.add(self.table)
        self.depth = self.pass_number = 0
        self.successor: Runtime | None = None
        self.step = StepPolicy()
        self._passes: list[Pass] = []
        self._way: Way | None = None
        self._traces: dict[Phase, tuple[TraceEntry, ...]] = {}

    # ---- groups

    @property
    def groups(self) -> list[ParamGroup]:
        """The groups of the model, in the order in which they were sharded."""
        return self.table.groups

    def add(self, group: ParamGroup, reshard_after_forward: bool | None) -> None:
        """Take a group into the model. Forgets the schedule: the next step records a new one."""
        self.table.add(group, GroupFacts(reshard_after_forward))
        self._forget()

    def absorb(self, other: "Runtime") -> None:
        """Take in the groups of a model that became part of this one; both at rest."""
        other.rest()
        self.table.absorb(other.table)
        self._forget()
        other.successor = self

    def regroup(self, group: ParamGroup, params: Sequence[ShardedParam]) -> None:
        """Give ``group`` other parameters; all at rest. Forgets the schedule."""
        self.table.regroup(group, params)
        self._forget()

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
        index = self.table.number(group)
        self._take(Action(kind, index))
        if isinstance(self._way, Together) and self._passes:
            self._way.note(kind, index)
        elif kind is ActionKind.UNSHARD:
            self.table.asked.add(index)

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Follow another policy, from the next pass on. Raises: InputError for a name of no group."""
        self.table.list_ahead(policy)
        if policy.agreement is not self.policy.agreement:
            self.table.compare_again()
            self._forget()
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
        return Schedule() if self._way is None else self._way.schedule

    @property
    def trace(self) -> Trace:
        """What did happen in the last pass of each phase."""
        return Trace(dict(self._traces))

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
        alone_s = communication_s(self.table, self.schedule)
        self.rest()
        return alone_s

    def _replan(self) -> None:
        if self._way is not None:
            self._way.replan(self.policy)

    def _forget(self) -> None:
        self._way = None
        self._traces = {}

    # ---- passes

    @property
    def phase(self) -> Phase | None:
        """The phase that is running, or None between phases."""
        return self._passes[-1].phase if self._passes else None

    def begin(self, phase: Phase, entry: Entry = NO_ENTRY) -> None:
        """Enter a phase, by the outermost module ``entry``; maybe inside another (a backward in a forward).

        Where ranks agree every rank of the model's meshes calls it. Raises: Diverged where others have
        called something else.
        """
        self.pass_number += phase is not Phase.BACKWARD
        nested = bool(self._passes)
        if not nested and phase is not Phase.BACKWARD:
            self._start_afresh()
        current = Pass(phase, self._choose_way(phase, entry), nested)
        self._passes.append(current)
        self._say_where()
        try:
            with beneath_transforms():
                current.way.begin(current, entry)
        except BaseException:
            self._passes.pop()
            self._say_where()
            raise

    def _choose_way(self, phase: Phase, entry: Entry) -> Way:
        if self._way is None:
            self.table.agreement = self.policy.agreement
            agrees = self.policy.agreement is Agreement.STRICT
            channel = channel_of([group.axis for group in self.groups]) if agrees else None
            if channel is None:
                self._way = Alone(self.table, self.policy)
            else:
                self._way = Together(self.table, channel, self.policy)
        if isinstance(self._way, Together) and phase is not Phase.BACKWARD and self.table.asked:
            needed = {self.table.number(group) for group in entry.groups()}
            if needed <= self.table.asked:
                return Private(self._way)
        return self._way

    def at(self, kind: EventKind, group: ParamGroup | None = None) -> None:
        """Take the actions of an event. After a begin event the group is unsharded, whatever was planned."""
        current = self._passes[-1]
        event = Event(kind, self.table.number(group) if group is not None else -1)
        start = time.perf_counter()
        with beneath_transforms():
            taken = current.way.at(current, event, self.step)
        if kind is EventKind.FORWARD_END:
            self.table.cover(event.group)
        elif kind in BEGINS:
            self.groups[event.group].uncover()
        current.order.append(event)
        self._write_down(current, taken, start)

    def _write_down(self, current: Pass, taken: Sequence[Stop], start: float) -> None:
        """Into the trace; events that this rank left out were passed in no time of their own."""
        took_s = time.perf_counter() - start
        for stop in taken:
            own_s = took_s if stop is taken[-1] else 0.0
            current.trace.append(TraceEntry(stop.event, stop.actions, start - current.began_s, own_s))

    def end(self, failed: bool = False) -> None:
        """Leave the phase.

        failed: the pass was cut short by an exception. Nothing is waited for then, since the ranks that
        would have to take part may be gone: what is in flight stays so until its group is next used.
        """
        current = self._passes.pop()
        self._say_where()
        start = time.perf_counter()
        if failed:
            here.failed(sys.exc_info()[1])
        with beneath_transforms():
            taken = current.way.end(current, failed)
            end_pass(self.table, current.phase, current.nested)
        if failed:
            if not self._passes:
                self._reshard_unsharded()
        elif not current.nested:
            self._write_down(current, taken, start)
            self._traces[current.phase] = tuple(current.trace)

    def _say_where(self) -> None:
        """Tell the launch log which phase is running."""
        here.enter(self.phase or "", self.pass_number)

    def join_evaluations(self) -> None:
        """Take part in the evaluations of other ranks until all ranks have called it."""
        way = self._choose_way(Phase.BACKWARD, NO_ENTRY)
        if isinstance(way, Together):
            self._start_afresh()
            way.participant.rest()

    def abandon(self) -> None:
        """Forget a step that an exception ended: its passes, its unreduced gradients."""
        self._passes.clear()
        self._say_where()
        if self._way is not None:
            self._way.abandon()
        self.depth = 0
        self.table.due.clear()
        for group in self.groups:
            group.drop_grads()
        self._reshard_unsharded()

    def rest(self) -> None:
        """Reshard every group, between phases (before parameters are saved, loaded, moved or cast)."""
        if self._passes:
            return
        self.table.asked.clear()
        for index, group in enumerate(self.groups):
            if group.stage is not Stage.SHARDED:  # asked by each module of the model that is saved
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
            self.table.choose(self.policy)
            self._replan()

    def _take(self, action: Action) -> None:
        self.table.take(action, nearby=self.phase is Phase.FORWARD)
