"""Weights that leave a forward: their memory is given back after it, so copies leave."""

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.engine.containers import map_tensors, tensors_in
from shardwright.engine.group import Stage
from shardwright.engine.unit import Unit
from shardwright.errors import StageError
from shardwright.torch_private import base_of, is_alias_of, peek_transforms


def without_weights(name: str, owners: Sequence[Unit], output: Any) -> Any:
    """``output`` of the modules called ``name`` with copies of what lies in the memory of a parameter of
    ``owners``: itself, a view of it. Raises: StageError for one in an object, which can't be replaced."""

    def is_weight(tensor: torch.Tensor) -> bool:
        base = base_of(tensor)
        root = tensor if base is None else base
        if root.grad_fn is not None or root.layout is not torch.strided or peek_transforms() is not None:
            return False
        groups = [owner.group for owner in owners if owner.group is not None]
        unsharded = [group for group in groups if group.stage is Stage.UNSHARDED]
        return any(is_alias_of(root, face) for group in unsharded for face in group.faces)

    if not any(map(is_weight, tensors_in(output))):
        return output
    output = map_tensors(lambda tensor: tensor.clone() if is_weight(tensor) else tensor, output)
    if any(map(is_weight, tensors_in(output))):
        raise StageError(
            f"the forward of {name!r} gives a view of one of its parameters in an object; give a copy of it "
            "(.clone()), since the memory of parameters is given back after the forward"
        )
    return output
