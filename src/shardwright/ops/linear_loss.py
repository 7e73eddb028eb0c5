"""The loss over a large vocabulary, without all of its logits at once."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.errors import InputError, StageError

_CHUNK_NUMEL = 1 << 26
"""Logits that there are at once, at most: 256 MiB in fp32."""
_LEAST_CHUNKS = 32


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """The summed cross-entropy of a linear head over a large vocabulary, without storing all logits at once.

    Equal to ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")``, but only
    some rows' logits exist at a time: at most 256 MiB of them, and at most a 32nd of all. The gradients are
    made in the forward, with each chunk's logits, so nothing is computed twice (as Liger Kernel does it,
    arXiv:2410.10989), except that the gradient of a bf16 ``weight`` takes the logits once more: four matrix
    products instead of three, and no sum in fp32. Torch's ``F.linear_cross_entropy`` does the same, but with
    bf16 weights its loss is in bf16, 1% off.

    Call it while ``weight`` is unsharded: in the forward of the module that has it. No communication. Until
    the backward it holds the gradients of ``hidden`` and ``weight`` in their dtypes (of an fp16 ``weight`` in
    fp32) and that of ``bias`` in fp32, for each of them that requires a gradient. Second derivatives aren't
    supported.

    Args:
        hidden: [n, width], floating point.
        weight: [vocabulary, width], of the same dtype.
        targets: int64 [n], each below ``vocabulary``, or ``ignore_index``.
        bias: [vocabulary], of the same dtype, or None.
        ignore_index: rows with this target don't count.

    Returns:
        The sum over rows in nats, fp32 of shape (). Divide it by the number of targets for the mean.

    Raises:
        InputError: the shapes don't fit each other.
        StageError: raised by its backward, if that runs a second time.

    Examples:
        >>> head = nn.Linear(16, 1000, bias=False)
        >>> hidden, targets = torch.randn(6, 16), torch.randint(1000, (6,))
        >>> loss = shardwright.linear_cross_entropy(hidden, head.weight, targets) / len(targets)
        >>> torch.testing.assert_close(loss, F.cross_entropy(head(hidden), targets))
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise InputError(
            f"linear_cross_entropy: got hidden {list(hidden.shape)}, weight {list(weight.shape)} and targets "
            f"{list(targets.shape)}, expected [n, width], [vocabulary, width] and [n]; flatten the batch"
        )
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, ignore_index, wanted)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        hidden, weight, bias, targets, ignored, (of_hidden, of_weight, of_bias) = args
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        totals = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        learned = (targets != ignored)[:, None]
        wanted = targets[:, None].where(learned, 0)
        by_words = of_weight and weight.dtype == torch.bfloat16
        grads = [
            torch.empty_like(hidden) if of_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if of_weight and not by_words else None,
            torch.zeros_like(bias, dtype=torch.float32) if of_bias else None,
        ]
        for rows in _chunks(len(hidden), len(weight)):
            logits = F.linear(hidden[rows], weight, bias).float()
            total = torch.logsumexp(logits, 1, keepdim=True, out=totals[rows])
            loss += (total - logits.gather(1, wanted[rows])).where(learned[rows], 0.0).sum()
            if any(args[-1]):
                _add(grads, rows, hidden, weight, _of_logits(logits, total, wanted[rows], learned[rows]))
            del logits  # before the next ones are made
        if by_words:
            grads[1] = _of_weight(hidden, weight, bias, wanted, learned, totals)
        ctx.grads, ctx.dtypes = grads, [None if t is None else t.dtype for t in (hidden, weight, bias)]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> Any:  # type: ignore[override]
        if ctx.grads is None:
            raise StageError(
                "linear_cross_entropy: its backward ran a second time, and its gradients are gone after the "
                "first; call it again for another backward"
            )
        pairs = zip(ctx.grads, ctx.dtypes, strict=True)
        scaled = [None if grad is None else grad.mul_(of_loss).to(dtype) for grad, dtype in pairs]
        ctx.grads = None
        return *scaled, None, None, None


def _chunks(size: int, across: int) -> Iterator[slice]:
    """Return chunks of ``size`` rows or words, each with ``across`` of the others: the logits at once."""
    each = max(1, min(_CHUNK_NUMEL // max(1, across), -(-size // _LEAST_CHUNKS)))
    yield from (slice(first, min(first + each, size)) for first in range(0, size, each))


def _of_logits(logits: Tensor, total: Tensor, wanted: Tensor, learned: Tensor) -> Tensor:
    """Write over ``logits`` their softmax, less 1 at the wanted word if that is among them."""
    of_logits = logits.sub_(total).exp_()
    here = (wanted >= 0) & (wanted < logits.shape[1])
    of_logits.scatter_add_(1, wanted.where(here, 0), -here.float())
    return of_logits.mul_(learned)


def _add(grads: list[Tensor | None], rows: slice, hidden: Tensor, weight: Tensor, of_logits: Tensor) -> None:
    """Add to the gradients what the loss of some rows gives."""
    of_hidden, of_weight, of_bias = grads
    if of_hidden is not None:
        torch.mm(of_logits.to(hidden.dtype), weight, out=of_hidden[rows])
    if of_weight is not None:
        of_weight.addmm_(of_logits.T, hidden[rows].float())
    if of_bias is not None:
        of_bias += of_logits.sum(0)


def _of_weight(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, learned: Tensor, totals: Tensor
) -> Tensor:
    """The gradient in the weight's dtype, some words at a time: each is summed over all rows in one product,
    so that no fp32 sum as large as the weight is stored. It makes the logits again: a fourth product."""
    grad = torch.empty_like(weight)
    for words in _chunks(len(weight), len(hidden)):
        logits = F.linear(hidden, weight[words], None if bias is None else bias[words]).float()
        narrow = _of_logits(logits, totals, wanted - words.start, learned).to(hidden.dtype)
        del logits
        torch.mm(narrow.T, hidden, out=grad[words])
    return grad
