"""Adapters of peft: its files and ours are the same ones, and models that carry its adapters are sharded."""

import copy

import pytest
import torch
from torch import nn

from shardwright import MixedPrecisionPolicy, fully_shard, quantize_
from shardwright.lora import Lora, add_lora, load_adapter, read_lora, save_adapter
from tests.ranks.models import full, train_on_parts
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_lora import Block, perturb

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
KINDS = pytest.mark.parametrize(
    "options", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"]
)


def base():
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), nn.LayerNorm(70))


def theirs(model, **options):
    names = {f"use_{name}": value for name, value in options.items()}
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["up", "down"], **names)
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


@KINDS
def test_peft_reads_our_adapters_and_we_read_its(tmp_path, options):
    ours = base()
    add_lora(ours, Lora(("up", "down"), 3, 6, **options))
    perturb(ours)
    save_adapter(tmp_path / "ours", ours)
    x = torch.randn(4, 70)
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "ours")
    assert torch.allclose(read(x), ours(x), atol=1e-6)
    made = perturb(theirs(base(), **options))
    made.save_pretrained(tmp_path / "theirs")
    model = base()
    add_lora(model, read_lora(tmp_path / "theirs"))
    load_adapter(tmp_path / "theirs", model)
    assert torch.allclose(model(x), made(x), atol=1e-6)


@pytest.mark.parametrize(
    ("codec", "order", "options"),
    [
        (None, "", {}),
        ("nf4", "codec first", {}),
        ("nf4", "adapter first", {"rslora": True}),
        (None, "", {"dora": True}),
    ],
)
@on_ranks(3)
def test_a_model_that_carries_pefts_adapters_is_sharded_as_it_is(rank, world, codec, order, options):
    plain = base()
    if codec and order == "codec first":
        quantize_(plain, codec)
    plain = theirs(plain, **options)
    if codec and order == "adapter first":
        assert len(quantize_(plain, codec)) == 4
    model = copy.deepcopy(plain)
    codes = {name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad}
    for block in model.base_model.model[:2]:
        fully_shard(block)
    fully_shard(model)
    expected = train_on_parts(plain, 0, 1, 70, lr=3.0, target=2.0)
    assert train_on_parts(model, rank, world, 70, lr=3.0, target=2.0) == pytest.approx(expected, abs=1e-4)
    for name, p in model.named_parameters():
        assert name not in codes or torch.equal(full(p), codes[name])
    state = peft.get_peft_model_state_dict(model)
    whole = {name: full(value) for name, value in state.items()}
    assert all(value.any() for name, value in whole.items() if "lora_B" in name)  # zeros at first
    for name, value in peft.get_peft_model_state_dict(plain).items():
        assert torch.allclose(whole[name], value, atol=1e-5), name


def carries_bitsandbytes(rank, world, folder):
    batch = torch.arange(48).reshape(2, 24) % 128
    losses = {}
    for storage in (torch.uint8, torch.float32, torch.bfloat16):
        for dtype in (None, torch.bfloat16):
            dtypes = {"compute_dtype": torch.float32, "quant_storage": storage}
            options = {f"bnb_4bit_{name}": value for name, value in (dtypes | {"quant_type": "nf4"}).items()}
            packed = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
            load_model = transformers.AutoModelForCausalLM.from_pretrained
            model = load_model(folder, quantization_config=packed, dtype=torch.float32)
            torch.manual_seed(2)
            targets = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
            model = peft.get_peft_model(model, targets)
            alone = model(input_ids=batch, labels=batch).loss
            alone.backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            model.zero_grad()
            for each in (*model.base_model.model.model.layers, model):
                fully_shard(each, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            losses.setdefault(dtype, set()).add(loss.item())
            if dtype is None:
                assert loss.item() == alone.item()
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        assert torch.allclose(full(p.grad), grads[name], atol=1e-7), name
    assert [len(found) for found in losses.values()] == [1, 1], losses  # codes are never cast


def test_a_base_that_bitsandbytes_has_quantised_is_sharded_as_it_is(tmp_path):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    run_ranks(2, carries_bitsandbytes, str(tmp_path))
