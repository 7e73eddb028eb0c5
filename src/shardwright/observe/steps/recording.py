"""From what the recorder of this process holds to a ring of records (``rings.py``)."""

import socket
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from shardwright import clock
from shardwright.observe.steps.rings import CoreUse, Record, RecordedStep, Ring
from shardwright.schedule.schedule import Action, ActionKind, Event, EventKind, Phase
from shardwright.transport.device_times import read_device_times
from shardwright.transport.process import Launch, process_state
from shardwright.transport.recorder import (
    ACTION,
    CALL,
    CALLED,
    DEVICE,
    DONE,
    HELD,
    LAUNCH,
    LINE,
    PHASE,
    SPAN,
    STALL,
    STEPS,
    USE,
    WAIT,
    Label,
    ThreadUse,
)

VERBS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point-to-point")
_HALVES = ("reduce", "spread")  # of an all-reduce
_OF_GRADS = {ActionKind.HOLD, ActionKind.REDUCE, ActionKind.WAIT_REDUCE, ActionKind.ALL_REDUCE}
_SEEN = ("compute", "outside", "span")
_LONG_S = 1e-3


def ring(last: int = STEPS) -> Ring:
    """The last steps of this process, the running one among them. Any thread may ask."""
    read_device_times()
    kept, ended_s = process_state.recorder.steps(), process_state.recorder.ended_s
    starts = [(number, at) for number, at, _ in kept]
    if ended_s is not None:
        starts.append((starts[-1][0] + 1, ended_s))
    ends = [at for _, at in starts[1:]] + [clock.perf_counter()]
    steps = [RecordedStep(*start, end) for start, end in zip(starts, ends, strict=True)][-last:]
    logs = process_state.logs
    reader = _Reader(steps, {log.name: log.axis for log in logs})
    for _, _, written in kept[-last - 1 :]:
        for each in written:
            reader.read[each[0]](*each[1:])
    joined = dist.is_initialized()
    return Ring(
        dist.get_rank() if joined else 0,
        dist.get_world_size() if joined else 1,
        socket.gethostname(),
        {log.name: log.ranks for log in logs} | reader.called,
        steps,
        reader.records(),
        [each for each in reader.memory if each[0] >= steps[0].start],
        [each for each in reader.held if each[0] >= steps[0].start],
        tuple(each for each in reader.cores if each.end > steps[0].start),
    )


@dataclass
class _Collective:
    launch: Launch
    at: float
    phase: str
    end: float = 0.0
    met: bool = False
    groups: tuple[str, ...] = ()
    nbytes: int = 0
    start: float = 0.0  # on a device
    link: tuple[Any, ...] = ()


@dataclass
class _Reader:
    """Reads tuples in the order in which they were written."""

    steps: Sequence[RecordedStep]
    axes: dict[str, str] = field(default_factory=dict)
    called: dict[str, tuple[int, ...]] = field(default_factory=dict)
    memory: list[tuple[float, int]] = field(default_factory=list)
    held: list[tuple[float, int, int, int]] = field(default_factory=list)
    _stalls: list[tuple[float, str, int]] = field(default_factory=list)
    cores: list[CoreUse] = field(default_factory=list)
    _used: tuple[ThreadUse, float] | None = None
    _found: list[Record] = field(default_factory=list)
    _calls: list[tuple[float, float, tuple[Any, ...]]] = field(default_factory=list)
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _collectives: dict[tuple[str, int], _Collective] = field(default_factory=dict)
    _fresh: list[_Collective] = field(default_factory=list)
    _lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read = {
            CALL: self._call,
            PHASE: self._phase,
            ACTION: self._action,
            LAUNCH: self._launch,
            WAIT: self._wait,
            DONE: self._done,
            SPAN: self._span,
            LINE: lambda line, at: self._lines.append((at, line)),
            DEVICE: self._device,
            STALL: lambda transport, number, at: self._stalls.append((at, transport, number)),
            HELD: lambda *held: self.held.append(held),
            USE: self._use,
            CALLED: self._called,
        }

    def _call(self, labels: Any, event: Event, _: Any, start: float, end: float, held_nbytes: int) -> None:
        names = _names(labels, (event.group,))
        self._calls.append((start, end, (str(event.kind), names)))
        self.memory.append((end, held_nbytes))
        self._fresh.clear()

    def _phase(self, _: Any, phase: str, begins: bool, inner: bool, start: float, end: float) -> None:
        self._calls.append((start, end, (str(phase), begins, inner)))
        self._fresh.clear()

    def _action(self, labels: Any, action: Action | None, start: float, end: float) -> None:
        if action is None:
            self._add("action", "words", (), start, end)
            return
        names = _names(labels, action.groups)
        field_name = "grad_nbytes" if action.kind in _OF_GRADS else "nbytes"
        nbytes = sum(getattr(labels[index], field_name) for index in action.groups if index < len(labels))
        self._add("action", str(action.kind), names, start, end, nbytes=nbytes)
        inside = [each for each in self._fresh if start <= each.at <= end and _verb(each.launch.key) in VERBS]
        for each in inside:
            named = [place for place, name in enumerate(names) if name and name in each.launch.key.split()]
            one = len(inside) > 1 and bool(named)  # groups of several transports: the first one is in the key
            each.groups = (names[named[0]],) if one else names
            each.nbytes = getattr(labels[action.groups[named[0]]], field_name) if one else nbytes
        self._fresh.clear()

    def _launch(self, transport: str, launch: Launch, at: float) -> None:
        made = self._collectives[transport, launch.number] = _Collective(launch, at, str(launch.phase), at)
        self._fresh.append(made)

    def _wait(
        self,
        transport: str,
        launch: Launch,
        thread: int,
        start: float,
        end: float,
        link: tuple[int, ...] = (),
        link_s: float = 0.0,
    ) -> None:
        kind = "wait" if thread == process_state.thread else "background"
        known = self._collectives.get((transport, launch.number))
        issue = start if known is None else known.at
        groups, nbytes = ((), 0) if known is None else (known.groups, known.nbytes)
        step, phase = self._step(start), str(process_state.phase) if known is None else known.phase
        self._found.append(
            Record(
                kind, _verb(launch.key), groups, step, phase, nbytes, issue, start, end, transport,
                launch.number, launch.key, False, link, link_s, self.axes.get(transport, ""),
            )
        )  # fmt: skip
        if known is not None and not known.met:
            known.end = max(known.end, end)

    def _done(self, transport: str, number: int, at: float, met: bool, *link: Any) -> None:
        known = self._collectives.get((transport, number))
        if known is not None:
            known.end, known.met, known.link = at, met or known.met, link

    def _device(self, transport: str, number: int, start: float, end: float) -> None:
        known = self._collectives.get((transport, number))
        if known is not None:  # what a device has ended all ranks had launched
            known.start, known.end, known.met = start, end, True

    def _called(self, name: str, axis: str, ranks: tuple[int, ...], key: str, *rest: Any) -> None:
        number, phase, issue, start, end, met, link = rest
        self.called[name] = ranks
        of = Record(
            "collective", _verb(key), (), self._step(issue), phase, 0, issue, issue, end, name, number, key,
            met, axis=axis,
        )  # fmt: skip
        self._found.append(of)
        if start is not None:
            self._found.append(of._replace(kind="wait", start=start, met=False, link=link))

    def _span(self, what: str, note: str, start: float, end: float) -> None:
        if what != "gc":
            self._spans.append((start, end))
        self._add(*(("gc", "") if what == "gc" else ("span", what)), (), start, end, note=note)

    def _use(self, use: ThreadUse, at: float) -> None:
        if use.thread != process_state.thread:
            return
        if self._used is not None:
            before, start = self._used
            others_s = inf if torch.accelerator.device_count() else use.others_s - before.others_s
            self.cores.append(
                CoreUse(
                    start, at, use.ran_s - before.ran_s, use.queued_s - before.queued_s,
                    use.faults - before.faults, others_s, use.throttled_s - before.throttled_s,
                )
            )  # fmt: skip
        self._used = use, at

    def _say_lines(self) -> None:
        """What was seen of the training thread, into the records of what it did then; and into those of the
        same place in other steps that took about as long, the nearest line in time: it is looked a few times
        a second, so of what each step does again only some is seen."""
        own = [(each.start, place) for place, each in enumerate(self._found) if each.kind in _SEEN]
        own.sort()
        seen: dict[int, str] = {}
        for at, line in self._lines:
            before = bisect_right(own, (at, len(self._found))) - 1
            if before >= 0 and (each := self._found[own[before][1]]).end >= at and not each.note:
                seen.setdefault(own[before][1], line)
        times = Counter[tuple[Any, ...]]()
        alike: dict[tuple[Any, ...], list[int]] = {}
        for _, place in own:
            each = self._found[place]
            what = each.step, each.kind, each.action, each.groups, each.phase
            times[what] += 1
            alike.setdefault((*what[1:], times[what]), []).append(place)
        for places in alike.values():
            lines = [(self._found[place], seen[place]) for place in places if place in seen]
            for place in places:
                each = self._found[place]
                near = [
                    (abs(other.start - each.start), line) for other, line in lines if _as_long(other, each)
                ]
                if near and not each.note:
                    self._found[place] = each._replace(note=min(near)[1])

    def records(self) -> list[Record]:
        """All of them from the begin of the first step on, by start."""
        for (transport, number), each in self._collectives.items():
            self._found.append(
                Record(
                    "collective", _verb(each.launch.key), each.groups, self._step(each.at), each.phase,
                    each.nbytes, each.at, each.start or each.at, each.end, transport, number,
                    each.launch.key, each.met, axis=self.axes.get(transport, ""),
                    **dict(zip(("link", "link_s"), each.link, strict=False)),
                )
            )  # fmt: skip
        self._stretches()
        self._on_device()
        self._say_lines()
        first = self.steps[0].start
        return sorted((each for each in self._found if each.end >= first), key=lambda each: each.start)

    def _stretches(self) -> None:
        """What lies between calls of the runtime, and the calls themselves."""
        phases: list[str] = []
        groups: list[tuple[str, ...]] = []
        before, ended = self.steps[0].start, ""
        for start, end, call in sorted(self._calls, key=lambda each: each[:2]):
            begins_backward = call[:2] == (str(Phase.BACKWARD), True)
            if start > before:
                if phases:
                    self._add("compute", "", groups[-1] if groups else (), before, start, phase=phases[-1])
                else:
                    loss = begins_backward and ended == Phase.FORWARD
                    self._outside("loss" if loss else "user", before, start)
            before = max(before, end)
            if len(call) == 2:
                event, names = call
                self._add("runtime", event, names, start, end, phase=phases[-1] if phases else "")
                _follow(groups, event, names)
                continue
            phase, begins, inner = call
            self._add("runtime", "begin" if begins else "end", (), start, end, phase=phase)
            if begins:
                if not inner:
                    phases.clear()
                    groups.clear()
                phases.append(phase)
            elif phases:
                ended = phases.pop()
                if not phases:
                    groups.clear()
        end = self.steps[-1].end
        if not phases and end > before:
            self._outside("user", before, end)

    def _on_device(self) -> None:
        """What the compute stream did: it waits for a collective until that has ended, then goes on."""
        went, groups, phase = 0.0, (), ""
        for at, transport, number in sorted(self._stalls):
            known = self._collectives.get((transport, number))
            if went and at > went:
                self._add("device", "compute", groups, went, at, phase=phase)
            if known is None or not known.start:
                went = 0.0  # it isn't known when it went on
                continue
            went = max(at, went, known.end)
            if known.end > at:
                more = {"phase": known.phase, "note": known.launch.key}
                self._add("device", _verb(known.launch.key), known.groups, at, known.end, **more)
            if _verb(known.launch.key) == "all-gather":
                groups, phase = known.groups, known.phase

    def _outside(self, what: str, start: float, end: float) -> None:
        """Less what somebody has said of it."""
        for first, last in sorted(each for each in self._spans if each[0] < end and each[1] > start):
            if first > start:
                self._add("outside", what, (), start, first)
            start = max(start, last)
        if end > start:
            self._add("outside", what, (), start, end)

    def _add(
        self, kind: str, action: str, groups: tuple[str, ...], start: float, end: float, **more: Any
    ) -> None:
        fields: dict[str, Any] = {"phase": "", "nbytes": 0} | more
        step = self._step(start)
        self._found.append(Record(kind, action, groups, step, issue=start, start=start, end=end, **fields))

    def _step(self, at: float) -> int:
        return next((each.number for each in reversed(self.steps) if each.start <= at), self.steps[0].number)


def _as_long(seen: Record, each: Record) -> bool:
    """Whether what was not seen in one step may be what was in another; short stretches have no line."""
    ratio = (each.end - each.start) / max(seen.end - seen.start, 1e-9)
    return seen is each or (each.end - each.start > _LONG_S and 0.5 < ratio < 2)


def _follow(groups: list[tuple[str, ...]], event: str, names: tuple[str, ...]) -> None:
    """Whose forward or backward runs, the innermost last."""
    if event in (EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN, EventKind.RECOMPUTE):
        if names not in groups:
            groups.append(names)
    elif event in (EventKind.FORWARD_END, EventKind.BACKWARD_END) and names in groups:
        groups.remove(names)


def _names(labels: Sequence[Label], groups: Sequence[int]) -> tuple[str, ...]:
    """Empty for the end of a step, and for groups that were asked for before the first step."""
    return tuple(labels[index].name for index in groups if 0 <= index < len(labels))


def _verb(key: str) -> str:
    first = key.partition(" ")[0]
    return "all-reduce" if first in _HALVES else first if first in VERBS else "words"
