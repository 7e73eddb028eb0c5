"""Zeros in a gradient, which needn't be sent: an embedding's has rows for the tokens in use, an expert's that
saw no token has none.

A message then is what it would be without them, and says where its parts lie. The receiver puts zeros in
between, so every sum is the same bit for bit (only +0.0 is left out: -0.0 has a bit that is set).
"""

import functools

import torch

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))
BLOCK_NBYTES = 1024  # a row of 256 floats; finer cuts make more parts than they save bytes
SMALL_NBYTES = 256 << 10
_SAMPLES = 64
_GOLDEN = (5**0.5 - 1) / 2  # its multiples fall evenly, and in step with no stride of rows


def filled_runs(part: torch.Tensor) -> list[tuple[int, int]] | None:
    """``(start, stop)`` bytes of ``part`` (host, contiguous) outside of which all bits are zero, in order.

    None where that would save little: for less than 256 KiB, or where more than three quarters are filled.
    Looks at 64 places first (10 us); only a part that has zeros there is read as a whole (0.08 ms per MiB).
    """
    if part.nbytes < SMALL_NBYTES:
        return None
    whole = part.nbytes // BLOCK_NBYTES
    begin = part.storage_offset() * part.element_size()
    word = next(dtype for nbytes, dtype in _WORDS if begin % nbytes == 0)
    flat = part.view(torch.uint8)
    blocks = flat[: whole * BLOCK_NBYTES].view(word).view(whole, -1)
    sample = blocks[_places(whole), 0]
    if 4 * int(sample.count_nonzero()) > 3 * sample.numel():
        return None
    none = torch.zeros(1, dtype=torch.bool)
    filled = torch.cat([none, blocks.any(1), flat[whole * BLOCK_NBYTES :].any()[None], none]).to(torch.int8)
    edges = filled.diff()
    starts, stops = ((edges == step).nonzero().flatten() * BLOCK_NBYTES for step in (1, -1))
    stops = stops.clamp(max=part.nbytes)
    if 4 * int((stops - starts).sum()) > 3 * part.nbytes:
        return None
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


@functools.lru_cache(maxsize=256)
def _places(num_blocks: int) -> torch.Tensor:
    return torch.tensor([int(k * _GOLDEN % 1 * num_blocks) for k in range(_SAMPLES)])
