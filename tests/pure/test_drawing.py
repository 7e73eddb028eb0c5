"""Drawings of steps: what is in the file, that it needs no network, and that a plan's has all of it."""

import json
import re

import pytest
import torch

from bench import model as bench_model
from shardwright.errors import InputError
from shardwright.observe.ledger.late import doing
from shardwright.observe.memory.report import Category
from shardwright.observe.steps.drawing import COLOURS, Bar, Drawing, Level, figure_of
from shardwright.observe.steps.rings import Record, RecordedStep, Ring
from shardwright.observe.steps.step_page import draw
from shardwright.plan import Choice, estimate
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.schedule.schedule import EventKind
from tests.browser import needs_chromium, opened

GATHER, WAIT = Bar("gather", "</script> layers.0", 0.0, 0.5), Bar("late", "waits", 0.1, 0.2)
LEVELS = (Level(0.0, {"states": 1 << 20}), Level(0.5, {"states": 1 << 20, "mine": 5}, "there"))
DRAWING = Drawing("a < b", (GATHER, WAIT, Bar("compute", "x", 0.5, 1.5)), LEVELS, capacity_nbytes=1 << 30)


def data_of(path):
    text = path.read_text()
    assert "<h1>a &lt; b</h1>" in text or "<h1>A step" in text
    assert not re.search(r"(src|href)=|https?:", text)
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])


def test_a_page_holds_every_bar_and_level_and_asks_for_nothing_from_a_network(tmp_path):
    DRAWING.save(tmp_path / "step.html")
    data = data_of(tmp_path / "step.html")
    assert [row for row, _ in data["rows"]] == ["compute", "gather", "late"]
    assert data["bars"] == [[1, "</script> layers.0", 0.0, 0.5], [2, "waits", 0.1, 0.2], [0, "x", 0.5, 1.5]]
    assert [name for name, _ in data["categories"]] == ["states", "mine"]
    assert data["levels"] == [[0.0, [1 << 20, 0], ""], [0.5, [1 << 20, 5], "there"]]
    assert data["line_nbytes"] is None  # of a device a thousand times as large


@pytest.mark.parametrize("ending, begins", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_written_as_its_name_ends(tmp_path, ending, begins):
    DRAWING.save(tmp_path / f"step{ending}")
    assert (tmp_path / f"step{ending}").read_bytes().startswith(begins)


def test_a_picture_shows_all_of_its_text_and_bars_have_most_of_its_width():
    long = "model.language_model.layers.0.self_attention+"
    drawing = Drawing(
        "A step",
        (Bar(f"rank 0 {long * 3}", "x", 0.0, 1.0, kind=long * 2), Bar("rank 1 wait", "x", 0.5, 1.0)),
        (Level(0.0, {long * 2: 5 << 20}), Level(0.5, {long * 2: 9 << 20})),
        notes=(f"rank 0: exposed communication 14.7% (2.1% for the link; {long * 4})", "W" * 60 + " last"),
    )
    figure = figure_of(drawing)
    figure.draw_without_rendering()
    whole, axes = figure.bbox, [each.get_window_extent() for each in figure.axes]
    assert all(each.width > 0.55 * whole.width for each in axes)
    text = " ".join(each.get_text() for each in figure.texts)
    assert text.count("self_attention") == 4 and text.endswith("last")
    beside = [label for each in figure.axes for label in each.get_legend().get_texts()]
    beside += [label for each in figure.axes for label in each.get_yticklabels() if label.get_visible()]
    for each in (*figure.texts, *beside):
        box = each.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= whole.width and box.y1 <= whole.height, each
    assert min(each.get_window_extent().y0 for each in figure.texts) > max(each.y1 for each in axes)


def test_the_runtimes_own_time_is_drawn_with_what_it_did_and_without_the_waits_inside():
    def record(kind, action, start, end, groups=("blocks.1",)):
        return Record(kind, action, groups, 1, "forward", 0, start, start, end, "all", 1)

    records = [
        record("runtime", "F+", 1.0, 4.0),
        record("action", "unshard", 1.0, 1.5),
        record("action", "wait", 1.5, 3.5),
        record("wait", "all-gather", 2.0, 3.5),
        record("compute", "", 4.0, 6.0),
        record("runtime", "F-", 6.0, 7.0),
    ]
    ring = Ring(0, 1, "node0", {}, [RecordedStep(1, 1.0, 7.0)], records, [])
    bars = [bar for bar in draw([ring]).bars if bar.kind == "launches and copies"]
    first = "launches and copies: unshard of blocks.1, wait of blocks.1"
    assert [bar[:4] for bar in bars] == [
        ("rank 0 compute", first, 1.0, 2.0),
        ("rank 0 compute", first, 3.5, 4.0),
        ("rank 0 compute", "launches and copies", 6.0, 7.0),
    ]


def test_what_runs_and_what_is_held_have_colours_of_their_own_but_for_what_a_lane_fills():
    lanes = {"gather": "unsharded", "reduce": "gradients"}
    held = [str(each) for each in Category if str(each) not in (*lanes.values(), "head")]
    colours = [colour for name, colour in COLOURS.items() if name in held]
    shared = [name for name, colour in COLOURS.items() if name not in (*held, "plan") and colour in colours]
    assert not shared and len(set(colours)) == len(held)
    assert all(COLOURS[lane] == COLOURS[what] for lane, what in lanes.items())


def test_the_events_of_a_step_and_the_rest_of_the_memory_are_told_in_words():
    records = [Record("runtime", each, ("b",), 1, "forward", 0, 0.0, 0.0, 1.0, "", 1) for each in EventKind]
    records += [records[0]._replace(action=each, groups=()) for each in ("begin", "end")]
    said = [doing(each) for each in records]
    assert said[0] == "the forward of b" and said[-1] == "the end of the forward"
    assert not [each for each in said if re.search(r"[A-Z]|[+-]", each)]
    held = [(0.0, 40 << 20, 1 << 20, 30 << 20), (1.0, 45 << 20, 1 << 20, 30 << 20)]
    step = [RecordedStep(1, 0.0, 2.0)]
    ring = Ring(0, 1, "node0", {}, step, [], [(0.0, 0), (1.0, 0)], held=held)
    assert draw([ring]).categories[-1] == "other (30.0 MiB not drawn)"


def test_another_ending_is_an_error_and_writes_nothing(tmp_path):
    with pytest.raises(InputError, match=r"\.html, \.png or \.svg, got '.*step\.pdf'"):
        DRAWING.save(tmp_path / "step.pdf")
    assert not list(tmp_path.iterdir())


def planned():
    size = bench_model.Size(layers=3, width=128, vocab=512, sequence=64, batch=4)
    with torch.device("meta"):
        model, sample = bench_model.Transformer(size), torch.empty(4, 65, dtype=torch.int64)
    choice = Choice(groups=[["blocks.0"], ["blocks.1"], ["blocks.2"]], microbatches=2)
    return estimate(model, sample, Cluster(DEVICES["H100"], 8), choice)


def test_a_plan_is_drawn_whole_by_the_names_of_modules():
    found = planned()
    drawing = found.drawing()
    assert {"compute", "gather", "reduce", "host"} == {*drawing.rows}
    computed = sum(bar.end - bar.start for bar in drawing.bars if bar.row == "compute")
    assert computed == pytest.approx(float(found.timeline.compute_s))
    assert max(bar.end for bar in drawing.bars) == found.step_s
    assert max(sum(level.nbytes.values()) for level in drawing.levels) == found.peak.total
    times = [level.at for level in drawing.levels]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= found.step_s
    labels = {bar.label for bar in drawing.bars}
    gathers = {"all-gather embedding+position", "all-gather blocks.2, blocks.1, blocks.0"}
    assert {*gathers, "backward of blocks.1", "optimizer"} <= labels
    assert not [label for label in labels if re.search(r"(?<![.\w])\d", label)]


@needs_chromium
def test_the_page_draws_in_a_browser_with_an_axis_of_time_and_one_of_memory(tmp_path):
    found = planned()
    found.drawing().save(tmp_path / "step.html")
    page = opened(tmp_path / "step.html")
    assert float(page["drawn"].split()[1]) == pytest.approx(found.step_s)
    DRAWING.save(tmp_path / "small.html")
    sizes = [f"{kib}.0 KiB" for kib in (0, 256, 512, 768)]
    assert opened(tmp_path / "small.html")["sizes"].split(", ") == [*sizes, "1.0 MiB"]
