"""Codecs: how a weight is encoded at rest and on the wire, as plain tensors that are cut by rows.

A codec makes two tensors of a weight, *codes* and *scales*, both with the weight's leading dims; so they are
sharded, saved, loaded and gathered as any parameter is, and no rank needs another's numbers to encode its own
rows. A weight without a codec is *plain*: it travels cast to ``param_dtype``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.quantized import encodings

Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Decode = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Codec:
    """name: in messages. scales: what the scales' parameter is called, after the weight's name.

    encode: ``weight -> (codes, scales)``, each row by itself. decode: the reverse, ``(codes, scales, shape,
        dtype, out=)``.
    """

    name: str
    scales: str
    encode: Encode
    decode: Decode


@dataclass(frozen=True)
class Encoding:
    """How one weight of a module is encoded.

    shape, dtype: of the weight that was encoded. compute_dtype: what it is decoded to.
    per_use: decode it each time it is read ("layer") and not with its group, on arrival ("group").
    """

    codec: Codec
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    per_use: bool

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weight, or of some of its rows or experts those, in the compute dtype."""
        shape = (*codes.shape[:-1], self.shape[-1])
        return self.codec.decode(codes, scales, shape, self.compute_dtype, out=out)


def scales_name(name: str, codec: Codec) -> str:
    """The name of the parameter that holds the scales of ``name``."""
    return f"{name}_{codec.scales}"


def encode_entries(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Encode the entries of a state dict that are whole, plain weights where ``module`` has codes."""
    for name, encoding in encodings(module).items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.is_floating_point() and tuple(value.shape) == encoding.shape:
            codes, scales = encoding.codec.encode(value)
            state[prefix + name] = codes
            state[prefix + scales_name(name, encoding.codec)] = scales
