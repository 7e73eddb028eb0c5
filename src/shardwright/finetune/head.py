"""The loss at a model's head, in place of its logits, which take more memory than a model of many words."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.data.windows import IGNORED
from shardwright.ops.linear_loss import linear_cross_entropy

_log = logging.getLogger(__name__)
_PROBE = 8  # tokens of the first batch that both ways are tried on
_EQUAL = 0.01  # of the loss: compute may be in bf16


class HeadLoss:
    """What calls ``model`` (of transformers) for the loss of its tokens.

    The head is a ``nn.Linear`` whose forward is given the targets, and returns the loss where the model
    expects logits: it is unsharded there, as for any forward. A model that does more to its logits (scales
    or caps them), or has another head, makes all of them; so does one whose loss differs on the first tokens.
    call: in place of ``model``, what is called as that.
    """

    def __init__(self, model: Any, call: Callable[..., Any] | None = None) -> None:
        self._model, self._call = model, call or model
        self._targets, self._returned, self._at_once = None, None, 1
        head: Any = model.get_output_embeddings()
        plain = type(head).forward is nn.Linear.forward and "forward" not in vars(head)
        self._head: Any = head if plain else None
        self._is_tried = False
        if plain:
            self._whole = head.forward
            head.forward = self._forward

    def __call__(self, inputs: Tensor, targets: Tensor, *, by_row: bool = False, **arguments: Any) -> Tensor:
        """Sum of the cross-entropies, nats, fp32: of all, (), or ``by_row``, [b]. inputs, targets: int64
        [b, t], ``IGNORED`` where a token isn't learned. Every rank calls it, the first time for a short
        forward more.
        """
        if self._head is not None and not self._is_tried:
            self._try(inputs, targets, **arguments)
        if self._head is None:
            return self._of_logits(inputs, targets, by_row, **arguments)
        return self._at_head(inputs, targets, by_row, **arguments)

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._targets is None:
            return self._whole(hidden)
        head = self._head
        parts = zip(hidden.split(self._at_once), self._targets.split(self._at_once), strict=True)
        losses = [
            linear_cross_entropy(rows.flatten(0, 1), head.weight, wanted.flatten(), head.bias, IGNORED)
            for rows, wanted in parts
        ]
        self._returned = torch.stack(losses).view(-1, 1, 1)
        return self._returned

    @property
    def is_at_head(self) -> bool:
        """Whether the loss is made in the head's forward, as far as is known."""
        return self._head is not None

    @contextmanager
    def returning_losses(self, targets: Tensor, by_row: bool = False) -> Iterator[None]:
        """Within it the head, if it can, returns the loss of ``targets``, float32 [1 or b, 1, 1]."""
        self._targets, self._at_once = targets, 1 if by_row else len(targets)
        try:
            yield
        finally:
            self._targets = self._returned = None

    def is_returned(self, logits: Tensor) -> bool:
        """Within ``returning_losses``: whether the model's ``logits`` are what its head has returned."""
        return logits is self._returned

    def _at_head(self, inputs: Tensor, targets: Tensor, by_row: bool, **arguments: Any) -> Tensor:
        with self.returning_losses(targets, by_row):
            losses = self._call(input_ids=inputs, use_cache=False, **arguments).logits.flatten()
            return losses if by_row else losses.squeeze(0)

    def _of_logits(self, inputs: Tensor, targets: Tensor, by_row: bool, **arguments: Any) -> Tensor:
        logits = self._call(input_ids=inputs, use_cache=False, **arguments).logits.float()
        how = {"ignore_index": IGNORED, "reduction": "none" if by_row else "sum"}
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how)
        return losses.view(targets.shape).sum(1) if by_row else losses

    @torch.no_grad()
    def _try(self, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> None:
        """Whether what the head returns is the model's loss: of the first tokens, as if all were learned."""
        self._is_tried = True
        first, wanted = inputs[:1, :_PROBE], targets[:1, :_PROBE].clamp(min=0)
        first_of = {k: v[:1, :_PROBE] for k, v in arguments.items()}
        trains = self._model.training
        self._model.eval()
        ours = self._at_head(first, wanted, False, **first_of)
        theirs = self._of_logits(first, wanted, False, **first_of)
        self._model.train(trains)
        if not torch.allclose(ours, theirs, rtol=_EQUAL):
            self._head = None
            _log.warning(
                "%s changes what its head returns: the loss is made of all logits at once, %d KB a token",
                type(self._model).__name__,
                4 * self._model.config.vocab_size // 1000,
            )
