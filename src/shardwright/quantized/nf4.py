"""NF4: weights in 4 bits, as two plain tensors. Pure arithmetic; no ranks, no modules.

A row of ``cols`` elements is cut into blocks of 64; each block is divided by its largest magnitude, and each
element replaced by the nearest of 16 levels (quantiles of a normal distribution; Dettmers et al., QLoRA,
arXiv:2305.14314)::

    weight   [..., rows, cols]
    codes    [..., rows, ceil(cols / 2)]    uint8, the earlier element in the high half
    absmax   [..., rows, ceil(cols / 64)]   bfloat16, the scale of each block

No block crosses rows (the last one of a row may be shorter), so rows can be cut anywhere: quantising some of
the rows gives the same bits as quantising all of them. Scales quantised a second time save 0.015 bytes of
0.531 a parameter; as others do it, that ties every row to numbers that only all ranks together know. Here the
second level stays inside the row too (``quantize_double``)::

    scales   [..., rows, ceil(cols / 64) + 2]   uint8: each block's place on a ladder of 255 scales below the
                                                row's largest (a factor of 2 has 32 rungs; 255 is zero), and
                                                that largest one, as the two bytes of a bfloat16
"""

from functools import cache

import torch

from shardwright.errors import InputError
from shardwright.quantized import bnb

BLOCK = 64

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The 16 levels, those of bitsandbytes (the paper's authors), so that codes can be exchanged."""

_CHUNK_NUMEL = 1 << 19
"""Elements decoded at a time: indices and results stay in the cache (1.8 instead of 0.7 G elements/s)."""


def quantize(
    weight: torch.Tensor, block: int = BLOCK, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a weight in NF4: two elements to a byte, and one scale for each block.

    A block of zeros has scale 0. On the meta device only the shapes of the result are right. Pure arithmetic
    on the weight's device, of all rows or of some with the same bits.

    Args:
        weight: floating point, [..., cols], with at least one dim.
        block: elements that share a scale; even.
        scale_dtype: dtype of the scales; ``torch.float32`` gives the codes of bitsandbytes.

    Returns:
        ``(codes, absmax)``, uint8 [..., ceil(cols / 2)] with the earlier element in the high half of a byte,
            and ``scale_dtype`` [..., ceil(cols / block)].

    Raises:
        InputError: the weight isn't floating point or has no dims, or ``block`` is odd or below 2.

    Examples:
        >>> weight = torch.randn(4, 128)
        >>> codes, absmax = shardwright.quantized.nf4.quantize(weight)
        >>> codes.shape, absmax.shape
        (torch.Size([4, 64]), torch.Size([4, 2]))
        >>> decoded = shardwright.quantized.nf4.dequantize(codes, absmax, weight.shape, torch.float32)
        >>> bool((decoded - weight).norm() < 0.15 * weight.norm())
        True
    """
    if block < 2 or block % 2:
        raise InputError(f"block must be an even number of elements, at least 2, got {block}")
    _check_weight(weight)
    cols, lead = weight.shape[-1], weight.shape[:-1]
    if weight.is_meta:
        codes = weight.new_empty((*lead, -(-cols // 2)), dtype=torch.uint8)
        return codes, weight.new_empty((*lead, -(-cols // block)), dtype=scale_dtype)
    blocks = _in_blocks(weight, block)
    absmax = blocks.abs().amax(-1).to(scale_dtype)
    return _nearest(blocks, absmax, cols), absmax


def quantize_double(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize`` in blocks of 64, with the scales themselves in one byte each.

    Args:
        weight: floating point, [..., cols], with at least one dim.

    Returns:
        ``(codes, scales)``, uint8 [..., ceil(cols / 2)] and uint8 [..., ceil(cols / 64) + 2]. The last two
            bytes of a row's scales are its largest scale, as a bfloat16.

    Raises:
        InputError: the weight isn't floating point or has no dims.
    """
    if weight.is_meta:
        codes, absmax = quantize(weight)
        return codes, absmax.new_empty((*absmax.shape[:-1], absmax.shape[-1] + 2), dtype=torch.uint8)
    _check_weight(weight)
    blocks = _in_blocks(weight, BLOCK)
    scales = _compress(blocks.abs().amax(-1))
    return _nearest(blocks, _expand(scales), weight.shape[-1]), scales


def dequantize_double(
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode what ``quantize_double`` gave.

    Args:
        codes: uint8 [..., ceil(cols / 2)].
        scales: uint8 [..., ceil(cols / 64) + 2].
        shape: that of the weight, [..., cols].
        dtype: of the result.
        out: a contiguous tensor of ``shape`` and ``dtype`` to fill; None: a fresh one.

    Returns:
        The weight, of ``shape`` and ``dtype``, on the device of the codes; ``out`` where it was given.

    Raises:
        InputError: the shapes don't belong together.
    """
    return dequantize(codes, _expand(scales), shape, dtype, out=out)


def dequantize(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype = torch.bfloat16,
    block: int = BLOCK,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode what ``quantize`` gave; of normally distributed weights the error is about 9%.

    Method: pairs of codes index a table of two (or four) finished values; then one multiplication in place.
    On CUDA it is bitsandbytes' kernel, where that is installed (see ``bnb``).

    Args:
        codes: uint8 [..., ceil(cols / 2)].
        absmax: the scales, [..., ceil(cols / block)], of any floating point dtype.
        shape: that of the weight, [..., cols].
        dtype: of the result.
        block: the one that the weight was quantised with.
        out: a contiguous tensor of ``shape`` and ``dtype`` to fill; None: a fresh one.

    Returns:
        The weight, of ``shape`` and ``dtype``, on the device of the codes; ``out`` where it was given.

    Raises:
        InputError: the shapes don't belong together.
    """
    cols = shape[-1]
    _check(tuple(codes.shape), tuple(absmax.shape), tuple(shape), block)
    out = torch.empty(shape, dtype=dtype, device=codes.device) if out is None else out
    if out.numel() == 0 or out.is_meta:
        return out
    # Either may lie with another dim first, as a weight sharded on that dim does.
    codes = codes.contiguous().view(-1, codes.shape[-1])
    target = out.view(-1, cols)
    if bnb.decodes(codes, cols, block, dtype):
        bnb.decode(codes, absmax, _levels(codes.device), target)
        return out
    absmax = absmax.to(dtype).reshape(-1, absmax.shape[-1])
    step = max(1, _CHUNK_NUMEL // cols) if codes.device.type == "cpu" else len(codes)
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        _look_up(codes[rows], target[rows])
        _scale(target[rows], absmax[rows], block)
    return out


def _check_weight(weight: torch.Tensor) -> None:
    if not weight.is_floating_point() or weight.ndim < 1:
        raise InputError(
            f"nf4.quantize takes a floating-point tensor with at least one dim, got {weight.dtype} of shape "
            f"{list(weight.shape)}"
        )


def _in_blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [..., rows, blocks, block], the last block of a row filled up with zeros."""
    cols = weight.shape[-1]
    num_blocks = -(-cols // block)
    padded = torch.nn.functional.pad(weight.detach().float(), (0, num_blocks * block - cols))
    return padded.reshape(*weight.shape[:-1], num_blocks, block)


def _nearest(blocks: torch.Tensor, absmax: torch.Tensor, cols: int) -> torch.Tensor:
    """The codes of the first ``cols`` elements of each row, two to a byte."""
    # Times the reciprocal, as the oracle does: a division rounds otherwise at the boundaries of levels.
    inverse = torch.where(absmax > 0, absmax.float().reciprocal(), 0.0)
    nearest = torch.bucketize((blocks * inverse.unsqueeze(-1)).flatten(-2), _boundaries(blocks.device))
    codes = nearest.to(torch.uint8)[..., : cols + cols % 2]
    return (codes[..., ::2] << 4) | codes[..., 1::2]


def _compress(absmax: torch.Tensor) -> torch.Tensor:
    largest = absmax.amax(-1, keepdim=True).bfloat16()
    # The ladder is searched and not computed: a logarithm may round otherwise for rows by themselves.
    relative = torch.where(largest > 0, absmax / largest.float(), 0.0)
    ascending = _ladder(absmax.device).flip(0)
    rung = 255 - torch.bucketize(relative, (ascending[1:] + ascending[:-1]) / 2)
    return torch.cat([rung.to(torch.uint8), largest.view(torch.uint8)], -1)


def _expand(scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., blocks]"""
    largest = scales[..., -2:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    return _ladder(scales.device)[scales[..., :-2].int()] * largest


def _check(codes: tuple[int, ...], absmax: tuple[int, ...], shape: tuple[int, ...], block: int) -> None:
    lead, cols = tuple(shape[:-1]), shape[-1]
    expected = (*lead, -(-cols // 2)), (*lead, -(-cols // block))
    if (codes, absmax) != expected:
        raise InputError(
            f"codes {list(codes)} and absmax {list(absmax)} don't make a weight of shape {list(shape)} in "
            f"blocks of {block}: expected codes {list(expected[0])} and absmax {list(expected[1])}"
        )


def _look_up(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` [rows, cols] with the levels of ``codes`` [rows, ceil(cols / 2)]."""
    cols = out.shape[-1]
    if cols % 2:
        whole = out.new_empty(len(out), cols + 1)
        _look_up(codes, whole)
        out.copy_(whole[:, :cols])
        return
    wide = cols % 4 == 0 and out.element_size() == 2
    index, packed = (codes.view(torch.uint16), torch.int64) if wide else (codes, _PACKED[out.element_size()])
    table = _table(out.dtype, 2 if wide else 1, out.device)
    torch.index_select(table, 0, index.reshape(-1).to(torch.int32), out=out.view(packed).view(-1))


def _scale(out: torch.Tensor, absmax: torch.Tensor, block: int) -> None:
    cols = out.shape[-1]
    whole = cols // block * block
    out[:, :whole].unflatten(1, (-1, block)).mul_(absmax[:, : cols // block].unsqueeze(-1))
    if whole < cols:
        out[:, whole:].mul_(absmax[:, -1:])


_PACKED = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
"""Size of an element -> a dtype as wide as two of them."""


# Tables are made once for each device: a copy to one makes its host wait for all that it has queued.
@cache
def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


@cache
def _boundaries(device: torch.device) -> torch.Tensor:
    """The 15 midpoints between levels."""
    return (_levels(device)[1:] + _levels(device)[:-1]) / 2


@cache
def _ladder(device: torch.device) -> torch.Tensor:
    """float32 [256]: 2 ** (-rung / 32), and zero."""
    rungs = torch.exp2(-torch.arange(255, dtype=torch.float64) / 32)
    return torch.cat([rungs, rungs.new_zeros(1)]).float().to(device)


@cache
def _table(dtype: torch.dtype, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return for each value of one or two bytes of codes its elements' levels, as one integer."""
    levels = torch.tensor(LEVELS).to(dtype)
    values = torch.arange(256**num_bytes)
    elements = []
    for place in range(num_bytes):  # little-endian: the first byte is the low one
        byte = (values >> (8 * place)) & 255
        elements += [levels[byte >> 4], levels[byte & 15]]
    packed = torch.int64 if num_bytes == 2 else _PACKED[dtype.itemsize]
    return torch.stack(elements, 1).contiguous().view(packed).view(-1).to(device)
