"""Weights that torchao packs in 8 or 4 bits, sharded as they are: their codes and scales are gathered."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from shardwright import checkpoint, full_state_dict, fully_shard, set_transport, stats
from shardwright.errors import InputError
from shardwright.lora import Lora, add_lora
from shardwright.torch_private import local_of
from tests.ranks.models import full
from tests.ranks.pool import on_ranks
from tests.ranks.test_lora import perturb

pytest.importorskip("torchao", reason="needs torchao: make setup-hf, and this in its environment")
from torchao import float8
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.common import KernelPreference

WIDTH = 128
MX = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}


def packed(kind, weight):
    """A weight as torchao packs it, that a linear layer can use on a CPU."""
    if kind in MX:
        how = QuantizeTensorToMXKwargs(
            elem_dtype=MX[kind], block_size=32, kernel_preference=KernelPreference.EMULATED
        )
        return MXTensor.to_mx(weight.detach(), MX[kind], act_quant_kwargs=how)
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    quantize_(layer, {"fp8": Float8WeightOnlyConfig(), "int8": Int8WeightOnlyConfig()}[kind])
    return layer.weight.detach()


def build(kind=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).to(dtype)
    for layer in model[::2] if kind else ():
        layer.weight = nn.Parameter(packed(kind, layer.weight), requires_grad=False)
    return model


def parts(weight):
    return {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}


KINDS = pytest.mark.parametrize("kind", [*MX, "fp8", "int8"])


def batch(rank, step=0, dtype=torch.bfloat16):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(9 * step + rank)).to(dtype)


def shard(model, **options):
    for layer in model[::2]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@KINDS
@on_ranks(2, 3)
def test_as_many_bytes_are_sent_as_codes_and_scales_have_and_they_are_those_of_the_cast_bf16(
    rank, world, kind
):
    set_transport("sockets")
    plain = shard(build())
    model = shard(build(kind))
    with torch.no_grad():
        before = stats(model).sent_nbytes
        model(batch(rank))
        sent = stats(model).sent_nbytes - before
    shards = [local_of(p).detach() for p in model.parameters()]
    asked = sum(part.nbytes for s in shards if type(s) is not torch.Tensor for part in parts(s).values())
    asked += sum(s.nbytes for s in shards if type(s) is torch.Tensor)
    assert sent == (world - 1) * asked
    for layer, other in zip(model[::2], plain[::2], strict=True):
        layer.unshard()
        other.unshard()
        wanted = parts(packed(kind, other.weight))
        for name, part in parts(layer.weight).items():
            assert torch.equal(part.view(torch.uint8), wanted[name].view(torch.uint8)), name
        assert torch.equal(layer.weight.dequantize(), packed(kind, other.weight).dequantize())


@KINDS
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2, 3)
def test_adapters_on_packed_weights_train_as_in_one_process(rank, world, kind, reshard):
    given = partial(batch, dtype=torch.float32)
    alone = build(kind, torch.float32)
    # torchao's product with MX weights has no backward in eager mode ("b_hp.t().is_contiguous()").
    add_lora(alone, Lora(("2",) if kind in MX else ("0", "2"), rank=4))
    torch.manual_seed(3)
    perturb(alone)
    model = shard(copy.deepcopy(alone), reshard_after_forward=reshard)
    runs = [(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)) for m in (alone, model)]
    for step in range(3):
        every = [alone(given(each, step)) for each in range(world)]
        assert torch.equal(model(given(rank, step)), every[rank]) or step
        sum(each.square().mean() for each in every).div(world).backward()
        model(given(rank, step)).square().mean().backward()
        for _, optimizer in runs:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(full(param), expected, rtol=1e-5, atol=1e-6, msg=name)


@KINDS
@on_ranks(2)
def test_packed_weights_are_in_checkpoints(rank, kind, tmp_path):
    model = shard(build(kind))
    expected = model(batch(rank))
    checkpoint.save(tmp_path / "step", model=model, step=0)
    other = build()
    with torch.no_grad():
        for layer in other[::2]:
            layer.weight = nn.Parameter(packed(kind, layer.weight.detach() * 2), requires_grad=False)
    shard(other)
    assert not torch.equal(other(batch(rank)), expected)
    checkpoint.load(tmp_path / "step", model=other)
    assert torch.equal(other(batch(rank)), expected)


@KINDS
@on_ranks(2, 3)
def test_packed_weights_are_whole_in_full_state_dicts(rank, kind):
    whole, alone = full_state_dict(shard(build(kind))), build(kind)
    for name, part in parts(alone[0].weight).items() if rank == 0 else ():
        assert torch.equal(getattr(whole["0.weight"], name).view(torch.uint8), part.view(torch.uint8))


@on_ranks(2)
def test_a_packed_weight_that_asks_for_gradients_is_refused(rank):
    model = build("mxfp8")
    model[0].weight.requires_grad_(True)
    shard(model)
    with pytest.raises(InputError, match="'weight' is a MXTensor, which packs a weight and can't be trained"):
        model(batch(rank))


@pytest.mark.parametrize("precomputed", [False, True])
@on_ranks(2)
def test_weights_of_float8_training_are_gathered_in_8_bits_and_train_as_in_one_process(rank, precomputed):
    set_transport("sockets")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = shard(float8.convert_to_float8_training(build(), config=config))
    alone = float8.convert_to_float8_training(build(), config=float8.Float8LinearConfig(emulate=True))
    runs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (model, alone)]
    for step in range(3):
        before = stats(model).sent_nbytes
        with torch.no_grad():
            out = model(batch(0, step))
        asked = sum(p.to_local().nbytes // (2 if p.ndim == 2 else 1) for p in model.parameters())
        assert stats(model).sent_nbytes - before == asked
        assert torch.equal(out, alone(batch(0, step)))
        for each, optimizer in runs:
            each(batch(0, step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if precomputed:
            float8.precompute_float8_dynamic_scale_for_fsdp(model)
        for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.equal(full(param), expected), name
