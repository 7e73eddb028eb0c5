"""The codecs' arithmetic: error, bits, shapes, speed, and the codes of others."""

import copy
import importlib.util
import pickle
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright import nf4, quantize_
from shardwright.errors import InputError
from shardwright.quantized import bnb
from shardwright.quantized import module as encoded
from shardwright.quantized.codec import Encoding
from shardwright.quantized.codecs import INT8, NF4, NF4_DOUBLE

CODECS = pytest.mark.parametrize("codec", [NF4, NF4_DOUBLE, INT8], ids=lambda codec: codec.name)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative_error(got, expected):
    return ((got.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nf4_of_gaussian_weights_is_off_by_at_most_0_093(dtype):
    weight = gaussian(512, 1024)
    codes, absmax = nf4.quantize(weight)
    assert relative_error(nf4.dequantize(codes, absmax, weight.shape, dtype), weight) <= 0.093
    assert (codes.nbytes + absmax.nbytes) / weight.numel() == 0.53125


def test_scales_quantised_a_second_time_cost_no_accuracy_and_save_bytes():
    weight = gaussian(256, 4096) * torch.linspace(0.01, 1, 4096)  # scales that differ a hundredfold in a row
    codes, scales = NF4_DOUBLE.encode(weight)
    once = nf4.dequantize(*nf4.quantize(weight), weight.shape, torch.float32)
    twice = NF4_DOUBLE.decode(codes, scales, weight.shape, torch.float32)
    assert relative_error(twice, weight) <= relative_error(once, weight) + 0.0005
    assert relative_error(twice[:, :64], weight[:, :64]) <= 0.1
    assert (codes.nbytes + scales.nbytes) / weight.numel() < 0.5162


def test_int8_of_gaussian_weights_is_off_by_at_most_0_01():
    weight = gaussian(64, 1000)
    decoded = INT8.decode(*INT8.encode(weight), weight.shape, torch.float32)
    assert relative_error(decoded, weight) <= 0.01


@CODECS
@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 4), st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_rows_encoded_by_themselves_are_those_of_the_whole_to_the_bit(codec, rows, cols, world, scale):
    weight = gaussian(rows, cols) * scale
    whole = codec.encode(weight)
    chunks = [codec.encode(chunk) for chunk in weight.chunk(world)]
    for part, together in enumerate(whole):
        assert torch.equal(torch.cat([chunk[part] for chunk in chunks]), together)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 200), st.sampled_from([torch.bfloat16, torch.float32]))
def test_decoding_and_encoding_again_changes_no_bit(rows, cols, dtype):
    weight = gaussian(rows, cols)
    codes, absmax = nf4.quantize(weight)
    again = nf4.quantize(nf4.dequantize(codes, absmax, weight.shape, dtype))
    assert torch.equal(again[0] & 0xF0, codes & 0xF0)
    assert torch.equal(again[1], absmax)
    if cols % 2 == 0:
        assert torch.equal(again[0], codes)


@CODECS
def test_a_weight_of_experts_is_encoded_row_by_row(codec):
    weight = gaussian(3, 5, 100)
    codes, scales = codec.encode(weight)
    decoded = codec.decode(codes, scales, weight.shape, torch.float32)
    for expert in range(3):
        alone = codec.decode(*codec.encode(weight[expert]), weight[expert].shape, torch.float32)
        assert torch.equal(decoded[expert], alone)


@CODECS
def test_zeros_stay_zeros(codec):
    weight = torch.zeros(4, 130)
    assert torch.equal(codec.decode(*codec.encode(weight), weight.shape, torch.bfloat16), weight.bfloat16())


@pytest.mark.parametrize("block", [32, 128])
def test_the_block_is_the_callers_choice(block):
    weight = gaussian(7, 200)
    codes, absmax = nf4.quantize(weight, block)
    assert absmax.shape == (7, -(-200 // block))
    decoded = nf4.dequantize(codes, absmax, weight.shape, torch.float32, block)
    assert relative_error(decoded, weight) < 0.11


def test_bad_input_names_what_was_expected():
    codes, absmax = nf4.quantize(gaussian(4, 64))
    with pytest.raises(InputError, match=r"expected codes \[4, 64\] and absmax \[4, 2\]"):
        nf4.dequantize(codes, absmax, (4, 128))
    with pytest.raises(InputError, match="floating-point"):
        nf4.quantize(torch.zeros(4, 4, dtype=torch.int8))
    with pytest.raises(InputError, match="even"):
        nf4.quantize(gaussian(4, 64), block=3)


def test_nf4_decodes_100_million_parameters_a_second_on_one_thread():
    # 1900 M/s were seen on an idle core; a busy one must still do this.
    weight = gaussian(1024, 4096)
    codes, absmax = nf4.quantize(weight)
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            nf4.dequantize(codes, absmax, weight.shape, out=out)
            times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    assert weight.numel() / min(times) > 100e6


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
def test_codes_are_those_of_bitsandbytes():
    functional = importlib.import_module("bitsandbytes.functional")
    weight = gaussian(256, 1024)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    codes, absmax = nf4.quantize(weight, scale_dtype=torch.float32)
    assert torch.equal(packed.view(codes.shape), codes)
    assert torch.equal(state.absmax.view(absmax.shape), absmax)
    theirs = functional.dequantize_4bit(packed, state)
    assert torch.equal(nf4.dequantize(codes, absmax, weight.shape, torch.float32), theirs)


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [64, 128])
def test_their_kernel_decodes_what_the_plain_way_does(dtype, block):
    """On the CPU, by the same call as on CUDA but for where its result goes."""
    weight = gaussian(96, 512)
    codes, absmax = nf4.quantize(weight, block)
    ours = nf4.dequantize(codes, absmax, weight.shape, torch.float32, block)
    theirs = torch.empty(weight.shape, dtype=dtype)
    bnb.decode(codes, absmax, torch.tensor(nf4.LEVELS), theirs)
    assert torch.equal(theirs, ours.to(dtype))


def test_their_kernel_gets_the_same_table_of_levels_each_time(monkeypatch):
    """A new one would be copied to the device each time, for which the host waits."""
    codes, absmax = nf4.quantize(gaussian(4, 64))
    states = []
    library = SimpleNamespace(
        QuantState=lambda **state: states.append(state), dequantize_4bit=lambda codes, _: torch.zeros(4, 64)
    )
    monkeypatch.setattr(bnb, "decodes", lambda *_: True)
    monkeypatch.setattr(bnb, "_functional", lambda: library)
    for _ in range(2):
        nf4.dequantize(codes, absmax, (4, 64), torch.float32)
    assert states[0]["code"] is states[1]["code"]
    assert states[0]["code"].tolist() == pytest.approx(nf4.LEVELS)


def test_without_a_gpu_their_kernel_is_left_alone():
    codes, _ = nf4.quantize(gaussian(4, 64))
    assert not bnb.decodes(codes, 64, nf4.BLOCK, torch.float32)


# ---- models


def model_of(cols=100):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(cols, 33), nn.ReLU(), nn.Linear(33, 7))


def decoded_twin(model):
    """The same model with plain weights, those that ``model`` decodes."""
    twin = model_of(model[0].in_features)
    for ours, theirs in ((model[0], twin[0]), (model[2], twin[2])):
        theirs.weight.data.copy_(ours.weight)
        theirs.bias.data.copy_(ours.bias)
    return twin


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_a_quantised_model_computes_with_the_decoded_weights(codec):
    model = model_of()
    assert quantize_(model, codec) == ["0.weight", "2.weight"]
    twin = decoded_twin(model)
    x = torch.randn(4, 100, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    twin(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(model[0].bias.grad, twin[0].bias.grad)
    assert all(not p.requires_grad for name, p in model.named_parameters() if "weight" in name)


def test_the_backward_keeps_no_decoded_weight(monkeypatch):
    model = model_of(512)
    quantize_(model)
    kept, original = [], encoded.pack_codes

    def pack(decoded, tensor):
        kept.append(original(decoded, tensor))
        return kept[-1]

    monkeypatch.setattr(encoded, "pack_codes", pack)
    model(torch.randn(2, 512, requires_grad=True)).sum().backward()
    assert sum(not isinstance(each, torch.Tensor) for each in kept) == 2  # both weights, as handles
    assert not any(isinstance(each, torch.Tensor) for each in kept)  # frozen: no input is needed


def test_once_a_forward_has_ended_its_decoded_weights_are_freed(monkeypatch):
    model = model_of(512)
    quantize_(model, dequantise="layer")
    weights, original = [], Encoding.decode

    def decode(*args, **kwargs):
        weight = original(*args, **kwargs)
        weights.append(weakref.ref(weight.untyped_storage()))
        return weight

    monkeypatch.setattr(Encoding, "decode", decode)
    loss = model(torch.randn(2, 512, requires_grad=True)).sum()
    assert [weight() for weight in weights] == [None, None]
    loss.backward()
    assert [weight() for weight in weights] == [None] * 4  # each was decoded again


def test_a_plain_state_dict_is_quantised_as_it_is_loaded():
    source, model = model_of(), model_of()
    quantize_(model)
    torch.manual_seed(5)
    fresh = nn.Sequential(nn.Linear(100, 33), nn.ReLU(), nn.Linear(33, 7))
    model.load_state_dict(fresh.state_dict())
    expected = nf4.quantize(fresh[0].weight)
    assert torch.equal(model.state_dict()["0.weight"], expected[0])
    assert torch.equal(model.state_dict()["0.weight_absmax"], expected[1])
    quantize_(source)
    source.load_state_dict(model.state_dict())
    assert torch.equal(source[0].weight, model[0].weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_quantised_model_can_be_copied_and_pickled(copied):
    model = model_of()
    quantize_(model)
    x = torch.randn(3, 100)
    assert torch.equal(copied(model)(x), model(x))


def test_codes_whose_scales_were_taken_away_are_refused_by_name():
    model = model_of()
    quantize_(model)
    model[0].weight_absmax = None
    with pytest.raises(InputError, match="'weight' has codes, and 'weight_absmax' is None"):
        model(torch.randn(3, 100))


def test_on_the_meta_device_the_shapes_are_there_for_loading():
    with torch.device("meta"):
        model = model_of()
    quantize_(model)
    model.to_empty(device="cpu")
    state = model_of()
    model.load_state_dict(state.state_dict())
    quantize_(state)
    assert torch.equal(state[0].weight, model[0].weight)


def test_where_chooses_and_what_it_misses_is_said():
    model = model_of()
    assert quantize_(model, where="0.*ght") == ["0.weight"]
    assert quantize_(model, "int8", where=lambda name, p: p.ndim == 2) == ["2.weight"]
    with pytest.raises(InputError, match="matches no parameter"):
        quantize_(model_of(), where="*.q_proj.*")
    with pytest.raises(InputError, match=r"'0.bias' is torch.float32 of shape \[33\]"):
        quantize_(model_of(), where="0.*")
    with pytest.raises(InputError, match=r"\['int8', 'nf4', 'nf4-double'\]"):
        quantize_(model_of(), "nf5")
