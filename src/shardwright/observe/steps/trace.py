"""What did happen in a step: each event, what was done there, when, and how long it took the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.observe.steps.collection import save_together
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.step_page import Predicted
from shardwright.schedule.schedule import Action, Event, Phase, Schedule, ScheduleEntry
from shardwright.transport.process import process_state
from shardwright.transport.recorder import CALL, PHASE, Label


class TraceEntry(NamedTuple):
    """``event`` came ``at_s`` seconds after its phase began; the host spent ``took_s`` on ``actions``."""

    event: Event
    actions: tuple[Action, ...]
    at_s: float
    took_s: float

    def text(self, names: tuple[str, ...] = ()) -> str:
        """A line, with the names of groups where they are given."""
        entry = ScheduleEntry(self.event, self.actions).text(names)
        return f"{self.at_s * 1e3:9.2f} ms  +{self.took_s * 1e3:7.2f} ms  {entry}"


@dataclass(frozen=True)
class Trace:
    """The last pass of each phase. ``print`` it; ``schedule()`` is the same without the times.

    names: of the groups, by number.
    """

    phases: Mapping[Phase, tuple[TraceEntry, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def schedule(self) -> Schedule:
        """What happened as a schedule: equal to the planned one where the step followed it."""
        return Schedule(
            {
                phase: tuple(ScheduleEntry(e.event, e.actions) for e in entries)
                for phase, entries in self.phases.items()
            },
            self.names,
        )

    def save(self, folder: str | Path, *, steps: int = 1, predicted: Predicted | None = None) -> list[Path]:
        """Write what all ranks did in their last ``steps`` whole steps, on one clock: ``trace.html`` (a page
        that opens from disk and zooms), ``trace.png`` and ``trace.json`` (for ui.perfetto.dev).

        Every rank calls it, between steps; it needs the job's store and no collective. The first rank writes
        into ``folder``, and returns the files. predicted: what a plan expects, drawn above: a ``Plan``, or
        ``estimate(...).drawing()``. ``trace.png`` is left out where matplotlib isn't installed
        (``shardwright[plots]``). Where ranks can't reach the store any more, each leaves what it has as
        ``rank-N.ring`` in ``folder``: ``shardwright trace FOLDER --out PAGE`` makes a page of those.
        Raises: InputError where no step is on record, or ``steps`` is below 1.
        """
        return save_together(ring(), folder, steps, predicted)

    def __str__(self) -> str:
        lines = []
        for phase, entries in self.phases.items():
            lines.append(str(phase))
            lines.extend(f"  {entry.text(self.names)}" for entry in entries)
        return "\n".join(lines)


def last_trace(labels: tuple[Label, ...]) -> Trace:
    """Of the model whose groups have these labels, as far as the recorder remembers."""
    phases = {
        phase: tuple(
            TraceEntry(event, actions, start - began, end - start) for event, actions, start, end in calls
        )
        for phase, (began, calls) in _last_passes(labels).items()
    }
    return Trace(phases, tuple(label.name for label in labels))


def _last_passes(
    labels: tuple[Label, ...],
) -> Mapping[Phase, tuple[float, list[tuple[Event, tuple[Action, ...], float, float]]]]:
    """Return of the last whole pass of each phase of the model with these labels when it began, and
    its events with what was done there, from when to when. Other models, and passes inside of it, are left
    out."""
    found: dict[Phase, tuple[float, list[Any]]] = {}
    began, depth, calls = 0.0, 0, []
    for kind, *rest in (each for _, _, written in process_state.recorder.steps() for each in written):
        if kind not in (CALL, PHASE) or rest[0] is not labels or not labels:
            continue
        if kind == CALL:
            if depth == 1:
                calls.append(tuple(rest[1:5]))
            continue
        _, phase, begins, inner, start, _ = rest
        if begins and not inner:
            began, depth, calls = start, 1, []
        elif depth:
            depth += 1 if begins else -1
            if not depth and not inner:
                found.pop(phase, None)
                found[phase] = (began, calls)
    return found
