"""Rings as trace events, which Perfetto and Chrome's about:tracing read (the JSON Trace Event Format).

A process for each rank; in it the training thread, whose events lie inside of one another (``X``), on an
accelerator its compute stream, tracks of collectives, which may lie beside each other (async ``b`` and
``e``), flows from late ranks to waits (``s`` and ``f``) and a counter of memory (``C``). Times are
microseconds.
"""

from collections.abc import Sequence
from typing import Any

from shardwright.observe.ledger.late import called, collective, doing, late_ranks, over
from shardwright.observe.steps.recording import VERBS
from shardwright.observe.steps.rings import Record, Ring
from shardwright.observe.steps.step_memory import levels

_THREAD, _DEVICE = 1, 2


def trace_events(rings: Sequence[Ring]) -> dict[str, Any]:
    """rings: on one clock, with times from 0 on."""
    events: list[dict[str, Any]] = []
    for ring in rings:
        who = {"pid": ring.rank, "tid": _THREAD}
        events += [
            {"ph": "M", "name": "process_name", "args": {"name": f"rank {ring.rank} on {ring.host}"}} | who,
            {"ph": "M", "name": "process_sort_index", "args": {"sort_index": ring.rank}} | who,
            {"ph": "M", "name": "thread_name", "args": {"name": "training thread"}} | who,
        ]
        if any(each.kind == "device" for each in ring.records):
            stream = {"args": {"name": "compute stream"}, "pid": ring.rank, "tid": _DEVICE}
            events.append({"ph": "M", "name": "thread_name"} | stream)
        for each in ring.records:
            events += _collective(ring.rank, each) if each.kind == "collective" else _own(ring.rank, each)
        for level in levels(ring):
            events.append({"ph": "C", "name": "bytes", "ts": _us(level.at), "args": dict(level.nbytes)} | who)
    for number, each in enumerate(late_ranks(rings)):
        flow = {"name": "late", "cat": "late", "id": number}
        came_s = min(each.came_s, each.wait.end)
        if each.fault_s > 0:
            events.append({"ph": "s", "ts": _us(came_s), "pid": each.late, "tid": _THREAD} | flow)
            events.append(
                {"ph": "f", "bp": "e", "ts": _us(each.wait.end), "pid": each.rank, "tid": _THREAD} | flow
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _own(rank: int, record: Record) -> list[dict[str, Any]]:
    if record.kind == "background":
        return []
    on_device = record.kind == "device"
    name = f"waits in {collective(record)}" if record.kind == "wait" else doing(record)
    if on_device:
        computes = f"{record.phase} of {called(record.groups)}"
        name = computes if record.action == "compute" else f"waits for {record.note}"
    event = {
        "ph": "X",
        "name": name,
        "cat": record.kind,
        "pid": rank,
        "tid": _DEVICE if on_device else _THREAD,
        "ts": _us(record.start),
    }
    return [event | {"dur": max(0.0, _us(record.end) - _us(record.start)), "args": _args(record)}]


def _collective(rank: int, record: Record) -> list[dict[str, Any]]:
    if record.action not in VERBS:
        return []
    track = {
        "name": " ".join(filter(None, (record.action, ", ".join(record.groups), over(record.axis)))),
        "cat": record.action,
        "id": f"{rank} {record.transport} {record.number}",
        "pid": rank,
        "tid": _THREAD,
    }
    begins = {"ph": "b", "ts": _us(record.start), "args": _args(record)} | track
    return [begins, {"ph": "e", "ts": _us(record.end)} | track]


def _args(record: Record) -> dict[str, Any]:
    found = {
        "groups": list(record.groups),
        "step": record.step,
        "phase": record.phase,
        "bytes": record.nbytes,
        "transport": record.transport,
        "axis": record.axis,
        "number": record.number,
    }
    return {name: value for name, value in found.items() if value}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
