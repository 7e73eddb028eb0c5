"""The codecs that ``quantize_`` offers, by name."""

import torch

from shardwright.errors import InputError
from shardwright.quantized import nf4
from shardwright.quantized.codec import Codec


def _encode_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded to 255 levels of each row's largest magnitude: int8 ``[..., cols]``, float32 ``[..., 1]``."""
    rows = weight.detach().float()
    scale = rows.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, rows / scale, 0.0).round_().to(torch.int8)
    return codes, scale


def _decode_int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device=codes.device) if out is None else out
    return torch.mul(codes, scale, out=out) if dtype == torch.float32 else out.copy_(codes).mul_(scale)


NF4 = Codec("nf4", "absmax", nf4.quantize, nf4.dequantize)
INT8 = Codec("int8", "scale", _encode_int8, _decode_int8)
NF4_DOUBLE = Codec("nf4-double", "scales", nf4.quantize_double, nf4.dequantize_double)
CODECS = {codec.name: codec for codec in (NF4, NF4_DOUBLE, INT8)}


def codec_of(name: str) -> Codec:
    """The codec of that name. Raises: InputError."""
    if name not in CODECS:
        raise InputError(f"codec must be one of {sorted(CODECS)}, got {name!r}")
    return CODECS[name]
