"""The pictures of docs/ are drawn of what was recorded; nothing is run here (``make pictures`` does)."""

import pytest

from bench.pictures import ledger, losses, step, verdict


def drawn(module, found, folder):
    out = folder / "picture.svg"
    module.draw(found, out)
    return out.read_text()


def test_the_terminal_of_a_verdict_has_every_line_and_folds_long_ones(tmp_path):
    long = "rank 0: " + "RankLost: rank 1 <died> " * 8
    found = {"command": "torchrun x.py", "before": ["step 1"], "kill": "kill -KILL 7", "after": [long]}
    picture = drawn(verdict, found, tmp_path)
    assert picture.count("<text ") == 3 + len(verdict.folded(long)) > 4
    assert "RankLost: rank 1 &lt;died&gt;" in picture and ">$ kill -KILL 7<" in picture


def test_torchruns_own_lines_and_paths_of_the_machine_are_left_out(tmp_path):
    wrote = f"W1123 18:00:00.1 1 torch/x.py:1] Sending\n{'=' * 60}\nlost in {tmp_path}/train.py:3\n"
    assert verdict.said(wrote, tmp_path) == ["lost in train.py:3"]


def test_every_loss_curve_is_drawn_and_named(tmp_path):
    whole = [[number, 5.0 / number] for number in range(1, 9)]
    curves = {"1 rank": whole, "2 ranks": whole, "4 ranks": whole, "killed": whole[:6], "resumed": whole[4:]}
    picture = drawn(losses, {"curves": curves, "global_batch": 8}, tmp_path)
    for text in ("1 rank", "4 ranks", "killed after step 6", "from the checkpoint of step 4"):
        assert f"{text} -->" in picture


def test_the_ledgers_bars_are_as_long_as_what_was_booked(tmp_path):
    ranks = {
        "0": {"compute": 0.02, "waits for rank 1: data": 0.1, "rest": 0.001},
        "1": {"compute": 0.021, "data": 0.1, "rest": 0.001},
    }
    picture = drawn(ledger, {"ranks": ranks, "steps": 5, "says": ["82% data rank 1"]}, tmp_path)
    for text in ("waits for rank 1: data", "all else", "82% data rank 1", "100", "21"):
        assert f"<!-- {text} -->" in picture


def test_what_lies_between_blocking_collectives_is_compute():
    stamps = [("gather", "", 1.0, 2.0), ("reduce", "", 3.0, 4.0), ("phase", "forward", 0.0, 5.0)]
    bars = step.bars_of_stamps(stamps)
    spans = {lane: [bar[2:4] for bar in bars if bar.row == lane] for lane in step.LANES}
    assert spans["compute"] == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert spans["wait"] == sorted(spans["gather"] + spans["reduce"])


def test_two_systems_are_drawn_on_one_axis_with_what_is_exposed_of_each(tmp_path):
    ours = [["compute", "forward", 0.0, 1.0, "compute"], ["wait", "", 1.0, 1.2, ""]]
    stamps = [("gather", "", 1.0, 2.5), ("phase", "forward", 0.0, 3.0)]
    found = {"ours": ours, "shades": [[1.0, 1.2]], "fsdp2": step.bars_of_stamps(stamps)}
    picture = drawn(step, found, tmp_path)
    assert "1200 ms, of which 200 ms are exposed" in picture
    assert "3000 ms, of which 1500 ms are exposed" in picture


@pytest.mark.parametrize("name", ["compute", "link", "rest", "waits for rank 2: data", "something new"])
def test_every_cause_has_a_colour(name):
    assert ledger.colour(name).startswith("#")
