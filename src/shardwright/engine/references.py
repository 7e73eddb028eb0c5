"""Parameters that sharding doesn't reach: other references to their memory, and those that came later."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.optimizers.guard import is_left_out
from shardwright.engine.step.runtime import Runtime
from shardwright.errors import warn
from shardwright.torch_private import buffers_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}  # which recurrent modules make anew


def warn_of_references(modules: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
    """Say which modules hold the memory of a parameter by another way than as a parameter: what they compute
    with is its value as it is now, for ever.

    names: of the parameters that are about to be sharded.
    """
    by_memory = {_memory_of(param): name for param, name in names.items() if not isinstance(param, DTensor)}
    for root in modules:
        for path, module in root.named_modules():
            held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
            for attribute, value in (held | buffers_of(module)).items():
                found = [by_memory.get(_memory_of(tensor)) for tensor in _tensors_in(value)]
                name = next((each for each in found if each is not None), None)
                if name is not None:
                    where = f"{path}.{attribute}" if path else attribute
                    warn(
                        f"{where!r} of the model refers to parameter {name!r} by another name: after "
                        "fully_shard that stays the value of now, and isn't trained. Read the parameter by "
                        "its own name in the forward, or keep a copy (.clone()) where a constant is meant",
                    )


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Of attributes, containers, closures and partial calls; not of other modules."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor) and value.layout is torch.strided:
            yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif isinstance(value, partial):
        inside = (value.func, *value.args, *value.keywords.values())
    else:
        cells = getattr(value, "__closure__", None) or ()
        inside = [cell.cell_contents for cell in cells if _is_filled(cell)]
    for each in inside if depth else ():
        yield from _tensors_in(each, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def warn_of_late(root: nn.Module, runtime: Runtime) -> None:
    """Name the parameters that no call has taken, as those are that were put in after it; each once."""
    if all(group.axis.world * group.axis.num_copies == 1 for group in runtime.groups):
        return
    ours = {id(param.unsharded) for group in runtime.groups for param in group.params if param.bound}
    late = [
        name
        for name, param in root.named_parameters()
        if param.requires_grad
        and name not in runtime.late
        and not (isinstance(param, DTensor) or id(param) in ours or is_left_out(param))
    ]
    runtime.late.update(late)
    if late:
        warn(
            f"{len(late)} parameters of the model are in no group ({', '.join(late[:3])}"
            f"{', ...' if len(late) > 3 else ''}), so each rank trains its own: their gradients aren't "
            "averaged. Put them in before fully_shard, or pass those that you average yourself as "
            "ignored_params",
        )
