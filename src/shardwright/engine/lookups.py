"""Lookups: modules whose forward reads rows of their weight, and whose backward reads nothing of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.engine.gatherer import looks_up
from shardwright.params.rows import Rows, rows_in
from shardwright.torch_private import forward_hooks_of, forward_pre_hooks_of


def is_lookup(module: nn.Module, output: Any) -> bool:
    """Whether a module has done nothing but look up rows of its weight, and that is its output.

    Its class has the forward of ``nn.Embedding`` (one of its own may use the weight in ways that the output
    doesn't show), and no hook has changed the output since.
    """
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    return looks_up(module) and node is not None and node.name() == "EmbeddingBackward0"


@contextmanager
def wanted_rows(rows: Rows, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """While the group of ``rows`` is unsharded for this call of ``module``, those that it looks up
    suffice."""
    inputs = (*args, *kwargs.values())
    # Hooks of others, or methods that run as its forward, might read the rest of the weight.
    alone = len(forward_pre_hooks_of(module)) == len(forward_hooks_of(module)) == 1
    if alone and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and _is_as_built(module):
        rows.wanted = rows_in(inputs[0], rows.num_rows)
    try:
        yield
    finally:
        rows.wanted = None


def _is_as_built(module: nn.Module) -> bool:
    """Whether no method of the instance was replaced."""
    return not any(callable(value) for value in module.__dict__.values())
