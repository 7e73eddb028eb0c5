"""``plan.search``: the fastest of the candidates that fit, and why the others lost."""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from bench import model as bench_model
from shardwright.errors import InputError
from shardwright.plan import Choice, estimate, search
from shardwright.plan.cluster import DEVICES, GIB, Cluster
from shardwright.plan.predict import price
from shardwright.plan.search import Candidate, FoundPlan, Space, Tried, fastest, greedy, thriftiest
from shardwright.plan.subject import of_architecture
from shardwright.plan.transformer import Architecture, Microbatch, workload
from tests.pure.meta import on_meta, sample

SIZE = bench_model.Size(layers=4, width=512, vocab=4096, sequence=256, batch=8)
WIDE = Architecture(6, 4096, 32, 8, 128, 14336, 32000)
NARROW = Architecture(6, 512, 8, 8, 64, 2048, 128256)


@pytest.mark.parametrize("ranks", [8, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", [WIDE, NARROW], ids=["wide", "narrow"])
def test_greedy_is_within_two_percent_of_every_candidate_there_is(arch, ranks):
    def space(budget=None):
        work = {split: workload(arch, Microbatch(2048, 4 // split)) for split in (1, 2)}
        return Space(Cluster(DEVICES["H100"], ranks).within(budget), Choice(), work)

    whole = space()
    tried = [whole.price(candidate) for candidate in whole.all()]
    for share in (0.02, 0.2, 0.5, 1.0):
        sizes = sorted(one.nbytes for one in tried)
        budget = sizes[int(share * (len(sizes) - 1))]
        best = min(one.step_s for one in tried if one.nbytes <= budget)
        mine = space(budget)
        found = greedy(mine)
        assert found.nbytes <= budget
        assert found.step_s <= best * 1.02
        assert len(mine.seen) < len(tried) / 2


def test_what_was_found_is_what_estimate_says_of_it():
    cluster = Cluster(DEVICES["A100-80GB"], 16)
    plan = search(on_meta(SIZE), sample(SIZE), cluster)
    assert not plan.modules_to_recompute
    assert plan.candidate.split == 1
    again = estimate(on_meta(SIZE), sample(SIZE), cluster, plan.choice)
    assert again.step_s == pytest.approx(plan.estimate.step_s, rel=0.01)
    assert again.peak.total == pytest.approx(plan.estimate.peak.total, rel=0.01)
    found, planned = ([group.numel for group in e.workload.groups] for e in (again, plan.estimate))
    assert found == planned


def test_a_smaller_budget_costs_time_and_is_kept_to():
    cluster = Cluster(DEVICES["H100"], 8)
    free = search(on_meta(SIZE), sample(SIZE), cluster)
    budget = free.estimate.peak.total * 0.6
    tight = search(on_meta(SIZE), sample(SIZE), cluster, budget=budget)
    assert tight.estimate.peak.total <= budget
    assert tight.estimate.step_s >= free.estimate.step_s
    assert tight.modules_to_recompute or tight.candidate.split > 1
    again = estimate(on_meta(SIZE), sample(SIZE), cluster, replace(tight.choice, recompute=0.0))
    assert bool(tight.modules_to_recompute) == (tight.choice.recompute > 0)
    if tight.modules_to_recompute:
        assert again.peak.total > tight.estimate.peak.total
    names = dict(on_meta(SIZE).named_modules())
    assert set(tight.modules_to_recompute) <= set(names)


def test_the_front_is_what_nothing_beats_and_every_loser_has_a_reason():
    plan = search(on_meta(SIZE), sample(SIZE), Cluster(DEVICES["H100"], 64), budget=0.2 * GIB)
    seconds = [one.step_s for one in plan.front]
    sizes = [one.nbytes for one in plan.front]
    assert seconds == sorted(seconds)
    assert sizes == sorted(sizes, reverse=True)
    lost = plan.lost()
    assert len(lost) == len(plan.tried) - 1
    over = {one.candidate for one in plan.tried if one.nbytes > 0.2 * GIB}
    assert over
    assert all(("GiB more than there is" in why) == (candidate in over) for candidate, why in lost.items())
    fit = f"{len(plan.tried) - len(over)} of {len(plan.tried)} ways that were tried fit"
    assert str(plan).splitlines()[-1].startswith(f"{fit}; the nearest other one holds")


def test_a_search_says_what_it_chose_and_shows_only_what_fits_and_holds_less():
    subject = of_architecture(Architecture(16, 4096, 32, 8, 128, 14336, 32000), Microbatch(4096, 8))
    plan = fastest(subject, Cluster(DEVICES["H100"], 16), Choice())
    answer = plan.answer(tokens=2e9, price_per_hour=3.0)
    room = 0.867 * 80 * GIB
    assert answer["room_nbytes"] == plan.budget_nbytes == pytest.approx(room)
    chosen, *others = answer["ways"]
    assert {name: chosen[name] for name in plan.candidate._fields} == plan.candidate._asdict()
    sizes = [way["peak_nbytes"] for way in answer["ways"]]
    assert sizes[0] == plan.peak_nbytes <= room
    assert others and all(after < before * 0.95 for before, after in pairwise(sizes))
    seconds = [way["step_s"] for way in answer["ways"]]
    assert seconds == sorted(seconds)
    assert any(one.nbytes > room for one in plan.front)
    over = [one for one in plan.tried if one.nbytes > room]
    assert (answer["tried"], answer["too_large"]) == (len(plan.tried), len(over))
    assert answer["nearest_over_nbytes"] == pytest.approx(min(one.nbytes for one in over) - room)
    lines = str(plan).splitlines()
    choice, work = plan.choice, plan.estimate.workload
    size = f"{choice.microbatches} x {plan.microbatch_tokens:,} tokens on each a step"
    how = f"{size}, {len(work.groups)} groups sharded over {choice.shards}"
    assert f"fits on 16 x H100 in 2 hosts with {how}" in lines[0]
    start = lines.index("") + 1
    assert lines[start].split() == ["GiB", "tokens/s", "step", "s", "what", "differs"]
    assert lines[start + 1].endswith("(chosen)")
    assert not any(line.lstrip().startswith("-") for line in lines)


def test_a_search_reshards_to_the_ranks_of_a_host_where_links_between_hosts_are_slow():
    subject = of_architecture(Architecture(16, 4096, 32, 8, 128, 14336, 32000), Microbatch(4096, 1))
    slow = Cluster(DEVICES["H100"], 32, host_bandwidth=100e9)
    plan = fastest(subject, slow, Choice(), 8 * GIB)
    assert plan.candidate.reshards == plan.choice.reshard_after_forward == 8
    assert {group.reshard_after_forward for group in plan.groups} == {8, False}  # the root's stays
    whole = price(subject.workload, slow, replace(plan.choice, reshard_after_forward=True))
    assert whole.step_s > plan.step_s
    one_host = fastest(subject, replace(slow, ranks=8), Choice())
    assert {one.candidate.reshards for one in one_host.tried} == {True}


def test_a_search_keeps_the_last_groups_for_the_backward_where_there_is_memory_for_some():
    subject = of_architecture(Architecture(16, 4096, 32, 8, 128, 14336, 32000), Microbatch(2048, 1))
    slow, budget = Cluster(DEVICES["H100"], 64, ranks_per_host=1, host_bandwidth=25e9), 9.5 * GIB
    plan = fastest(subject, slow, Choice("shardwright-cpu"), budget)  # gathers and reductions share a link
    kept = plan.candidate.kept
    assert 0 < kept < 1 and plan.peak_nbytes <= budget
    stays = [not group.reshard_after_forward for group in plan.groups[:-1]]  # the last one is the root's
    assert stays == sorted(stays) and sum(stays) == len(stays) * kept
    none = price(plan.estimate.workload, slow, replace(plan.choice, keep=0.0, recompute=0.0))
    assert none.step_s > plan.step_s and none.peak.total < plan.peak_nbytes
    lost = plan.lost()
    assert "GiB more than there is" in lost[plan.candidate._replace(kept=1.0)]
    assert re.match(r"takes \d.*% longer, and holds \d", lost[plan.candidate._replace(kept=0.0)])
    assert f"{kept:.0%} of the groups kept for the backward" in str(plan).splitlines()[0]


def test_of_two_that_hold_as_much_the_faster_one_is_the_plan():
    subject = of_architecture(Architecture(16, 4096, 32, 8, 128, 14336, 32000), Microbatch(2048, 1))
    cluster = Cluster(DEVICES["H100"], 64, host_bandwidth=200e9)
    plan = fastest(subject, cluster, Choice("fsdp2"), 14 * GIB)
    assert plan.candidate in {one.candidate for one in plan.front}


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(InputError, match="budget must be a positive number of bytes, got 0"):
        search(on_meta(SIZE), sample(SIZE), Cluster(DEVICES["H100"], 8), budget=0)


def one(step_s, nbytes, over_nbytes=0.0, **changes):
    """A candidate that was tried."""
    return Tried(PLAIN._replace(**changes), step_s, nbytes, over_nbytes)


PLAIN = Candidate(1, 0.0, 8, True, 0.0, 1, 1, "nothing", "plain")


@pytest.mark.parametrize(
    ("other", "beaten"),
    [((2.0, 9), True), ((3.0, 8), True), ((2.0, 8), False), ((1.0, 12), False), ((3.0, 7), False)],
)
def test_a_candidate_beats_another_one_in_time_or_memory_where_it_loses_in_neither(other, beaten):
    assert one(2.0, 8).beats(one(*other)) is beaten


@pytest.mark.parametrize(
    ("tried", "why"),
    [
        ((1.0, 11 * GIB, GIB), "holds 1.0 GiB more than there is"),
        ((1.0, 10 * GIB), "takes 50.0% less, but holds 2.0 GiB more"),
        ((2.0, 8 * GIB), "takes 0.0% longer"),
        ((3.0, 8 * GIB), "takes 50.0% longer"),
        ((3.0, 7 * GIB), "takes 50.0% longer, and holds 1.0 GiB less"),
    ],
)
def test_why_a_candidate_lost_is_its_memory_or_its_time(tried, why):
    assert FoundPlan._why(SimpleNamespace(), one(*tried), one(2.0, 8 * GIB)) == why


def space_of_ranks(ranks, ranks_per_host=8):
    work = workload(NARROW, Microbatch(128, 1))
    return Space(Cluster(DEVICES["H100"], ranks, ranks_per_host), Choice(), {1: work})


@pytest.mark.parametrize(
    ("ranks", "per_host", "shards", "reshards"),
    [
        (8, 8, (8,), (True,)),
        (16, 8, (16, 8), (True, 8)),
        (128, 8, (128, 64, 8), (True, 8)),
        (4, 1, (4, 1), (True,)),
    ],
)
def test_parameters_are_sharded_over_all_ranks_or_a_host_and_resharded_over_a_host_of_several(
    ranks, per_host, shards, reshards
):
    values = space_of_ranks(ranks, per_host).values
    assert (values["shards"], values["reshards"]) == (shards, reshards)


def test_a_candidate_is_priced_as_it_says():
    space = space_of_ranks(16)
    plain = Candidate(*(each[0] for each in space.values.values()))
    for candidate, budget, reshards in (
        (plain, None, True),
        (plain._replace(ahead=2), int, True),
        (plain._replace(reshards=8), None, 8),
        (plain._replace(reshards=8, shards=8), None, True),
    ):
        space.price(candidate)
        choice = space.seen[candidate][1].choice
        found = choice.policy.budget_nbytes
        assert (found is None) if budget is None else isinstance(found, budget)
        assert choice.reshard_after_forward is reshards or choice.reshard_after_forward == reshards != 1


def test_of_what_takes_at_most_a_hundredth_longer_that_which_holds_least_is_taken():
    best = one(100.0, 20)
    tried = [best, one(101.0, 9, groups=2), one(101.1, 8, groups=3), one(100.0, 7, base="nf4")]
    tried.append(one(100.0, 8, 1.0, groups=4))
    space = SimpleNamespace(seen={each.candidate: (each, None) for each in tried})
    assert thriftiest(space, best) == tried[1]
    assert thriftiest(SimpleNamespace(seen={PLAIN: (best, None)}), best) == best
