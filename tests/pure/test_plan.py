"""Plans: the schedule of a step, simulated in time and counted in bytes, with neither a device nor a rank."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import plan_fit
from shardwright.cli import main
from shardwright.errors import ConfigError
from shardwright.plan import cluster, runs
from shardwright.plan.cluster import DEVICES, GIB, Cluster, DeviceSpec
from shardwright.plan.constants import Constants
from shardwright.plan.memory import Category, Sharding, memory, peak, reserved
from shardwright.plan.predict import Choice, price
from shardwright.plan.presets import PRESETS, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import simulate
from shardwright.plan.transformer import Architecture, Microbatch, Recompute, workload
from shardwright.plan.workload import GroupSize, Op, OpKind, Stretch, Workload
from shardwright.schedule.check import check
from shardwright.schedule.schedule import Event, EventKind, Phase

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published"
H100, OURS, FSDP2 = DEVICES["H100"], PRESETS["shardwright"], PRESETS["fsdp2"]
SMALL = Architecture(4, 256, 4, 4, 64, 1024, 1000)
published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the table of published runs isn't here")

# A device on which a byte takes a second to be copied, and a floating-point operation one to be done.
SLOW = DeviceSpec("slow", 1.0, 100.0, 1.0, 1.0, matmul=1.0, attention=1.0, ring=1.0)
PLAIN = Constants(1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)


def two_layers(forward_flops, numel):
    """Two groups and nothing around them."""
    ahead, back = (Stretch((Op(OpKind.MATMUL, flops * forward_flops),)) for flops in (1, 2))
    kinds = EventKind.FORWARD_BEGIN, EventKind.FORWARD_END
    backs = EventKind.BACKWARD_BEGIN, EventKind.GRADS_READY, EventKind.BACKWARD_END
    forward = [(Event(kind, g), ahead if kind is kinds[0] else Stretch()) for g in (0, 1) for kind in kinds]
    backward = [(Event(kind, g), back if kind is backs[0] else Stretch()) for g in (1, 0) for kind in backs]
    backward.append((Event(EventKind.STEP_END), Stretch()))
    groups = (GroupSize("a", numel, numel), GroupSize("b", numel, numel))
    return Workload(groups, {Phase.FORWARD: tuple(forward), Phase.BACKWARD: tuple(backward)})


def priced(preset="fsdp2", ranks=2, itemsize=2):
    return Prices(Cluster(SLOW, ranks, ranks), PLAIN, PRESETS[preset], ranks, reduce_itemsize=itemsize)


def test_a_step_of_one_rank_takes_what_its_compute_takes():
    work = two_layers(forward_flops=5.0, numel=1)
    found = simulate(schedule(work, OURS), work, replace(priced("shardwright", 1), shards=1))
    copies = 2 * OURS.reduce_nbytes(2, 2)
    assert found.step_s == pytest.approx(2 * (5 + 10) + copies)
    assert found.exposed_s == pytest.approx(0)


def test_gathers_hide_behind_compute_where_it_takes_longer_and_are_exposed_where_not():
    latency = 20e-6  # of each collective
    for flops, numel in ((1000.0, 10), (10.0, 1000)):
        work = two_layers(flops, numel)
        policy = replace(OURS.policy, bucket_cap_mb=0.0)
        preset = replace(OURS, policy=policy, reduce_copies=0)
        prices = replace(priced("shardwright"), preset=preset)
        found = simulate(schedule(work, preset), work, prices)
        one = numel * 2 / 2 + latency  # half of the bytes come from the other rank
        assert found.compute_s == pytest.approx(6 * flops)
        if flops > numel:  # the first gather has nothing beside it, and so has the last reduction
            assert found.exposed_s == pytest.approx(2 * one, rel=1e-6)
        else:
            assert found.exposed_s > 3 * one


def test_every_interval_of_a_lane_begins_when_the_one_before_has_ended():
    work = workload(SMALL, Microbatch(128, 2))
    for name, preset in PRESETS.items():
        prices = Prices(Cluster(DEVICES["A100-80GB"], 16), Constants(), preset, 16)
        found = simulate(schedule(work, preset), work, prices, 3, keeps=True)
        assert {interval.lane for interval in found.intervals} >= {"host", "compute", "gather"}, name
        ends: dict[str, float] = {}
        for interval in found.intervals:
            assert interval.start >= ends.get(interval.lane, 0.0)
            ends[interval.lane] = interval.end


def test_more_microbatches_take_what_one_more_takes_each():
    work = workload(SMALL, Microbatch(128, 2))
    prices = Prices(Cluster(H100, 8), Constants(), PRESETS["fsdp1"], 8)
    planned = schedule(work, PRESETS["fsdp1"])
    seconds = [float(simulate(planned, work, prices, count).step_s) for count in (2, 3, 12)]
    assert seconds[2] - seconds[0] == pytest.approx(10 * (seconds[1] - seconds[0]))


def test_a_constant_may_be_an_array_of_variants():
    work = workload(SMALL, Microbatch(128, 2))
    both = np.array([0.5, 0.6])

    def step_s(share):
        constants = replace(Constants(), matmul=share)
        prices = Prices(Cluster(H100, 8), constants, FSDP2, 8)
        return simulate(schedule(work, FSDP2), work, prices).step_s

    assert step_s(both) == pytest.approx([step_s(0.5), step_s(0.6)])


@pytest.mark.parametrize("name", PRESETS)
def test_the_schedule_of_every_preset_is_sound_and_frees_what_it_takes(name):
    work = workload(SMALL, Microbatch(128, 2, Recompute.FULL))
    planned = schedule(work, PRESETS[name])
    check(planned)
    sharding = Sharding(4, 4, accumulates=True)
    found = memory(planned, work, PRESETS[name], sharding)
    start = work.numel // 4
    assert found[0].nbytes[Category.STATES] == start * 12
    last = found[-1].nbytes
    assert last[Category.GRADIENTS] == start * 4
    assert {last[category] for category in (Category.TRANSPORT, Category.ACTIVATIONS, Category.HEAD)} == {0}
    kept = 2 * sum(group.numel for group in work.groups[-(PRESETS[name].limit or 0) :])
    assert last[Category.UNSHARDED] <= kept


def test_recomputation_takes_time_and_frees_memory():
    def priced_as(recompute):
        work = workload(SMALL, Microbatch(512, 8, recompute))
        planned = schedule(work, FSDP2)
        prices = Prices(Cluster(H100, 8), Constants(), FSDP2, 8)
        held = peak(memory(planned, work, FSDP2, Sharding(8)))
        return float(simulate(planned, work, prices).compute_s), held.nbytes[Category.ACTIVATIONS]

    none, some, full = map(priced_as, (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
    assert none[0] < some[0] < full[0]
    assert none[1] > some[1] > full[1]


def test_a_cluster_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "cluster.toml"
    for mine in (
        Cluster(replace(H100, name="ours", memory_nbytes=1e9), 24, 4, 1e9),
        Cluster(replace(H100, matmul=0.7), 16),
        Cluster(replace(H100, dtype="float32"), 16),
        Cluster(DeviceSpec("slow", 1.0, 100.0, 1.0, 1.0), 16),
        Cluster(DEVICES["A100-40GB"], 8),
    ):
        mine.save(path)
        assert Cluster.load(path) == mine
    assert 'device = "A100-40GB"' in path.read_text()
    path.write_text('ranks = 16\ndevice = {name = "H100", matmul = 0.7}\n')
    assert Cluster.load(path) == Cluster(replace(H100, matmul=0.7), 16)


@pytest.mark.parametrize(
    ("printed", "name", "gib", "host_bandwidth"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 80, 200e9),
        ("A100", "A100-80GB", 80, 200e9),
        ("A100-SXM4-40GB", "A100-40GB", 40, 200e9),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe", 80, 200e9),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe", 40, 200e9),
        ("NVIDIA H100 80GB HBM3", "H100", 80, 400e9),
        ("H100-80GB-SXM", "H100", 80, 400e9),
        ("H100-96GB-HBM2e-500W", "H100-96GB-500W", 96, 400e9),
        ("NVIDIA H100 PCIe", "H100-PCIe", 80, 400e9),
        ("NVIDIA H100 NVL", "H100-NVL", 94, 400e9),
        ("NVIDIA H200", "H200", 141e9 / GIB, 400e9),
        ("NVIDIA B200", "B200", 180e9 / GIB, 400e9),
        ("AMD Instinct MI300X", "MI300X", 192, 400e9),
    ],
)
def test_the_names_that_torch_prints_are_each_their_own_device(printed, name, gib, host_bandwidth):
    found = cluster.device(printed)
    assert (found.name, found.memory_nbytes) == (name, pytest.approx(gib * GIB))
    assert found == DEVICES[name]
    assert Cluster(found, 64).network == host_bandwidth
    assert Cluster(found, 64, host_bandwidth=1e9).network == 1e9


def test_what_was_not_measured_is_not_in_the_file_and_is_asked_for(tmp_path):
    path, work = tmp_path / "cluster.toml", workload(SMALL, Microbatch(512, 1))
    Cluster(H100, 64).save(path)
    assert "host_bandwidth" not in path.read_text() and Cluster.load(path).network == 400e9
    ours = replace(H100, name="ours", source="measured", link_bandwidth=0.0)
    names = ("host_bandwidth", "link_bandwidth", "host_link", "host_memory", "host_memory_nbytes")
    for name in ("ours", "NVIDIA H100 80GB HBM3"):  # nor is it taken from the library
        Cluster(replace(ours, name=name, host_link=25e9), 8, 4).save(path)
        assert not any(line.startswith(names) for line in path.read_text().splitlines())
        assert (Cluster.load(path).device.link_bandwidth, Cluster.load(path).host_bandwidth) == (0, 0)
    Cluster(ours, 8, 4).save(path)
    inside = r"inside a host isn't known, .*write \[device\] link_bandwidth .*--nproc-per-node 4 "
    between = r"between hosts isn't known, .*write host_bandwidth .*bench links .*on two"
    for ranks, fields, says in ((4, {}, inside), (8, {"link_bandwidth": 3e11}, between)):
        found = replace(Cluster.load(path), device=replace(ours, **fields)).of(ranks)
        with pytest.raises(ConfigError, match=says):
            price(work, found, Choice())
    assert price(work, Cluster.load(path).of(1), Choice()).step_s > 0  # one rank needs no link
    assert Cluster(replace(H100, source="measured"), 16).network == 0


def test_copies_of_shards_inside_one_host_need_nothing_between_hosts():
    ours = replace(H100, name="ours", source="measured")
    work = workload(SMALL, Microbatch(512, 1))
    assert price(work, Cluster(ours, 8), Choice(shards=4)).step_s > 0


def test_what_is_between_hosts_is_measured_only_where_several_were(tmp_path):
    ours = replace(H100, name="ours", source="measured")
    work = workload(SMALL, Microbatch(512, 1))
    for hosts, known in ((0, False), (1, False), (2, True)):
        Cluster(ours, 16, host_bandwidth=1e11, measured_hosts=hosts).save(tmp_path / "cluster.toml")
        found = price(work, Cluster.load(tmp_path / "cluster.toml"), Choice())
        assert (found.answer()["error"] is not None) == known
        says = "what is between hosts is as the cluster's file says, and was not measured"
        assert known or says in str(found)
        assert price(work, Cluster.load(tmp_path / "cluster.toml").of(8), Choice()).answer()["error"] == 0.1


@pytest.mark.parametrize(
    "name", ["abacus", "A100X", "H100 MIG 1g.10gb", "H100 96GB HBM3", "H200 NVL", "PCIe", ""]
)
def test_a_device_that_nobody_knows_is_refused_with_what_to_do(name):
    with pytest.raises(ConfigError, match=rf"no device '{name}'.*H100.*describe yours in a file"):
        cluster.device(name)


def on_h100(line):
    return f'ranks = 8\ndevice = {{name = "H100", {line}}}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ranks = ", "Invalid value"),
        ('device = "H100"', "ranks is missing"),
        ('device = "abacus"\nranks = 8', "no device 'abacus' is in the library"),
        ("ranks = 8", "device is None, expected a name, or a table with a name"),
        ('ranks = 8\ndevice = {name = "half"}', r"\[device\] peak_flops is missing .'half' isn't in the"),
        (on_h100("speed = 1"), r"\[device\] speed is unknown; known: name, peak_flops"),
        (on_h100('matmul = "1"'), r"\[device\] matmul: got '1', expected a number"),
        (on_h100('dtype = "int8"'), "dtype: got 'int8', expected one of bfloat16, float"),
        ('ranks = 0\ndevice = "H100"', "ranks must be a whole number > 0, got 0"),
        ('ranks = 8.5\ndevice = "H100"', "ranks: got 8.5, expected a whole number"),
        ('ranks = 8\nhosts = 1\ndevice = "H100"', "hosts is unknown; known: device, ranks, ranks_per_host"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_with_what_is_wrong(text, says, tmp_path):
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"cluster.toml is not a cluster: .*{says}"):
        Cluster.load(tmp_path / "cluster.toml")
    with pytest.raises(ConfigError, match=r"none.toml is not a cluster: .*No such file"):
        Cluster.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cluster("H100", 8), "Cluster.device is 'H100', expected a DeviceSpec: .*device"),
        (lambda: Cluster(H100, 0), "Cluster.ranks must be a whole number > 0, got 0"),
        (lambda: Cluster(H100, -4), "Cluster.ranks must be a whole number > 0, got -4"),
        (lambda: Cluster(H100, 2.5), "Cluster.ranks must be a whole number > 0, got 2.5"),
        (lambda: Cluster(H100, 8, 0), "Cluster.ranks_per_host must be a whole number > 0, got 0"),
        (
            lambda: Cluster(H100, 8, host_bandwidth=-1.0),
            "Cluster.host_bandwidth must be a number >= 0, got -1.0",
        ),
        (lambda: Cluster(H100, 12), "12 ranks aren't whole hosts of 8: take 8 or 16"),
        (lambda: Cluster(H100, 8).of(20), "20 ranks aren't whole hosts of 8: take 16 or 24"),
        (lambda: replace(H100, peak_flops=0.0), "'H100' DeviceSpec.peak_flops must be a number > 0"),
        (lambda: replace(H100, dtype="int8"), "'H100' DeviceSpec.dtype must be one of bfloat16"),
    ],
)
def test_a_cluster_in_python_is_checked_like_one_of_a_file(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


MODELS = (
    "model_id,n_layers,d_model,n_heads,n_kv_heads,head_dim,ffn_dim,ffn_gated,vocab_size,tied_embeddings,biases,"
    "norm,pos\nsmall,4,256,4,4,64,1024,1,1000,0,0,rmsnorm,rope\n"
)
RUNS = (
    "row_id,model_id,seq_len_tokens,n_gpus,gpus_per_node,gpu,gpu_mem_gb,internode_gbps_per_node,framework,"
    "sharding,tp,pp,cp,activation_ckpt,torch_compile,compute_dtype,allgather_dtype,reduce_dtype,"
    "microbatch_seqs_per_gpu,grad_accum,global_batch_seqs\n"
    "one,small,512,16,8,H100,80,3200,torchtitan FSDP2,FSDP2 1D,1,1,1,none,0,bf16,bf16,fp32,4,2,128\n"
    "two,small,512,16,8,H100,80,3200,torchtitan FSDP2,FSDP2 1D,2,1,1,none,0,bf16,bf16,fp32,4,2,128\n"
    "three,large,512,16,8,H100,80,3200,torchtitan FSDP2,FSDP2 1D,1,1,1,none,0,bf16,bf16,fp32,4,2,128\n"
)


FILES = {"runs": "runs.csv", "models": "models.csv", "out": "out"}


def predicted(folder, table=RUNS, models=MODELS, code=0):
    """The rows that the command writes for these tables."""
    (folder / "runs.csv").write_text(table)
    (folder / "models.csv").write_text(models)
    files = (f"--{option}={folder / file}" for option, file in FILES.items())
    assert main(["plan", *files]) == code
    return [] if code else list(csv.DictReader((folder / "out").read_text().splitlines()))


def test_the_command_predicts_the_rows_it_can_and_says_why_not_the_others(tmp_path, capsys):
    one, *others = predicted(tmp_path, RUNS.replace("FSDP2 1D,2,", "FSDP2 1D,3,"))
    said = capsys.readouterr()
    assert "1 of 3 runs predicted" in said.out
    assert "row two: a mesh of tp=3 needs a multiple of 3 ranks" in said.err
    assert "row three: column model_id is 'large', expected a row of the table of models" in said.err
    assert tuple(one) == runs.COLUMNS
    tokens = 128 * 512 / 16
    assert float(one["tokens_per_s_per_gpu"]) == pytest.approx(tokens / float(one["step_time_s"]), rel=1e-4)
    assert one["fits"] == "1"
    assert [other["step_time_s"] for other in others] == ["", ""]


def test_a_table_that_is_not_there_or_has_no_numbers_is_named(tmp_path):
    with pytest.raises(ConfigError, match="can't read the table"):
        runs.read(tmp_path / "none.csv", runs.RUN_COLUMNS)
    (tmp_path / "models.csv").write_text(MODELS.replace("4,256", "four,256"))
    with pytest.raises(ConfigError, match="row small: column n_layers is 'four', expected a number above 0"):
        runs.architectures(runs.read(tmp_path / "models.csv", runs.MODEL_COLUMNS))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sharding": "DDP"}, "FSDP, the one that is predicted"),
        ({"sharding": "NO_SHARD"}, "FSDP, the one that is predicted"),
        ({"framework": "DeepSpeed ZeRO-3"}, "FSDP, the one that is predicted"),
        ({"sharding": "rows"}, "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD"),
        ({"n_gpus": "12", "sharding": "HYBRID_SHARD", "global_batch_seqs": ""}, "a multiple of the 8"),
        ({"n_gpus": "0"}, "a number above 0"),
        ({"n_gpus": "1.5"}, "a whole number"),
        ({"compute_dtype": "fp32"}, "bf16, fp16 or fp8"),
        ({"allgather_dtype": "fp32"}, "bf16, fp16 or fp8"),
        ({"reduce_dtype": "int8"}, "bf16, fp16 or fp32"),
        ({"activation_ckpt": "weird"}, "none, full, selective_op"),
        ({"activation_ckpt": "selective_every_0th_layer"}, "every 1st layer"),
        ({"torch_compile": "perhaps"}, "0 or 1"),
        ({"microbatch_seqs_per_gpu": "-1"}, "a number above 0"),
        ({"global_batch_seqs": "100"}, "n_gpus x grad_accum (32) x microbatch_seqs_per_gpu (4)"),
        ({"global_batch_seqs": "7", "microbatch_seqs_per_gpu": ""}, "n_gpus x grad_accum (32)"),
        ({"grad_accum": "inf"}, "a number above 0"),
        ({"internode_gbps_per_node": "fast"}, "a number above 0"),
        ({"gpu_mem_gb": "much"}, "a number above 0"),
        ({"gpu": "abacus"}, "a device of the library: no device 'abacus' is"),
        ({"pp": "two"}, "a number above 0"),
    ],
)
def test_a_run_that_cannot_be_predicted_stays_empty_with_its_reason_and_the_others_are_written(
    changes, expected, tmp_path, capsys
):
    one = next(csv.DictReader(RUNS.splitlines()))
    bad = one | {"row_id": "bad"} | changes
    table = "\n".join(",".join(cells) for cells in (one, bad.values(), one.values()))
    bad, good = predicted(tmp_path, table)
    column, got = next(iter(changes.items()))
    assert f"row bad: column {column} is {got!r}, expected {expected}" in capsys.readouterr().err
    assert [bad[column] for column in runs.COLUMNS] == ["bad", "", "", "", "", ""]
    assert float(good["step_time_s"]) > 0


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ((RUNS.replace("sharding,tp", "tp"),), r"runs.csv lacks the column\(s\) sharding; it has row_id"),
        (("",), r"runs.csv lacks the column\(s\) row_id, .*; it has none"),
        ((RUNS, MODELS.replace(",norm", "")), r"models.csv lacks the column\(s\) norm; it has model_id"),
        ((), "out exists already: give another name, or remove it first"),
    ],
    ids=["runs", "no runs", "models", "a folder in the way"],
)
def test_a_table_that_lacks_a_column_or_cannot_be_written_is_told_before_anything_is_priced(
    tables, says, tmp_path, capsys, monkeypatch
):
    def priced(*_):
        raise AssertionError("nothing is to be priced")

    monkeypatch.setattr(runs, "predict", priced)
    if not tables:
        (tmp_path / "out").mkdir()
    predicted(tmp_path, *tables, code=2)
    assert re.search(says, capsys.readouterr().err)


def test_a_model_that_cannot_be_read_loses_its_own_runs_alone(tmp_path, capsys):
    predicted(tmp_path, models=MODELS + MODELS.splitlines()[1].replace("small,4", "large,none"))
    said = capsys.readouterr()
    assert "2 of 3 runs predicted" in said.out
    assert "row large: column n_layers is 'none', expected a number above 0" in said.err


def test_the_allocator_takes_more_than_is_in_use_until_the_device_is_full():
    device = H100
    assert reserved(10 * GIB, device) == pytest.approx(13.6 * GIB)
    assert 60 * GIB < reserved(60 * GIB, device) < 70 * GIB
    assert reserved(79 * GIB, device) == 79 * GIB


@published
def test_compiled_llama_reserves_as_much_less_on_128_devices_as_was_measured():
    models = runs.architectures(runs.read(PUBLISHED / "models.csv", runs.MODEL_COLUMNS))
    rows = runs.read(PUBLISHED / "measured_runs.csv", runs.RUN_COLUMNS)
    row = next(row for row in rows if row["row_id"] == "TTH002")
    found = []
    for ranks in (8, 128):
        there = {**row, "n_gpus": str(ranks), "global_batch_seqs": str(2 * ranks)}
        setup = runs.setup(there, models)
        found.append(reserved(runs.held(setup).total, setup.cluster.device) / GIB)
    assert found[0] - found[1] == pytest.approx(15.0, rel=0.05)


@published
def test_published_runs_are_predicted_as_docs_plan_says():
    models = runs.architectures(runs.read(PUBLISHED / "models.csv", runs.MODEL_COLUMNS))
    errors, memories = [], {}
    for row in runs.read(PUBLISHED / "measured_runs.csv", runs.RUN_COLUMNS):
        setup = runs.setup(row, models)
        found = runs.predict(setup, Constants())
        assert found["fits"] == "1", row["row_id"]
        tokens = float(row["global_batch_seqs"]) * float(row["seq_len_tokens"]) / float(row["n_gpus"])
        errors.append(abs(float(found["step_time_s"]) * float(row["tokens_per_s_per_gpu"]) / tokens - 1))
        if row["peak_mem_gib"]:
            memories[row["row_id"]] = float(found["peak_reserved_gib"]) / float(row["peak_mem_gib"]) - 1
    assert np.mean(errors) < 0.035
    assert np.quantile(errors, 0.9) < 0.08
    assert len(memories) == 6
    assert all(abs(error) < 0.05 for error in memories.values()), memories


@published
@pytest.mark.exhaustive
def test_model_sizes_that_were_left_out_of_the_fit_are_predicted_as_docs_plan_says():
    rows, setups = plan_fit.measured(PUBLISHED / "measured_runs.csv", PUBLISHED / "models.csv")
    seconds = np.array([plan_fit.measured_s(row) for row in rows])
    sizes = [plan_fit.size(row["model_id"]) for row in rows]
    errors = np.abs(plan_fit.left_out(setups, np.log(seconds), sizes))
    assert len(errors) == 158
    assert np.mean(errors) < 0.04
    assert np.quantile(errors, 0.9) < 0.09
