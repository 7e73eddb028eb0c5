"""What did happen in a step: each event, what was done there, when, and how long it took the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.schedule.schedule import Action, Event, Phase, Schedule, ScheduleEntry


class TraceEntry(NamedTuple):
    """``event`` came ``at_s`` seconds after its phase began; the host spent ``took_s`` on ``actions``."""

    event: Event
    actions: tuple[Action, ...]
    at_s: float
    took_s: float

    def __str__(self) -> str:
        stop = str(ScheduleEntry(self.event, self.actions))
        return f"{self.at_s * 1e3:9.2f} ms  +{self.took_s * 1e3:7.2f} ms  {stop}"


@dataclass(frozen=True)
class Trace:
    """The last pass of each phase. ``print`` it; ``schedule()`` is the same without the times."""

    phases: Mapping[Phase, tuple[TraceEntry, ...]] = field(default_factory=dict)

    def schedule(self) -> Schedule:
        """What happened as a schedule: equal to the planned one where the step followed it."""
        return Schedule(
            {
                phase: tuple(ScheduleEntry(e.event, e.actions) for e in entries)
                for phase, entries in self.phases.items()
            }
        )

    def __str__(self) -> str:
        lines = []
        for phase, entries in self.phases.items():
            lines.append(str(phase))
            lines.extend(f"  {entry}" for entry in entries)
        return "\n".join(lines)
