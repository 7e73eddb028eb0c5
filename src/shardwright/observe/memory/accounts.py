"""Counts what is alive on this rank: from the groups and optimizers, and from what the allocator says in all.

Shards, optimizer states, unsharded parameters, gradients and the buffers of collectives are known tensor by
tensor. Activations aren't: they are what has been allocated besides, since the forward began.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardwright.engine.groups.gradient_state import mark_of
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.optimizers.registry import registry
from shardwright.engine.unit import unit_of, units_in
from shardwright.observe.memory.report import NO_GROUP, Amount, Category, MemoryReport, merged
from shardwright.transport.cpu.pages import allocated_nbytes
from shardwright.transport.differences import differences_of


def group_names(model: nn.Module) -> dict[ParamGroup, str]:
    """The groups below ``model``, each by the names of its modules; the model itself is "(root)"."""
    names = {id(module): name or "(root)" for name, module in model.named_modules()}
    found = {}
    for unit in units_in(model):
        for group in unit.groups:
            modules = unit.modules if group is unit.group else [p.sites[0].module for p in group.params]
            listed = dict.fromkeys(names[id(module)] for module in modules if id(module) in names)
            found[group] = "+".join(listed) or group.name
    return found


class _Tally:
    """Adds up tensors on one kind of device, every storage once."""

    def __init__(self, device: torch.device) -> None:
        self.amounts: list[Amount] = []
        self._device = device
        self._seen: set[int] = set()

    def add(self, category: Category | None, group: str, tensors: Iterable[Any]) -> None:
        """Count the storages of ``tensors``; None: only remember that somebody else counts them."""
        for local in (part for tensor in tensors for part in _parts(tensor)):
            if local.device.type != self._device.type:
                continue
            with suppress(RuntimeError):  # of a subclass that has no memory of its own
                storage = local.untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    if category is not None:
                        self.amounts.append(Amount(category, group, storage.nbytes()))


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that have the memory of one, which may be a DTensor or another subclass around them."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor


def _known(names: dict[ParamGroup, str], device: torch.device) -> list[Amount]:
    """What is known tensor by tensor."""
    tally = _Tally(device)
    optimizers = tuple(registry.known)
    states = {id(param): state for optimizer in optimizers for param, state in optimizer.state.items()}
    for group, name in names.items():
        faces = [param.bound for param in group.params if param.bound is not None]
        tally.add(None, name, [tensor for face in faces for tensor in (face.param, face.segment.flat)])
        tally.amounts.append(Amount(Category.UNSHARDED, name, group.held_nbytes))
        tally.add(Category.STATES, name, [param.local for param in group.params])
        for param in group.params:
            tally.add(Category.STATES, name, states.get(id(param.sharded), {}).values())
            mark = mark_of(param.sharded.grad)
            tally.add(Category.GRADIENTS, name, [param.sharded.grad if mark is None else mark.earlier])
        tally.add(Category.GRADIENTS, name, [face.param.grad for face in faces])
        gradients = group.reducer.gradients
        tally.add(Category.GRADIENTS, name, _tensors_of(gradients.at))
        in_flight = [reduction for reduction, _ in gradients.flying.values()]
        tally.add(Category.TRANSPORT, name, _tensors_of(in_flight))
        if device.type == "cpu":
            differences = differences_of(group.axis.comm)
            kept = [differences.of(face.segment) for face in faces] if differences else []
            coded = sum(each.nbytes for each in kept if each is not None)
            tally.amounts.append(Amount(Category.TRANSPORT, name, coded))
    return tally.amounts


def _tensors_of(root: Any) -> Iterator[torch.Tensor]:
    """Tensors in containers and segments, and in what can be waited for."""
    left, seen = [root], set()
    while left:
        found = left.pop()
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, list | tuple):
            left += found
        elif isinstance(found, dict):
            left += found.values()
        elif (hasattr(found, "wait") or hasattr(found, "flat")) and id(found) not in seen:
            seen.add(id(found))
            left += getattr(found, "__dict__", {}).values()
            left += [getattr(found, "flat", None)]


def memory_of(model: nn.Module) -> MemoryReport:
    """What is alive now. No communication. Raises: InputError for a module that isn't sharded."""
    runtime, names = unit_of(model).runtime, group_names(model)
    device = runtime.groups[0].axis.device
    known, rest = known_and_rest(names, device)
    if rest is None:
        return MemoryReport("", merged(known), is_complete=False)
    seen, in_step = runtime.executor.memory.other_nbytes, runtime.executor.memory.in_step
    other = rest if seen is None or not in_step else min(rest, seen)
    found = [Amount(Category.ACTIVATIONS, NO_GROUP, rest - other), Amount(Category.OTHER, NO_GROUP, other)]
    return MemoryReport("", merged([*known, *found]))


def see_other(model: nn.Module) -> None:
    """See what is held besides, as the outermost forward is about to begin. To ask a malloc with many free
    blocks takes it milliseconds."""
    runtime = unit_of(model).runtime
    if not runtime.groups:
        return
    known, rest = known_and_rest(group_names(model), runtime.groups[0].axis.device)
    states = [amount.nbytes for amount in known if amount.category is Category.STATES]
    runtime.executor.memory.other_nbytes, runtime.executor.memory.states_nbytes = rest, sum(states)


def known_and_rest(names: dict[ParamGroup, str], device: torch.device) -> tuple[list[Amount], int | None]:
    """What is known tensor by tensor, and the bytes that are allocated besides."""
    known, allocated = _known(names, device), allocated_nbytes(device)
    return known, None if allocated is None else max(0, allocated - sum(amount.nbytes for amount in known))
