"""The loss over a large vocabulary, without all of its logits at once."""

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
    arXiv:2410.10989). Torch's ``F.linear_cross_entropy`` does the same, but with bf16 weights its loss is in
    bf16, 1% off.

    Call it while ``weight`` is unsharded: in the forward of the module that has it. No communication. Until
    the backward it holds the gradient of ``hidden`` in its dtype, and those of ``weight`` and ``bias`` in
    fp32, for each of them that requires a gradient. Second derivatives aren't supported.

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
        grads = [
            torch.empty_like(hidden) if of_hidden else None,
            torch.zeros_like(weight, dtype=torch.float32) if of_weight else None,
            torch.zeros_like(bias, dtype=torch.float32) if of_bias else None,
        ]
        rows = max(1, min(_CHUNK_NUMEL // len(weight), -(-len(hidden) // _LEAST_CHUNKS)))
        for first in range(0, len(hidden), rows):
            some, wanted = hidden[first : first + rows], targets[first : first + rows, None]
            learned = wanted != ignored
            wanted = wanted.where(learned, 0)
            logits = F.linear(some, weight, bias).float()
            total = logits.logsumexp(1, keepdim=True)
            loss += (total - logits.gather(1, wanted)).where(learned, 0.0).sum()
            if not any(args[-1]):
                continue
            of_logits = logits.sub_(total).exp_()  # softmax, less 1 at the target
            of_logits.scatter_add_(1, wanted, torch.full_like(total, -1.0))
            of_logits.mul_(learned)
            if grads[2] is not None:
                grads[2] += of_logits.sum(0)
            narrow = of_logits.to(hidden.dtype)
            if grads[0] is not None:
                torch.mm(narrow, weight, out=grads[0][first : first + rows])
            if grads[1] is not None and narrow.dtype == grads[1].dtype:
                grads[1].addmm_(narrow.T, some)
            elif grads[1] is not None:
                grads[1] += narrow.T @ some
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
