"""What tensor, context and pipeline parallelism add to a predicted step."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.errors import InputError
from shardwright.plan import Architecture, Choice, Microbatch, estimate, fewest_ranks, of_model, runs, search
from shardwright.plan.axes import AxisSizes, in_flight
from shardwright.plan.cluster import Cluster, device
from shardwright.plan.configs import architecture
from shardwright.plan.presets import preset
from shardwright.plan.prices import Prices
from shardwright.plan.workload import Op, OpKind
from tests.pure.test_plan import RUNS, predicted

ARCH = Architecture(
    n_layers=8, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=14336, vocab_size=32000
)
BATCH = Microbatch(sequence=4096, sequences=2)
CLUSTER = Cluster(device("H100"), ranks=64)


def of(batch=BATCH, cluster=CLUSTER, arch=ARCH, **choice):
    return estimate(arch, batch, cluster, Choice(**choice))


def test_ranks_of_tp_exchange_each_blocks_tokens_eight_times_and_eleven_times_with_recomputation():
    tokens = 2 * BATCH.tokens * ARCH.d_model
    outside = 4  # the embedding's and the head's, forward and backward
    assert of(tp=8).exchanged == {"tp": (8 * ARCH.n_layers + outside) * tokens}
    again = of(tp=8, recompute=1.0)  # of all blocks but the last
    assert again.exchanged == {"tp": (11 * (ARCH.n_layers - 1) + 8 + outside) * tokens}


def test_tp_and_pp_cut_what_is_at_rest_and_what_is_computed_to_equal_parts():
    alone, cut = of(), of(tp=4, pp=2, microbatches=8)
    assert cut.kept.params == pytest.approx(alone.kept.params, rel=0.02)  # shards are over fewer ranks
    assert cut.model_flops == pytest.approx(alone.model_flops, rel=1e-3)
    assert cut.tokens_per_s * cut.step_s == pytest.approx(64 * BATCH.tokens)
    assert cut.workload.parameters == alone.workload.numel
    assert cut.phases["save"].disk == pytest.approx(alone.phases["save"].disk, rel=1e-3)


def test_an_exchange_between_hosts_takes_longer_than_inside_of_one():
    hosts_of_four = replace(CLUSTER, ranks_per_host=4)
    for axis in ({"tp": 8}, {"cp": 8}):
        inside, between = (of(cluster=each, **axis).timeline.exposed_s for each in (CLUSTER, hosts_of_four))
        assert between > 1.05 * inside


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "pp"])
def test_an_exchange_takes_what_was_measured_of_exchanges(axis):
    def taken(nbytes, **measured):
        constants, axes = replace(CLUSTER.constants, **measured), AxisSizes(**{axis: 8})
        prices = Prices(CLUSTER, constants, preset("shardwright"), 8, axes=axes)
        return prices.exchange(Op(OpKind.EXCHANGE, nbytes=nbytes, axis=axis))

    at_zero, whole = taken(0.0), taken(1e9)
    assert taken(1e9, exchange=0.5) - at_zero == pytest.approx(2 * (whole - at_zero))
    assert taken(1e9, exchange_s=1e-3) == pytest.approx(whole + 1e-3)


def test_a_pipeline_is_idle_for_its_bubble_and_an_interleaved_one_for_half_of_that():
    few, many = (of(pp=4, microbatches=m) for m in (4, 32))
    halved = of(pp=4, chunks=2, microbatches=4)
    assert few.step_s / 4 > 1.3 * many.step_s / 32
    one_more = of(pp=4, microbatches=5).step_s - few.step_s
    head = one_more - (few.step_s - halved.step_s) / (3 / 2)  # of the last stage alone
    assert few.step_s - halved.step_s == pytest.approx(1.5 * (one_more - head))
    assert 0 < head < one_more / 2


@pytest.mark.parametrize(
    ("axes", "stage", "microbatches", "held"),
    [
        (AxisSizes(pp=4), 0, 8, 4),
        (AxisSizes(pp=4), 3, 8, 1),
        (AxisSizes(pp=4), 0, 2, 2),
        (AxisSizes(pp=4, chunks=2), 0, 8, 5.5),
        (AxisSizes(pp=4, chunks=2), 3, 8, 2.5),
    ],
)
def test_a_stage_holds_the_microbatches_that_are_on_their_way(axes, stage, microbatches, held):
    assert in_flight(axes, stage, microbatches) == held


def test_activations_of_a_sequence_are_shared_by_ranks_of_cp():
    one, shared = (of(Microbatch(65536, 1), cp=cp, recompute=1.0).peak for cp in (1, 8))
    assert shared.total < one.total / 4


def test_a_row_with_tp_pp_or_cp_is_predicted(tmp_path):
    one = next(csv.DictReader(RUNS.splitlines()))
    for number, axis in enumerate(("tp", "pp", "cp")):
        folder = tmp_path / str(number)
        folder.mkdir()
        row = one | {axis: "2", "global_batch_seqs": "64"}
        (found,) = predicted(folder, "\n".join((",".join(row), ",".join(row.values()))))
        tokens = float(found["tokens_per_s_per_gpu"]) * float(found["step_time_s"]) * 16
        assert tokens == pytest.approx(64 * 512, rel=1e-4)
        per_device = runs.setup(row | {"global_batch_seqs": "128"}, {"small": ARCH})
        assert per_device.batch.sequences == 8  # four on each of two devices


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"cp": 32, "pp": 4}, "a multiple of 128 ranks"),
        ({"tp": 16}, "tp=16 doesn't divide n_kv_heads=8"),
        ({"cp": 64}, "cp=64 doesn't divide the 32 heads"),
        ({"pp": 16}, "16 stages are more than the 8 blocks"),
        ({"tp": 0}, "tp"),
        ({"ep": 2}, "ep=2 doesn't divide the 0 experts"),
    ],
)
def test_what_ranks_cannot_share_is_refused(choice, says):
    with pytest.raises(InputError, match=says):
        of(**choice)


MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN = MIXTRAL | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(("config", "billions", "used"), [(MIXTRAL, 46.7, 12.9), (QWEN, 30.5, 3.3)])
def test_a_model_of_experts_has_the_parameters_that_its_makers_state(config, billions, used, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = architecture(tmp_path)
    found = of(arch=arch).workload.parameters
    idle = arch.n_layers * arch.expert_numel * (arch.experts - arch.chosen)
    assert (found / 1e9, (found - idle) / 1e9) == (
        pytest.approx(billions, abs=0.1),
        pytest.approx(used, abs=0.1),
    )


def test_ranks_of_ep_send_each_token_to_its_experts_and_hold_the_same_at_rest_but_gather_fewer():
    arch = replace(ARCH, experts=8, chosen=2)
    alone, shared = of(arch=arch), of(arch=arch, ep=8)
    tokens = 2 * BATCH.tokens * arch.d_model * arch.chosen
    assert shared.exchanged == {"ep": 4 * arch.n_layers * tokens}
    assert shared.kept == alone.kept
    gathered = [found.workload.groups[0].numel for found in (alone, shared)]
    assert gathered[0] - gathered[1] == 7 * arch.expert_numel
    assert shared.model_flops == pytest.approx(alone.model_flops)


def test_the_command_takes_the_sizes_of_a_mesh(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    words = ["plan", str(tmp_path), "--device=H100", "--ranks=64", "--recompute=1", "--microbatches=8"]
    assert main([*words, "--tp=2", "--cp=2", "--ep=4", "--pp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mesh"], found["shards"]) == ("tp=2 x cp=2 x ep=4 x pp=2", 16)
    assert main([*words, "--meshes"]) == 2
    assert "--meshes goes with --search" in capsys.readouterr().err


def test_fewest_ranks_are_a_multiple_of_those_that_share():
    choice = Choice(tp=4, pp=2, recompute=1.0)
    found = fewest_ranks(of_model(ARCH, BATCH, choice), CLUSTER, choice)
    assert found.value % 8 == 0


def test_a_search_of_meshes_shares_a_sequence_that_does_not_fit_on_one_rank_and_says_so():
    batch, cluster = Microbatch(262144, 1), Cluster(device("H100"), ranks=8)
    alone, found = search(ARCH, batch, cluster), search(ARCH, batch, cluster, meshes=True)
    assert (alone.estimate.fits, found.estimate.fits) == (False, True)
    assert found.choice.tp * found.choice.cp * found.choice.pp > 1
    assert f"a mesh of {found.choice.axes}" in str(found)
    assert found.estimate.tokens_per_s * found.step_s == pytest.approx(8 * batch.tokens)


LLAMA = MIXTRAL | {"model_type": "llama", "vocab_size": 128256}
LARGER = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
OF_13B = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40}
MODELS = {
    "llama-8b": LLAMA,
    "llama-70b": LLAMA | LARGER,
    "llama2-13b": LLAMA | OF_13B | {"intermediate_size": 13824, "vocab_size": 32000},
    "mixtral-8x7b": MIXTRAL,
}
CLUSTERS = {"gbit100.toml": ("H100", 64, 12.5e9), "gbit10.toml": ("A100", 16, 1.25e9)}
FOUND = re.findall(
    r"^\| (\S+) \| `(--.*)` \| (.*=.*) \| (.*) \| (.*) \|$", Path("docs/plan.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("model", "arguments", "mesh", "gib", "speed"), FOUND)
def test_the_meshes_that_the_page_of_plans_shows_are_found(
    model, arguments, mesh, gib, speed, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    for name, (kind, ranks, bandwidth) in CLUSTERS.items():
        Cluster(device(kind), ranks, host_bandwidth=bandwidth).save(name)
    assert main(["plan", ".", *arguments.split(), "--search", "--meshes"]) == 0
    said = capsys.readouterr().out
    for words in (f"a mesh of {mesh}, ", f"a step holds {gib} ", f"it trains {speed} tokens/s"):
        assert words in said


def test_the_page_of_plans_shows_five_meshes():
    assert len(FOUND) == 5
