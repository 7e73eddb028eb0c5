"""A reader of the JSON Trace Event Format (Google's "Trace Event Format" document), for what we write.

It refuses what a viewer would drop or misdraw: keys that a kind of event must have, complete events of one
thread that overlap without lying inside of each other, async events and flows without their other end.
"""

from collections import defaultdict
from typing import Any

_KEYS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}


def read(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Its events by kind. Raises: ValueError for what the format doesn't allow."""
    if not isinstance(trace.get("traceEvents"), list) or trace.get("displayTimeUnit") not in ("ms", "ns"):
        raise ValueError("not an object with traceEvents and displayTimeUnit")
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        _check(event)
        kinds[event["ph"]].append(event)
    _check_nesting(kinds["X"])
    _check_pairs(kinds["b"], kinds["e"], ("cat", "id", "name", "pid"))
    _check_pairs(kinds["s"], kinds["f"], ("cat", "id", "name"))
    return kinds


def _check(event: dict[str, Any]) -> None:
    missing = _KEYS[event["ph"]] - event.keys()
    if missing:
        raise ValueError(f"{event} lacks {missing}")
    for key in ("ts", "dur"):
        if key in event and (not isinstance(event[key], int | float) or event[key] < 0):
            raise ValueError(f"{key} of {event} is no time from 0 on")
    if event["ph"] == "C" and not all(isinstance(value, int | float) for value in event["args"].values()):
        raise ValueError(f"a counter counts in numbers: {event}")
    if event["ph"] == "M" and _METADATA[event["name"]] not in event["args"]:
        raise ValueError(f"metadata without a value: {event}")
    if event["ph"] == "f" and event["bp"] != "e":
        raise ValueError(f"a flow that ends in no slice: {event}")


def _check_nesting(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for found in threads.values():
        around: list[tuple[float, float, str]] = []
        for each in sorted(found, key=lambda each: (each[0], -each[1])):
            while around and around[-1][1] <= each[0] + 2e-3:
                around.pop()
            if around and each[1] > around[-1][1] + 2e-3:  # microseconds, rounded to thousandths
                raise ValueError(f"{each} begins inside of {around[-1]} and ends after it")
            around.append(each)


def _check_pairs(begins: list[dict[str, Any]], ends: list[dict[str, Any]], keys: tuple[str, ...]) -> None:
    first = {tuple(each[key] for key in keys): each["ts"] for each in begins}
    last = {tuple(each[key] for key in keys): each["ts"] for each in ends}
    if first.keys() != last.keys() or len(first) != len(begins) or len(last) != len(ends):
        raise ValueError(f"without their other end: {first.keys() ^ last.keys()}")
    if backwards := [key for key in first if first[key] > last[key]]:
        raise ValueError(f"end before they begin: {backwards}")
