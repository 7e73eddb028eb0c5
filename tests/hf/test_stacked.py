"""Experts that a model of transformers stores stacked: in 4 bits, and with adapters that are peft's."""

import copy

import pytest

pytest.importorskip("peft", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import peft
import torch
import transformers

from shardwright import full_state_dict, fully_shard, quantize_
from shardwright.lora import Lora, add_lora, load_adapter, merge_lora, read_lora, save_adapter
from tests.hf.models import SIZES
from tests.ranks.models import full
from tests.ranks.pool import on_ranks
from tests.ranks.test_lora import perturb

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
HOW = pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])


def mixtral(how="eager"):
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = how
    model = transformers.MixtralForCausalLM(config)
    return model if how == "grouped_mm" else model.double()  # torch has no grouped product of float64


def close(how):
    return {"rtol": 1e-5, "atol": 1e-6} if how == "grouped_mm" else {"rtol": 1e-12, "atol": 1e-12}


def tokens(rank=0):
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(rank))


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


def theirs(model):
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=STACKED)
    return peft.get_peft_model(model, config)


def adapted(model):
    add_lora(model, Lora(("q_proj", *STACKED), 3, 6))
    torch.manual_seed(3)
    return perturb(model)


def gradients(model):
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@HOW
def test_gradients_of_adapters_on_experts_are_pefts_and_files_go_both_ways(tmp_path, how):
    made = perturb(theirs(mixtral(how)))
    made.save_pretrained(tmp_path / "theirs")
    ours = mixtral(how)
    names = add_lora(ours, read_lora(tmp_path / "theirs"))
    assert [name.rpartition(".")[2] for name in names].count("down_proj") == 2
    load_adapter(tmp_path / "theirs", ours)
    losses = [loss_of(model, tokens()) for model in (made, ours)]
    torch.testing.assert_close(*losses, **close(how))
    for loss in losses:
        loss.backward()
    expected, found = gradients(made), gradients(ours)
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, expected[name], **close(how))
    save_adapter(tmp_path / "ours", ours)
    read = peft.PeftModel.from_pretrained(mixtral(how), tmp_path / "ours")
    torch.testing.assert_close(loss_of(read, tokens()), losses[1], **close(how))
    merged = made.merge_and_unload()
    merge_lora(ours)
    assert type(ours.model.layers[0].mlp.experts) is type(mixtral().model.layers[0].mlp.experts)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, merged.state_dict()[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dequantise", ["group", "layer"])
@HOW
@on_ranks(2)
def test_experts_in_4_bits_with_adapters_train_over_ranks_as_in_one_process(rank, world, how, dequantise):
    alone = mixtral(how)
    stacked = quantize_(alone, "nf4", where="*.experts.*", dequantise=dequantise)
    assert len(stacked) == 4
    adapted(alone)
    model = copy.deepcopy(alone)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    runs = [(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)) for m in (alone, model)]
    for _ in range(2):
        sum(loss_of(alone, tokens(each)) for each in range(world)).div(world).backward()
        loss_of(model, tokens(rank)).backward()
        for _, optimizer in runs:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(param), expected, **close(how), msg=name)
    state = full_state_dict(model)
    assert rank or state["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.uint8
