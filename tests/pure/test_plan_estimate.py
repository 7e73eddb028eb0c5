"""``plan.estimate``: what a module computes, keeps and moves, from one forward and backward without data."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench import model as bench_model
from bench.rankzero import rank_zero_of
from shardwright import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard
from shardwright.errors import ConfigError, InputError
from shardwright.plan import Choice, estimate, largest_batch, of_model, search
from shardwright.plan.cluster import DEVICES, Cluster, DeviceSpec
from shardwright.plan.groups import groups_of_calls
from shardwright.plan.memory import Category
from shardwright.plan.presets import preset, schedule
from shardwright.plan.search import planned
from shardwright.plan.subject import names_of_groups
from shardwright.plan.trace import trace
from shardwright.plan.transformer import Architecture, Microbatch, workload
from shardwright.plan.workload import OpKind
from shardwright.schedule.schedule import EventKind, Phase
from shardwright.torch_private import parameters_of
from tests.pure.meta import on_meta, sample

SIZE = bench_model.Size(layers=3, width=128, vocab=512, sequence=64, batch=4)
H100, B200 = DEVICES["H100"], DEVICES["B200"]
EIGHT = Cluster(H100, 8)
SLOW_BETWEEN_HOSTS = replace(EIGHT, ranks=16, host_bandwidth=1e9)
FP32 = MixedPrecisionPolicy()


def of_small(cluster=EIGHT, *choice):
    return estimate(on_meta(SIZE), sample(SIZE), cluster, *choice)


def total(found, phase, kind, what):
    return sum(getattr(op, what) for _, s in found.phases[phase] for op in s.ops if op.kind is kind)


GROUPS = {
    "chosen": "auto",
    "by hand": [["embedding", "position"], ["blocks.0", "blocks.1"], ["blocks.2"], ["norm", "head"]],
    "blocks alone": [["blocks.0"], ["blocks.1"], ["blocks.2"]],
}


def as_run(model, shard, tokens, policy=None):
    """The schedule that the runtime has after a step on each of ``tokens``."""
    with rank_zero_of(8):
        shard(model)
        model.set_schedule_policy(policy or SchedulePolicy())
        for batch in tokens:
            model(batch).backward()
        return model.schedule()


def two_batches(size):
    return [bench_model.tokens(size, 0, step) for step in range(2)]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(
    "policy", [SchedulePolicy(), SchedulePolicy(depth=2, bucket_cap_mb=0.0, keep_last=0)]
)
@pytest.mark.parametrize(("keep", "reshards"), [(0.0, True), (0.5, True), (0.5, 2), (1.0, True)])
def test_the_schedule_that_is_priced_is_the_one_that_the_runtime_plans(
    groups, policy, keep, reshards, tmp_path
):
    choice = Choice(groups=groups, mp_policy=FP32, policy=policy, keep=keep, reshard_after_forward=reshards)
    found = of_small(EIGHT, choice)
    plan = planned(found, names_of_groups(on_meta(SIZE), choice))
    plan.save(tmp_path / "plan.toml")
    kept = [each.reshard_after_forward for each in plan.groups].count(False)
    backward = found.workload.orders[Phase.BACKWARD]
    begun = {event.group for event in backward if event.kind is EventKind.BACKWARD_BEGIN}
    inner = begun - set(found.workload.of_root)
    assert kept == round(keep * len(inner))
    ways = [{"plan": tmp_path / "plan.toml"}, *([] if keep or reshards is not True else [{"groups": groups}])]
    for way in ways:
        run = as_run(bench_model.build(SIZE), partial(fully_shard, **way), two_batches(SIZE), policy)
        assert found.schedule == run
        assert str(found.schedule) == str(run)


def test_an_estimate_speaks_of_modules_and_in_plain_numbers():
    found = of_small()
    assert "F+ blocks.0 : " in str(found.schedule)
    assert "most held at: backward of " in str(found)
    seconds = [found.timeline.step_s, found.timeline.exposed_s]
    seconds += [moment for each in found.timeline.intervals for moment in each[2:]]
    assert {type(each) for each in seconds} == {float}
    assert "float64" not in repr(found)


LARGE = bench_model.Size(layers=3, width=320, vocab=1024, sequence=32, batch=2)


@pytest.mark.parametrize("policy", [SchedulePolicy(), SchedulePolicy(depth=2, bucket_cap_mb=0.0)])
def test_a_large_first_block_and_root_are_cut_in_two_as_the_runtime_cuts_them(policy):
    found = estimate(on_meta(LARGE), sample(LARGE), EIGHT, Choice(mp_policy=FP32, policy=policy))
    sizes = found.workload.groups
    assert [group.name for group in sizes if group.part_of is not None] == ["blocks.0.expand+contract"]
    model = on_meta(LARGE)
    calls = [*([block] for block in model.blocks), [model]]
    groups = groups_of_calls(model, lambda shard: [shard(each, set()) for each in calls], FP32)
    one_by_one = trace(model, [sample(LARGE)], {}, groups)
    assert [group.part_of for group in one_by_one.groups] == [None, None, None, 0, None, 4]
    planned = schedule(one_by_one, replace(preset("shardwright"), policy=policy))
    for asked, expected in (("auto", found.schedule), (None, planned)):

        def shard(model, asked=asked):
            for block in () if asked else model.blocks:
                fully_shard(block)
            fully_shard(model, groups=asked)

        assert expected == as_run(bench_model.build(LARGE), shard, two_batches(LARGE), policy)
    theirs = estimate(on_meta(LARGE), sample(LARGE), EIGHT, Choice("fsdp2", mp_policy=FP32))
    assert len(theirs.workload.groups) == len(sizes) - 1


@pytest.mark.parametrize(
    ("apart", "part_of"), [(["embedding"], [1, None, 5]), (["embedding", "position"], [2, None])]
)
def test_a_head_that_is_left_to_the_root_is_gathered_when_the_runtime_gathers_it(apart, part_of):
    def calls(model):
        return [*([model.get_submodule(name)] for name in apart), *([each] for each in model.blocks), [model]]

    model = on_meta(LARGE)
    groups = groups_of_calls(model, lambda shard: [shard(each, set()) for each in calls(model)], FP32)
    work = trace(model, [sample(LARGE)], {}, groups)
    assert [group.part_of for group in work.groups[len(apart) + 3 :]] == part_of

    def shard(model):
        for each in calls(model):
            fully_shard(*each)

    run = as_run(bench_model.build(LARGE), shard, two_batches(LARGE))
    assert schedule(work, preset("shardwright")) == run


def test_a_traced_model_reads_its_parameters_from_tables_of_its_own_again():
    model = on_meta(LARGE)
    estimate(model, sample(LARGE), EIGHT)
    assert {type(parameters_of(module)) for module in model.modules()} == {dict}


class Layer(nn.Module):
    """Takes its input by name, as layers of some libraries do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, *, hidden):
        return hidden + self.linear(hidden)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return hidden.sum()


def test_layers_that_take_their_input_by_name_are_resharded_as_the_runtime_does():
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    policy = SchedulePolicy(bucket_cap_mb=0.0)
    found = estimate(ByName(), tokens, EIGHT, Choice(mp_policy=FP32, policy=policy))
    assert found.schedule == as_run(ByName(), partial(fully_shard, groups="auto"), [tokens] * 2, policy)


def test_a_trace_and_the_architecture_numbers_give_the_same_operations():
    size = bench_model.Size(layers=3, width=256, vocab=2048, sequence=256, batch=2)
    found = estimate(on_meta(size), sample(size), EIGHT).workload
    arch = Architecture(3, 256, 4, 4, 64, 1024, 2048, gated=False, biases=False, rotary=False, rms=False)
    row = workload(arch, Microbatch(256, 2, fused_loss=True))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for kind in (OpKind.MATMUL, OpKind.ATTENTION):
            assert total(found, phase, kind, "flops") == total(row, phase, kind, "flops")
        passes = total(found, phase, OpKind.MEMORY, "nbytes") / total(row, phase, OpKind.MEMORY, "nbytes")
        assert 0.8 < passes < 1.5
    number = [group.name for group in found.groups].index("blocks.1")
    begin = (EventKind.FORWARD_BEGIN, number)
    block = next(s for event, s in found.phases[Phase.FORWARD] if event == begin)
    mine = next(s for event, s in row.phases[Phase.FORWARD] if event == (EventKind.FORWARD_BEGIN, 1))
    assert block.saved_nbytes == pytest.approx(mine.saved_nbytes, rel=0.02)


def test_what_a_forward_keeps_its_backward_frees():
    found = of_small().workload
    saved = [stretch.saved_nbytes for phase in found.phases.values() for _, stretch in phase]
    assert max(saved) > 0
    assert abs(sum(saved)) < 64  # bytes; the loss itself outlives its backward


class Chain(nn.Module):
    """Layers, each computed again in the backward or not."""

    def __init__(self, again):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.sum()


def test_recomputation_is_seen_in_operations_and_in_bytes():
    def of(again):
        with torch.device("meta"):
            model = Chain(again)
        x = torch.empty(32, 64, device="meta", requires_grad=True)
        return estimate(model, x, EIGHT, Choice(mp_policy=FP32))

    plain, again = of(False), of(True)
    forward = total(plain.workload, Phase.FORWARD, OpKind.MATMUL, "flops")
    assert total(again.workload, Phase.FORWARD, OpKind.MATMUL, "flops") == forward
    more = [total(e.workload, Phase.BACKWARD, OpKind.MATMUL, "flops") for e in (plain, again)]
    assert more[1] - more[0] >= forward * 0.5  # torch stops recomputing where nothing more is needed
    saved = [e.workload.phases[Phase.FORWARD][0][1].saved_nbytes for e in (plain, again)]
    assert saved[1] < saved[0] / 4


def test_the_model_is_left_as_it_was_and_may_be_real():
    model = bench_model.build(SIZE)
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    found = estimate(model, bench_model.tokens(SIZE, 0, 0), EIGHT)
    assert found.step_s == of_small().step_s
    for name, param in model.named_parameters():
        assert (id(param), param.grad) == (before[name][0], None)
        assert torch.equal(param, before[name][1])


def test_the_answer_is_one_sentence_of_what_fits_how_fast_how_long_and_at_what_cost():
    found = of_small(EIGHT, Choice(microbatches=3))
    assert found.fits
    assert found.tokens == SIZE.batch * (SIZE.sequence + 1)
    assert found.tokens_per_s == pytest.approx(8 * 3 * found.tokens / found.step_s)
    dollars = found.cost_per_billion_tokens(2.0)
    assert dollars == pytest.approx(8 * 2.0 / 3600 * 1e9 / found.tokens_per_s)
    assert 0 < found.mfu < 1
    states = sum(group.numel for group in found.workload.groups) // 8 * 12
    assert found.peak.nbytes[Category.STATES] == states
    answer = found.answer(tokens=4e9, price_per_hour=2.0)
    assert answer["cost"] == pytest.approx(4 * dollars) == 2.0 * answer["device_hours"]
    assert answer["days"] == pytest.approx(4e9 / found.tokens_per_s / 86400)
    assert (answer["model"], answer["fits"], answer["error"]) == ("Transformer", True, 0.08)
    assert json.loads(json.dumps(answer)) == answer
    first, *_ = found.table(2.0, 4e9).splitlines()
    assert re.fullmatch(
        r"Transformer \([\d,]+ parameters\) fits on 8 x .* with 3 x [\d,]+ tokens on each a step, .*: "
        r"a step holds .* \(\+- 5%\) of [\d.]+ GiB \([\d.]+ less a reserve of [\d.]+\), "
        r"and it trains [\d,]+ tokens/s \(\+- 8%\), 4 billion tokens in .* "
        r"\([\d.,]+ device-hours, [\d.,]+ at 2 each\)\.",
        first,
    )
    assert found.drawing().title.startswith("A step of Transformer on 8 x ")


def test_what_fits_is_said_in_numbers_that_are_compared():
    """What a step may hold is what an allocator was seen to fill, and the answer says both."""
    found = of_small()
    room = EIGHT.room_nbytes
    assert room == pytest.approx(0.867 * EIGHT.device.memory_nbytes)
    for share, fits in ((0.5, True), (1.0, True), (1.001, False)):
        cluster = replace(EIGHT, device=replace(EIGHT.device, memory_nbytes=found.peak.total / 0.867 / share))
        answer = of_small(cluster).answer()
        assert answer["fits"] == fits == (answer["peak_nbytes"] <= answer["room_nbytes"] * (1 + 1e-12))
    tight = of_small(EIGHT.within(found.peak.total - 2**20))
    assert not tight.fits and tight.over_nbytes == 2**20
    assert "doesn't fit on 8 x" in str(tight) and "(its budget)" in str(tight)
    assert "tokens/s" not in str(tight)


@pytest.mark.parametrize(
    ("cluster", "choice", "says"),
    [
        (EIGHT, Choice(offload=CPUOffloadPolicy()), "no run with states or parameters on the host"),
        (replace(EIGHT, ranks=1024), Choice(), "no published run has more than 512 devices"),
        (SLOW_BETWEEN_HOSTS, Choice(), "published runs have 50 GB/s or more between"),
    ],
)
def test_what_no_run_shows_has_no_error_bar(cluster, choice, says):
    found = of_small(cluster, choice)
    answer = found.answer()
    assert answer["error"] is answer["error_mean"] is None and says in answer["error_why"]
    assert "+- 8%" not in str(found) and "tokens/s (error not known)" in str(found)
    json.dumps(answer, allow_nan=False)


def test_a_hosts_memory_is_shared_by_its_ranks_and_checked():
    offloaded = Choice(offload=CPUOffloadPolicy())
    found = of_small(EIGHT, offloaded)
    need = 8 * found.host_nbytes
    assert found.answer()["host_nbytes"] == need and found.answer()["host_room_nbytes"] is None
    assert "Not checked: the memory of a host" in str(found)
    for share, fits in ((1.01, True), (0.99, False)):
        known = replace(EIGHT, host_memory_nbytes=need * share / 0.867)
        checked = of_small(known, offloaded)
        assert checked.fits == fits and "Not checked" not in str(checked)
    with pytest.raises(InputError, match=r"rows of a microbatch: 1 is too much already"):
        tiny = replace(EIGHT, host_memory_nbytes=1e3)
        largest_batch(of_model(on_meta(SIZE), sample(SIZE)), tiny, offloaded)


def test_ranks_of_a_cpu_share_its_memory():
    cpu = DeviceSpec("CPU, 2 threads", 1e11, 16e9, 2e10, 1e10, float32=1.0, tf32=1.0)
    assert Cluster(cpu, 1).memory_nbytes == 16e9
    assert Cluster(cpu, 4).memory_nbytes == Cluster(cpu, 8, 4, 1e9).memory_nbytes == 4e9
    assert Cluster(H100, 8).memory_nbytes == 80 * 2**30


class Wide(nn.Module):
    """Matmuls, and nothing else that takes long."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def wide(device, dtype, convolution=False):
    """One rank that computes in a dtype."""
    with torch.device("meta"):
        model, x = Wide(), torch.empty(8192, 4096)
        if convolution:
            model.layers = nn.ModuleList(nn.Conv2d(64, 64, 3) for _ in range(4))
            x = torch.empty(64, 64, 64, 64)
    return estimate(model, x, Cluster(device, 1), Choice(mp_policy=MixedPrecisionPolicy(param_dtype=dtype)))


@pytest.fixture
def highest():
    """Float32 as torch has it at first: without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def matmuls_s(found):
    """Of the compute, which is little else."""
    return float(found.timeline.compute_s)


@pytest.mark.parametrize("name", ["A100-80GB", "H100", "B200"])
def test_matmuls_in_float32_are_priced_in_float32_and_in_tf32_where_torch_takes_it(name, highest):
    device = replace(DEVICES[name], memory_bandwidth=1e18)
    half = matmuls_s(wide(device, torch.bfloat16))
    assert matmuls_s(wide(device, torch.float16)) == half
    assert matmuls_s(wide(device, None)) == pytest.approx(half / device.float32, rel=0.01)
    assert 12 < 1 / device.float32 <= 30
    torch.set_float32_matmul_precision("high")
    assert matmuls_s(wide(device, None)) == pytest.approx(2 * half, rel=0.01)


def test_torch_takes_tf32_for_convolutions_unless_told_otherwise(highest):
    dtypes = {op.dtype for op in forward_ops(wide(H100, None, convolution=True)) if op.flops}
    assert dtypes == {"tf32"}


def forward_ops(found):
    return [op for _, stretch in found.workload.phases[Phase.FORWARD] for op in stretch.ops]


def test_mfu_is_of_the_peak_in_the_dtype_that_is_computed_in(highest):
    device = H100
    half, whole = wide(device, torch.bfloat16), wide(device, None)
    assert whole.mfu == pytest.approx(whole.model_flops / whole.step_s / 67e12)
    assert half.mfu == pytest.approx(half.model_flops / half.step_s / 989e12)
    assert "% of bfloat16, " in str(half) and "% of float32, " in str(whole)


@pytest.mark.parametrize(
    ("changes", "dtype", "says"),
    [
        ({}, torch.float64, "matmuls in float64, and of 'H100' only the rates in bfloat16, .*float32"),
        ({"float32": 0.0}, None, "matmuls in float32, and of 'H100' only the rates in bfloat16, .*tf32 are"),
        (
            {"dtype": "float32"},
            torch.bfloat16,
            "matmuls in bfloat16, and of 'H100' only the rates in float32",
        ),
    ],
)
def test_a_dtype_whose_rate_is_not_known_is_refused_with_what_to_do(changes, dtype, says, highest):
    with pytest.raises(ConfigError, match=rf"{says}.*bench compute --dtype"):
        wide(replace(H100, **changes), dtype)
    assert wide(replace(H100, dtype="float32"), None).mfu < 1


SHEET = "by a data sheet (shardwright bench compute measures) were within 30% (mean 17%)"
MEASURED = "on a machine measured in the same way were within 10% (mean 6%)"
RUNS = "published runs of FSDP1 and FSDP2 on such devices were within 8% (mean 4%)"


@pytest.mark.parametrize(
    ("device", "dtype", "says"),
    [
        (H100, torch.bfloat16, RUNS),
        (H100, None, SHEET),
        (B200, torch.bfloat16, SHEET),
        (replace(B200, source="measured"), torch.float16, MEASURED),
        (replace(B200, source="measured"), None, SHEET),
        (replace(B200, source="measured", dtype="float32"), None, MEASURED),
    ],
)
def test_error_bars_say_how_the_numbers_of_the_device_were_obtained(device, dtype, says, highest):
    found = wide(device, dtype)
    first, *rest = str(found).splitlines()
    assert any(says in line for line in rest)
    assert f"tokens/s (+- {found.accuracy.most:.0%})" in first and "(+- 5%)" in first


def test_a_host_that_computes_does_not_run_ahead_of_it():
    def runs_ahead(runtime):
        intervals = of_small(EIGHT, Choice(runtime, mp_policy=FP32)).timeline.intervals
        launched = [each for each in intervals if each.lane == "host"]
        computed = {each.label: each.end for each in intervals if each.lane == "compute"}
        return any(later.start < computed[each.label] for each, later in pairwise(launched))

    assert runs_ahead("shardwright")
    assert not runs_ahead("shardwright-cpu")


def test_more_ranks_hold_less_and_copies_of_shards_hold_more():
    sizes = [
        of_small(Cluster(H100, ranks), Choice(shards=shards)).peak.total
        for ranks, shards in ((64, None), (8, None), (64, 8))
    ]
    assert sizes[0] < sizes[1] == sizes[2]


class Deciding(nn.Module):
    """Its forward looks at values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return self.layers[int(x.sum() > 0)](x).sum()


def test_a_sample_of_a_wrong_shape_is_named_and_torch_writes_no_traceback(capfd):
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.empty(4, 5)
    says = r"Sequential fails with this sample \(\[4, 5\] float32\): a and b .*5\] X .8, 8.\. Pass as sample"
    with pytest.raises(InputError, match=says):
        estimate(model, x, EIGHT, loss=torch.sum)
    assert "Traceback" not in capfd.readouterr().err


def test_what_cannot_be_planned_is_refused_with_what_to_do():
    with torch.device("meta"):
        model, deciding = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), Deciding()
    x = torch.empty(4, 8, device="meta")
    for given, says in (
        ((model, None), r"needs a sample batch.*for instance"),
        ((model, x), r"returns a tensor of shape \[4, 8\], which is no loss; pass loss="),
        ((deciding, x), r"Deciding can't be traced without data"),
    ):
        with pytest.raises(InputError, match=says):
            estimate(*given, EIGHT)
    assert estimate(model, x, EIGHT, loss=lambda out: F.mse_loss(out, out.detach())).step_s > 0
    for ask in (estimate, search):
        with pytest.raises(ConfigError, match=r"the cluster is 'H100', expected a .*Cluster\(device"):
            ask(model, x, "H100", loss=torch.sum)
    for name in ("recompute", "keep"):
        with pytest.raises(InputError, match=rf"Choice\.{name} must be a number >= 0 and <= 1, got 2"):
            Choice(**{name: 2})
    for wrong in ({"microbatches": 0}, {"shards": -1}):
        with pytest.raises(InputError, match="must be a whole number >= 1, got"):
            Choice(**wrong)
    with pytest.raises(InputError, match=r"shards must divide the cluster's 8 ranks, got 3"):
        of_small(EIGHT, Choice(shards=3))
