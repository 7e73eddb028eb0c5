"""Experts of transformers' models over ranks: losses, norms and parameters are those of one process."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import shardwright
import shardwright.hf
from shardwright import (
    checkpoint,
    clip_grad_norm_,
    context_parallel,
    expert_parallel,
    full_state_dict,
    fully_shard,
)
from shardwright.errors import InputError
from shardwright.lora import Lora, add_lora
from shardwright.optim import hidden_matrices
from shardwright.parallel import mean_over_tokens, shift_labels, tokens_per_expert
from tests.hf import models
from tests.hf.models import EXPERTS, SIZES
from tests.ranks.models import Run, both_step
from tests.ranks.pool import run_ranks

LENGTH = 8
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, layer_types=["full_attention"] * 2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
        num_experts_per_tok=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_local_experts=4,
    ),
}  # fmt: skip


def build(kind, implementation="eager"):
    if kind == "deepseek_v3":  # whose router multiplies matrices in float32, wherever the model is float64
        modeling_deepseek_v3.torch = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    torch.manual_seed(3)
    attention = "eager" if kind == "gpt_oss" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention)
    model.set_experts_implementation(implementation)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            nn.init.normal_(buffer)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    return model.double()


def sum_of(model, input_ids, labels, position_ids):
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def prepared(kind, sizes, implementation="eager"):
    model = build(kind, implementation)
    mesh = shardwright.mesh(**sizes, model=model)
    expert_parallel(context_parallel(model, mesh), mesh)
    fully_shard(model, mesh=mesh.shard, groups="auto")
    return model, mesh


def train_beside(ours, theirs, mesh, steps, one_token):
    """Steps beside one process that sees all samples; ``one_token``: each sample is of one token repeated."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, 96, (mesh.num_samples, LENGTH), generator=generator)
        if one_token:
            tokens[:] = tokens[0, 0]
        whole = {"input_ids": tokens, "labels": shift_labels(tokens)}
        whole["position_ids"] = torch.arange(LENGTH)[None]
        part = mesh.split({name: whole[name][mesh.sample_rank, None] for name in ("input_ids", "labels")})
        total = sum_of(ours.model, **part)
        loss = mean_over_tokens(total, (part["labels"] != -100).sum(), mesh)
        loss.backward()
        expected = sum_of(theirs.model, **whole) / (whole["labels"] != -100).sum()
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
        norms = [clip_grad_norm_(ours.model.parameters(), 0.1)]
        norms.append(nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.1))
        assert norms[1] > 0.1
        torch.testing.assert_close(*norms, atol=1e-12, rtol=1e-12)
        both_step(ours, theirs, 1e-12)


def trains(rank, world, kind, sizes, one_token, recomputed, implementation):
    model, mesh = prepared(kind, sizes, implementation)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ours, theirs = Run.of(model), Run.of(build(kind, implementation))
    train_beside(ours, theirs, mesh, range(3), one_token)


@pytest.mark.parametrize(
    ("kind", "world", "sizes", "one_token", "recomputed", "implementation"),
    [
        ("mixtral", 2, {"ep": 2}, False, False, "eager"),
        ("mixtral", 2, {"ep": 1}, False, False, "eager"),
        ("mixtral", 4, {"ep": 2}, True, True, "eager"),
        ("mixtral", 4, {"ep": 2, "cp": 2}, False, False, "eager"),
        ("mixtral", 4, {"ep": 4}, True, False, "batched_mm"),
        ("mixtral", 4, {"ep": 2, "replicate": 2}, False, False, "eager"),
        ("qwen2_moe", 2, {"ep": 2}, True, False, "eager"),
        ("qwen3_moe", 4, {"ep": 4, "cp": 2}, False, True, "eager"),
        ("deepseek_v3", 2, {"ep": 2, "cp": 2}, False, False, "eager"),
        ("deepseek_v3", 4, {"ep": 4}, True, False, "eager"),
        ("gpt_oss", 2, {"ep": 2}, True, False, "eager"),
    ],
    ids=str,
)
def test_models_with_experts_over_ranks_train_as_in_one_process(
    kind, world, sizes, one_token, recomputed, implementation
):
    run_ranks(world, trains, kind, sizes, one_token, recomputed, implementation)


def saves(rank, world, folder, sizes, steps, loads):
    """Trains some steps beside one process, from a checkpoint or the beginning, and saves both."""
    model, mesh = prepared("mixtral", sizes)
    ours, theirs = Run.of(model), Run.of(build("mixtral"))
    if loads:
        checkpoint.load(folder / loads, model=model, optimizer=ours.optimizer)
        whole = torch.load(folder / f"{loads}.pt")
        theirs.model.load_state_dict(whole[0])
        theirs.optimizer.load_state_dict(whole[1])
    train_beside(ours, theirs, mesh, steps, one_token=False)
    checkpoint.save(folder / str(steps[0]), model=model, optimizer=ours.optimizer, step=0)
    weights, expected = full_state_dict(model), theirs.model.state_dict()
    if rank == 0:
        torch.save([expected, theirs.optimizer.state_dict()], folder / f"{steps[0]}.pt")
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=0)


def test_checkpoints_and_whole_state_dicts_have_all_experts_however_many_ranks_share_them(tmp_path):
    run_ranks(2, saves, tmp_path, {"ep": 2}, range(1), None)
    run_ranks(2, saves, tmp_path, {"ep": 1}, range(1, 2), "0")
    run_ranks(4, saves, tmp_path, {"ep": 2}, range(2, 3), "1")


def reads(rank, world, folder):
    mesh = shardwright.mesh(ep=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(models.config("qwen3_moe"))
    shardwright.hf.shard(expert_parallel(model, mesh), mesh=mesh.shard)
    shardwright.hf.read_weights(model, folder)
    ids, expected = models.tokens(rank), models.whole(folder)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-5, rtol=0)
    counts = tokens_per_expert(model, mesh)
    routed = [expected(models.tokens(each), output_router_logits=True).router_logits for each in range(world)]
    for layer, found in enumerate(counts.values()):
        chosen = torch.stack([of[layer].topk(2).indices for of in routed])
        assert found.tolist() == chosen.flatten().bincount(minlength=4).tolist()
    assert [*counts] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_each_rank_reads_its_experts_from_files_into_a_model_on_the_meta_device_and_tokens_are_counted(
    tmp_path,
):
    models.write("qwen3_moe", tmp_path)
    run_ranks(2, reads, tmp_path)


def refuses(rank, world):
    mesh = shardwright.mesh(ep=2)
    with pytest.raises(InputError, match="LlamaForCausalLM has no module whose forward takes hidden_states"):
        expert_parallel(transformers.AutoModelForCausalLM.from_config(models.config("llama")), mesh)
    three = transformers.AutoModelForCausalLM.from_config(models.config("mixtral"))
    with pytest.raises(InputError, match=r"ep=2 doesn't divide the 3 experts of model\.layers\.0\.mlp"):
        expert_parallel(three, mesh)
    model = expert_parallel(build("mixtral"), mesh)
    with pytest.raises(InputError, match="is expert-parallel already"):
        expert_parallel(model, mesh)
    with pytest.raises(InputError, match=r"gate_up_proj' is shared by ranks \(expert_parallel\).*take ep=1"):
        add_lora(model, Lora(targets=("gate_up_proj",)))
    with pytest.raises(InputError, match="is sharded already; call expert_parallel before fully_shard"):
        expert_parallel(fully_shard(build("mixtral")), mesh)


def test_experts_that_can_not_be_distributed_are_refused():
    run_ranks(2, refuses)


@pytest.mark.parametrize("kind", CONFIGS)
def test_muon_is_for_stacked_experts_and_all_other_matrices_of_the_blocks(kind):
    named = [(n, p) for n, p in build(kind).named_parameters() if min(p.shape[-2:]) > 1 and p.ndim > 1]
    inside = [name for name, _ in named if ".layers." in name and "bias" not in name]
    assert any("experts" in name for name in inside)
    assert hidden_matrices(build(kind)) == inside
