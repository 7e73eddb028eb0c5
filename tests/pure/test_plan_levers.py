"""What a plan may change of a model: larger or smaller groups, recomputation; and what a collective costs."""

from dataclasses import replace

import pytest
import torch

from bench import model as bench_model
from bench.adapted import adapted
from shardwright import quantize_
from shardwright.errors import InputError
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.plan.constants import Constants
from shardwright.plan.groups import traced_groups
from shardwright.plan.levers import kept_groups, merged, neighbours, recomputed
from shardwright.plan.memory import Category, Sharding, memory, peak
from shardwright.plan.predict import Choice, estimate, price
from shardwright.plan.presets import PRESETS, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.search import Candidate, Space, fastest, space_of
from shardwright.plan.simulate import simulate
from shardwright.plan.subject import of_architecture, of_model
from shardwright.plan.trace import TracedGroup, trace
from shardwright.plan.transformer import Architecture, Microbatch, Recompute, workload
from shardwright.plan.workload import OpKind
from shardwright.policy import CPUOffloadPolicy, OffloadPolicy, OptimizerOffloadPolicy, SchedulePolicy
from shardwright.quantize import quantisable
from shardwright.recipe.config import ModelConfig
from shardwright.schedule.check import check
from shardwright.schedule.schedule import ActionKind, Phase
from shardwright.train.models import Transformer
from tests.pure.meta import on_meta, sample

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
    inside, beyond = prices(8).gathering, prices(16).gathering
    assert inside.bandwidth > beyond.bandwidth
    assert prices(512).gathering.latency_s > 7 * prices(64).gathering.latency_s
    assert prices(512).gathering.bandwidth == pytest.approx(prices(64).gathering.bandwidth, rel=0.02)
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
    model = on_meta(SIZE)
    tokens = sample(SIZE)
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
        both = [[stretch for _, stretch in each.phases[phase]] for each in (work, DEEP)]
        flops = [sum(op.flops for stretch in each for op in stretch.ops) for each in both]
        saved = [sum(stretch.saved_nbytes for stretch in each) for each in both]
        assert flops[0] == pytest.approx(flops[1]) and saved[0] == pytest.approx(saved[1])
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


def test_a_model_that_recomputes_by_itself_is_not_asked_to_recompute_again():
    with torch.device("meta"):
        model = Transformer(ModelConfig(num_layers=2, dim=64), activation_checkpointing=True)
    subject = of_model(model, torch.empty(2, 16, dtype=torch.int64), loss=lambda logits: logits.sum())
    cluster = Cluster(DEVICES["H100"], 8)
    with pytest.raises(InputError, match="pass the model without activation checkpointing"):
        price(subject.workload, cluster, Choice(recompute=0.5))
    assert space_of(subject, cluster, Choice()).values["recomputed"] == (0.0,)


def test_a_traced_block_begins_from_its_input_alone():
    model = on_meta(SIZE)
    tokens = sample(SIZE)
    work = trace(model, (tokens,), {}, traced_groups(model, "auto"), torch.bfloat16)
    entries = {group.name: group.entry_nbytes for group in work.groups}
    hidden = SIZE.batch * SIZE.sequence * SIZE.width * 2
    assert [entries[f"blocks.{index}"] for index in range(4)] == [hidden] * 4
    attention = [op for _, s in work.phases[Phase.FORWARD] for op in s.ops if op.kind is OpKind.ATTENTION]
    assert len(attention) == 4


def test_what_is_on_the_host_takes_no_memory_of_the_device_and_the_way_there_takes_time():
    def found(offload, link=50e9):
        spec = replace(DEVICES["H100"], host_link=link)
        return price(DEEP, Cluster(spec, 8), Choice(offload=offload))

    policies = (OptimizerOffloadPolicy(), CPUOffloadPolicy(params=False, grads=False), CPUOffloadPolicy())
    plain, optimizer, state, everything = map(found, (OffloadPolicy(), *policies))
    shard = DEEP.numel // 8
    states = [each.peak.nbytes[Category.STATES] for each in (plain, optimizer, state, everything)]
    assert states == [12 * shard, 2 * shard, 4 * shard, 0]
    hosts = [each.host_nbytes for each in (plain, optimizer, state, everything)]
    assert hosts == [0, 16 * shard, 8 * shard, 16 * shard]
    assert everything.phases["load"].total == 0 and state.phases["step"].total >= 16 * shard
    assert everything.phases["save"].host == 16 * shard + 12 * DEEP.numel // 8
    assert plain.step_s < optimizer.step_s < found(OptimizerOffloadPolicy(), link=5e9).step_s
    assert plain.step_s < state.step_s
    copies = {each.label for each in everything.timeline.intervals if each.lane == "copies"}
    gathers = {each.label for each in everything.timeline.intervals if each.lane == "gather"}
    assert gathers < copies and any(label.startswith("reduce") for label in copies)
    assert any(lane == "host" and label == "optimizer" for lane, label, *_ in optimizer.timeline.intervals)


def test_bytes_gathered_ahead_are_those_of_two_groups():
    space = Space(Cluster(DEVICES["H100"], 64), Choice(), {1: DEEP})
    plain = Candidate(*(values[0] for values in space.values.values()))

    def ahead(candidate):
        space.price(candidate)
        actions = [str(a) for e in space.seen[candidate][1].schedule.phases[Phase.FORWARD] for a in e.actions]
        issued = actions[: actions.index("wait 0")]
        return sum(action.startswith("unshard") for action in issued) - issued.count("unshard 32")

    assert [ahead(plain), ahead(plain._replace(ahead=2))] == [2, 3]


def test_a_search_offloads_where_nothing_else_fits():
    subject = of_architecture(Architecture(32, 4096, 32, 8, 128, 14336, 128256), Microbatch(2048, 1))
    found = fastest(subject, Cluster(DEVICES["H100"], 8), Choice(), budget=12 * 2**30)
    assert found.offload != "none" and found.estimate.peak.total <= 12 * 2**30
    assert fastest(subject, Cluster(DEVICES["H100"], 8), Choice()).offload == "none"


def test_a_base_in_four_bits_is_priced_by_the_bytes_that_quantize_makes():
    def model():
        with torch.device("meta"):
            return adapted(bench_model.Transformer(SIZE), codec=None)

    tokens = sample(SIZE)
    cluster = Cluster(DEVICES["H100"], 8)
    plain, four = (estimate(model(), tokens, cluster, Choice(base=base)) for base in ("plain", "nf4"))
    quantised = model()
    frozen = [name for name in quantisable(quantised) if not quantised.get_parameter(name).requires_grad]
    quantize_(quantised, "nf4", frozen)
    parts = [p for name, p in quantised.named_parameters() if name.removesuffix("_absmax") in frozen]
    groups = merged(four.workload, neighbours(four.workload, 2)).groups
    assert sum(group.coded[1] for group in groups) == sum(part.nbytes for part in parts) > 0
    elements = sum(group.coded[0] for group in groups)
    whole = [model().get_parameter(name) for name in frozen]
    assert elements == sum(param.numel() for param in whole)
    saved = (sum(param.nbytes for param in whole) - sum(part.nbytes for part in parts)) // 8
    assert plain.kept.params - four.kept.params == pytest.approx(saved, abs=8)
    assert plain.kept.state == four.kept.state == 8 * (plain.workload.trained // 8)
    gathers = ([i for i in e.timeline.intervals if i.lane == "gather"] for e in (plain, four))
    gathering = [sum(each.end - each.start for each in of) for of in gathers]
    assert gathering[1] < gathering[0]
    says = r"pass the model as it was before quantize_, and Choice\(base=\"nf4\"\)"
    with pytest.raises(InputError, match=says):
        estimate(quantised, tokens, cluster)
    with pytest.raises(InputError, match=r"Choice.base must be one of plain, nf4, got 'int3'"):
        Choice(base="int3")


def test_a_base_is_quantised_only_where_nothing_else_fits():
    with torch.device("meta"):
        model = adapted(bench_model.Transformer(SIZE), codec=None)
    subject = of_model(model, sample(SIZE))
    cluster = Cluster(DEVICES["H100"], 1)
    space = space_of(subject, cluster, Choice())
    values = space.values
    least = Candidate(*(each[0] for each in values.values()))
    least = least._replace(recomputed=1.0, split=values["split"][-1], offload="all")
    sizes = {base: space.price(least._replace(base=base)).nbytes for base in values["base"]}
    assert sizes["nf4"] < sizes["plain"]
    assert fastest(subject, cluster, Choice()).base == "plain"
    tight = fastest(subject, cluster, Choice(), budget=sizes["nf4"])
    assert tight.base == "nf4" and tight.peak_nbytes <= sizes["nf4"]


def test_shards_over_a_smaller_world_are_kept_for_the_backward_and_gathered_in_a_host():
    sixteen = Cluster(DEVICES["H100"], 16)
    whole, smaller = (price(DEEP, sixteen, Choice(reshard_after_forward=r)) for r in (True, 8))

    def gathers(found, phase):
        actions = [action for event in found.schedule.phases[phase] for action in event.actions]
        labels = {str(action) for action in actions if action.kind is ActionKind.UNSHARD}
        return [i.end - i.start for i in found.timeline.intervals if i.lane == "gather" and i.label in labels]

    clusters = (replace(sixteen, ranks=ranks) for ranks in (8, 16))
    inside, between = (Prices(each, Constants(), OURS, each.ranks).gathering for each in clusters)
    nbytes = 2 * DEEP.groups[0].numel
    assert gathers(smaller, Phase.FORWARD)[1] == pytest.approx(between.seconds(nbytes))
    last = [i for i in smaller.timeline.intervals if i.lane == "gather"][-1]
    assert last.end - last.start == pytest.approx(inside.seconds(nbytes))
    assert smaller.step_s < whole.step_s
    kept = 32 * nbytes // 8  # of all blocks, when the last of them has run
    peaks = [max(held.nbytes.get(Category.UNSHARDED, 0) for held in found.held) for found in (whole, smaller)]
    assert 0.8 * kept < peaks[1] - peaks[0] <= kept
    assert smaller.held[-1].nbytes[Category.UNSHARDED] == whole.held[-1].nbytes[Category.UNSHARDED]
    with pytest.raises(InputError, match=r"or a factor of the 16 ranks that .*, got 3"):
        price(DEEP, sixteen, Choice(reshard_after_forward=3))


def test_groups_that_are_kept_are_those_that_the_backward_needs_first_and_save_their_all_gather():
    names = [group.name for group in DEEP.groups]
    assert [names[group] for group in kept_groups(DEEP, 0.1)] == ["layers.31", "layers.30", "layers.29"]
    cluster = Cluster(DEVICES["H100"], 64)

    def found(share, runtime="shardwright"):
        priced = price(DEEP, cluster, Choice(runtime, keep=share))
        check(priced.schedule)
        entries = priced.schedule.phases[Phase.BACKWARD]
        gathered = {g for e in entries for a in e.actions if a.kind is ActionKind.UNSHARD for g in a.groups}
        return gathered, max(held.nbytes.get(Category.UNSHARDED, 0) for held in priced.held)

    for runtime, kept_anyway in (("shardwright", 1), ("fsdp2", 0)):
        (before, least), (after, most) = found(0.0, runtime), found(0.25, runtime)
        assert before == set(range(32 - kept_anyway))
        assert after == set(range(24 - kept_anyway))  # ``keep_last`` keeps one of the others
        assert most - least == pytest.approx(2 * 8 * DEEP.groups[0].numel, rel=0.3)
        assert found(1.0, runtime)[0] == set()
