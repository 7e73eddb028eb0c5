"""Whether ranks begin with the same weights, of which each keeps its own rows: told by hashes.

Of each tensor up to 16,384 elements are hashed: all of a smaller one, else 16 pieces, evenly spread. So other
seeds and other files are seen, and a difference in a few numbers of a large tensor may not be.
"""

from zlib import crc32

import torch

_PIECES, _PIECE = 16, 1024


def hash_of(tensor: torch.Tensor) -> int | None:
    """A hash of its numbers, sampled; None where it has none here (meta device), or is of another class."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    try:
        return _hash_of(tensor.detach())
    except (RuntimeError, NotImplementedError, TypeError):  # a class that doesn't take these operations
        return None


def _hash_of(tensor: torch.Tensor) -> int:
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
    flat = tensor.permute(order).reshape(-1)  # as it lies in memory
    if flat.numel() > _PIECES * _PIECE:
        step = (flat.numel() - _PIECE) // (_PIECES - 1)
        flat = flat.as_strided((_PIECES, _PIECE), (step, 1), flat.storage_offset()).reshape(-1)
    return crc32(flat.cpu().contiguous().view(torch.uint8).numpy().data)


class Beginning:
    """Hashes of a parameter when it was sharded: of all of it, and of this rank's shard."""

    def __init__(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        self._whole, self._shard = hash_of(whole), hash_of(shard)

    def told(self, shard: torch.Tensor) -> str:
        """What ranks compare: the hash; "written" where the shard isn't what it was, or can't be hashed."""
        if self._whole is None or self._shard is None or hash_of(shard) != self._shard:
            return WRITTEN
        return f"{self._whole:08x}"


WRITTEN = "written"


def differing(texts: list[list[str]]) -> tuple[str, int] | None:
    """The first name of which ranks tell different hashes, and a rank whose isn't that of rank 0; None where
    there is none.

    texts: of each rank a line for each tensor, its name and what it tells. What some rank has written since
    was initialised after it was sharded.
    """
    for lines in zip(*texts, strict=False):
        told = [line.rpartition(" ")[2] for line in lines]
        if WRITTEN not in told and len({*told}) > 1:
            other = next(rank for rank, each in enumerate(told) if each != told[0])
            return lines[0].rpartition(" ")[0], other
    return None
