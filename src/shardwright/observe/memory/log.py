"""A step's memory, by ``model.record_memory()``: what is alive before and after the actions of each event."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from shardwright import clock
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.unit import unit_of
from shardwright.errors import StageError
from shardwright.observe.memory.accounts import group_names, known_and_rest
from shardwright.observe.memory.report import NO_GROUP, Amount, Category, MemoryReport, in_mib, merged
from shardwright.observe.steps.drawing import Bar, Drawing, Level
from shardwright.schedule.schedule import Event, EventKind, event_in_words


@dataclass
class MemoryLog:
    """A step's memory, from ``model.record_memory()``: a report before and after the actions of each event.

    moments: each with its seconds since the recording began. ``print`` shows the moment at which most is
    held; ``save`` draws them all.
    """

    moments: list[tuple[float, MemoryReport]] = field(default_factory=list)

    @property
    def peak(self) -> MemoryReport:
        """The moment at which most is held; an empty report before the first event."""
        reports = [report for _, report in self.moments]
        return max(reports, key=lambda report: report.total_nbytes, default=MemoryReport("", ()))

    def drawing(self, by: str = "category") -> Drawing:
        """The bytes over the seconds of the step. by: "category" or "group"."""
        levels = [Level(at_s, _parts(report, by), report.at) for at_s, report in self.moments]
        ends = [level.at for level in levels[1:]] + [level.at for level in levels[-1:]]
        bars = [Bar("events", level.label, level.at, end) for level, end in zip(levels, ends, strict=True)]
        peak = self.peak
        title = f"Memory of a step by {by}: {in_mib(peak.total_nbytes)} MiB at most, {peak.at}"
        return Drawing(title, tuple(bars), tuple(levels))

    def save(self, path: str | Path, by: str = "category") -> None:
        """Write the drawing as ``.html``, ``.png`` or ``.svg``. Raises: InputError as ``Drawing.save``."""
        self.drawing(by).save(path)

    def __str__(self) -> str:
        return f"{self.peak.at}, where most is held:\n{self.peak}"


def _parts(report: MemoryReport, by: str) -> dict[str, int]:
    if by == "group":
        return report.by_group
    return {str(category): nbytes for category, nbytes in report.by_category.items()}


@contextmanager
def recorded(model: nn.Module) -> Iterator[MemoryLog]:
    """Take a report before and after the actions of each event; see ``FSDPModule.record_memory``."""
    runtime = unit_of(model).runtime
    if runtime.running() is not None:
        raise StageError("record_memory() was entered inside a forward or backward; enter it between steps")
    recorder = _StepRecorder(model)
    watchers = runtime.executor.memory.watchers
    watchers.append(recorder)
    try:
        yield recorder.log
    finally:
        watchers.remove(recorder)


class _StepRecorder:
    """Books what was allocated between two events to the group that ran there, and what of it is freed from
    there first: what is left over was there before, or is nobody's."""

    def __init__(self, model: nn.Module) -> None:
        self.log = MemoryLog()
        self._names = group_names(model)
        runtime = unit_of(model).runtime
        self._numbered = [self._names.get(group, group.name) for group in runtime.groups]
        self._device = runtime.groups[0].axis.device
        self._accounts: Counter[tuple[Category, str]] = Counter()
        self._running: list[int] = []
        self._last: EventKind | None = None
        self._rest: int | None = None
        self._began_s = clock.perf_counter()

    def __call__(self, event: Event, group: ParamGroup | None, has_acted: bool) -> None:
        """An event has come, or its actions are taken."""
        at_s = clock.perf_counter() - self._began_s
        known, rest = known_and_rest(self._names, self._device)
        if rest is not None and self._rest is not None and not has_acted:
            self._book(rest - self._rest, self._owner(event))
        self._rest = rest
        if has_acted:
            self._move(event)
        amounts = [*known, *(Amount(*key, nbytes) for key, nbytes in self._accounts.items())]
        if rest is not None:
            other = max(0, rest - sum(self._accounts.values()))
            amounts.append(Amount(Category.OTHER, NO_GROUP, other))
        name = "" if group is None else self._names.get(group, group.name)
        when = f"{'after' if has_acted else 'before'} {event_in_words(event.kind, name)}"
        self.log.moments.append((at_s, MemoryReport(when, merged(amounts), rest is not None)))

    def _owner(self, event: Event) -> tuple[Category, str]:
        if self._last is EventKind.FORWARD_END and event.kind is EventKind.BACKWARD_BEGIN:
            return Category.HEAD, NO_GROUP
        return Category.ACTIVATIONS, self._numbered[self._running[-1]] if self._running else NO_GROUP

    def _move(self, event: Event) -> None:
        self._last = event.kind
        if event.kind in (EventKind.FORWARD_BEGIN, EventKind.RECOMPUTE, EventKind.BACKWARD_BEGIN):
            self._running.append(event.group)
        elif event.kind in (EventKind.FORWARD_END, EventKind.BACKWARD_END):
            self._running = [group for group in self._running if group != event.group]
        elif event.kind is EventKind.STEP_END:
            self._running = []

    def _book(self, nbytes: int, owner: tuple[Category, str]) -> None:
        if nbytes >= 0:
            self._accounts[owner] += nbytes
            return
        others = sorted(self._accounts, key=lambda key: (key[0] is not Category.HEAD, -self._accounts[key]))
        for key in (owner, *others):
            freed = min(-nbytes, self._accounts[key])
            self._accounts[key] -= freed
            nbytes += freed
