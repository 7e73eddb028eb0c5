"""What a plan may change of a model: larger or smaller groups, recomputation; and what a collective costs."""

from dataclasses import replace

import pytest
import torch

from bench import model as bench_model
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.plan.constants import Constants
from shardwright.plan.levers import merged, neighbours, recomputed
from shardwright.plan.memory import Category, Sharding, memory, peak
from shardwright.plan.predict import traced_groups
from shardwright.plan.presets import PRESETS, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import simulate
from shardwright.plan.trace import TracedGroup, trace
from shardwright.plan.transformer import Architecture, Microbatch, Recompute, workload
from shardwright.plan.workload import OpKind
from shardwright.policy import SchedulePolicy
from shardwright.schedule.check import check
from shardwright.schedule.schedule import Phase

OURS = PRESETS["shardwright"]
DEEP = workload(Architecture(32, 1024, 16, 16, 64, 4096, 32000), Microbatch(2048, 4))
SIZE = bench_model.Size(layers=4, width=128, vocab=4096, sequence=64, batch=2)


def prices(ranks):
    return Prices(Cluster(DEVICES["H100"], ranks), Constants(), OURS, ranks)


def step_s(work, ranks):
    return float(simulate(schedule(work, OURS), work, prices(ranks)).step_s)


def test_a_collective_takes_its_latency_and_its_bytes_over_the_bandwidth():
    for ranks in (8, 64, 512):
        cost = prices(ranks).gathering
        small, large = (prices(ranks).gather(nbytes) for nbytes in (0, 10**9))
        assert small == cost.latency_s > 0
        assert large == pytest.approx(cost.latency_s + 1e9 / cost.bandwidth)
        assert cost.seconds(cost.half_nbytes) == pytest.approx(2 * cost.latency_s)
    inside, beyond = prices(8).gathering, prices(16).gathering
    assert inside.bandwidth > beyond.bandwidth
    assert prices(512).gathering.latency_s > 7 * prices(64).gathering.latency_s
    assert prices(1).gather(10**9) == 0


def test_copies_of_shards_pay_latency_for_their_number_and_share_the_bandwidth_of_a_host():
    cluster = Cluster(DEVICES["H100"], 64)
    hybrid = Prices(cluster, Constants(), OURS, 8)
    assert hybrid.gathering == prices(8).gathering
    assert hybrid.copying.latency_s < prices(64).gathering.latency_s * 2
    whole = prices(64).gather(8 * 10**9)
    assert hybrid.gather(8 * 10**9) + hybrid.all_reduce(10**9) < 2 * whole


def test_the_best_number_of_groups_falls_as_ranks_grow():
    counts = (1, 2, 4, 8, 16, 32)
    best = []
    for ranks in (8, 64, 512, 4096):
        seconds = {count: step_s(merged(DEEP, neighbours(DEEP, count)), ranks) for count in counts}
        best.append(min(seconds, key=seconds.__getitem__))
    assert best == sorted(best, reverse=True)
    assert len(set(best)) >= 3, best


def test_more_groups_hold_less():
    peaks = []
    for count in (1, 4, 16, 32):
        work = merged(DEEP, neighbours(DEEP, count))
        found = memory(schedule(work, OURS), work, OURS, Sharding(8))
        peaks.append(max(held.nbytes.get(Category.UNSHARDED, 0) for held in found))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 4


def test_a_root_of_fragments_holds_them_for_the_whole_step_and_groups_of_their_own_do_not():
    with torch.device("meta"):
        model = bench_model.Transformer(SIZE)
    tokens = torch.empty(SIZE.batch, SIZE.sequence + 1, dtype=torch.int64)
    split = traced_groups(model, "auto")
    blocks = [group for group in split if group.modules[0].startswith("blocks")]
    rest = tuple(name for group in split if group not in blocks for name in group.parameters)
    alone = replace(OURS, policy=SchedulePolicy(bucket_cap_mb=0.0))
    peaks = {}
    for name, groups in (("split", split), ("root", [*blocks, TracedGroup(("",), rest)])):
        work = trace(model, (tokens,), {}, groups, torch.bfloat16)
        found = memory(schedule(work, alone), work, alone, Sharding(8))
        peaks[name] = max(held.nbytes.get(Category.UNSHARDED, 0) for held in found)
    numel = sum(model.get_parameter(name).numel() for name in rest)
    block = sum(model.get_parameter(name).numel() for name in blocks[0].parameters)
    assert peaks["root"] == 2 * (numel + 2 * block)  # bytes: all fragments, and two blocks at once
    assert peaks["split"] < peaks["root"] - 0.4 * 2 * numel


@pytest.mark.parametrize("count", [1, 3, 8, 100])
def test_merged_groups_have_sound_schedules_and_lose_nothing(count):
    parts = neighbours(DEEP, count)
    assert sorted(group for part in parts for group in part) == list(range(33))
    work = merged(DEEP, parts)
    assert len(work.groups) == len(parts) == min(count, 32) + 1
    check(schedule(work, OURS))
    assert work.numel == DEEP.numel
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        flops, saved = (
            [
                sum(op.flops for _, stretch in each.phases[phase] for op in stretch.ops),
                sum(stretch.saved_nbytes for _, stretch in each.phases[phase]),
            ]
            for each in (work, DEEP)
        )
        assert flops == pytest.approx(saved)
    assert work.phases[Phase.FORWARD][0][0].group == len(parts) - 1  # the root begins first


def test_recomputing_a_workload_is_what_the_architecture_numbers_say_of_it():
    arch = Architecture(4, 256, 4, 4, 64, 1024, 1000)
    plain, full = (workload(arch, Microbatch(128, 2, how)) for how in (Recompute.NONE, Recompute.FULL))
    mine = recomputed(plain, range(4))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for (_, ours), (_, theirs) in zip(mine.phases[phase], full.phases[phase], strict=True):
            assert ours.saved_nbytes == theirs.saved_nbytes
            assert sum(op.flops for op in ours.ops) == sum(op.flops for op in theirs.ops)
    peaks = [peak(memory(schedule(w, OURS), w, OURS, Sharding(4))).total for w in (plain, mine, full)]
    assert peaks[1] < peaks[0]
    assert peaks[1] == pytest.approx(peaks[2], rel=0.1)


def test_a_traced_block_begins_from_its_input_alone():
    with torch.device("meta"):
        model = bench_model.Transformer(SIZE)
    tokens = torch.empty(SIZE.batch, SIZE.sequence + 1, dtype=torch.int64)
    work = trace(model, (tokens,), {}, traced_groups(model, "auto"), torch.bfloat16)
    entries = {group.name: group.entry_nbytes for group in work.groups}
    hidden = SIZE.batch * SIZE.sequence * SIZE.width * 2
    assert [entries[f"blocks.{index}"] for index in range(4)] == [hidden] * 4
    attention = [op for _, s in work.phases[Phase.FORWARD] for op in s.ops if op.kind is OpKind.ATTENTION]
    assert len(attention) == 4
