"""The runtime of a model: follows the schedule, event by event. The only mutable whole-model object.

A *pass* is one phase as it runs: a forward, an evaluation, a backward. Its events are recorded as they
come. While they are those that the schedule foretells, the schedule's actions are taken; from the first
that isn't, the same planner decides without looking ahead (unshard on demand), which is always exact. A
pass that went another way than the schedule replaces it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwright.comm.base import Comm
from shardwright.errors import StageError
from shardwright.observe.trace import Trace, TraceEntry
from shardwright.plan.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupFacts,
    Phase,
    Planner,
    Schedule,
    plan,
)
from shardwright.policy import SchedulePolicy
from shardwright.state.group import ParamGroup, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stats:
    """Bytes and seconds of a sharded model on this rank.

    param_numel: logical elements of all sharded parameters. full_nbytes: their bytes unsharded, at rest's
    dtype. at_rest_nbytes: bytes of this rank's shards. unsharded_nbytes, peak_unsharded_nbytes: buffers of
    unsharded parameters held now, and at most since the start. sent_nbytes: sent by this rank since the
    start. exposed_s: seconds that the host was blocked in waits since the start (None on CUDA, where a
    stream waits and not the host).
    """

    num_groups: int
    param_numel: int
    full_nbytes: int
    at_rest_nbytes: int
    unsharded_nbytes: int
    peak_unsharded_nbytes: int
    sent_nbytes: int
    exposed_s: float | None


@dataclass(frozen=True)
class StepPolicy:
    """What the caller said of the step that is running.

    is_last_backward: False lets reductions run on after this backward; the last one waits for them all.
    optimizer_event: recorded after the optimizer's step; the next forward's all-gathers wait for it.
    """

    is_last_backward: bool = True
    optimizer_event: Any = None


@dataclass
class _Pass:
    """A phase as it runs. ``planner`` decides once the events have left the schedule."""

    phase: Phase
    order: list[Event]
    trace: list[TraceEntry]
    planner: Planner | None
    nested: bool
    began_s: float = field(default_factory=time.perf_counter)


@dataclass
class _Memory:
    """Bytes of unsharded buffers, now and at most since the start."""

    now_nbytes: int = 0
    peak_nbytes: int = 0

    def take(self, nbytes: int) -> None:
        self.now_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)


@dataclass
class _Book:
    """What was recorded and what was planned from it. ``said``: a departure has been logged."""

    orders: dict[Phase, tuple[Event, ...]] = field(default_factory=dict)
    traces: dict[Phase, tuple[TraceEntry, ...]] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    said: bool = False


class Runtime:
    """Groups of one model, in the order in which they were sharded, and where their step stands.

    root: the groups of the outermost module, which stay unsharded between forward and backward by default.
    depth: sharded modules that are in their forward now, one inside the other.
    pass_number: counts forwards. successor: the runtime that has taken this one's groups in, if one has.
    """

    def __init__(self, policy: SchedulePolicy | None = None) -> None:
        self.policy = policy or SchedulePolicy()
        self.groups: list[ParamGroup] = []
        self.root: tuple[ParamGroup, ...] = ()
        self.depth = 0
        self.pass_number = 0
        self.successor: Runtime | None = None
        self.step = StepPolicy()
        self._settings: list[GroupFacts] = []
        self._index: dict[ParamGroup, int] = {}
        self._passes: list[_Pass] = []
        self._memory = _Memory()
        self._book = _Book()

    # ---- groups

    def add(self, group: ParamGroup, reshard_after_forward: bool | None) -> None:
        """Take a group into the model. Forgets the schedule: the next step records a new one."""
        self._index[group] = len(self.groups)
        self.groups.append(group)
        self._settings.append(GroupFacts(reshard_after_forward))
        self._book = _Book()

    def absorb(self, other: "Runtime") -> None:
        """Take in the groups of a model that became part of this one; both at rest."""
        other.rest()
        shift = len(self.groups)
        for group, facts in zip(other.groups, other._settings, strict=True):
            self.add(group, facts.reshard_after_forward)
            self._settings[-1] = facts.shifted(shift)
        self._memory.peak_nbytes = max(self._memory.peak_nbytes, other._memory.peak_nbytes)
        other.successor = self

    def set_facts(self, group: ParamGroup, **changes: Any) -> None:
        """Replace fields of what the planner knows of ``group``, from the next pass on."""
        index = self._index[group]
        self._settings[index] = replace(self._settings[index], **changes)
        self._replan()

    def settings(self, group: ParamGroup) -> GroupFacts:
        """What was asked of ``group``."""
        return self._settings[self._index[group]]

    def facts(self, group: ParamGroup) -> GroupFacts:
        """What the planner knows of ``group``: ``settings``, with what follows for the root."""
        return self._facts(self._index[group])

    def do(self, kind: ActionKind, group: ParamGroup) -> None:
        """Take an action that the caller asks for; what is already so is left so."""
        self._take(Action(kind, self._index[group]))

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Follow another policy, from the next pass on."""
        self.policy = policy
        self._replan()

    def set_ahead(self, group: ParamGroup, phase: Phase, ahead: Sequence[ParamGroup] | None) -> None:
        """Groups to gather when ``group`` begins in a phase, instead of the next ones; None: the next."""
        listed = None if ahead is None else tuple(self._index[g] for g in ahead)
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

    def _facts(self, index: int) -> GroupFacts:
        group, facts = self.groups[index], self._settings[index]
        root_stays = facts.reshard_after_forward is None and group in self.root
        reshard = False if root_stays else facts.reshard_after_forward
        return replace(facts, reshard_after_forward=reshard, nbytes=group.unsharded_nbytes)

    def _replan(self) -> None:
        self._book.schedule = plan(self._book.orders, self.policy, self._facts)

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
            planner = Planner(self.policy, self._facts)
        elif phase is not Phase.BACKWARD:
            self._start_afresh()
        self._passes.append(_Pass(phase, [], [], planner, nested))

    def at(self, kind: EventKind, group: ParamGroup | None = None) -> None:
        """Take the actions of an event. After a begin event the group is unsharded, whatever was planned."""
        current = self._passes[-1]
        event = Event(kind, self._index[group] if group is not None else -1)
        actions = self._actions(current, event)
        if kind is EventKind.STEP_END and not self.step.is_last_backward:
            actions = tuple(action for action in actions if action.kind is not ActionKind.WAIT_REDUCE)
        start = time.perf_counter()
        for action in actions:
            self._take(action)
        if kind is EventKind.STEP_END and self.step.is_last_backward:
            for waiting in self.groups:
                waiting.reducer.wait()
            for waiting in self.groups:
                waiting.reducer.settle()
        if kind in BEGINS and (
            kind is not EventKind.BACKWARD_BEGIN or self._facts(event.group).unshard_in_backward
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
        if failed:
            for group in self.groups:
                if group.stage is Stage.UNSHARDED and not self._passes:
                    self._take(Action(ActionKind.RESHARD, self._index[group]))
            return
        departed = tuple(current.order) != self._book.orders.get(current.phase)
        if current.phase is not Phase.BACKWARD and (departed or current.planner is not None):
            planner = current.planner or self._planner_now()
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

    def abandon(self) -> None:
        """Forget a step that an exception ended: its passes, its unreduced gradients."""
        self._passes.clear()
        self.depth = 0
        for group in self.groups:
            group.drop_grads()
            if group.stage is Stage.UNSHARDED:
                self._take(Action(ActionKind.RESHARD, self._index[group]))

    def rest(self) -> None:
        """Reshard every group, between phases (before parameters are saved, loaded, moved or cast)."""
        if not self._passes:
            for index in range(len(self.groups)):
                self._take(Action(ActionKind.RESHARD, index))

    def _start_afresh(self) -> None:
        if self.step.optimizer_event is not None:
            self.step.optimizer_event.wait()
            self.step = replace(self.step, optimizer_event=None)
        for index, group in enumerate(self.groups):
            if group.near is not None:
                self._memory.take(-group.near.held_nbytes)
                group.near.forget()
            if group.stage is Stage.UNSHARDED and group.is_stale:
                self._take(Action(ActionKind.RESHARD, index))

    def _actions(self, current: _Pass, event: Event) -> tuple[Action, ...]:
        if current.planner is None:
            stops = self.schedule.phases.get(current.phase, ())
            place = len(current.order)
            if place < len(stops) and stops[place].event == event:
                return stops[place].actions
            current.planner = self._planner_now()
        return current.planner.at(current.phase, event)

    def _planner_now(self) -> Planner:
        """A planner that knows what is live and being reduced at this moment."""
        planner = Planner(self.policy, self._facts)
        for index, group in enumerate(self.groups):
            if group.stage is not Stage.SHARDED:
                planner.live[index] = None
            if group.stage is Stage.UNSHARDED:
                planner.waited.add(index)
            if group.reducer.in_flight:
                planner.reducing.append(index)
        return planner

    def _take(self, action: Action) -> None:
        """Take one action; what is already so is left so."""
        group = self.groups[action.group]
        held_nbytes = group.held_nbytes
        if action.kind is ActionKind.UNSHARD:
            if group.stage is Stage.SHARDED:
                group.unshard()
        elif action.kind is ActionKind.WAIT:
            if group.stage is Stage.GATHERING:
                group.wait()
        elif action.kind is ActionKind.RESHARD:
            if group.stage is not Stage.SHARDED:
                group.reshard(nearby=self.phase is Phase.FORWARD)
        elif action.kind is ActionKind.REDUCE:
            group.reducer.wait()
            group.reducer.settle()
            group.reducer.reduce()
        else:
            group.reducer.wait()
        self._memory.take(group.held_nbytes - held_nbytes)

    # ---- what it costs

    def comms(self) -> list[Comm]:
        """The transports in use, each once."""
        used = [
            (group.axis.comm, group.axis.replicate, group.near and group.near.comm) for group in self.groups
        ]
        return list({id(comm): comm for comms in used for comm in comms if comm is not None}.values())

    def communication_s(self) -> float:
        """Seconds that the collectives of one step take alone: the median of three times."""
        if self._passes:
            raise StageError("communication_s was called inside a forward or backward; call it between steps")
        self.rest()
        times = sorted(self._rehearse() for _ in range(3))
        return times[1]

    def _rehearse(self) -> float:
        start = time.perf_counter()
        for index, group in enumerate(self.groups):
            for _ in range(1 if self._facts(index).reshard_after_forward is False else 2):
                for kind in (ActionKind.UNSHARD, ActionKind.WAIT, ActionKind.RESHARD):
                    self._take(Action(kind, index))
            group.reducer.rehearse()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    def stats(self) -> Stats:
        """Bytes and seconds so far, on this rank; no communication."""
        params = [param for group in self.groups for param in group.params]
        exposed = [comm.exposed_s for comm in self.comms()]
        return Stats(
            num_groups=len(self.groups),
            param_numel=sum(param.layout.numel for param in params),
            full_nbytes=sum(param.layout.numel * param.sharded.dtype.itemsize for param in params),
            at_rest_nbytes=sum(param.local.nbytes for param in params),
            unsharded_nbytes=self._memory.now_nbytes,
            peak_unsharded_nbytes=self._memory.peak_nbytes,
            sent_nbytes=sum(comm.sent_nbytes for comm in self.comms()),
            exposed_s=None if None in exposed else sum(value for value in exposed if value is not None),
        )
