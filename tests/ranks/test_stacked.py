"""Stacked experts, 3-D parameters of one module: encoded, with adapters, and both."""

import copy
import pickle

import pytest
import torch
from torch import nn

from shardwright import checkpoint, fully_shard, publish, quantize_, receive
from shardwright.errors import InputError, StageError
from shardwright.lora import (
    Lora,
    add_lora,
    load_adapter,
    merge_lora,
    save_adapter,
    without_adapters,
)
from shardwright.quantized.codec import Encoding
from shardwright.quantized.codecs import codec_of
from tests.ranks.models import full, sharded, train_on_parts
from tests.ranks.pool import on_ranks
from tests.ranks.test_lora import perturb

EXPERTS, WIDTH, HIDDEN = 3, 70, 37
LORA = Lora(("up", "down"), rank=2, alpha=6)
CODECS = pytest.mark.parametrize("codec", [None, "nf4", "nf4-double", "int8"])


class Experts(nn.Module):
    """Reads its parameters for one expert after another, as transformers does."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shapes = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, *(s[::-1] if is_transposed else s)) * 0.1) for s in shapes
        )

    def forward(self, x):
        x = x.double()

        def linear(x, weight):
            return x @ (weight if self.is_transposed else weight.mT)

        return x + sum(linear(linear(x, self.up[i]).tanh(), self.down[i]) for i in range(EXPERTS))


def build(codec="nf4", lora=LORA, is_transposed=False, first="codec"):
    torch.manual_seed(1)
    model = nn.Sequential(Experts(is_transposed), Experts(is_transposed), nn.LayerNorm(WIDTH)).double()
    if codec and first == "codec":
        quantize_(model, codec)
    if lora:
        assert add_lora(model, lora) == ["0.up", "0.down", "1.up", "1.down"]
        torch.manual_seed(2)
        perturb(model)
    if codec and first != "codec":
        assert len(quantize_(model, codec)) == 4
    return model


def same(model, other, rtol=1e-12):
    for (name, param), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(full(param), full(expected), rtol=rtol, atol=1e-13, msg=name)


@pytest.mark.each_case
@CODECS
@pytest.mark.parametrize("is_transposed", [False, True])
@on_ranks(2, 3)
def test_adapters_on_experts_train_over_ranks_as_in_one_process(rank, world, tmp_path, codec, is_transposed):
    model, alone, fresh = (build(codec, is_transposed=is_transposed) for _ in range(3))
    sharded(model, model[:2])
    train_on_parts(alone, 0, 1, WIDTH, lr=0.3, target=2.0)
    train_on_parts(model, rank, world, WIDTH, lr=0.3, target=2.0)
    assert not torch.equal(alone[0].lora_B.weight, fresh[0].lora_B.weight)
    same(model, alone)
    checkpoint.save(tmp_path / "step", model=model, step=0)
    checkpoint.load(tmp_path / "step", model=sharded(fresh, fresh[:2]))
    same(fresh, alone)
    save_adapter(tmp_path / "adapter", model)
    read = build(codec, is_transposed=is_transposed)
    load_adapter(tmp_path / "adapter", read)
    same(read, alone)


@pytest.mark.parametrize("codec", ["nf4", "int8"])
@on_ranks(2)
def test_experts_are_encoded_before_or_after_adapters_and_sharding_with_the_bits_of_each_alone(rank, codec):
    model, later, latest = build(codec), build(codec, first="adapter"), build(None)
    sharded(latest, latest[:2])
    assert len(quantize_(latest, codec)) == 4
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    expected = model(x)
    assert torch.equal(later(x), expected)
    torch.testing.assert_close(latest(x), expected, rtol=1e-12, atol=1e-12)
    same(later, model)
    same(latest, model)
    plain, params = build(None), dict(model.named_parameters())
    scales = codec_of(codec).scales
    for expert in range(EXPERTS):
        own = nn.Linear(WIDTH, HIDDEN, bias=False)
        own.weight = nn.Parameter(plain[0].state_dict()["up"][expert])
        alone = nn.Sequential(own)
        quantize_(alone, codec)
        for name, part in (("0.weight", "0.up"), (f"0.weight_{scales}", f"0.up_{scales}")):
            assert torch.equal(alone.state_dict()[name], params[part][expert])


@CODECS
@pytest.mark.parametrize("is_transposed", [False, True])
def test_merged_experts_compute_what_they_did_with_adapters(codec, is_transposed):
    model = build(codec, is_transposed=is_transposed)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    expected = model(x)
    with without_adapters(model):
        assert torch.equal(model(x), build(codec, None, is_transposed)(x))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), expected)
    if codec:
        with pytest.raises(InputError, match="requantise=True"):
            merge_lora(model)
    merge_lora(model, requantise=True)
    assert not any("lora" in name for name in model.state_dict())
    assert codec or type(model[0]) is Experts
    assert (model(x) - expected).norm() < (0.15 if codec else 1e-6) * expected.norm()


@on_ranks(3)
@pytest.mark.each_case
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("codec", [None, "nf4"])
def test_experts_are_published_merged_and_decoded(rank, codec, is_transposed):
    model, whole = build(codec, is_transposed=is_transposed), build(codec, is_transposed=is_transposed)
    publisher = publish(sharded(model, model[:2]), "tcp://127.0.0.1:0", names="merged")
    receiver = receive(publisher.address) if rank == 0 else None
    publisher.send()
    if receiver is not None:
        receiver.wait(1)
        got, expected = dict(receiver), dict(build(None, None).named_parameters())
        assert got.keys() == expected.keys()
        for name in ("0.up", "1.down"):
            merged = getattr(whole[int(name[0])], name[2:]).detach()  # reads as the sum
            torch.testing.assert_close(got[name], merged, rtol=1e-6, atol=1e-6)
        receiver.close()
    publisher.close()


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_a_forward_makes_experts_once_and_the_backward_keeps_none_and_makes_each_by_itself(
    monkeypatch, codec
):
    model = build(codec)
    kept, made = [], []
    decode = Encoding.decode
    monkeypatch.setattr(Encoding, "decode", lambda *a, **k: made.append(decode(*a, **k)) or made[-1])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)).sum()
    assert len(made) == (4 if codec else 0)
    sizes = {tensor.untyped_storage().nbytes() for tensor in kept}
    assert max(sizes) < EXPERTS * WIDTH * HIDDEN * 8
    made.clear()
    loss.backward()
    assert [len(each) for each in made] == [1] * (12 if codec else 0)


def test_adapters_that_peft_has_not_are_refused_before_anything_changes():
    for options in ({"dropout": 0.1}, {"dora": True}):
        model = build(None, None)
        with pytest.raises(InputError, match=r"'0.up' is a 3-D parameter, whose adapters have no dropout"):
            add_lora(model, Lora(("up",), **options))
        assert all(param.requires_grad for param in model.parameters())
    model[0].inner = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(InputError, match=r"'0.inner' lies in '0', whose 'up' is to have an adapter"):
        add_lora(model, Lora(("up", "inner")))
    convolution = nn.Sequential(nn.Conv1d(3, 4, 5))
    with pytest.raises(InputError, match=r"matches no nn\.Linear or 3-D parameter"):
        add_lora(convolution, Lora(("weight",)))


@on_ranks(2)
def test_an_adapter_that_is_sharded_apart_from_its_experts_is_an_error(rank):
    model = build()
    fully_shard(model[0].lora_A)
    fully_shard(model)
    with pytest.raises(StageError, match="the adapter of 'down' isn't gathered with it: call fully_shard"):
        model(torch.randn(2, WIDTH, dtype=torch.float64))
