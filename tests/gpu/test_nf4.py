"""4-bit weights on a CUDA device: by bitsandbytes' kernel where that is installed, else in plain torch."""

import importlib.util

import pytest
import torch

from shardwright import nf4
from shardwright.quantized import bnb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("cols", [512, 100])
def test_weights_are_decoded_as_on_the_host(cols):
    weight = torch.randn(96, cols)
    codes, absmax = nf4.quantize(weight)
    installed = importlib.util.find_spec("bitsandbytes") is not None
    assert bnb.decodes(codes.cuda(), cols, nf4.BLOCK, torch.float32) == (installed and cols == 512)
    decoded = nf4.dequantize(codes.cuda(), absmax.cuda(), weight.shape, torch.float32)
    assert torch.equal(decoded.cpu(), nf4.dequantize(codes, absmax, weight.shape, torch.float32))
