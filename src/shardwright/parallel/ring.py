"""Attention over sequences that are cut over ranks, by torch's ring: keys and values go round, heads stay.

Ring attention (Liu et al. 2023, arXiv:2310.01889) as ``torch.distributed.tensor.experimental`` has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.torch_private import ring_attention

_REST = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""What flash kernels of devices return besides, and want back."""


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """[batch, heads, sequence / cp, size] of each rank's part -> the same, of whole sequences. Every rank of
    the group calls it, and takes part in its backward. Without dropout."""
    return _Ring.apply(query, key, value, group, is_causal, scale)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, group, is_causal, scale = args
        ctx.given = {"group": group, "is_causal": is_causal, "scale": scale, "dropout_p": 0.0}
        run, ctx.back, ctx.options = ring_attention(query.device.type)
        with _of_parts(ctx.options, query.dtype):
            out, sums, *rest = run(query=query, key=key, value=value, **ctx.given)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.given |= dict(zip(_REST, rest, strict=False))
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        with _of_parts(ctx.options, query.dtype):
            found = ctx.back(
                grad_out=grads[0].contiguous(), query=query, key=key, value=value, out=out, logsumexp=sums,
                **ctx.given,
            )  # fmt: skip
        return *found[:3], None, None, None


@contextmanager
def _of_parts(options: Any, dtype: torch.dtype) -> Iterator[None]:
    """Torch's options meanwhile: ranks have parts in their order (``mesh.split``), not halves of two that
    balance the load; and what is double stays so."""
    before = vars(options).copy()
    options.enable_load_balance, options.convert_to_f32 = False, dtype != torch.float64
    try:
        yield
    finally:
        vars(options).update(before)
