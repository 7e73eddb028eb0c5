"""The workload of a module: one forward and backward of it under fake tensors, which have shapes and no data.

Every operation is noted with the group whose module runs, with what it computes and moves, and with the
memory that was taken and given back since the one before. A group's events are where its operations begin and
end, so a module that runs twice in a step counts as running all the while between.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from shardwright.errors import InputError
from shardwright.plan.workload import GroupSize, Op, OpKind, Stretch, Workload
from shardwright.schedule.schedule import Event, EventKind, Phase
from shardwright.torch_private import FakeTensorMode, TorchDispatchMode, tree_flatten, tree_map

Loss = Callable[[Any], Tensor]
_NOBODY = -1


@dataclass(frozen=True)
class TracedGroup:
    """Modules whose parameters are one group, by their names in the model. parameters: by theirs. lookup: its
    backward reads no parameters, so that none has to be there."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    lookup: bool = False


@dataclass
class _Noted:
    """One operation: the group that it is of, the storages that it reads, and the bytes that were taken and
    given back by it, of which storage."""

    group: int
    is_backward: bool
    op: Op | None
    read: frozenset[int]
    taken: list[tuple[int, int]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)


def trace(
    model: nn.Module,
    sample: Sequence[Any],
    named: Mapping[str, Any],
    groups: Sequence[TracedGroup],
    dtype: torch.dtype | None = None,
    loss: Loss | None = None,
) -> Workload:
    """The workload of ``model(*sample, **named)`` and its backward. Nothing is computed, and nothing changed.

    groups: in the order in which schedules number them; modules in none of them are the model's own.
    dtype: of parameters and floating-point inputs while they are computed with (None: their own).
    loss: from what the model returns, the tensor that the backward begins at; left out where that is a
    tensor of one element, or has it as ``.loss``.
    Raises: InputError where the forward needs data, or returns no loss.
    """
    owners = {name: index for index, group in enumerate(groups) for name in group.modules}
    step = _Whole(model, loss)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {f"model.{name}": _fake_parameter(p, dtype) for name, p in model.named_parameters()}
        buffers = {f"model.{name}": _fake(buffer, None) for name, buffer in model.named_buffers()}
        args, kwargs = (
            tree_map(lambda leaf: _fake(leaf, dtype) if isinstance(leaf, Tensor) else leaf, part)
            for part in (tuple(sample), dict(named))
        )
        tracker = ModuleTracker()
        recorder = _Recorder(tracker, owners, [*params.values(), *buffers.values(), args, kwargs])
        try:
            with tracker, recorder:
                functional_call(step, params | buffers, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"{type(model).__name__} can't be traced without data: {str(error).splitlines()[0]}. Its "
                "forward must not decide by values (.item(), nonzero, a mask of data); or pass a row of "
                "architecture numbers instead (shardwright plan --runs)"
            ) from error
        grads = [param.grad for param in params.values() if param.grad is not None]
        kept = {recorder.held[_key(grad)] for grad in grads if _key(grad) in recorder.held}
    first = recorder.unended(any(tensor.requires_grad for tensor in _tensors((args, kwargs))))
    forward = [noted for noted in recorder.noted if not noted.is_backward]
    backward = [noted for noted in recorder.noted if noted.is_backward]
    marks = {
        Phase.FORWARD: _forward_marks(forward, groups),
        Phase.BACKWARD: _backward_marks(backward, groups, first),
    }
    return Workload(
        tuple(_size(model, group, _entry(forward, index)) for index, group in enumerate(groups)),
        {
            Phase.FORWARD: _entries(forward, marks[Phase.FORWARD], kept),
            Phase.BACKWARD: _entries(backward, marks[Phase.BACKWARD], kept),
        },
        _root(groups),
        max((param.itemsize for param in params.values()), default=2),
    )


class _Whole(nn.Module):
    """A forward, the loss and a backward, so that parameters are replaced for all of it."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> None:
        out = self.model(*args, **kwargs)
        value = self.loss(out) if self.loss is not None else getattr(out, "loss", out)
        if not isinstance(value, Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, Tensor)
            got = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise InputError(
                f"{type(self.model).__name__} returns {got}, which is no loss; pass loss=, a function from "
                "what it returns to a tensor of one element"
            )
        value.backward()


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    changed = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=changed)


def _fake_parameter(param: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(_fake(param.detach(), dtype), requires_grad=param.requires_grad)


def _entry(forward: Sequence[_Noted], group: int) -> int:
    """Bytes that the forward of a group reads and others have made."""
    mine = [noted for noted in forward if noted.group == group]
    made = {key for noted in mine for key, _ in noted.taken}
    read = {key for noted in mine for key in noted.read} - made
    return sum(nbytes for noted in forward for key, nbytes in noted.taken if key in read)


def _size(model: nn.Module, group: TracedGroup, entry_nbytes: int) -> GroupSize:
    params = [model.get_parameter(name) for name in group.parameters]
    trained = sum(param.numel() for param in params if param.requires_grad)
    name = "+".join(group.modules) or "root"
    return GroupSize(name, sum(param.numel() for param in params), trained, entry_nbytes)


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class _Recorder(TorchDispatchMode):
    """Notes every operation. held: storages that aren't given back yet, each with a number of its own; those
    of parameters never count."""

    def __init__(self, tracker: ModuleTracker, owners: Mapping[str, int], outside: Any) -> None:
        super().__init__()
        self.tracker, self.owners = tracker, owners
        self.noted: list[_Noted] = []
        self.held = dict.fromkeys(map(_key, _tensors(outside)), 0)
        self.count = 0
        self.entered: dict[tuple[bool, str], int] = {}
        self.last_parents: tuple[str, ...] = ()

    def __torch_dispatch__(
        self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function.namespace == "prim":
            return out
        outputs = _tensors(out)
        read = frozenset(self.held.get(_key(tensor), 0) for tensor in _tensors((args, kwargs)))
        noted = _Noted(self._group(), self.tracker.is_bw, _op(function, args, kwargs, out), read)
        self.noted.append(noted)
        self.last_parents = tuple(self.tracker.parents)
        for tensor in outputs:
            storage, key = tensor.untyped_storage(), _key(tensor)
            if key not in self.held:
                self.count += 1
                self.held[key] = self.count
                noted.taken.append((self.count, storage.nbytes()))
                weakref.finalize(storage, self._give_back, key, storage.nbytes())
        return out

    def unended(self, inputs_have_gradients: bool) -> set[int]:
        """The groups that ran in the backward to its end: nothing asks for gradients of their inputs."""
        running = {group for name in self.last_parents if (group := self._owner(name)) != _NOBODY}
        if inputs_have_gradients and self.noted:
            running.discard(self.noted[-1].group)
        return running

    def _give_back(self, key: int, nbytes: int) -> None:
        self.noted[-1].given.append((self.held.pop(key), nbytes))

    def _group(self) -> int:
        """The group of the module that was entered last, of those that run."""
        last, found = -1, _NOBODY
        for name in self.tracker.parents:
            at = self.entered.setdefault((self.tracker.is_bw, name), len(self.entered))
            group = self._owner(name)
            if group != _NOBODY and at > last:
                last, found = at, group
        return found

    def _owner(self, name: str) -> int:
        """name: as the tracker has it, ``_Whole.model.blocks.0``."""
        _, dot, inside = name.partition(".model")
        return self.owners.get(inside.removeprefix("."), _NOBODY) if dot else _NOBODY


# ---- what an operation is


def _op(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Op | None:
    """None for a view: it computes and moves nothing."""
    name, inputs, outputs = str(function), _tensors((args, kwargs)), _tensors(out)
    there = {_key(tensor) for tensor in inputs}
    base = name.split(".")[1] if name.count(".") else name
    if outputs and all(_key(tensor) in there for tensor in outputs) and not base.endswith("_"):
        return None
    nbytes = float(sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs)))
    if "scaled_dot_product" in base or "_attention_" in base:
        return Op(OpKind.ATTENTION, _attention_flops(base, args), nbytes)
    if function.overloadpacket in flop_registry:
        flops = float(flop_registry[function.overloadpacket](*args, **kwargs, out_val=out))
        return Op(OpKind.MATMUL, flops, nbytes, _narrowest(inputs, outputs))
    if base == "embedding":  # it reads the rows that it looks up
        nbytes = 2.0 * sum(tensor.numel() * tensor.itemsize for tensor in outputs)
    return Op(OpKind.MEMORY, 0.0, nbytes)


def _attention_flops(base: str, args: tuple[Any, ...]) -> float:
    """Of fused attention; half of it is computed where it is causal. A backward is 2.5 forwards."""
    is_backward = base.endswith("backward")
    query, key, value = [arg for arg in args if isinstance(arg, Tensor)][is_backward : 3 + is_backward]
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    causal = any(arg is True for arg in args)
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) / (2 if causal else 1)
    return flops * (2.5 if is_backward else 1)


def _narrowest(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> float:
    """The least size of the matrices of a matmul."""
    sizes = [size for tensor in (*inputs, *outputs) if tensor.dim() > 1 for size in tensor.shape[-2:]]
    return float(min(sizes, default=1))


# ---- events


def _root(groups: Sequence[TracedGroup]) -> int | None:
    return next((index for index, group in enumerate(groups) if "" in group.modules), None)


_Mark = tuple[int, int, int, Event]
"""An event before the operation of this number; of several there, which comes first."""


def _spans(noted: Sequence[_Noted], groups: Sequence[TracedGroup]) -> dict[int, tuple[int, int]]:
    """From which operation to which each group runs."""
    spans: dict[int, tuple[int, int]] = {}
    for place, each in enumerate(noted):
        if each.group != _NOBODY:
            spans[each.group] = (spans.get(each.group, (place, 0))[0], place + 1)
    root = _root(groups)
    return spans if root is None else {**spans, root: (0, len(noted))}


def _forward_marks(noted: Sequence[_Noted], groups: Sequence[TracedGroup]) -> list[_Mark]:
    marks: list[_Mark] = []
    for group, (first, last) in _spans(noted, groups).items():
        marks.append((first, 1, first - last, Event(EventKind.FORWARD_BEGIN, group)))
        marks.append((last, 0, last - first, Event(EventKind.FORWARD_END, group)))
    return marks


def _backward_marks(noted: Sequence[_Noted], groups: Sequence[TracedGroup], unended: set[int]) -> list[_Mark]:
    """unended: groups of which nothing says that their backward has ended. Where others begin after one, its
    inputs do have a gradient: the tracker doesn't look at inputs that are passed by name."""
    marks: list[_Mark] = [(len(noted), 2, 0, Event(EventKind.STEP_END))]
    spans = _spans(noted, groups)
    last_begin = max((first for first, _ in spans.values()), default=0)
    unended = {group for group in unended if group in spans and spans[group][1] > last_begin}
    for group, (first, last) in spans.items():
        if not groups[group].lookup:
            marks.append((first, 1, first - last, Event(EventKind.BACKWARD_BEGIN, group)))
        marks.append((last, 0, last - first, Event(EventKind.GRADS_READY, group)))
        if group not in unended and not groups[group].lookup:
            marks.append((last, 0, last - first, Event(EventKind.BACKWARD_END, group)))
    return marks


def _entries(
    noted: Sequence[_Noted], marks: Sequence[_Mark], kept: set[int]
) -> tuple[tuple[Event, Stretch], ...]:
    """The events of a phase, each with what was noted after it."""
    events = sorted(marks, key=lambda mark: mark[:3])
    places = [0, *(place for place, *_ in events[1:]), len(noted)]
    return tuple(
        (event, _stretch(noted[places[index] : places[index + 1]], kept))
        for index, (*_, event) in enumerate(events)
    )


def _stretch(noted: Sequence[_Noted], kept: set[int]) -> Stretch:
    """kept: storages that are gradients of parameters, which are counted as such."""
    held = most = 0
    for each in noted:
        held += sum(nbytes for key, nbytes in each.taken if key not in kept)
        most = max(most, held)
        held -= sum(nbytes for key, nbytes in each.given if key not in kept)
    ops = tuple(each.op for each in noted if each.op is not None)
    return Stretch(ops, held, most - max(held, 0))
