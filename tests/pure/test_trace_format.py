"""The reader of trace events refuses what a viewer would drop or misdraw."""

import pytest

from shardwright.observe.steps.rings import Record, RecordedStep, Ring
from shardwright.observe.steps.trace_events import trace_events
from tests import trace_format

X = {"ph": "X", "name": "a", "cat": "c", "ts": 0.0, "dur": 10.0, "pid": 0, "tid": 1}
B = {"ph": "b", "name": "a", "cat": "c", "id": "1", "ts": 1.0, "pid": 0, "tid": 1}
E = B | {"ph": "e", "ts": 5.0}


def trace(*events):
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def test_events_inside_of_each_other_and_pairs_are_read_by_kind():
    found = trace_format.read(trace(X, X | {"ts": 2.0, "dur": 8.0}, X | {"ts": 10.0}, B, E))
    assert {kind: len(events) for kind, events in found.items() if events} == {"X": 3, "b": 1, "e": 1}


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([{key: value for key, value in X.items() if key != "dur"}], "lacks"),
        ([X | {"ts": -1.0}], "no time from 0 on"),
        ([X, X | {"ts": 5.0}], "begins inside of"),
        ([B], "without their other end"),
        ([B, E | {"ts": 0.5}], "end before they begin"),
        ([{"ph": "C", "name": "m", "ts": 0.0, "pid": 0, "args": {"bytes": "many"}}], "counts in numbers"),
        ([{"ph": "M", "name": "process_name", "pid": 0, "args": {}}], "metadata without a value"),
    ],
)
def test_what_the_format_does_not_allow_is_refused(events, why):
    with pytest.raises(ValueError, match=why):
        trace_format.read(trace(*events))


def test_a_trace_calls_waits_by_the_words_of_the_page():
    words = (1, "forward", 0, 0.0, 0.0, 1.0, "all", 1, "agreement on 14 integers")
    gather = (1, "forward", 8, 1.0, 1.0, 2.0, "all", 2, "all-gather a (2)")
    records = [Record("wait", "words", (), *words), Record("wait", "all-gather", ("a", "b"), *gather)]
    ring = Ring(0, 2, "node0", {}, [RecordedStep(1, 0.0, 2.0)], records, [])
    names = [event["name"] for event in trace_format.read(trace_events([ring]))["X"]]
    assert names == ["waits in an agreement of ranks", "waits in all-gather a, b"]
