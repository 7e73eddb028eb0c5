"""What a step of fine-tuning makes small: the loss of a batch, and what it is the mean over."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.data.windows import Batch
from shardwright.finetune.head import HeadLoss
from shardwright.lora import without_adapters
from shardwright.recipe.config import Recipe
from shardwright.recipe.named import named


class Objective(Protocol):
    """What is learned of a batch: a loss of each token, or of each pair of answers."""

    def count(self, batch: Batch) -> int:
        """How many tokens, or pairs, of ``batch`` have a loss."""
        ...

    def total(self, batch: Batch) -> Tensor:
        """The sum of the losses of all of them, fp32 (), on the model's device. Every rank calls."""
        ...

    def step_sums(self) -> tuple[int, dict[str, float]]:
        """How many of that were trained on since ``begin_step``, and sums over them, by the key that their
        mean has in ``metrics.jsonl``. Waits for the device. Empty where there is only the loss."""
        ...

    def begin_step(self) -> None:
        """Forget what was trained on before."""
        ...


class TokenLoss:
    """The cross-entropy of each learned token, in nats; or ``own(logits, targets)`` of them.

    own: given logits [b, t, words] in the dtype of the model's head and targets int64 [b, t], ``IGNORED``
    (-100) where nothing is learned; returns the sum over the others. call: as of ``HeadLoss``.
    """

    def __init__(
        self,
        model: Any,
        own: Callable[[Tensor, Tensor], Tensor] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self._call, self._own = call or model, own
        self._head_loss = None if own else HeadLoss(model, call)

    def count(self, batch: Batch) -> int:
        """See ``Objective``."""
        return batch.num_targets

    def total(self, batch: Batch) -> Tensor:
        """See ``Objective``."""
        positions: dict[str, Any] = {} if batch.positions is None else {"position_ids": batch.positions}
        if self._head_loss is not None:
            return self._head_loss(batch.inputs, batch.targets, **positions).sum()
        assert self._own is not None
        logits = self._call(input_ids=batch.inputs, use_cache=False, **positions).logits
        return self._own(logits, batch.targets).float()

    def step_sums(self) -> tuple[int, dict[str, float]]:
        """See ``Objective``."""
        return 0, {}

    def begin_step(self) -> None:
        """See ``Objective``."""


class PreferenceLoss:
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290) of pairs: all chosen answers of a
    batch, then in the same order those that were rejected. The loss of a pair::

        -log sigmoid(beta * ((log p(chosen) - log p(rejected)) - (log q(chosen) - log q(rejected))))

    with p the model, and q the same one with its adapters switched off. What the sigmoid is taken of is by
    how much the implicit reward of the chosen answer is the larger one: of a step its mean
    (``rewards/margins``), and the share of pairs in which it is above 0 (``rewards/accuracies``), as TRL
    calls them.
    """

    def __init__(self, model: Any, beta: float) -> None:
        self._model, self._beta, self._head_loss = model, beta, HeadLoss(model)
        self._margins: list[Tensor] = []  # of the rewards of a step's pairs

    def count(self, batch: Batch) -> int:
        """See ``Objective``."""
        return len(batch.inputs) // 2

    def total(self, batch: Batch) -> Tensor:
        """See ``Objective``."""
        trains = self._model.training
        with torch.no_grad(), without_adapters(self._model):
            self._model.eval()
            reference = self._margin(batch)
            self._model.train(trains)
        margins = self._beta * (self._margin(batch) - reference)
        if trains:
            self._margins.append(margins.detach())
        return -F.logsigmoid(margins).sum()

    def step_sums(self) -> tuple[int, dict[str, float]]:
        """See ``Objective``."""
        margins = torch.cat(self._margins)
        right, total = torch.stack([(margins > 0).float().sum(), margins.sum()]).tolist()
        return len(margins), {"rewards/accuracies": right, "rewards/margins": total}

    def begin_step(self) -> None:
        """See ``Objective``."""
        self._margins = []

    def _margin(self, batch: Batch) -> Tensor:
        """Return by how much each chosen answer is likelier than the rejected one, in nats, fp32 [pairs]."""
        chosen, rejected = self._head_loss(batch.inputs, batch.targets, by_row=True).chunk(2)
        return rejected - chosen


def objective_of(recipe: Recipe, model: Any, call: Callable[..., Any] | None = None) -> Objective:
    """What ``training.loss`` names. call: in place of ``model``, what is called as that.

    Raises: InputError where it names a function that isn't there."""
    training = recipe.training
    if training.loss == "dpo":
        return PreferenceLoss(model, training.dpo_beta)
    own = None if training.loss == "cross-entropy" else named("training.loss", training.loss)
    return TokenLoss(model, own, call)
