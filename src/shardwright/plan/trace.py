"""The workload of a module: one forward and backward of it under fake tensors, which have shapes and no data.

Every operation is noted with the group whose module runs, with what it computes and moves, and with the
memory that was taken and given back since the one before, among the events that the runtime would have there.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry

from shardwright.errors import InputError
from shardwright.plan.axes import ALONE, AxisSizes
from shardwright.plan.events import StepEvents, TracedGroup, cut_from
from shardwright.plan.traced import exchanging
from shardwright.plan.workload import GroupSize, Op, OpKind, ParamSize, Stretch, Workload
from shardwright.quantized.codecs import NF4
from shardwright.quantized.module import is_base
from shardwright.schedule.schedule import Event, EventKind, Phase
from shardwright.torch_private import (
    NEEDS_DATA,
    FakeTensorMode,
    TorchDispatchMode,
    current_graph_task,
    fake_tensor_log,
    tree_flatten,
    tree_map,
)

Loss = Callable[[Any], Tensor]
_NOBODY = -1


@dataclass
class _Noted:
    """One operation, or an event: the group that it is of, the storages that it reads, and the bytes that
    were taken and given back from here to the next one, of which storage."""

    group: int
    is_backward: bool
    op: Op | None = None
    read: frozenset[int] = frozenset()
    event: Event | None = None
    taken: list[tuple[int, int]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)


def trace(
    model: nn.Module,
    sample: Sequence[Any],
    named: Mapping[str, Any],
    groups: Sequence[TracedGroup],
    dtype: torch.dtype | None = None,
    loss: Loss | None = None,
    axes: AxisSizes = ALONE,
) -> Workload:
    """The workload of ``model(*sample, **named)`` and its backward. Nothing is computed, and nothing changed.

    groups: in the order in which schedules number them; modules in none of them are the model's own.
    dtype: of parameters and floating-point inputs while they are computed with (None: their own).
    loss: from what the model returns, the tensor that the backward begins at; left out where that is a
    tensor of one element, or has it as ``.loss``.
    axes: of ranks of which each has such a sample, and such a part of the model (``traced``).
    Raises: InputError where the forward needs data, or returns no loss.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {name: _fake_parameter(p, dtype) for name, p in model.named_parameters()}
        buffers = {name: _fake(buffer) for name, buffer in model.named_buffers()}
        args, kwargs = (
            tree_map(lambda leaf: _fake(leaf) if isinstance(leaf, Tensor) else leaf, part)
            for part in (tuple(sample), dict(named))
        )
        recorder = _Recorder([*params.values(), *buffers.values(), args, kwargs])
        events = recorder.events = StepEvents(model, groups, params, dtype, recorder.note)
        state = {f"model.{name}": tensor for name, tensor in (params | buffers).items()}
        try:
            with events, recorder, exchanging(model, axes, recorder.exchange), _without_torchs_traceback():
                functional_call(_Whole(model, loss), state, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise _untraceable(model, (tuple(sample), dict(named)), error) from error
        kept = {
            recorder.held[_key(grad)]: group for group, grad in events.taken if _key(grad) in recorder.held
        }
        outside = sum(tensor.untyped_storage().nbytes() for tensor in _tensors((buffers, args, kwargs)))
        start = next((at for at, each in enumerate(recorder.noted) if each.event), 0)
        outside += _stretch(recorder.noted[:start], kept).saved_nbytes  # inputs that are cast before all else
    noted = recorder.noted[start:]
    first = next((at for at, each in enumerate(noted) if each.event and each.is_backward), len(noted))
    forward, backward = noted[:first], noted[first:]
    for each in reversed(forward):  # of the loss: its bytes lie before that event, its time is the backward's
        if each.is_backward:
            backward.insert(1, _Noted(each.group, True, each.op))
            each.op = None
    entries = _entries_nbytes(forward)
    return Workload(
        tuple(_size(model, groups, index, entries[index]) for index in range(len(groups))),
        {Phase.FORWARD: _entries(forward, kept), Phase.BACKWARD: _entries(backward, kept)},
        next((index for index, group in enumerate(groups) if "" in group.modules), None),
        max((param.itemsize for param in params.values()), default=2),
        outside_nbytes=outside,
    )


@contextmanager
def _without_torchs_traceback() -> Iterator[None]:
    """Drop torch's log of an operation that fails under fake tensors: the error that we raise says it."""
    before, fake_tensor_log.disabled = fake_tensor_log.disabled, True
    try:
        yield
    finally:
        fake_tensor_log.disabled = before


def _untraceable(model: nn.Module, sample: Any, error: Exception) -> InputError:
    """Says whether the forward needs data, or its sample or an operation is at fault."""
    name, first = type(model).__name__, str(error).partition("\n")[0].rstrip(".")
    if isinstance(error, NEEDS_DATA):
        return InputError(
            f"{name} can't be traced without data: {first}. Its forward must not decide by values (.item(), "
            "nonzero, a mask of data); or pass a row of architecture numbers instead (shardwright plan "
            "--runs)"
        )
    given = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in _tensors(sample))
    return InputError(
        f"{name} fails with this sample ({given}): {first}. Pass as sample what its forward takes on one "
        "rank: these arguments, shapes and dtypes; every operation must run without data, on the meta device"
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


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def _fake_parameter(param: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    changed = dtype if dtype is not None and param.is_floating_point() else param.dtype
    return nn.Parameter(torch.empty(param.shape, dtype=changed), requires_grad=param.requires_grad)


def _entries_nbytes(forward: Sequence[_Noted]) -> Counter[int]:
    """Return by group the bytes that its forward reads and others have made."""
    made = {key: (noted.group, nbytes) for noted in forward for key, nbytes in noted.taken}
    read = {(noted.group, key) for noted in forward for key in noted.read if key in made}
    found: Counter[int] = Counter()
    for group, key in read:
        if made[key][0] != group:
            found[group] += made[key][1]
    return found


def _size(model: nn.Module, groups: Sequence[TracedGroup], index: int, entry_nbytes: int) -> GroupSize:
    group, part_of = groups[index], cut_from(groups, index)
    params = [model.get_parameter(name) for name in group.parameters]
    trained = sum(param.numel() for param in params if param.requires_grad)
    name = "+".join(group.modules) or "root"
    if part_of is not None:
        inside = [parameter.removeprefix(f"{name}.") for parameter in group.parameters]
        parts = "+".join(dict.fromkeys(parameter.rpartition(".")[0] for parameter in inside))
        name = f"{name}.{parts}" if any(group.modules) else parts
    sizes = [ParamSize(tuple(p.shape), p.itemsize, p.requires_grad, p.is_floating_point()) for p in params]
    numel = sum(param.numel() for param in params)
    frozen = [param for param in params if not param.requires_grad and is_base(param, *_shown(model, param))]
    codes = sum(part.nbytes for p in frozen for part in NF4.encode(p.to("meta")))
    quantised = (sum(param.numel() for param in frozen), codes)
    return GroupSize(name, numel, trained, entry_nbytes, tuple(sizes), part_of, quantised)


def _shown(model: nn.Module, param: nn.Parameter) -> tuple[list[str], list[nn.Module]]:
    """The names of a parameter, and the modules that show it."""
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is param]
    return names, [model.get_submodule(name.rpartition(".")[0]) for name in names]


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class _Recorder(TorchDispatchMode):
    """Notes every operation. held: storages that aren't given back yet, each with a number of its own; those
    of parameters never count."""

    events: StepEvents

    def __init__(self, outside: Any) -> None:
        super().__init__()
        self.noted: list[_Noted] = []
        self.held = dict.fromkeys(map(_key, _tensors(outside)), 0)
        self.count = 0

    def note(self, event: Event) -> None:
        """An event happens here."""
        self.noted.append(_Noted(event.group, current_graph_task() != -1, event=event))

    def exchange(self, op: Op) -> None:
        """Ranks exchange something here."""
        self.noted.append(_Noted(self._group, current_graph_task() != -1, op))

    @property
    def _group(self) -> int:
        return self.events.inside[-1] if self.events.inside else _NOBODY

    def __torch_dispatch__(
        self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:  # autograd asks for it more often than for all else
            return args[0].device
        kwargs = kwargs or {}
        out = _shaped(function, args, kwargs)
        if function.namespace == "prim":
            return out
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        read = frozenset(self.held.get(_key(tensor), 0) for tensor in inputs)
        op = _op(function, args, kwargs, out, inputs, outputs)
        self.noted.append(noted := _Noted(self._group, current_graph_task() != -1, op, read))
        for tensor in outputs:
            storage, key = tensor.untyped_storage(), _key(tensor)
            if key not in self.held:
                self.count += 1
                self.held[key] = self.count
                nbytes = _storage_nbytes(function, args, storage)
                noted.taken.append((self.count, nbytes))
                weakref.finalize(storage, self._give_back, key, nbytes)
        return out

    def _give_back(self, key: int, nbytes: int) -> None:
        self.noted[-1].given.append((self.held.pop(key), nbytes))


# ---- what an operation is


def _shaped(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What it returns. Of fake tensors torch has grouped matmuls in bfloat16 alone; a CPU computes others."""
    if str(function) == "aten._grouped_mm.default" and args[0].dtype != torch.bfloat16:
        narrow = (tensor.to(torch.bfloat16) for tensor in args[:2])
        return function(*narrow, *args[2:], **kwargs).to(args[0].dtype)
    return function(*args, **kwargs)


def _storage_nbytes(function: Any, args: tuple[Any, ...], storage: torch.UntypedStorage) -> int:
    """Bytes that the storage of an output has once it is computed."""
    if function is torch.ops.aten.mse_loss.default and args[2:] != (0,):
        inputs = torch.broadcast_tensors(*args[:2])  # the sum stays in the memory of what was summed
        return inputs[0].numel() * torch.promote_types(inputs[0].dtype, inputs[1].dtype).itemsize
    return storage.nbytes()


def _op(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Op | None:
    """Return None for a view: it computes and moves nothing."""
    name, there = str(function), {_key(tensor) for tensor in inputs}
    base = name.split(".")[1] if name.count(".") else name
    if outputs and all(_key(tensor) in there for tensor in outputs) and not base.endswith("_"):
        return None
    nbytes = float(sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs)))
    if "scaled_dot_product" in base or "_attention_" in base:
        return Op(OpKind.ATTENTION, _attention_flops(base, args), nbytes, dtype=_dtype(base, inputs))
    flops = _matmul_flops(function, args, kwargs, out)
    if flops is not None:
        sizes = [size for tensor in (*inputs, *outputs) if tensor.dim() > 1 for size in tensor.shape[-2:]]
        narrowest = float(min(sizes, default=1))
        return Op(OpKind.MATMUL, flops, nbytes, narrowest, dtype=_dtype(base, inputs))
    if base == "embedding":  # it reads the rows that it looks up
        nbytes = 2.0 * sum(tensor.numel() * tensor.itemsize for tensor in outputs)
    return Op(OpKind.MEMORY, 0.0, nbytes)


def _dtype(base: str, inputs: Sequence[Tensor]) -> str:
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), inputs[0].dtype)
    return multiplied_in(dtype, "conv" in base)


def multiplied_in(dtype: torch.dtype, convolves: bool = False) -> str:
    """What a matmul of tensors in ``dtype`` multiplies in, by torch's name: TF32 in place of float32 where
    this process lets torch take it."""
    if dtype is torch.float32:
        of = (torch.backends.cudnn, "conv") if convolves else (torch.backends.cuda, "matmul")
        return "tf32" if getattr(*of).fp32_precision == "tf32" else "float32"
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _matmul_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float | None:
    """Return None for what is no matmul.

    Of grouped ones it counts the rows of each group: with a matrix of its own, or (for the gradients of
    these, which have three dims) with other rows of it.
    """
    if str(function) == "aten._grouped_mm.default":
        rows, others = args[:2]
        of_rows = rows.dim() == 2 and out.dim() == 3
        return 2.0 * (rows.numel() * others.shape[-1] if of_rows else out.numel() * rows.shape[-1])
    count = flop_registry.get(function.overloadpacket)
    return None if count is None else float(count(*args, **kwargs, out_val=out))


def _attention_flops(base: str, args: tuple[Any, ...]) -> float:
    """Count fused attention; half of it is computed where it is causal. A backward is 2.5 forwards."""
    is_backward = base.endswith("backward")
    query, key, value = [arg for arg in args if isinstance(arg, Tensor)][is_backward : 3 + is_backward]
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    causal = any(arg is True for arg in args)
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) / (2 if causal else 1)
    return flops * (2.5 if is_backward else 1)


# ---- events


def _entries(noted: Sequence[_Noted], kept: Mapping[int, int]) -> tuple[tuple[Event, Stretch], ...]:
    """The events of a phase, each with what was noted from there to the next one. What the loss computes
    before the first event of the backward follows the last one of the forward."""
    places = [place for place, each in enumerate(noted) if each.event is not None]
    begins = [0, *places[1:], len(noted)]
    return tuple(
        (
            noted[place].event or Event(EventKind.STEP_END),
            _stretch(noted[begins[index] : begins[index + 1]], kept),
        )
        for index, place in enumerate(places)
    )


def _stretch(noted: Sequence[_Noted], kept: Mapping[int, int]) -> Stretch:
    """kept: storages that are gradients of parameters, each with its group; they are counted apart."""
    held = most = 0
    gradients: Counter[int] = Counter()
    for each in noted:
        held += sum(nbytes for key, nbytes in each.taken if key not in kept)
        most = max(most, held)
        held -= sum(nbytes for key, nbytes in each.given if key not in kept)
        for key, nbytes in each.taken:
            if key in kept:
                gradients[kept[key]] += nbytes
    ops = tuple(each.op for each in noted if each.op is not None)
    return Stretch(ops, held, most - max(held, 0), gradients=tuple(gradients.items()))
