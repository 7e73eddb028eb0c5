"""4-bit weights of other libraries: the codes are ours, bit for bit; the scales are kept otherwise.

bitsandbytes (the state dict of a ``Linear4bit``), each under the weight's name::

    weight                                uint8 [numel / 2, 1]: the codes of the flattened weight
    weight.absmax                         float32 [blocks], or uint8 where the scales are quantised again
    weight.nested_absmax, .nested_quant_map   then: the scales of 256 scales, and what the bytes mean
    weight.quant_map                      float32 [16]: the levels
    weight.quant_state.bitsandbytes__nf4  uint8: block size, dtype, shape, ... as JSON

torchao (an ``NF4Tensor``): ``quantized_data``, and scales in int8 with a factor for each 256 and one mean.

Their blocks run over the flattened weight. Rows of a multiple of 64 elements have whole blocks, and only such
weights are taken; for others decode with the library that made them, and quantise.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

from shardwright.errors import InputError
from shardwright.files import json_object, reason_of
from shardwright.quantized import nf4

_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)


def from_bitsandbytes(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turn a state dict with weights of bitsandbytes into one for a model that ``quantize_(model, "nf4")``
    encoded.

    Codes keep their bits; scales are rounded to bfloat16. Local, on the device of the tensors.

    Args:
        state: a state dict with the keys, shapes and dtypes of ``Linear4bit`` (see the top of this module);
            other entries, of any shape and dtype, are passed on.

    Returns:
        A new state dict, with ``weight`` (uint8 [..., cols / 2]) and ``weight_absmax`` (bfloat16 [...,
            cols / 64]) for each encoded weight.

    Raises:
        InputError: a weight has other levels than NF4's, rows that blocks cross, blocks that aren't a
            multiple of 64 elements, or parts that are missing or of another form; it is named.
    """
    names = [key.removesuffix(_STATE) for key in state if key.endswith(_STATE)]
    parts = {name + part for name in names for part in ("", *_PARTS)}
    ours = {key: value for key, value in state.items() if key not in parts}
    for name in names:
        try:
            ours[name], ours[f"{name}_absmax"] = _decoded(state, name)
        except InputError:
            raise
        except Exception as error:  # who reads what anybody may have written raises many kinds
            raise InputError(
                f"{name!r} isn't as bitsandbytes keeps a weight in 4 bits ({reason_of(error)}); see "
                "shardwright.quantized.interchange"
            ) from error
    return ours


def _decoded(state: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    facts = json_object(bytes(state[name + _STATE].tolist()))
    shape, block = tuple(facts["shape"]), facts["blocksize"]
    absmax = state[name + ".absmax"]
    if absmax.dtype == torch.uint8:
        nested = state[name + ".nested_absmax"].repeat_interleave(facts["nested_blocksize"])
        levels = state[name + ".nested_quant_map"][absmax.int()]
        absmax = levels * nested[: absmax.numel()] + facts["nested_offset"]
    _check(name, shape, block, state[name + ".quant_map"])
    return _in_rows(state[name], absmax, shape, block)


def to_bitsandbytes(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The reverse of ``from_bitsandbytes``: a whole state dict with NF4 weights as bitsandbytes keeps it.

    Args:
        state: a state dict of whole tensors, as ``full_state_dict`` gives it.
        dtype: what bitsandbytes is to decode the weights to.

    Returns:
        A new state dict, with the keys, shapes and dtypes of ``Linear4bit``.

    Raises:
        InputError: a weight's rows are no multiple of 64 elements.
    """
    theirs = dict(state)
    for name in [key for key in state if f"{key}_absmax" in state]:
        codes, absmax = state[name], theirs.pop(f"{name}_absmax")
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        if shape[-1] != nf4.BLOCK * absmax.shape[-1]:
            raise InputError(_uneven(name, shape))
        facts = {
            "quant_type": "nf4",
            "blocksize": nf4.BLOCK,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(shape),
        }
        theirs[name] = codes.reshape(-1, 1)
        theirs[name + ".absmax"] = absmax.float().flatten()
        theirs[name + ".quant_map"] = torch.tensor(nf4.LEVELS)
        theirs[name + _STATE] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    return theirs


NF4_ROWS = ("quantized_data", "quantized_scalers", "quantization_factor")
"""Of what torchao's ``NF4Tensor`` is made of, what lies in the order of its rows; the rest is one for all."""

STATE_ROWS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("OptimState8bit", "OptimState4bit", "OptimStateFp8"), ("codes", "scale")
)
"""The same of the states of torchao's 8-bit, 4-bit and fp8 optimizers, by the names of their classes."""


def is_nf4_tensor(weight: Any) -> bool:
    """Whether a tensor is torchao's ``NF4Tensor``, wherever the class lives in its version.

    Args:
        weight: anything.

    Returns:
        True for an ``NF4Tensor``.
    """
    return all(hasattr(weight, name) for name in (*NF4_ROWS, "scaler_mean"))


def from_nf4_tensor(weight: Any, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of torchao's ``NF4Tensor``: its codes as they are, its scales rounded to bfloat16.

    Args:
        weight: an ``NF4Tensor`` of shape [..., cols].
        name: what to call it in an error.

    Returns:
        ``(codes, absmax)``, uint8 [..., cols / 2] and bfloat16 [..., cols / 64].

    Raises:
        InputError: it has other levels than NF4's, rows that blocks cross, or blocks that aren't a multiple
            of 64 elements.
    """
    _check(name, tuple(weight.shape), weight.block_size, weight.nf4)
    scalers = weight.quantized_scalers.float().view(-1, weight.scaler_block_size)
    absmax = scalers / weight.quantization_factor.float().unsqueeze(-1) + weight.scaler_mean.float()
    return _in_rows(weight.quantized_data, absmax.flatten(), tuple(weight.shape), weight.block_size)


def _in_rows(
    codes: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, ...], block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, cols = shape
    scales = absmax.float().repeat_interleave(block // nf4.BLOCK).to(torch.bfloat16)
    return codes.reshape(*lead, cols // 2), scales.reshape(*lead, cols // nf4.BLOCK)


def _check(name: str, shape: tuple[int, ...], block: int, levels: torch.Tensor) -> None:
    # torchao has them with four decimals.
    if not torch.allclose(levels.float().cpu(), torch.tensor(nf4.LEVELS), atol=1e-4):
        raise InputError(f"{name!r} has other levels than NF4's: {levels.tolist()}")
    if block % nf4.BLOCK or shape[-1] % block:
        raise InputError(_uneven(name, shape, block))


def _uneven(name: str, shape: tuple[int, ...], block: int = nf4.BLOCK) -> str:
    return (
        f"{name!r} of shape {list(shape)} in blocks of {block} can't be exchanged: blocks must be a multiple "
        f"of {nf4.BLOCK} and rows of whole blocks. Decode it with the library that made it, and quantise it"
    )
