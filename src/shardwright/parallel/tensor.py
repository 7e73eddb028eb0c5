"""Tensor parallelism of models of transformers, by the plans that these have."""

import re
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwright.engine.unit import units_in
from shardwright.errors import InputError
from shardwright.parallel.mesh import Mesh

M = TypeVar("M", bound=nn.Module)

_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # Of a norm over each head: ranks have different heads, so its gradient is a sum over them. Which dim is
    # said to be cut doesn't matter to what it computes.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
}
"""By the names of transformers."""


def tensor_parallel(model: M, mesh: Mesh) -> M:
    """Let the ranks of ``mesh.tp`` share the layers of a model of transformers, by its plan (``tp_plan``).

    Torch's ``parallelize_module`` with the styles that the plan names; attention and feed-forward then
    all-reduce their outputs, and the gradients of their inputs. Every rank calls it once, before
    ``fully_shard(..., mesh=mesh.shard)`` and before an optimizer is made; no communication. The head stays
    whole, since a loss is made of all of its logits. Ranks of ``mesh.tp`` read the same samples, and have the
    same loss; seed dropout by ``mesh.seed``.

    Args:
        model: on the meta device, or with the same weights on every rank of ``mesh.tp``; changed in place.
        mesh: what ``mesh(tp=..., model=model)`` returned. With tp=1 nothing is changed.

    Returns:
        The argument ``model``.

    Raises:
        InputError: the model has no plan, one with other styles (of experts and packed matrices), is sharded
            already, or has adapters: ``add_lora`` comes after this. Nothing is changed then.
    """
    if mesh.tp is None:
        return model
    found: dict[str, ParallelStyle] = {path: _STYLES[style]() for path, style in styles_of(model).items()}
    parallelize_module(model, mesh.tp, found, src_data_rank=None)  # in place
    return model


def styles_of(model: nn.Module) -> dict[str, str]:
    """The modules that its plan shares, by their paths, and the names of their styles. Raises: InputError."""
    name, any_model = type(model).__name__, model
    plan: dict[str, str] = dict(getattr(any_model, "tp_plan", None) or {})
    if units_in(model):
        raise InputError(f"{name} is sharded already; call tensor_parallel before fully_shard")
    head = getattr(any_model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    found = dict[str, str]()
    for path, part in [*model.named_modules(), *model.named_parameters()]:
        style = plan.get(re.sub(r"\b\d+\b", "*", path))
        if style is None or (weight is not None and getattr(part, "weight", None) is weight):
            continue
        if style not in _STYLES or not isinstance(part, nn.Module):
            raise InputError(
                f"{name}: its plan has {style!r} for {path}, which tensor_parallel doesn't know (it knows "
                f"{', '.join(_STYLES)}); take tp=1"
            )
        if [*part.children()]:
            raise InputError(f"{name}: {path} has an adapter already; call tensor_parallel before add_lora")
        found[path] = style
    if not found:
        raise InputError(f"{name} has no plan for tensor parallelism (tp_plan); take tp=1")
    return found
