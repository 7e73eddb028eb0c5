"""Counts what is alive on this rank: from the groups and optimizers, and from what the allocator says in all.

Shards, optimizer states, unsharded parameters, gradients and the buffers of collectives are known tensor by
tensor. Activations aren't: they are what has been allocated besides, since the forward began.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from shardwright import clock
from shardwright.engine.groups.gradient_state import mark_of
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.optimizers.guard import stepped
from shardwright.engine.unit import unit_of, units_in
from shardwright.errors import StageError
from shardwright.observe.memory.report import (
    NO_GROUP,
    Amount,
    Category,
    MemoryLog,
    MemoryReport,
    merged,
)
from shardwright.schedule.schedule import Event, EventKind, event_in_words
from shardwright.transport.host_memory import allocated_nbytes


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
    states = {id(param): state for optimizer in tuple(stepped) for param, state in optimizer.state.items()}
    for group, name in names.items():
        faces = [param.bound for param in group.params if param.bound is not None]
        tally.add(None, name, [tensor for face in faces for tensor in (face.param, face.segment.flat)])
        tally.amounts.append(Amount(Category.UNSHARDED, name, group.held_nbytes))
        tally.add(Category.STATES, name, [param.local for param in group.params])
        for param in group.params:
            tally.add(Category.STATES, name, states.get(id(param.sharded), {}).values())
            tally.add(Category.GRADIENTS, name, [_real(param.sharded.grad)])
        tally.add(Category.GRADIENTS, name, [face.param.grad for face in faces])
        gradients = group.reducer.gradients
        tally.add(Category.GRADIENTS, name, _tensors_of(gradients.at))
        in_flight = [reduction for reduction, _ in gradients.flying.values()]
        tally.add(Category.TRANSPORT, name, _tensors_of(in_flight))
        if device.type == "cpu":
            coded = sum(face.segment.kept.nbytes for face in faces if face.segment.kept is not None)
            tally.amounts.append(Amount(Category.TRANSPORT, name, coded))
    return tally.amounts


def _real(grad: torch.Tensor | None) -> torch.Tensor | None:
    mark = mark_of(grad)
    return grad if mark is None else mark.earlier


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
    known, rest = _known_and_rest(names, device)
    if rest is None:
        return MemoryReport("", merged(known), is_complete=False)
    seen, in_step = runtime.executor.memory.other_nbytes, runtime.executor.memory.in_step
    other = rest if seen is None or not in_step else min(rest, seen)
    found = [Amount(Category.ACTIVATIONS, NO_GROUP, rest - other), Amount(Category.OTHER, NO_GROUP, other)]
    return MemoryReport("", merged([*known, *found]))


def see_other(model: nn.Module) -> None:
    """See what is held besides, as the outermost forward is about to begin."""
    runtime = unit_of(model).runtime
    known, rest = _known_and_rest(group_names(model), runtime.groups[0].axis.device)
    states = [amount.nbytes for amount in known if amount.category is Category.STATES]
    runtime.executor.memory.other_nbytes, runtime.executor.memory.states_nbytes = rest, sum(states)


def _known_and_rest(names: dict[ParamGroup, str], device: torch.device) -> tuple[list[Amount], int | None]:
    """What is known tensor by tensor, and the bytes that are allocated besides."""
    known, allocated = _known(names, device), allocated_nbytes(device)
    return known, None if allocated is None else max(0, allocated - sum(amount.nbytes for amount in known))


@contextmanager
def recorded(model: nn.Module) -> Iterator[MemoryLog]:
    """Take a report before and after the actions of each event; see ``FSDPModule.record_memory``."""
    runtime = unit_of(model).runtime
    if runtime.running() is not None:
        raise StageError("record_memory() was entered inside a forward or backward; enter it between steps")
    recorder = _StepRecorder(model)
    watchers = runtime.executor.memory.watchers
    watchers.append(recorder)
    try:
        yield recorder.log
    finally:
        watchers.remove(recorder)


class _StepRecorder:
    """Books what was allocated between two events to the group that ran there, and what of it is freed from
    there first: what is left over was there before, or is nobody's."""

    def __init__(self, model: nn.Module) -> None:
        self.log = MemoryLog()
        self._names = group_names(model)
        runtime = unit_of(model).runtime
        self._numbered = [self._names.get(group, group.name) for group in runtime.groups]
        self._device = runtime.groups[0].axis.device
        self._accounts: Counter[tuple[Category, str]] = Counter()
        self._running: list[int] = []
        self._last: EventKind | None = None
        self._rest: int | None = None
        self._began_s = clock.perf_counter()

    def __call__(self, event: Event, group: ParamGroup | None, has_acted: bool) -> None:
        """An event has come, or its actions are taken."""
        at_s = clock.perf_counter() - self._began_s
        known, rest = _known_and_rest(self._names, self._device)
        if rest is not None and self._rest is not None and not has_acted:
            self._book(rest - self._rest, self._owner(event))
        self._rest = rest
        if has_acted:
            self._move(event)
        amounts = [*known, *(Amount(*key, nbytes) for key, nbytes in self._accounts.items())]
        if rest is not None:
            other = max(0, rest - sum(self._accounts.values()))
            amounts.append(Amount(Category.OTHER, NO_GROUP, other))
        name = "" if group is None else self._names.get(group, group.name)
        when = f"{'after' if has_acted else 'before'} {event_in_words(event.kind, name)}"
        self.log.moments.append((at_s, MemoryReport(when, merged(amounts), rest is not None)))

    def _owner(self, event: Event) -> tuple[Category, str]:
        if self._last is EventKind.FORWARD_END and event.kind is EventKind.BACKWARD_BEGIN:
            return Category.HEAD, NO_GROUP
        return Category.ACTIVATIONS, self._numbered[self._running[-1]] if self._running else NO_GROUP

    def _move(self, event: Event) -> None:
        self._last = event.kind
        if event.kind in (EventKind.FORWARD_BEGIN, EventKind.RECOMPUTE, EventKind.BACKWARD_BEGIN):
            self._running.append(event.group)
        elif event.kind in (EventKind.FORWARD_END, EventKind.BACKWARD_END):
            self._running = [group for group in self._running if group != event.group]
        elif event.kind is EventKind.STEP_END:
            self._running = []

    def _book(self, nbytes: int, owner: tuple[Category, str]) -> None:
        if nbytes >= 0:
            self._accounts[owner] += nbytes
            return
        others = sorted(self._accounts, key=lambda key: (key[0] is not Category.HEAD, -self._accounts[key]))
        for key in (owner, *others):
            freed = min(-nbytes, self._accounts[key])
            self._accounts[key] -= freed
            nbytes += freed
