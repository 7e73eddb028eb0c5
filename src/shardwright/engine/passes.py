"""Phases as they run, and what a caller has said of the step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardwright.engine.group import ParamGroup
from shardwright.observe.trace import TraceEntry
from shardwright.policy import SchedulePolicy
from shardwright.schedule.planner import Planner
from shardwright.schedule.schedule import Event, Phase, Schedule, Stop


@dataclass(frozen=True)
class StepPolicy:
    """What the caller said of the step that is running.

    is_last_backward: False lets reductions run on after this backward; the last one waits for them all.
    optimizer_event: recorded after the optimizer's step; the next forward's all-gathers wait for it.
    """

    is_last_backward: bool = True
    optimizer_event: Any = None


class Entry(NamedTuple):
    """The outermost module that runs: its name, and what lists the groups that it and its children need."""

    name: str = ""
    groups: Callable[[], Sequence[ParamGroup]] = tuple


NO_ENTRY = Entry()


@dataclass
class Pass:
    """A phase as it runs, and the way that its collectives are decided on.

    planner: decides once the events have left the schedule (``Alone``).
    """

    phase: Phase
    way: "Way"
    nested: bool
    order: list[Event] = field(default_factory=list)
    trace: list[TraceEntry] = field(default_factory=list)
    planner: Planner | None = None
    began_s: float = field(default_factory=time.perf_counter)


class Way(Protocol):
    """How the collectives of a pass are decided on: by each rank for itself, or by all together."""

    def begin(self, current: Pass, entry: Entry) -> None:
        """The pass begins."""
        ...

    def at(self, current: Pass, event: Event, step: StepPolicy) -> Sequence[Stop]:
        """Take an event's actions; after a begin event the group is unsharded. Returns what was taken."""
        ...

    def end(self, current: Pass, failed: bool) -> Sequence[Stop]:
        """The pass has ended, or was cut short by an exception. Returns what was taken."""
        ...

    def abandon(self) -> None:
        """Forget what an exception has cut short."""
        ...

    def replan(self, policy: SchedulePolicy) -> None:
        """Plan anew: the policy or what is known of a group has changed."""
        ...

    @property
    def schedule(self) -> Schedule:
        """Planned from the passes so far; empty before one."""
        ...
