"""The recorder: what it keeps, what readers make of it, and one clock for all ranks."""

import random
import sys

import pytest

from shardwright import record_function
from shardwright.errors import InputError
from shardwright.observe.steps import recording
from shardwright.observe.steps.clocks import offsets, on_one_clock
from shardwright.observe.steps.drawing import Bar, Drawing
from shardwright.observe.steps.rings import Record, RecordedStep, Ring, load, write
from shardwright.observe.steps.step_memory import levels
from shardwright.observe.steps.step_page import draw
from shardwright.observe.watch.process_status import user_line
from shardwright.schedule.schedule import Action, ActionKind
from shardwright.transport.process import Launch
from shardwright.transport.recorder import (
    ACTION,
    DEVICE,
    LAUNCH,
    LINE,
    MOST,
    PHASE,
    SPAN,
    STALL,
    STEPS,
    Label,
    Recorder,
)


def filled(steps: int, records: int) -> Recorder:
    recorder = Recorder()
    for step in range(steps):
        for number in range(records):
            recorder.write((SPAN, f"{step}", "", number, number))
        recorder.begin_optimizer()
        recorder.end_optimizer()
        recorder.turn()
    return recorder


def test_the_last_64_steps_are_kept_and_no_other():
    kept = filled(100, 3).steps()
    assert len(kept) == STEPS
    assert [number for number, *_ in kept] == list(range(101 - STEPS + 1, 102))
    # A busy machine writes besides for how long this thread was in line.
    assert {sum(each[0] != LINE for each in written) for *_, written in kept[:-1]} == {4}


def test_steps_of_many_records_leave_room_for_fewer_steps():
    kept = filled(10, MOST // 4).steps()
    assert sum(len(written) for *_, written in kept) <= MOST
    assert 1 < len(kept) < 10


def test_a_step_begins_where_the_optimizer_ended_and_microbatches_make_none():
    recorder = Recorder()
    for _ in range(3):
        recorder.turn()
        recorder.end_backward()  # no optimizer is known yet: each backward is a step's last
    assert len(recorder.steps()) == 3
    recorder.end_optimizer()  # so they were microbatches
    assert [number for number, *_ in recorder.steps()] == [1]
    ended_s = recorder.ended_s
    for _ in range(3):
        recorder.turn()
        recorder.end_backward()
    assert [number for number, *_ in recorder.steps()] == [1, 2]
    assert recorder.steps()[-1][1] == ended_s


def collective(number: int, issue: float, end: float, transport: str = "all") -> Record:
    return Record("collective", "words", (), 1, "", 0, issue, issue, end, transport, number, "", True)


def rings_of(skew: list[float], transports: dict[str, list[int]], seed: int) -> list[Ring]:
    """Of ranks whose clocks are ahead by ``skew``, each entering and leaving at random times."""
    draw, found = random.Random(seed), [[] for _ in skew]
    for number in range(50):
        for name, ranks in transports.items():
            entries = {rank: number + draw.uniform(0, 0.5) for rank in ranks}
            for rank in ranks:
                end = max(entries.values()) + draw.expovariate(1000)
                times = entries[rank] + skew[rank], end + skew[rank]
                found[rank].append(collective(number, *times, name))
    named = {name: tuple(ranks) for name, ranks in transports.items()}
    steps = [RecordedStep(1, 0.0, 50.0)]
    rest = (len(skew), "", named, steps)
    return [Ring(rank, *rest, records, [(1.0, 5)]) for rank, records in enumerate(found)]


@pytest.mark.parametrize(
    "transports", [{"all": [0, 1, 2, 3]}, {"01": [0, 1], "23": [2, 3], "13": [1, 3]}], ids=["one", "a chain"]
)
def test_offsets_of_clocks_are_right_within_their_error(transports):
    for seed in range(50):
        draw = random.Random(seed)
        skew = [draw.uniform(-1e4, 1e4) for _ in range(4)]
        found = offsets(rings_of(skew, transports, seed))
        for rank, ahead in found.items():
            assert abs(ahead.offset_s - (skew[rank] - skew[0])) <= ahead.error_s + 1e-9
            assert ahead.error_s < 0.02


def test_a_rank_that_met_nobody_has_an_offset_that_nobody_knows():
    first, second = rings_of([0.0, 5.0], {"all": [0, 1]}, 0)
    found = offsets([first, second._replace(records=[])])
    assert found[1].error_s == float("inf")


def test_on_one_clock_nobody_leaves_a_collective_before_all_have_entered_it():
    rings = on_one_clock(rings_of([0.0, 100.0, -40.0], {"all": [0, 1, 2]}, 3))
    for found in zip(*(ring.records for ring in rings), strict=True):
        assert min(each.end for each in found) >= max(each.issue for each in found) - 0.02
    assert rings[1].memory == [(pytest.approx(-99.0, abs=0.02), 5)]


def test_a_ring_is_written_and_read_back_whole(tmp_path):
    rings = rings_of([0.0, 1.0], {"all": [0, 1]}, 0)
    for ring in reversed(rings):
        write(tmp_path, ring)
    assert load(tmp_path) == rings


def test_what_is_no_ring_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(InputError, match="holds no rings"):
        load(tmp_path)
    (tmp_path / "rank-0.ring").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"no ring of a rank.*rank-N\.ring"):
        load(tmp_path)


def test_a_plans_drawing_stands_above_what_was_measured_and_begins_with_the_step():
    def ring(rank: int, compute: Record) -> Ring:
        steps = [RecordedStep(4, 10.0, 12.0), RecordedStep(5, 12.0, 12.5)]
        return Ring(rank, 2, "", {"all": (0, 1)}, steps, [compute, collective(1, 11.0, 11.5)], [(11.0, 5)])

    forward = Record("compute", "", ("blocks.0",), 4, "forward", 0, 10.0, 10.0, 11.0)
    rings = [ring(0, forward), ring(1, forward._replace(end=10.5))]
    planned = Drawing("", (Bar("compute", "forward of blocks.0", 0.0, 0.4), Bar("gather", "g", 0.0, 0.2)))
    drawing = draw(rings, planned)
    assert drawing.rows[:3] == ["plan compute", "plan gather", "rank 0 compute"]
    own = [(bar.row, bar.start, bar.end) for bar in drawing.bars if bar.label == "forward of blocks.0"]
    assert own == [
        ("plan compute", 10.0, 10.4),
        ("rank 0 compute", 10.0, 11.0),
        ("rank 1 compute", 10.0, 10.5),
    ]
    assert "planned: 400.0 ms" in drawing.notes


def test_a_block_of_the_users_loop_is_on_record_by_its_name():
    with record_function("augment"):
        pass
    assert ("span", "augment") in [(each.kind, each.action) for each in recording.ring().records]


def user_code(longer: dict[int, float], seen: dict[float, str]) -> list[str]:
    """Notes of 50 ms of user code in each of five steps, or of what is ``longer``, with lines as seen."""
    reader, at = recording._Reader([RecordedStep(number, 0.1 * number, 0.0) for number in range(5)]), 0.0
    for step in range(5):
        at = 0.1 * step + longer.get(step, 0.05)
        for begins in (True, False):
            reader.read[PHASE](None, "forward", begins, False, at, at)
            at += 0.01
        reader.read[PHASE](None, "backward", True, False, at, at)
        reader.read[PHASE](None, "backward", False, False, 0.1 * step + 0.1, 0.1 * step + 0.1)
    for when, line in seen.items():
        reader.read[LINE](line, when)
    return [each.note for each in reader.records() if (each.kind, each.action) == ("outside", "user")]


def test_a_line_that_was_seen_in_one_step_is_said_of_the_same_place_in_others():
    assert user_code({}, {0.22: "train.py:7 in main"}) == ["train.py:7 in main"] * 5
    assert user_code({}, {}) == [""] * 5
    # The nearest one; and none of a stretch that takes much longer or shorter: it does something else.
    seen = {0.02: "train.py:7 in main", 0.42: "train.py:9 in main"}
    assert user_code({}, seen) == ["train.py:7 in main"] * 3 + ["train.py:9 in main"] * 2
    assert user_code({3: 0.01}, {0.02: "train.py:7 in main"})[3] == ""
    # Not of another place: what was seen in the backward.
    assert user_code({}, {0.29: "train.py:8 in main"}) == [""] * 5


def test_code_that_python_makes_is_no_line_of_the_user_s():
    made: dict[str, object] = {"seen": lambda: user_line(sys._getframe(1))}
    exec("def __init__():\n    return seen()", made)  # as dataclasses and named tuples do
    assert user_line(sys._getframe()).startswith("tests/pure/test_recorder.py:")
    assert made["__init__"]().startswith("tests/pure/test_recorder.py:")  # pyright: ignore


def on_a_device() -> Ring:
    """Two all-gathers of which the compute stream waits for the second one, and a reduction beside it."""
    reader = recording._Reader([RecordedStep(1, 0.0, 10.0)])
    labels = (Label("blocks.0", 100, 100), Label("blocks.1", 100, 100))
    launches = [
        (Launch(1, "all-gather blocks.0", "forward", 1), 0, 1.0),
        (Launch(2, "all-gather blocks.1", "forward", 1), 1, 1.2),
        (Launch(3, "reduce-scatter blocks.1", "backward", 1), 1, 1.4),
    ]
    for launch, place, at in launches:
        kind = ActionKind.REDUCE if launch.number == 3 else ActionKind.UNSHARD
        reader.read[LAUNCH]("cuda", launch, at)
        reader.read[ACTION](labels, Action(kind, (place,)), at - 0.1, at + 0.05)
    for device in ((1, 1.1, 2.0), (2, 2.0, 5.0), (3, 5.5, 7.0)):
        reader.read[DEVICE]("cuda", *device)
    for number, at in ((1, 1.5), (2, 3.0), (3, 8.0)):
        reader.read[STALL]("cuda", number, at)
    return Ring(0, 1, "", {"cuda": (0, 1)}, list(reader.steps), reader.records(), [])


def test_on_a_device_collectives_stand_where_it_ran_them_and_waits_are_its_own():
    found = on_a_device().records
    ran = {r.number: (r.action, r.groups, r.issue, r.start, r.end) for r in found if r.kind == "collective"}
    assert ran == {
        1: ("all-gather", ("blocks.0",), 1.0, 1.1, 2.0),
        2: ("all-gather", ("blocks.1",), 1.2, 2.0, 5.0),
        3: ("reduce-scatter", ("blocks.1",), 1.4, 5.5, 7.0),
    }
    assert [(r.action, r.groups, r.start, r.end) for r in found if r.kind == "device"] == [
        ("all-gather", ("blocks.0",), 1.5, 2.0),
        ("compute", ("blocks.0",), 2.0, 3.0),
        ("all-gather", ("blocks.1",), 3.0, 5.0),
        ("compute", ("blocks.1",), 5.0, 8.0),
    ]


def test_the_page_of_a_device_has_a_lane_for_the_host():
    drawing = draw([on_a_device()])
    lanes = ("host", "compute", "gather", "reduce", "wait")
    assert drawing.lanes == tuple(f"rank 0 {lane}" for lane in lanes)
    for waits in ([bar for bar in drawing.bars if bar.row == "rank 0 wait"], drawing.shades):
        assert [(each.start, each.end) for each in waits] == [(1.5, 2.0), (3.0, 5.0)]
    assert {"forward of blocks.0", "forward of blocks.1"} <= {bar.label for bar in drawing.bars}


def test_memory_is_drawn_by_what_it_is_for():
    held = [(3.5, 1000, 200, 50), (9.0, 700, 200, 50)]
    ring = on_a_device()._replace(memory=[(1.0, 30), (4.0, 60)], held=held)
    found = {level.at: dict(level.nbytes) for level in levels(ring)}
    kinds = ("states", "unsharded", "gradients", "activations", "other")
    assert found[3.5] == dict(zip(kinds, (200, 30, 0, 720, 50), strict=True))
    assert found[4.0]["unsharded"] == 60
    assert found[5.5]["gradients"] == 100  # whole
    assert found[7.0]["gradients"] == 50  # a shard of it
    assert found[9.0]["activations"] == 700 - 200 - 50 - 60 - 50
    again = Ring.from_bytes(ring.to_bytes())
    assert again.held == ring.held
