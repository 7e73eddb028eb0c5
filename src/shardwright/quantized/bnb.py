"""NF4 decoded by bitsandbytes' kernel on CUDA: the one file that uses that library (extra ``[bnb]``).

The kernel multiplies a level by its block's scale in float32 and rounds once. In float32 that is what
``nf4.dequantize`` does in plain torch, bit for bit; in 16 bits, where that rounds the level and the scale
first, results may differ in the last bit, so all ranks should have the extra, or none.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _functional() -> Any:
    found = importlib.util.find_spec("bitsandbytes")
    return None if found is None else importlib.import_module("bitsandbytes.functional")


def decodes(codes: torch.Tensor, cols: int, block: int, dtype: torch.dtype) -> bool:
    """Whether its kernel takes these codes: on CUDA, whole blocks in every row, and the extra installed."""
    fits = codes.device.type == "cuda" and cols % block == 0 and block in _BLOCKS and dtype in _DTYPES
    return fits and _functional() is not None


def decode(codes: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` [rows, cols] from ``codes`` uint8 [rows, cols / 2], ``absmax`` [rows, cols / block] and
    ``levels`` float32 [16], all on one device."""
    functional = _functional()
    state = functional.QuantState(
        absmax=absmax.float().reshape(-1),
        shape=out.shape,
        code=levels,
        blocksize=out.numel() // absmax.numel(),
        quant_type="nf4",
        dtype=out.dtype,
    )
    if codes.device.type == "cuda":
        functional.dequantize_4bit(codes.reshape(-1, 1), state, out=out)
    else:  # its kernels for other devices fill nothing that is there already
        out.copy_(functional.dequantize_4bit(codes.reshape(-1, 1), state))
