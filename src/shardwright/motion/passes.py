"""Phases as they run, and what was recorded and planned of them."""

import time
from dataclasses import dataclass, field
from typing import Any

from shardwright.observe.trace import TraceEntry
from shardwright.plan.planner import Planner
from shardwright.plan.schedule import Event, Phase, Schedule


@dataclass(frozen=True)
class StepPolicy:
    """What the caller said of the step that is running.

    is_last_backward: False lets reductions run on after this backward; the last one waits for them all.
    optimizer_event: recorded after the optimizer's step; the next forward's all-gathers wait for it.
    """

    is_last_backward: bool = True
    optimizer_event: Any = None


@dataclass
class Pass:
    """A phase as it runs. ``planner`` decides once the events have left the schedule."""

    phase: Phase
    order: list[Event]
    trace: list[TraceEntry]
    planner: Planner | None
    nested: bool
    began_s: float = field(default_factory=time.perf_counter)


@dataclass
class Book:
    """What was recorded and what was planned from it. ``said``: a departure has been logged."""

    orders: dict[Phase, tuple[Event, ...]] = field(default_factory=dict)
    traces: dict[Phase, tuple[TraceEntry, ...]] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    said: bool = False
