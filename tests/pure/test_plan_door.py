"""``fully_shard(model, plan=...)`` and the plan's file: what was priced is what the model is sharded by."""

import copy
import dataclasses
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench import model as bench_model
from bench.adapted import adapted
from bench.rankzero import rank_zero_of
from shardwright import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimizerOffloadPolicy,
    SchedulePolicy,
    fully_shard,
)
from shardwright.engine.unit import is_sharded, unit_of
from shardwright.errors import ConfigError, InputError, MissingExtra
from shardwright.plan import Choice, Plan, estimate, search
from shardwright.plan.cluster import DEVICES, GIB, Cluster
from shardwright.plan.file import PlannedGroup
from shardwright.plan.predict import price
from shardwright.plan.search import grouped, planned
from shardwright.plan.subject import of_model
from shardwright.quantized.codec import encodings
from shardwright.train.report import Screen, beside_prediction
from shardwright.train.run import _expected_peak
from tests.pure.meta import on_meta, sample

SIZE = bench_model.Size(layers=4, width=128, vocab=512, sequence=64, batch=4)
LARGE = bench_model.Size(layers=3, width=320, vocab=1024, sequence=32, batch=2)  # its first block is cut
FP32 = Choice(mp_policy=MixedPrecisionPolicy())
GROUPS = PlannedGroup(("embedding", "position")), PlannedGroup(("blocks.0", "blocks.1"), False)
POLICY = SchedulePolicy(keep_last=0, bucket_cap_mb=0.0)
BY_HAND = Plan(8, 8, GROUPS, modules_to_recompute=("blocks.2",), policy=POLICY)


def found(ranks, choice=FP32, size=SIZE, **options):
    return search(on_meta(size), sample(size), Cluster(DEVICES["H100"], ranks), choice, **options)


def in_file(plan):
    """What a file has of a plan."""
    return [getattr(plan, field.name) for field in dataclasses.fields(Plan)]


def steps(model, count=2, size=SIZE):
    for step in range(count):
        model(bench_model.tokens(size, 0, step)).backward()


@pytest.mark.parametrize(("ranks", "size"), [(8, SIZE), (4096, SIZE), (8, LARGE)])
def test_a_model_that_is_sharded_by_a_plan_has_the_schedule_that_was_priced(ranks, size, tmp_path):
    plan = found(ranks, size=size)
    path = tmp_path / "plan.toml"
    plan.save(path)
    assert in_file(Plan.load(path)) == in_file(plan)
    assert not plan.modules_to_recompute
    with rank_zero_of(ranks):
        model = fully_shard(bench_model.build(size), plan=path)
        steps(model, size=size)
        done = str(replace(model.schedule(), names=()))
        done = re.sub(r", all-reduce \d+", "", done)  # of copies: priced with the reduction
        assert done == str(replace(plan.estimate.schedule, names=()))
        assert {unit_of(model.blocks[0]).group.axis.world} == {plan.shards}


def test_a_plan_that_reshards_to_a_smaller_world_is_applied_as_it_was_priced(tmp_path):
    subject = of_model(on_meta(SIZE), sample(SIZE), FP32)
    priced = price(subject.workload, Cluster(DEVICES["H100"], 32), replace(FP32, reshard_after_forward=8))
    path = tmp_path / "plan.toml"
    planned(priced, subject.modules).save(path)
    assert {group.reshard_after_forward for group in Plan.load(path).groups} == {8}
    with rank_zero_of(32):
        model = fully_shard(bench_model.build(SIZE), plan=path)
        steps(model)
        assert str(replace(model.schedule(), names=())) == str(replace(priced.schedule, names=()))
        assert unit_of(model.blocks[0]).group.gatherer.smaller_world is not None


def test_a_plan_keeps_every_field_in_its_file(tmp_path):
    policy = SchedulePolicy(depth=3, budget_nbytes=7, agreement="off")
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    groups = (PlannedGroup(('a."b"', "c"), False), PlannedGroup(("d",), 4))
    found = (0.5, 0.1, 3 * GIB, "H100", "optimizer", "nf4")
    plan = Plan(64, 8, groups, 2, 8192, ("d",), policy, precision, *found)
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
    assert "3.00 GiB" in (tmp_path / "plan.toml").read_text()


def test_groups_are_resharded_each_as_the_plan_says():
    with rank_zero_of(8):
        model = fully_shard(bench_model.build(SIZE), plan=BY_HAND)
        steps(model, 1)
        model(bench_model.tokens(SIZE, 0, 0))
        inner = {name: module for name, module in model.named_modules() if name and is_sharded(module)}
        held = {name for name, module in inner.items() if unsharded(module)}
    assert {"blocks.0", "blocks.1"} <= held
    assert "blocks.2" not in held and "embedding" not in held


def test_what_a_plan_offloads_is_on_the_host():
    policies = {"none": OffloadPolicy(), "optimizer": OptimizerOffloadPolicy(), "all": CPUOffloadPolicy()}
    for name, policy in policies.items():
        with rank_zero_of(8):
            model = fully_shard(bench_model.build(SIZE), plan=dataclasses.replace(BY_HAND, offload=name))
            assert {param.place.split.offload for param in unit_of(model.blocks[0]).params} == {policy}


def test_a_plan_quantises_what_is_frozen():
    with rank_zero_of(8):
        model = adapted(bench_model.build(SIZE), codec=None)
        plan = dataclasses.replace(BY_HAND, base="nf4", modules_to_recompute=())
        fully_shard(model, plan=plan)
        assert set(encodings(model.blocks[0].qkv)) == {"weight"}
        assert not encodings(model.embedding)
        steps(model, 1)


def unsharded(module):
    return any(group.buffer is not None and group.buffer.allocated_nbytes for group in unit_of(module).groups)


def test_a_plan_for_another_model_or_number_of_ranks_is_refused_before_anything_is_sharded(monkeypatch):
    plan = partial(dataclasses.replace, BY_HAND)
    over_four = plan(shards=4)
    with rank_zero_of(8):
        model = bench_model.build(SIZE)
        refused = partial(fully_shard, model)
        no_block = r"no module 'block.0', which the plan's groups.*'blocks.0'"
        no_layer = r"no module 'layers.7', which the plan's modules_to_recompute"
        for wrong, says in (
            (plan(groups=(PlannedGroup(("block.0",)),)), no_block),
            (plan(modules_to_recompute=("layers.7",)), no_layer),
            (plan(ranks=4, shards=4), r"is for 4 ranks, and there are 8: start 4, or make a plan for 8"),
        ):
            with pytest.raises(InputError, match=says):
                refused(plan=wrong)
        coded = dataclasses.replace(BY_HAND, policy=SchedulePolicy(wire="difference"))
        with monkeypatch.context() as without, pytest.raises(MissingExtra, match=r"shardwright\[wire\]"):
            without.setattr("importlib.util.find_spec", lambda name: None)
            refused(plan=coded)
        with pytest.raises(InputError, match=r"offload_policy=, and the plan's offload is 'all': leave"):
            refused(plan=dataclasses.replace(BY_HAND, offload="all"), offload_policy=OptimizerOffloadPolicy())
        for options in ({"groups": "auto"}, {"reshard_after_forward": True}, {"shard_over_all": True}):
            with pytest.raises(InputError, match=r"got plan= and .*which the plan sets: leave"):
                refused(plan=BY_HAND, **options)
        says = r"shards over 4 of 8 ranks, got a mesh of \(8,\); pass one of \(2, 4\)"
        with pytest.raises(InputError, match=says):
            refused(plan=over_four, mesh=init_device_mesh("cpu", (8,)))
        with pytest.raises(InputError, match="plan= takes one model, got list"):
            fully_shard([model.blocks[0]], plan=BY_HAND)
        assert not any(is_sharded(module) for module in model.modules())
        assert fully_shard(model, plan=over_four) is model


def test_the_term_that_is_further_off_is_named_where_the_host_knows_it():
    given = {"step_s": 1.0, "exposed_s": 0.2, "measured_step_s": 1.3}
    waits = {0.45: "exposed communication, +0.25 s", 0.1: "compute, +0.4 s"}
    for measured, says in waits.items():
        beside = beside_prediction({**given, "measured_exposed_s": measured})
        assert beside[1] == ("most of the difference", says)
    assert "+0.3 s; no host waits" in beside_prediction({**given, "measured_exposed_s": None})[1][1]
    assert beside_prediction(None) == []


TOML = """
ranks = 8
shards = 8
microbatches = 1
microbatch_tokens = 1
modules_to_recompute = []
offload = "none"
base = "plain"
predicted = {devices = "", step_s = 1.0, exposed_s = 0.1, peak_nbytes = 1}
policy = {depth = 2}
mp_policy = {param_dtype = "bfloat16"}
groups = [{modules = ["a"], reshard_after_forward = true}]
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ranks = 8", "ranks = ", "Invalid value"),
        ("ranks = 8\n", "", "ranks is missing"),
        ("= true}", "= 3}", "reshard_after_forward must be true, false or a factor of its 8 shards, got 3"),
        ("= true}", '= "8"}', "reshard_after_forward: got '8', expected true or false or a whole number"),
        ("ranks = 8", "ranks = true", "ranks: got True, expected a whole number"),
        ("ranks = 8", "ranks = 12", "shards must divide its 12 ranks, got 8"),
        ("microbatches = 1", "microbatches = 0", "microbatches must be a whole number >= 1, got 0"),
        ("ranks = 8", "ranks = 8\nrank = 1", "rank is unknown; known: ranks, shards"),
        ('"none"', '"disk"', "offload: got 'disk', expected one of none, optimizer, all"),
        ('"plain"', '"int3"', "base: got 'int3', expected one of plain, nf4"),
        ("depth = 2", "deep = 2", r"\[policy\] deep is unknown; known: backward_prefetch"),
        ("depth = 2", "depth = -1", "depth must be a whole number >= 0, got -1"),
        ('"bfloat16"', '"bf16"', "must be a floating-point torch.dtype or None, got 'bf16'"),
        ('["a"]', "[1]", r"\[modules\]: got 1, expected text"),
        ('["a"]', '["a", "a"]', r"must each name modules of their own, got \['a'\]"),
        ('["a"]', "[]", "must each name modules of their own, got an empty one"),
        ("{modules", "3, {modules", r"\[\[groups\]\] got 3, expected modules"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_what_is_wrong(old, new, says, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TOML)
    assert Plan.load(path).policy.depth == 2
    assert old in TOML
    path.write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=rf"plan.toml is not a plan: .*{says}"):
        Plan.load(path)


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"can't read the plan .*No such file.*Plan.save"):
        fully_shard(nn.Linear(2, 2), plan=tmp_path / "nosuch.toml")


def numel_of(model):
    return [sum(param.sharded.numel() for param in group.params) for group in unit_of(model).runtime.groups]


def test_a_copy_of_a_planned_model_recomputes_in_its_own_modules():
    with rank_zero_of(8):
        model = fully_shard(bench_model.build(SIZE), plan=BY_HAND)
        twin = copy.deepcopy(model)
        steps(twin)
        assert all(param.grad is not None for param in twin.parameters())
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("ranks", [8, 512])
def test_groups_for_a_cluster_take_no_longer_than_those_by_rule(ranks, tmp_path):
    cluster = Cluster(DEVICES["H100"], 64)
    cluster.save(tmp_path / "cluster.toml")
    here = dataclasses.replace(cluster, ranks=ranks)
    with rank_zero_of(ranks):
        for given in (cluster, tmp_path / "cluster.toml"):
            model = fully_shard(bench_model.build(SIZE), groups="auto", cluster=given, sample=sample(SIZE))
            steps(model)
        by_rule = fully_shard(bench_model.build(SIZE), groups="auto")
        steps(by_rule)
    ours = grouped(on_meta(SIZE), sample(SIZE), here, FP32)
    found = estimate(on_meta(SIZE), sample(SIZE), here, dataclasses.replace(FP32, groups=ours))
    rule = estimate(on_meta(SIZE), sample(SIZE), here, FP32)
    assert sorted(numel_of(model)) == sorted(group.numel for group in found.workload.groups)
    assert found.step_s <= rule.step_s * 1.01
    assert len(numel_of(model)) <= len(numel_of(by_rule))


def test_groups_for_a_cluster_are_fewer_where_an_all_gather_takes_longer_to_begin():
    size = bench_model.Size(layers=8, width=1024, vocab=8192, sequence=1024, batch=8)
    with torch.device("meta"):
        model, tokens = bench_model.Transformer(size), torch.empty(8, 1025, dtype=torch.int64)
    counts = [len(grouped(model, tokens, Cluster(DEVICES["H100"], ranks), FP32)) for ranks in (8, 64, 512)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_cluster_needs_a_sample_and_groups_that_may_be_chosen():
    cluster = Cluster(DEVICES["H100"], 8)
    with rank_zero_of(8):
        model = bench_model.build(SIZE)
        alone, chosen = {"sample": sample(SIZE)}, {"groups": "auto", "cluster": cluster}
        by_hand = {"groups": [["blocks.0"]], "cluster": cluster, **alone}
        for options in ({"cluster": cluster}, alone, chosen, by_hand):
            with pytest.raises(InputError, match='cluster= and sample= go together with groups="auto"'):
                fully_shard(model, **options)
        with pytest.raises(InputError, match="plans for shards over one axis"):
            fully_shard(model, groups="auto", cluster=cluster, sample=sample(SIZE), reshard_after_forward=2)
        with pytest.raises(ConfigError, match="is not a cluster"):
            fully_shard(model, groups="auto", cluster="nosuch.toml", sample=sample(SIZE))
        with pytest.raises(InputError, match=r"plan= and cluster="):
            fully_shard(model, plan=BY_HAND, cluster=cluster)
        assert not any(is_sharded(module) for module in model.modules())


def test_a_model_that_returns_no_loss_is_grouped_for_a_cluster_as_well():
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with rank_zero_of(8):
        cluster = Cluster(DEVICES["A100-80GB"], 8)
        fully_shard(layers, groups="auto", cluster=cluster, sample=torch.empty(4, 64))
        assert is_sharded(layers)


class Untraceable:
    """A job whose model can't be run without data."""

    def expected_peak(self):
        raise RuntimeError("its forward calls .item()\nand more")


def test_a_model_that_has_no_price_trains_all_the_same_and_is_told_of(capsys):
    assert _expected_peak(Screen(shown=True), Untraceable()) is None
    line = "expected peak of memory: not known (RuntimeError: its forward calls .item())\n"
    assert capsys.readouterr().out == line
