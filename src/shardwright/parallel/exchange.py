"""What ranks exchange inside of a forward, with gradients: heads for parts of the sequence, rows of
experts, and a loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.recorded import calling
from shardwright.torch_private import ring_attention


def exchange(tensors: Sequence[Tensor], group: dist.ProcessGroup, scatter: int, gather: int) -> list[Tensor]:
    """Each tensor with dim ``scatter`` cut over the ranks of a group and dim ``gather`` joined, in one
    all-to-all. Every rank of the group calls it, with the same shapes; of one dtype."""
    return list(_AllToAll.apply(group, scatter, gather, *tensors))  # type: ignore[arg-type]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        group, scatter, gather, *tensors = args
        ctx.back, world = (group, gather, scatter), group.size()
        parts = [tensor.unflatten(scatter, (world, -1)).movedim(scatter, 0) for tensor in tensors]
        sent = torch.cat([part.reshape(world, -1) for part in parts], 1)
        received = torch.empty_like(sent)
        with calling(group, "all-to-all", sent.device, axis="cp"):
            dist.all_to_all_single(received, sent, group=group)
        arrived = zip(received.split([part[0].numel() for part in parts], 1), parts, strict=True)
        return tuple(got.view(p.shape).movedim(0, gather).flatten(gather, gather + 1) for got, p in arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *exchange(grads, *ctx.back)


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0 of a group, and so on; what comes, in the order of ranks.
    Every rank of the group calls it, and takes part in its backward."""
    return _RowsToRanks.apply(rows, sent, received, group)  # type: ignore[no-any-return]


class _RowsToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        rows, sent, received, group = args
        ctx.back = received, sent, group
        came = rows.new_empty(sum(received), *rows.shape[1:])
        met = all(received)  # else a rank may leave before the one that has no rows for it comes
        with calling(group, "all-to-all", rows.device, met, axis="ep"):
            dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return exchange_rows(grads[0], *ctx.back), None, None, None


def reduced(tensor: Tensor, reduce: Callable[[Tensor], Tensor], forward: bool) -> Tensor:
    """What ``reduce`` makes of it in the forward, or of its gradient in the backward."""
    return _Reduced.apply(tensor, reduce, forward)  # type: ignore[no-any-return]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        tensor, ctx.reduce, ctx.forward = args
        return ctx.reduce(tensor) if ctx.forward else tensor.view_as(tensor)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] if ctx.forward else ctx.reduce(grads[0]), None, None


def mean_of_all(total: Tensor, number: Tensor | int, group: dist.ProcessGroup) -> Tensor:
    """The sum of 0-d ``total`` over a group's ranks, divided by that of ``number``; the gradient is so many
    times larger as the group has ranks. Every rank of the group calls it."""
    return _Mean.apply(total, number, group)  # type: ignore[no-any-return]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        total, number, group = args
        number = torch.as_tensor(number, device=total.device)
        sums = torch.stack([total.double(), number.double()])  # fp32 counts up to 16 million tokens only
        with calling(group, "all-reduce", sums.device):
            dist.all_reduce(sums, group=group)
        whole = sums[1].clamp(min=1)  # without tokens the loss is 0, and so are gradients
        ctx.factor = group.size() / whole
        return (sums[0] / whole).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] * ctx.factor).to(grads[0].dtype), None, None


_REST = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""What flash kernels of devices return besides, and want back."""


def ring(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention by torch's ring (Liu et al. 2023, arXiv:2310.01889): keys and values go round the ranks.
    [batch, heads, sequence / cp, size] -> the same. Every rank of the group calls it, and takes part in its
    backward. Without dropout."""
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
