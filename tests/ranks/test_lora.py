"""Adapters on a frozen base, plain or quantised, on any number of ranks; peft's files."""

import copy
import importlib
import importlib.util
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard, quantize_
from shardwright.errors import CheckpointError, InputError
from shardwright.train.lora import Lora, add_lora, load_adapter, merge_lora, read_lora, save_adapter
from tests.ranks.models import full, train_on_parts
from tests.ranks.pool import run_ranks

LORA = Lora(("up", "down"), rank=3, alpha=6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(70, 37)
        self.down = nn.Linear(37, 70)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build(codec="nf4", lora=LORA):
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(70))
    if codec:
        quantize_(model, codec)
    torch.manual_seed(2)
    assert add_lora(model, lora) == ["0.up", "0.down", "1.up", "1.down"]
    return model


def shard(model):
    for block in model[:2]:
        fully_shard(block)
    return fully_shard(model)


def on_ranks(rank, world, folder, codec):
    model = shard(build(codec))
    base = {name: full(p).clone() for name, p in model.named_parameters() if "lora" not in name}
    losses = train_on_parts(model, rank, world, width=70, lr=3.0, steps=4, target=2.0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)
    assert all(torch.equal(full(p), base[n]) for n, p in model.named_parameters() if n in base)
    save_adapter(f"{folder}/{world}", model, base="tiny")
    dist.barrier()
    fresh = shard(build(codec))
    load_adapter(f"{folder}/{world}", fresh)
    x = torch.randn(3, 70)
    assert torch.equal(fresh(x), model(x))
    return losses


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_qlora_has_the_same_losses_on_1_to_4_ranks_and_its_adapter_loads_anywhere(tmp_path, codec):
    expected = run_ranks(1, on_ranks, str(tmp_path), codec)[0]
    assert expected[-1] < 0.98 * expected[0]
    for world in (2, 3, 4):
        for losses in run_ranks(world, on_ranks, str(tmp_path), codec):
            assert losses == pytest.approx(expected, abs=1e-4)
        model, alone = build(codec), build(codec)
        load_adapter(tmp_path / str(world), model)
        load_adapter(tmp_path / "1", alone)
        x = torch.randn(3, 70)
        assert torch.allclose(model(x), alone(x), atol=1e-5)


def perturb(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


def test_merging_into_a_plain_base_changes_no_output_and_leaves_plain_layers():
    model = perturb(build(None, Lora(("up", "down"), 4, rslora=True)))
    x = torch.randn(5, 70)
    expected = model(x)
    merge_lora(model)
    assert type(model[0].up) is nn.Linear
    assert not any("lora" in name for name in model.state_dict())
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_merging_into_a_quantised_base_is_asked_for():
    model = perturb(build())
    with pytest.raises(InputError, match="requantise=True"):
        merge_lora(model)
    expected = model[0].up.weight + model[0].up.lora_B.weight @ model[0].up.lora_A.weight * LORA.scaling
    merge_lora(model, requantise=True)
    assert (model[0].up.weight - expected).norm() < 0.1 * expected.norm()


def test_bad_adapters_are_refused_before_anything_changes(tmp_path):
    plain = nn.Sequential(Block())
    with pytest.raises(InputError, match=r"'q_proj' matches no nn.Linear .* \['down', 'up'\]"):
        add_lora(plain, Lora(("up", "q_proj")))
    assert all(p.requires_grad for p in plain.parameters())
    with pytest.raises(InputError, match="rank"):
        Lora(("up",), rank=0)
    with pytest.raises(CheckpointError, match="not a readable adapter"):
        read_lora(tmp_path)
    save_adapter(tmp_path, build(None))
    other = build(None, Lora(("up", "down"), rank=5))
    with pytest.raises(CheckpointError, match="8 tensors don't fit"):
        load_adapter(tmp_path, other)
    with pytest.raises(CheckpointError, match=r"scaled by 2\.0"):
        load_adapter(tmp_path, build(None, Lora(("up", "down"), rank=3, alpha=9)))
    assert read_lora(tmp_path).rank == 3
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed")
def test_peft_reads_our_adapters_and_we_read_its(tmp_path):
    peft = importlib.import_module("peft")
    ours = perturb(build(None))
    save_adapter(tmp_path / "ours", ours)
    torch.manual_seed(1)
    base = nn.Sequential(Block(), Block(), nn.LayerNorm(70))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    x = torch.randn(4, 70)
    assert torch.allclose(theirs(x), ours(x), atol=1e-6)
    made = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["up", "down"]))
    perturb(made)
    made.save_pretrained(tmp_path / "theirs")
    model = build(None, read_lora(tmp_path / "theirs"))
    load_adapter(tmp_path / "theirs", model)
    assert torch.allclose(model(x), made(x), atol=1e-6)
