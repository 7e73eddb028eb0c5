"""Optimizers with the options and the arithmetic of ``torch.optim``, made of optax's parts.

Each stored array has a state of its own, as each parameter has in torch, so that one which got no gradient
is left alone: no decay, no step counted.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

from shardwright.errors import InputError

LearningRate = float | Callable[[Any], Any]
"""A number, or a function from the count of steps done (a jax int32) to one, such as optax's schedules."""


Decayed = Callable[[str, tuple[int, ...]], bool]
"""``decayed(name, shape)``: whether the weight decay is for that parameter; None in its place: for all."""


def _check(owner: str, **numbers: Any) -> None:
    for name, value in numbers.items():
        if not callable(value) and not value >= 0:
            raise InputError(f"{owner}({name}={value!r}): expected a number of at least 0")


@dataclass(frozen=True)
class SGD:
    """``torch.optim.SGD`` for XLA: weight decay is added to the gradient, momentum is summed undamped.

    Args:
        lr: a number, or a function from the count of steps done (a jax int32) to one, such as optax's
            schedules.
        momentum: share of the former update that is kept.
        weight_decay: share of a parameter that is added to its gradient.
        nesterov: look ahead by one momentum.
        decayed: called with the name and shape of a parameter; returns whether the weight decay is for it.
            None: for all.

    Raises:
        InputError: a number is negative, or ``nesterov`` comes without momentum.
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decayed: Decayed | None = None

    state_names = {"momentum_buffer": "trace"}  # noqa: RUF012 (not a field)

    def __post_init__(self) -> None:
        _check("SGD", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not self.momentum:
            raise InputError("SGD(nesterov=True) needs a momentum above 0")

    def transform(self, decayed: bool = True) -> optax.GradientTransformation:
        """What it does to one array.

        Args:
            decayed: whether the array is decayed.

        Returns:
            A transformation of optax.
        """
        parts = []
        if self.weight_decay and decayed:
            parts.append(optax.add_decayed_weights(self.weight_decay))
        if self.momentum:
            parts.append(optax.trace(self.momentum, self.nesterov))
        return optax.chain(*parts, optax.scale_by_learning_rate(self.lr))


@dataclass(frozen=True)
class AdamW:
    """``torch.optim.AdamW`` for XLA: decay apart from the gradient, bias-corrected moments.

    Args:
        lr: a number, or a function from the count of steps done (a jax int32) to one, such as optax's
            schedules.
        betas: decay of both moments, each at least 0 and below 1.
        eps: added to the denominator.
        weight_decay: share of a parameter that is subtracted, times the learning rate.
        decayed: called with the name and shape of a parameter; returns whether the weight decay is for it.
            None: for all.

    Raises:
        InputError: a number is negative, or a beta is outside of these bounds.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decayed: Decayed | None = None

    state_names = {"exp_avg": "mu", "exp_avg_sq": "nu", "step": "count"}  # noqa: RUF012 (not a field)

    def __post_init__(self) -> None:
        _check("AdamW", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"AdamW(betas={self.betas}): each must be at least 0 and below 1")

    def transform(self, decayed: bool = True) -> optax.GradientTransformation:
        """What it does to one array.

        Args:
            decayed: whether the array is decayed.

        Returns:
            A transformation of optax.
        """
        return optax.chain(
            optax.scale_by_adam(*self.betas, self.eps),
            optax.add_decayed_weights(self.weight_decay if decayed else 0.0),
            optax.scale_by_learning_rate(self.lr),
        )


Optimizer = SGD | AdamW
