"""Batches and losses of sequences that are cut over ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.errors import InputError


def part_of(batch: Mapping[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """Part ``rank`` of ``world`` of a batch's sequences. Raises: InputError."""
    if not batch or (first := next(iter(batch.values()))).ndim < 2:
        raise InputError(f"split: got {[*batch]}, expected tensors, the first of them [batch, sequence, ...]")
    length = first.shape[1]
    if length % world:
        raise InputError(
            f"split: {next(iter(batch))!r} has sequences of {length}, which cp={world} ranks can't share "
            f"evenly; pad them to {-(-length // world) * world}, with labels that the loss leaves out"
        )
    if "position_ids" not in batch:
        batch = {**batch, "position_ids": torch.arange(length, device=first.device)[None]}
    return {
        name: tensor.chunk(world, 1)[rank].contiguous()
        if tensor.ndim > 1 and tensor.shape[1] == length
        else tensor
        for name, tensor in batch.items()
    }


def shift_labels(labels: Tensor, position_ids: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Labels of the next token: shifted before the sequence is cut, so that the last token of a rank's part
    learns the first of the next one's. Local.

    Args:
        labels: [batch, sequence] of any dtype, not shifted.
        position_ids: [batch or 1, sequence], int64: of packed documents, each of which begins at 0. The last
            token of a document then learns nothing.
        ignore_index: the label of tokens that learn nothing.

    Returns:
        [batch, sequence], of the same dtype, the last of each row ``ignore_index``.

    Examples:
        >>> shardwright.parallel.shift_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if position_ids is None:
        return shifted
    return shifted.masked_fill(F.pad(position_ids[:, 1:] == 0, (0, 1)), ignore_index)


def document_positions(cu_seqlens: Tensor) -> Tensor:
    """The ``position_ids`` of documents that are packed into one row, from where each begins. Local.

    Args:
        cu_seqlens: int32 or int64 [documents + 1], as FlashAttention takes it: 0, the end of each document.

    Returns:
        int64 [1, sequence], 0 at the first token of each document.

    Examples:
        >>> shardwright.parallel.document_positions(torch.tensor([0, 3, 5]))
        tensor([[0, 1, 2, 0, 1]])
    """
    starts = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff())
    return (torch.arange(len(starts), device=starts.device) - starts)[None]
