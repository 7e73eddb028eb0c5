"""The inverse questions: what fits, and that the neighbour doesn't; in Python and on the command line."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench import model as bench_model
from shardwright import MixedPrecisionPolicy
from shardwright.errors import InputError
from shardwright.plan import (
    Architecture,
    Choice,
    Microbatch,
    estimate,
    fewest_ranks,
    largest_batch,
    longest_sequence,
    of_model,
    savings,
    search,
)
from shardwright.plan.cluster import DEVICES, GIB, Cluster
from shardwright.plan.predict import price
from shardwright.plan.subject import of_architecture
from shardwright.plan.transformer import Recompute, workload
from tests.pure.meta import on_meta, sample
from tests.pure.test_plan_command import ON, config_in, plan

ARCH = Architecture(32, 4096, 32, 8, 128, 14336, 128256)
SUBJECT = of_architecture(ARCH, Microbatch(2048, 1))
SIXTEEN = Cluster(DEVICES["A100-80GB"], 16)
SIZE = bench_model.Size(layers=2, width=128, vocab=512, sequence=64, batch=4)


def fits(cluster, rows=1, sequence=2048, budget=None):
    """By an estimate that is made anew."""
    found = price(of_architecture(ARCH, Microbatch(sequence, rows)).workload, cluster, Choice())
    return found.peak.total <= (0.867 * 80 * GIB if budget is None else budget)


def test_numbers_are_planned_like_the_module_that_they_describe():
    numbers, batch = Architecture(3, 256, 4, 4, 64, 1024, 1000), Microbatch(128, 2)
    priced = price(workload(numbers, batch), SIXTEEN, Choice())
    assert estimate(numbers, batch, SIXTEEN).step_s == priced.step_s
    found = search(numbers, batch, SIXTEEN)
    assert found.groups[-1].modules == ("model.embed_tokens", "model.norm", "lm_head")
    assert found.step_s <= estimate(numbers, batch, SIXTEEN).step_s * 1.01
    assert largest_batch(of_model(numbers, batch), SIXTEEN).value > 100
    wrong = r"expected with an Architecture a shardwright\.plan\.Microbatch, as Microbatch\("
    unset = r"priced in 16 bits, and .*param_dtype is None: set it"
    for given, choice, says in (
        (torch.empty(2, 128), None, wrong),
        (replace(batch, recompute=Recompute.FULL), None, r"Choice\.recompute is the share"),
        (batch, Choice(mp_policy=MixedPrecisionPolicy()), unset),
    ):
        for ask in (partial(estimate, numbers, given, SIXTEEN), partial(search, numbers, given, SIXTEEN)):
            with pytest.raises(InputError, match=says):
                ask(choice)


@pytest.mark.parametrize("budget", [None, 60 * GIB])
def test_the_largest_batch_fits_and_one_row_more_does_not(budget):
    found = largest_batch(SUBJECT, SIXTEEN, budget=budget)
    assert found.value > 1
    assert found.estimate.tokens == found.value * 2048
    assert fits(SIXTEEN, found.value, budget=budget)
    assert not fits(SIXTEEN, found.value + 1, budget=budget)


@pytest.mark.parametrize("multiple", [128, 1])
def test_the_longest_sequence_fits_and_the_next_does_not(multiple):
    found = longest_sequence(SUBJECT, SIXTEEN, multiple=multiple)
    assert found.value % multiple == 0
    assert found.estimate.tokens == found.value
    assert fits(SIXTEEN, sequence=found.value)
    assert not fits(SIXTEEN, sequence=found.value + multiple)
    assert not found.beyond.fits


@pytest.mark.parametrize(("rows", "few"), [(1, 2), (3, 16)])
def test_the_fewest_ranks_fit_and_the_next_fewer_do_not(rows, few):
    found = fewest_ranks(of_architecture(ARCH, Microbatch(2048, rows)), SIXTEEN, budget=60 * GIB)
    host = SIXTEEN.ranks_per_host
    assert found.value <= host or found.value % host == 0
    assert found.value >= few
    fewer = found.value - 1 if found.value <= host else found.value - host

    def on(ranks):
        return replace(SIXTEEN, ranks=ranks, ranks_per_host=min(ranks, host))

    assert fits(on(found.value), rows, budget=60 * GIB)
    assert not fits(on(fewer), rows, budget=60 * GIB)


def test_a_module_is_asked_as_a_row_of_numbers_is():
    model = on_meta(SIZE)
    batch = sample(SIZE)
    cluster, budget = Cluster(DEVICES["H100"], 2), 0.05 * GIB
    found = largest_batch(of_model(model, batch), cluster, budget=budget)

    def peak(rows):
        return estimate(model, batch.new_empty(rows, SIZE.sequence + 1), cluster).peak.total

    assert peak(found.value) <= budget < peak(found.value + 1)
    assert found.value != SIZE.batch


def test_savings_are_what_a_change_of_one_lever_frees_the_most_first():
    found = savings(of_architecture(ARCH, Microbatch(2048, 4)), SIXTEEN)
    by_lever = {saving.lever: saving for saving in found}
    assert list(by_lever) == sorted(by_lever, key=lambda lever: -by_lever[lever].nbytes)
    assert found[0].lever == "recomputed" and found[0].value == 1.0
    assert found[0].nbytes > 10 * GIB and found[0].seconds > 0
    assert all(saving.nbytes > 0 for saving in found)
    assert "split" in by_lever and not {"reshards", "kept"} & set(by_lever)  # to keep more frees nothing


def test_a_large_model_fits_on_some_devices_once_its_blocks_are_recomputed():
    large = Architecture(80, 8192, 64, 8, 128, 28672, 128256)
    subject, hosts = of_architecture(large, Microbatch(8192, 1)), Cluster(DEVICES["H100"], 8)
    with pytest.raises(InputError, match=r"or recompute blocks \(Choice.recompute, --recompute 1\)"):
        fewest_ranks(subject, hosts)
    found = fewest_ranks(subject, hosts, Choice(recompute=1.0))
    assert found.estimate.fits and found.beyond is not None and not found.beyond.fits
    some = largest_batch(subject, replace(hosts, ranks=512), Choice(recompute=1.0))
    assert some.value >= 1 and not some.beyond.fits


def test_what_never_fits_is_refused_with_what_to_do():
    wide = of_architecture(ARCH, Microbatch(2048, 64))
    with pytest.raises(InputError, match=r"no number of devices is enough: on .* each holds .* GiB; ask for"):
        fewest_ranks(wide, SIXTEEN)
    small = Cluster(DEVICES["A100-40GB"], 1)
    says = r"rows of a microbatch: 1 is too much already, .* GiB on each of 1 x"
    with pytest.raises(InputError, match=says):
        largest_batch(SUBJECT, small)
    with pytest.raises(InputError, match=r"tokens of a row: 128 is too much already"):
        longest_sequence(SUBJECT, small)
    with torch.device("meta"):
        flat = of_model(torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2))), torch.empty(8))
    with pytest.raises(InputError, match="rows have no tokens"):
        longest_sequence(flat, SIXTEEN)


def test_the_command_answers_the_same(tmp_path, capsys):
    config_in(tmp_path)
    (batch, *rest) = plan(capsys, tmp_path, *ON, "--largest", "batch")
    found = largest_batch(SUBJECT, Cluster(DEVICES["H100"], 64))
    beyond = f"{found.beyond.peak.total / GIB:.1f}"
    assert batch.startswith(f"largest batch: {found.value} (the next holds {beyond} GiB). {tmp_path} (8.03")
    assert f"a step holds {found.estimate.peak.total / GIB:.1f} (+- 5%) of 69.4 GiB" in batch
    assert rest == str(found.estimate).splitlines()[1:]
    assert plan(capsys, tmp_path, *ON, "--fewest", "ranks", "--budget", 60)[0].startswith("fewest ranks: ")
    asked = json.loads(plan(capsys, tmp_path, *ON, "--largest", "batch", "--json")[0])
    assert (asked["asked"], asked["value"]) == ("largest batch", found.value)
    assert asked["next_peak_nbytes"] == found.beyond.peak.total > asked["room_nbytes"]
    assert "ask one by one" in plan(capsys, tmp_path, *ON, "--savings", "--search", code=2)
    assert "ask one by one" in plan(capsys, tmp_path, *ON, "--savings", "--out", "x", code=2)


def test_savings_are_told_with_what_is_then_held_and_none_is_negative(tmp_path, capsys):
    config_in(tmp_path)
    lines = plan(capsys, tmp_path, *ON, "--batch", 8, "--savings")
    head, *rows = lines[lines.index("") + 1 :]
    assert head.split() == ["GiB", "less", "GiB", "then", "seconds", "more", "what", "differs"]
    held = price(of_architecture(ARCH, Microbatch(2048, 8)).workload, Cluster(DEVICES["H100"], 64), Choice())
    for row in rows:
        less, then, _, words = row.split(maxsplit=3)
        assert float(less) >= 0
        assert float(less) + float(then) == pytest.approx(held.peak.total / GIB, abs=0.11)
        assert words
    assert any(row.endswith("100% of the blocks computed again") for row in rows)
