"""Refuses to compute the gradients of shards that a graph lacks: autograd would leave them out in silence.

A forward uses the unsharded parameters; their gradients are reduced into the shards. ``autograd.grad`` and
``backward(inputs=)`` compute what they are asked for, and modules show the shards when they are asked.
Loaded when one of the two is called.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from shardwright.engine.groups.table import tables
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam


def refuse_shards(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises: StageError where the graph of ``outputs`` has the unsharded parameter of one of ``inputs``."""
    asked = {id(each) for each in inputs if isinstance(each, DTensor)}
    used = {id(face): param for face, param in _faces(asked)} if asked else {}
    waiting = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in outputs if used]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        param = used.get(id(getattr(node, "variable", None)))
        if param is not None:
            raise StageError(
                f"autograd was asked for the gradient of {param.fqn!r} by grad() or backward(inputs=), but "
                "got its shard, and the forward has used the unsharded parameter: it would be left out. Call "
                "backward() without inputs= and read .grad, which is reduced; freeze parameters that are to "
                "get none"
            )
        waiting.extend(following for following, _ in node.next_functions)


def _faces(asked: set[int]) -> Iterator[tuple[torch.Tensor, ShardedParam]]:
    """What the graph has in the place of the shards that are asked for."""
    for group in (group for table in tuple(tables) for group in table.groups):
        if all(param.bound is not None for param in group.params):
            pairs = zip(group.faces, group.params, strict=True)
            yield from (pair for pair in pairs if id(pair[1].sharded) in asked)
