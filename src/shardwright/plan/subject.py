"""What is to be planned: a module that is traced, or a row of numbers; by rows and tokens of a sample.

Both give workloads; ``estimate``, ``search`` and the inverse questions are the same from there on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from shardwright.plan.axes import ALONE, AxisSizes
from shardwright.plan.events import cut_from
from shardwright.plan.predict import (
    Choice,
    a_microbatch,
    chosen_groups,
    first_tensor,
    resized,
    workload_of,
)
from shardwright.plan.transformer import Architecture, Microbatch, workload
from shardwright.plan.workload import Workload


@dataclass(frozen=True)
class Subject:
    """A model and a microbatch, as the input of ``largest_batch`` and the other questions.

    Attributes:
        modules: names of the modules of each group, in the order of the workload's groups; ``("",)`` is the
            group of the model's own parameters, ``()`` a group that was split off another one.
        rows: of a microbatch on one rank.
        sequence: tokens of a row; None if the sample has no such dim.
        at: takes rows and tokens of a row, and returns the workload of such a microbatch.
        numbers: of a model that was given as such, and the microbatch; else None.
    """

    modules: tuple[tuple[str, ...], ...]
    rows: int
    sequence: int | None
    at: Callable[[int, int | None], Workload]
    numbers: tuple[Architecture, Microbatch] | None = None

    @property
    def workload(self) -> Workload:
        """The workload of the microbatch that was asked about."""
        return self.at(self.rows, self.sequence)


def of_model(
    model: nn.Module | Architecture,
    sample: Any,
    choice: Choice | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Subject:
    """A model and a sample, for ``largest_batch`` and the other questions; each size is traced once, when it
    is needed.

    Args:
        model: as ``estimate``.
        sample: as ``estimate``; a tensor's first dim is its rows, its second its tokens.
        choice: as ``estimate``.
        loss: as ``estimate``.

    Returns:
        The ``Subject`` for these questions.

    Raises:
        InputError: as ``estimate``.
    """
    choice = choice or Choice()
    if isinstance(model, Architecture):
        return of_architecture(model, a_microbatch(sample, choice), choice.axes)
    first = first_tensor(sample)
    rows = first.shape[0] if first is not None else 1
    sequence = first.shape[1] if first is not None and first.dim() > 1 else None

    @cache
    def at(rows: int, sequence: int | None) -> Workload:
        return workload_of(model, resized(sample, rows, sequence), choice, loss)

    return Subject(names_of_groups(model, choice), rows, sequence, at)


def names_of_groups(model: nn.Module, choice: Choice) -> tuple[tuple[str, ...], ...]:
    """``Subject.modules`` of a module in the groups of ``choice``. Raises: InputError."""
    groups = chosen_groups(model, choice)
    return tuple(() if cut_from(groups, n) is not None else group.modules for n, group in enumerate(groups))


def of_architecture(
    arch: Architecture, batch: Microbatch, axes: AxisSizes = ALONE, name: str = "the model"
) -> Subject:
    """A row of numbers, by the names that its modules have in a model of transformers; of a pipeline those of
    its first stage."""

    @cache
    def at(rows: int, sequence: int | None) -> Workload:
        size = replace(batch, sequences=rows, sequence=sequence or batch.sequence)
        return replace(workload(arch, size, axes), name=name)

    blocks = tuple((f"model.layers.{index}",) for index in range(-(-arch.n_layers // axes.pp)))
    modules = (*blocks, ("model.embed_tokens", "model.norm", "lm_head"))
    return Subject(modules, batch.sequences, batch.sequence, at, (arch, batch))
