"""The page of a step: what every rank did in it, on one clock; as a page, a picture and a trace for Perfetto.

Lanes of each rank: compute (what its training thread does: the model, the loss, the optimizer, data, the
runtime's copies and launches, ...),
gather and reduce (collectives, from their launch until what they bring is there) and wait (the thread is
blocked until others come). On an accelerator compute and wait are those of its compute stream, collectives
stand where the device ran them, and the training thread has a lane of its own (host). Behind them exposed
communication is shaded: the thread launches, moves bytes or waits, or the device waits. An arrow leads from
each wait to the rank that came last, and to what that did then.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardwright.columns import in_words
from shardwright.errors import InputError, MissingExtra
from shardwright.observe.ledger.causes import LINK, SCHEDULE
from shardwright.observe.ledger.late import LateRank, called, collective, doing, late_ranks, over
from shardwright.observe.ledger.ledger import Ledger, booked
from shardwright.observe.memory.report import Category
from shardwright.observe.steps.clocks import offsets, on_one_clock
from shardwright.observe.steps.drawing import Arrow, Bar, Drawing, Level, Shade
from shardwright.observe.steps.rings import Record, Ring
from shardwright.observe.steps.step_memory import levels
from shardwright.observe.steps.trace_events import trace_events
from shardwright.plan.file import Plan

_LANES = {
    "all-gather": "gather",
    "reduce-scatter": "reduce",
    "all-reduce": "reduce",
    "all-to-all": "exchange",
    "point-to-point": "exchange",
}
_MOVES = ("unshard", "participate", "wait", "reduce", "wait-reduce", "all-reduce", "finalize", "words")
_SHOWN = 0.004  # of the step: shorter waits have no arrow
_MOST_ARROWS = 60
_NOTES = 6
_TOLD = 0.005  # of the step: what less was waited for is not told by itself

Predicted = Drawing | Plan
"""What a plan expects of a step: its drawing (``estimate(...).drawing()``), or the plan."""


def save_page(
    rings: Sequence[Ring], folder: str | Path, steps: int = 1, predicted: Predicted | None = None
) -> list[Path]:
    """Write ``trace.json``, ``trace.html`` and ``trace.png`` of the last whole steps; returns their paths.

    rings: of all ranks. ``trace.png`` takes matplotlib (``shardwright[plots]``) and is left out without it.
    Raises: InputError where nothing is on record, or ``steps`` is below 1.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    known = on_one_clock(rings)
    chosen = _chosen(known, steps)
    ledger = booked(known, (step.number for step in chosen[0].steps))
    place, error_s = Path(folder), max(each.error_s for each in offsets(rings).values())
    drawing = draw(chosen, predicted, error_s, ledger)
    place.mkdir(parents=True, exist_ok=True)
    written = [place / f"trace.{ending}" for ending in ("json", "html", "png")]
    written[0].write_text(json.dumps(trace_events(chosen), separators=(",", ":")), encoding="utf-8")
    drawing.save(written[1])
    try:
        drawing.save(written[2])
    except MissingExtra:
        del written[2]
    return written


def _chosen(rings: Sequence[Ring], count: int) -> list[Ring]:
    """Keep the last ``count`` steps that all of them have whole, and nothing else; the running one, where
    none is whole. Seconds begin with the first of them."""
    if not any(ring.records for ring in rings):
        raise InputError("nothing is on record: no forward of a sharded model has run in these processes")
    last = min((ring.steps[-2] if ring.steps[1:] else ring.steps[-1]).number for ring in rings)
    kept = []
    for ring in rings:
        steps = [each for each in ring.steps if last - count < each.number <= last] or ring.steps[-1:]
        start, end = steps[0].start, steps[-1].end
        records = [each for each in ring.records if each.start < end and each.end > start]
        memory = [each for each in ring.memory if start <= each[0] <= end]
        held = [each for each in ring.held if start <= each[0] <= end]
        kept.append(ring._replace(steps=steps, records=records, memory=memory, held=held))
    first = min(ring.steps[0].start for ring in kept)
    return [ring.shifted(first) for ring in kept]


def draw(
    rings: Sequence[Ring],
    predicted: Predicted | None = None,
    error_s: float = 0.0,
    ledger: Ledger | None = None,
) -> Drawing:
    """The lanes of rings that are on one clock, above the memory of the rank that holds most.

    error_s: by which their clocks may differ. ledger: of their steps, to say what exposed communication was
    for.
    """
    start, end = min(r.steps[0].start for r in rings), max(r.steps[-1].end for r in rings)
    bars, lanes, notes = _predicted_bars(predicted, start)
    shades: list[Shade] = []
    exchanged = any(_LANES.get(each.action) == "exchange" for ring in rings for each in ring.records)
    for ring in rings:
        name = f"rank {ring.rank}"
        thread = _threads(ring)[0]
        moves = [each for each in ("gather", "reduce", "exchange") if each != "exchange" or exchanged]
        lanes += [f"{name} {lane}" for lane in dict.fromkeys((thread, "compute", *moves, "wait"))]
        bars += [bar for each in ring.records if (bar := _bar(name, thread, each)) is not None]
        bars += [Bar(f"{name} {thread}", *each, kind=SCHEDULE) for each in _own_schedule(ring)]
        shades += [Shade(f"{name} compute", f"{name} wait", *each) for each in _exposed(ring)]
        notes.append(_shares(ring, ledger))
    found = sorted(late_ranks(rings), key=lambda each: each.wait.start - each.wait.end)
    threads = {ring.rank: _threads(ring) for ring in rings}
    bars += [
        Bar(f"rank {each.rank} {threads[each.rank][1]}", each.text(), each.wait.start, each.wait.end)
        for each in found
    ]
    long = [each for each in found if each.fault_s > _SHOWN * (end - start)]
    notes = [*notes[: 2 * _NOTES], *(each.text() for each in long[:_NOTES])]
    if len(rings) > 1:
        notes.append(f"clocks of ranks are the same within {1e6 * error_s:.0f} us")
    numbers = [step.number for step in rings[0].steps]
    which = f"Step {numbers[0]}" if len(numbers) == 1 else f"Steps {numbers[0]} to {numbers[-1]}"
    ranks = f"{len(rings)} rank{'s' if len(rings) > 1 else ''}"
    return Drawing(
        f"{which} on {ranks}: {1e3 * (end - start):.1f} ms",
        tuple(bars),
        tuple(_changing(levels(max(rings, key=lambda ring: max((n for _, n in ring.memory), default=0))))),
        lanes=tuple(lanes),
        arrows=tuple(_arrow(each, threads) for each in long[:_MOST_ARROWS]),
        shades=tuple(shades),
        notes=tuple(notes),
    )


def _predicted_bars(predicted: Predicted | None, start: float) -> tuple[list[Bar], list[str], list[str]]:
    """Above what was measured."""
    if predicted is None:
        return [], [], []
    if isinstance(predicted, Plan):
        computes_s = predicted.step_s - predicted.exposed_s
        bars = [
            Bar("plan", f"computes {1e3 * computes_s:.1f} ms", 0.0, computes_s, "compute"),
            Bar("plan", f"exposed {1e3 * predicted.exposed_s:.1f} ms", computes_s, predicted.step_s, "wait"),
        ]
        step_s, rows = predicted.step_s, ["plan"]
    else:
        bars = [bar._replace(row=f"plan {bar.row}") for bar in predicted.bars]
        step_s, rows = max(bar.end for bar in bars), [f"plan {row}" for row in predicted.rows]
    moved = [bar._replace(start=bar.start + start, end=bar.end + start) for bar in bars]
    return moved, rows, [f"planned: {1e3 * step_s:.1f} ms"]


def _threads(ring: Ring) -> tuple[str, str]:
    """The lanes of the training thread and of its waits. On an accelerator both are a lane of its own: the
    others then show what the device did."""
    on_device = any(each.kind == "device" for each in ring.records)
    return ("host", "host") if on_device else ("compute", "wait")


def _exposed(ring: Ring) -> list[tuple[float, float]]:
    """When communication was waited for and nothing computed: by the device, or else by the thread."""
    if _threads(ring)[0] == "host":
        moved = [r for r in ring.records if r.kind == "device" and r.action != "compute"]
    else:
        moved = [r for r in ring.records if (r.kind == "action" and r.action in _MOVES) or r.kind == "wait"]
    return _joined((each.start, each.end) for each in moved)


def _bar(name: str, thread: str, record: Record) -> Bar | None:
    times = record.start, record.end
    if record.kind == "compute" or (record.kind, record.action) == ("device", "compute"):
        of = called(record.groups) or "what is around groups"
        lane = thread if record.kind == "compute" else "compute"
        return Bar(f"{name} {lane}", f"{record.phase} of {of}", *times, "compute")
    if record.kind == "device":
        return Bar(f"{name} wait", f"waits for {record.note}", *times, "wait")
    if record.kind in ("outside", "span", "gc"):
        return Bar(f"{name} {thread}", doing(record), *times, record.action or "gc")
    if record.kind == "collective" and record.action in _LANES:
        size = f" ({in_words(record.nbytes)})" if record.nbytes else ""
        return Bar(f"{name} {_LANES[record.action]}", f"{collective(record)}{size}", *times)
    return None


def _own_schedule(ring: Ring) -> Iterable[tuple[str, float, float]]:
    """The calls of the runtime, with what they do, less the waits inside: they have a lane of their own."""
    waits = [each for each in ring.records if each.kind == "wait"]
    actions = [each for each in ring.records if each.kind == "action"]
    wait = action = 0
    for call in (each for each in ring.records if each.kind == "runtime"):
        did = []
        while action < len(actions) and actions[action].start < call.end:
            did += [doing(actions[action])] if actions[action].start >= call.start else []
            action += 1
        label, start = f"{SCHEDULE}: {', '.join(dict.fromkeys(did))}" if did else SCHEDULE, call.start
        while wait < len(waits) and waits[wait].start < call.end:
            if waits[wait].start > start:
                yield label, start, waits[wait].start
            start = max(start, waits[wait].end)
            wait += 1
        if call.end > start:
            yield label, start, call.end


def _arrow(late: LateRank, threads: Mapping[int, tuple[str, str]]) -> Arrow:
    did_wait = late.did is not None and late.did.kind == "wait"
    own = f"rank {late.late} {threads[late.late][did_wait]}"
    return Arrow(late.text(), f"rank {late.rank} {threads[late.rank][1]}", late.wait.end, own, late.came_s)


def _shares(ring: Ring, ledger: Ledger | None) -> str:
    """What became of the rank's time."""
    whole = ring.steps[-1].end - ring.steps[0].start
    exposed = "exposed communication"
    seconds = {"compute": 0.0, exposed: 0.0, "optimizer": 0.0}
    for each in ring.records:
        took = min(each.end, ring.steps[-1].end) - max(each.start, ring.steps[0].start)
        if each.kind == ("device" if _threads(ring)[0] == "host" else "compute"):
            seconds["compute"] += took if each.action in ("", "compute") else 0.0
        elif each.kind in ("outside", "span"):
            seconds[each.action] = seconds.get(each.action, 0.0) + took
    seconds[exposed] = sum(end - start for start, end in _exposed(ring))
    if _threads(ring)[0] != "host":  # inside of a forward or backward
        seconds["compute"] -= sum(r.end - r.start for r in ring.records if r.kind == "wait" and r.is_torchs)
    shown = {name: f"{name} {_percent(each, whole)}" for name, each in seconds.items() if each > 5e-4 * whole}
    by_host = _threads(ring)[0] != "host"  # the ledger books what the host waited for
    if ledger is not None and ledger.seconds and by_host and exposed in shown:
        shown[exposed] += f" ({_waited(ring.rank, ledger, seconds[exposed], whole)})"
    return f"rank {ring.rank}: {', '.join(shown.values())}"


def _waited(rank: int, ledger: Ledger, exposed_s: float, whole_s: float) -> str:
    """What so many seconds of exposed communication were for: late ranks, links, and the rest of them."""
    waits = ledger._replace(lines=[each for each in ledger.lines if each.rank == rank != each.whose])
    found = [each for each in waits.losses() if each.seconds > _TOLD * whole_s]
    said = []
    for each in found:
        if each.cause != LINK:
            where = f" ({each.detail})" if each.detail else ""
            axes = f" {over(*each.axes)}" if each.axes else ""
            said.append(f"{_percent(each.seconds, whole_s)} for rank {each.whose}{axes}: {each.cause}{where}")
    link_s = sum(each.seconds for each in found if each.cause == LINK)
    own_s = max(0.0, exposed_s - sum(each.seconds for each in found))
    said.append(f"{_percent(link_s, whole_s)} for the link")
    return "; ".join([*said, f"{_percent(own_s, whole_s)} copies, launches and what nothing could hide"])


def _percent(seconds: float, whole_s: float) -> str:
    return f"{100 * seconds / whole_s:.1f}%"


def _changing(found: Sequence[Level]) -> list[Level]:
    """The same, less what a process always holds of no category: the interpreter and libraries, often so much
    more than a model that one would see nothing else. The category's name says how much that is."""
    other = str(Category.OTHER)
    always = min((level.nbytes[other] for level in found if other in level.nbytes), default=0)
    name = f"{other} ({in_words(always)} not drawn)"
    # On top of the others, though the first level may lack some of these.
    kinds = sorted(dict.fromkeys(each for level in found for each in level.nbytes), key=lambda e: e == other)
    return [
        level._replace(
            nbytes={
                name if each == other else each: max(0, level.nbytes.get(each, 0) - always * (each == other))
                for each in kinds
            }
        )
        for level in found
    ]


def _joined(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same, where they overlap or touch as one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(times):
        if found and start <= found[-1][1] + 1e-6:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
