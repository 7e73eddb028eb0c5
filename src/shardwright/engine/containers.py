"""Tensors inside of what a forward takes and gives: any nesting of containers, dataclasses and objects."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.torch_private import tree_leaves, tree_map

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside ``value``, each once: in containers, and in the attributes of any object."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, _PLAIN) or id(leaf) in seen:
                continue
            seen.add(id(leaf))
            if isinstance(leaf, torch.Tensor):
                yield leaf
            else:
                waiting.extend(_inside(leaf))


def opaque_tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that are attributes of objects, where ``map_tensors`` can't put others in their place."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, (*_PLAIN, torch.Tensor)):
            yield from tensors_in(leaf)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor changed: containers and dataclasses are made anew, other objects kept."""

    def at_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, set | frozenset):
            return type(leaf)(at_leaf(item) for item in leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [f.name for f in dataclasses.fields(leaf) if f.init]
            return dataclasses.replace(
                leaf, **{name: map_tensors(change, getattr(leaf, name)) for name in fields}
            )
        return leaf

    return tree_map(at_leaf, value)


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype`` where it is floating point, else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _inside(leaf: Any) -> list[Any]:
    if isinstance(leaf, set | frozenset):
        return list(leaf)
    slots = (name for cls in type(leaf).__mro__ for name in _slot_names(cls))
    return [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, n) for n in slots if hasattr(leaf, n))]


def _slot_names(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)
