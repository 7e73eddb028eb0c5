"""Tensors inside of what a forward takes and gives: any nesting of containers, dataclasses and objects."""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwright.torch_private import beneath_all_transforms, peek_transforms, tree_leaves, tree_map

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


# ---- weights are moved outside of the transforms and the inference mode that a model runs in


_INSIDE_NONE = nullcontext()


def beneath_transforms() -> AbstractContextManager[None]:
    """A context in which no transform of ``torch.func`` and no inference mode is entered. 0.1 us where none
    was.

    Inside of one, every tensor that the transformed function did not make is a constant that may not be
    written to. The buffers of unsharded weights are such: they are filled beneath all transforms, and what
    runs inside reads them as it reads any captured tensor. What an inference mode makes may not be trained
    with after it.
    """
    if torch.is_inference_mode_enabled():
        return _beneath(torch.inference_mode(False), torch.no_grad())
    return _INSIDE_NONE if peek_transforms() is None else _beneath()


@contextmanager
def _beneath(*modes: AbstractContextManager[None]) -> Generator[None]:
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        with beneath_all_transforms():
            yield
