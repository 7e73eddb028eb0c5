"""The bench's arithmetic, tables and argument checks; what needs ranks is in tests/ranks/test_bench.py."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import faults, links, plan_machine, report, step
from bench.model import Size, build, tokens
from bench.systems import GROUPINGS, OPTIONAL, SYSTEMS
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.plan.constants import Constants
from shardwright.plan.presets import preset
from shardwright.plan.prices import Prices


def paired(step_s, local_s, exposed_s=None):
    """What one rank measured: blocks of (step, local step) seconds."""
    nothing = [0.0] * len(step_s)
    sent = [2.0 * 2**20] * len(step_s)
    own = {"step_s": step_s, "cpu_s": nothing, "sent_nbytes": sent}
    local = {"local_step_s": local_s, "local_cpu_s": nothing, "local_sent_nbytes": nothing}
    return {**own, **local, "exposed_s": exposed_s or [math.nan] * len(step_s)}


def solo(communication_s, losses=(3.0, 2.0)):
    nbytes = {"peak_nbytes": 3 * 2**20, "unsharded_nbytes": None, "at_rest_nbytes": None}
    return {**nbytes, "communication_s": communication_s, "losses": list(losses)}


def row(system="fsdp2", losses=(3.0, 2.0), communication_s=0.5):
    ranks = [paired([1.2, 1.5, 4.0], [1.0, 1.0, 2.0]), paired([1.2, 1.5, 4.0], [1.0, 1.5, 2.0])]
    return report.summarise(system, ranks, [solo(communication_s, losses)] * 2)


def test_the_order_of_configurations_counts_where_their_times_can_be_told_apart():
    found = [
        plan_machine.Found("1gbit", name, predicted, measured, measured - 1, measured + 1)
        for name, predicted, measured in (("a", 10, 20), ("b", 12, 21), ("c", 30, 40), ("d", 11, 60))
    ]
    assert plan_machine.tau(found) == pytest.approx((3 - 2) / 5)  # a and b overlap; d is faster than b and c


def test_compute_is_scaled_to_the_local_step_that_is_measured_beside_it():
    found = plan_machine.workload(plan_machine.SIZE, "blocks")
    constants = Constants(launch_s=1e-5, contention=0.5)
    prices = Prices(Cluster(DEVICES["H100"], 2, 1), constants, preset("shardwright-cpu"), 2, 4, 4)
    factor = plan_machine.compute_factor(found, prices, 0.2)
    scaled = replace(prices, software=factor)
    alone = replace(scaled, cluster=replace(prices.cluster, ranks=1), shards=1)
    assert plan_machine.predicted_s(found, alone) == pytest.approx(0.2)
    assert plan_machine.predicted_s(found, scaled) > 0.2


def test_a_model_that_a_plan_is_measured_with_has_the_groups_of_each_grouping():
    for name, number in (("one", 1), ("blocks", 9), ("blocks-by-4", 3)):
        found = plan_machine.workload(plan_machine.SIZE, name)
        assert len(found.groups) == number
        assert found.root == number - 1
        assert found.numel == sum(p.numel() for p in build(plan_machine.SIZE).parameters())


def test_the_ratio_is_the_median_of_paired_block_ratios():
    found = row()
    assert found.block_ratios == pytest.approx([1.2, 1.25, 2.0])
    assert found.ratio == pytest.approx(1.25)
    assert found.step_ms == pytest.approx(1500)
    assert found.local_ms == pytest.approx((1000 + 1500) / 2)
    assert (found.sent_mib, found.peak_mib) == pytest.approx((2.0, 3.0))


def test_overlap_is_one_when_all_hides_and_zero_when_nothing_does():
    assert report.overlap(compute=2.0, communication=1.0, step=2.0) == pytest.approx(1.0)
    assert report.overlap(compute=2.0, communication=1.0, step=3.0) == pytest.approx(0.0)
    assert report.overlap(compute=1.0, communication=2.0, step=2.5) == pytest.approx(0.5)


def test_overlap_has_no_meaning_without_communication():
    assert report.overlap(2.0, None, 2.0) is None
    assert report.overlap(2.0, 0.0, 2.0) is None
    assert row("local", communication_s=None).overlap is None


def test_exposed_time_and_unsharded_bytes_are_shown_where_a_system_counts_them():
    uncounted = row()
    assert (uncounted.exposed_ms, uncounted.unsharded_mib) == (None, None)
    ranks = [paired([1.0, 1.0], [1.0, 1.0], [0.1, 0.3])] * 2
    counted = report.summarise("shardwright", ranks, [solo(0.5) | {"unsharded_nbytes": 5 * 2**20}] * 2)
    assert counted.exposed_ms == pytest.approx(200)
    assert counted.unsharded_mib == 5
    shown = dict(zip(report.COLUMNS, report.cells(counted), strict=True))
    assert (shown["exposed ms"], shown["unsharded MiB"]) == ("200", "5")


def test_losses_of_systems_that_train_one_model_must_agree():
    alone = [row("local", (9.0, 9.0)), row("local-met", (8.0, 9.0))]
    rows = [*alone, row("ddp"), row("fsdp2", (3.0, 2.0 + 1e-6))]
    assert report.disagreements(rows) == []
    wrong = report.disagreements([*rows, row("fsdp1-pre", (3.0, 2.1))])
    assert wrong == ["step 1: fsdp1-pre 2.100000, ddp 2.000000"]
    assert report.disagreements([row("ddp"), row("fsdp2", (3.0, float("nan")))])


MACHINE = {"cores": 2, "torch": "2.13.0", "date": "2026-01-02", "commit": "abc"}
OPTIONS = {"link": "1gbit", "world": 2, "blocks": 3, "steps": 2}


def test_a_result_file_reads_back_as_the_same_rows():
    rows = [row("local", communication_s=None), row("ddp")]
    assert report.loads(report.dumps(MACHINE, OPTIONS, rows)) == (MACHINE, OPTIONS, rows)


def test_the_markdown_table_has_a_line_per_system_and_names_the_machine():
    text = report.markdown(report.dumps(MACHINE, OPTIONS, [row("local", communication_s=None), row("ddp")]))
    heading, _, *table = text.splitlines()
    assert "1gbit, 2 ranks" in heading and "commit abc" in heading
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1
    assert table[3].startswith("| ddp | 1.250 | 1.20-2.00 | 1500 | 1250 |")
    assert table[2].endswith("| - | - |")


def test_time_and_memory_are_shown_over_those_of_the_first_system_that_counts_them():
    none = replace(row("none"), step_ms=4000.0, unsharded_mib=20.0, at_rest_mib=180.0, exposed_ms=1600.0)
    pre = replace(none, system="pre", step_ms=3000.0, unsharded_mib=40.0)
    expected = [
        ["none", "4000", "+0%", "1600", "20.0", "200", "+0.0%"],
        ["pre", "3000", "-25%", "1600", "40.0", "220", "+10.0%"],
    ]
    assert report.trade([row("ddp"), none, pre]) == expected
    text = report.markdown(report.dumps(MACHINE, OPTIONS, [none, pre]))
    assert "| pre | 3000 | -25% | 1600 | 40.0 | 220 | +10.0% |" in text


def test_the_screen_table_has_the_same_cells():
    table = report.screen_table(MACHINE, OPTIONS, [row("ddp")])
    assert [next(iter(column.cells)) for column in table.columns] == report.cells(row("ddp"))


def test_the_model_is_the_one_of_the_tables():
    assert sum(p.numel() for p in build(Size()).parameters()) == 33_702_912


def test_batches_differ_between_ranks_and_steps_and_are_repeatable():
    size = Size(layers=1, width=64, vocab=97, sequence=8, batch=2)
    first = tokens(size, 0, 0)
    assert first.shape == (2, 9) and int(first.max()) < 97
    assert first.equal(tokens(size, 0, 0))
    assert not first.equal(tokens(size, 1, 0)) and not first.equal(tokens(size, 0, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "ddp,fsdp3"], "--systems has fsdp3; known are local, local-met, ddp"),
        (["--systems", ","], "--systems has no name"),
        (["--world", "0"], "--world is 0, expected 1 to 8"),
        (["--world", "1", "--link", "1gbit"], "--link 1gbit joins ranks, but --world is 1"),
        (["--blocks", "0"], "--blocks is 0, expected at least 1"),
        (["--width", "200"], "width is 200, expected a multiple of 64"),
        (["--layers", "0"], "layers is 0, expected at least 1"),
        (["--link", "carrier-pigeon"], "invalid choice: 'carrier-pigeon'"),
        (["--out", "/no/such/folder/x.json"], "no such folder: /no/such/folder"),
    ],
)
def test_a_bad_argument_is_named_before_anything_starts(arguments, message, capsys):
    with pytest.raises(SystemExit):
        step.parse(["--systems", "ddp", *arguments])
    assert message in capsys.readouterr().err


def test_all_systems_are_measured_where_all_are_asked_for():
    assert step.parse(["--systems", "all"]).systems == (*SYSTEMS, *OPTIONAL)


def test_groupings_of_one_model_are_systems_of_their_own():
    assert step.parse(["--groupings", "one, blocks"]).systems == ("grouping-one", "grouping-blocks")
    assert step.parse(["--groupings", "all"]).systems == tuple(f"grouping-{name}" for name in GROUPINGS)
    with pytest.raises(SystemExit):
        step.parse(["--groupings", "rows"])


def test_the_short_form_measures_less():
    options = step.parse(["--short", "--systems", "ddp"])
    assert (options.blocks, options.steps) == (2, 2)
    assert step.parse(["--systems", "ddp"]).blocks > 2


def test_a_slow_link_without_root_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    refused = pytest.raises(links.LinkError, match="'1gbit' needs root; run as root")
    with refused, links.places("1gbit", 2):
        pass


def test_a_slow_link_without_iproute_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", lambda name: None)
    with pytest.raises(links.LinkError, match="needs the command 'ip' and the command 'tc'"):
        links.places("10gbit", 2).__enter__()


def test_loopback_works_without_root(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    with links.places("loopback", 3) as homes:
        assert homes == [links.Place((), "lo", 3)] * 3


def test_the_interval_of_a_median_leaves_out_what_the_binomial_distribution_allows():
    ratios = [float(number) for number in range(15)]
    # Of 15 at most 3 lie below their median with 1.8%, at most 4 with 5.9%: and as many above it.
    assert report.interval(ratios) == report.interval(ratios[::-1]) == (3.0, 11.0)
    assert report.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert report.interval([1.0]) == (1.0, 1.0)


def figure(folder, **precisions):
    """Draws results of links with the given precisions; status, output and the picture's text."""
    machine, files, out = {"cores": 2, "torch": "2.13"}, [], folder / "links.svg"
    for name, precision in precisions.items():
        options = {"link": name, "world": 2, "precision": precision, "size": {"layers": 8}}
        files.append(folder / f"{name}.json")
        files[-1].write_text(report.dumps(machine, options, [row("shardwright"), row("fsdp2"), row("local")]))
    script = Path(__file__).resolve().parents[2] / "bench/links_figure.py"
    command = [sys.executable, str(script), *map(str, files), "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr, out.read_text() if out.exists() else ""


def test_the_picture_over_links_has_a_point_for_each_system_and_speed(tmp_path):
    status, table, picture = figure(tmp_path, **{"1gbit": "bf16", "100mbit": "bf16"})
    assert status == 0, table
    rows = [line.split(" | ")[:2] for line in table.splitlines()[2:]]
    assert rows == [[f"| {speed}", system] for system in ("fsdp2", "shardwright") for speed in ("0.1", "1")]
    for text in ("PyTorch FSDP2", "Shardwright", "100 Mbit/s", "2 ranks, bf16"):
        assert f"<!-- {text}" in picture


def test_results_that_do_not_go_together_are_not_drawn(tmp_path):
    status, text, picture = figure(tmp_path, **{"1gbit": "bf16", "100mbit": "fp32"})
    assert status == 2 and not picture
    assert "100mbit.json: precision is fp32, of" in text


def test_the_page_that_compares_has_every_scenario_of_faults():
    page = (Path(__file__).resolve().parents[2] / "docs/compare.md").read_text()
    assert all(f" | `{name}` |\n" in page for name in faults.SCENARIOS if name != "none")
