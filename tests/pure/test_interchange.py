"""4-bit weights of bitsandbytes and torchao: from files that they wrote, and beside them where installed."""

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright import nf4, quantize_
from shardwright.errors import InputError
from shardwright.interchange import from_bitsandbytes, is_nf4_tensor, to_bitsandbytes

FIXTURES = Path(__file__).parent / "fixtures"  # written by make_nf4.py
SHAPE = (16, 1024)


def plain():
    torch.manual_seed(0)
    return torch.randn(SHAPE) * 0.02


def kinds_of(state):
    return {key: (value.dtype, value.shape) for key, value in state.items() if "state" not in key}


def layer_of(weight):
    model = nn.Sequential()
    model.layer = nn.Linear(*SHAPE[::-1], bias=False)
    model.layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize("name", ["bitsandbytes", "bitsandbytes_double"])
def test_a_state_dict_of_bitsandbytes_is_taken_over_code_by_code(name):
    theirs = load_file(FIXTURES / f"{name}.safetensors")
    decoded = theirs.pop("decoded").float()
    state = from_bitsandbytes({**theirs, "norm.weight": torch.ones(3)})
    assert set(state) == {"layer.weight", "layer.weight_absmax", "norm.weight"}
    codes, _ = nf4.quantize(plain(), scale_dtype=torch.float32)
    assert torch.equal(state["layer.weight"], codes)
    model = layer_of(torch.zeros(SHAPE))
    quantize_(model)
    model.load_state_dict({k: v for k, v in state.items() if k != "norm.weight"})
    assert (model.layer.weight - decoded).norm() <= 0.005 * decoded.norm()


def test_what_is_exported_for_bitsandbytes_comes_back_to_the_bit():
    model = layer_of(plain())
    quantize_(model)
    theirs = to_bitsandbytes(model.state_dict())
    written = load_file(FIXTURES / "bitsandbytes.safetensors")
    del written["decoded"]
    assert kinds_of(theirs) == kinds_of(written)
    back = from_bitsandbytes(theirs)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


class NF4Tensor(torch.Tensor):
    """What torchao's class shows of itself; the values are those that it wrote."""

    block_size, scaler_block_size = 64, 256


def test_an_nf4_tensor_of_torchao_is_unpacked_without_rounding_its_codes():
    parts = load_file(FIXTURES / "torchao.safetensors")
    decoded = parts.pop("decoded").float()
    weight = torch.zeros(SHAPE, dtype=torch.bfloat16).as_subclass(NF4Tensor)
    vars(weight).update(parts)
    model = nn.Sequential()
    model.layer = nn.Linear(*SHAPE[::-1], bias=False)
    model.layer._parameters["weight"] = weight
    assert is_nf4_tensor(weight)
    assert quantize_(model) == ["layer.weight"]
    assert torch.equal(model.state_dict()["layer.weight"].flatten(), parts["quantized_data"])
    assert (model.layer.weight.float() - decoded).norm() <= 0.01 * decoded.norm()


def test_what_cant_be_exchanged_says_why():
    theirs = load_file(FIXTURES / "bitsandbytes.safetensors")
    with pytest.raises(InputError, match=r"'layer.weight' has other levels"):
        from_bitsandbytes({**theirs, "layer.weight.quant_map": torch.linspace(-1, 1, 16)})
    model = nn.Sequential(nn.Linear(100, 3))
    quantize_(model)
    with pytest.raises(InputError, match=r"'0.weight' of shape \[3, 100\].*whole blocks"):
        to_bitsandbytes(model.state_dict())


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
def test_bitsandbytes_loads_what_we_export():
    bnb = importlib.import_module("bitsandbytes.nn")
    model = layer_of(plain())
    quantize_(model)
    theirs = {key.removeprefix("layer."): value for key, value in to_bitsandbytes(model.state_dict()).items()}
    layer = bnb.Linear4bit(*SHAPE[::-1], bias=False, quant_type="nf4")
    statistics = {key: value for key, value in theirs.items() if key != "weight"}
    layer.weight = bnb.Params4bit.from_prequantized(theirs["weight"], statistics, device="cpu")
    x = torch.randn(5, SHAPE[1])
    ours = nn.functional.linear(x, model.layer.weight)
    assert (layer(x) - ours).norm() <= 0.01 * ours.norm()


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")
def test_torchaos_own_nf4_tensors_are_taken():
    made = importlib.import_module("torchao.quantization").to_nf4(plain(), 64, 256)
    model = layer_of(made)
    quantize_(model)
    decoded = made.get_original_weight().float()
    assert (model.layer.weight.float() - decoded).norm() <= 0.01 * decoded.norm()
