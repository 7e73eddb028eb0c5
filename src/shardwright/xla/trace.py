"""What happens at a unit's call while a program is traced: unshard, run the module, throw the weights away.

A unit that reshards runs inside ``jax.checkpoint``. Results of arithmetic are kept for the backward, data
movement is not: the all-gather and every view, cast and transpose of its output run again from the shard,
so nothing keeps unsharded weights alive in between. The barrier ties the all-gather to the unit's input,
in the forward and (through its transpose) in the backward, so that the compiler can't gather early.
"""
# pyright: reportMissingImports=false

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import nn

from shardwright.errors import InputError, StageError
from shardwright.torch_private import buffers_of, parameters_of, tree_flatten, tree_unflatten
from shardwright.xla import torch_bridge as bridge
from shardwright.xla.placeholder import PlaceholderUsed
from shardwright.xla.unit import Stored, XlaUnit

MOVES = frozenset(
    [
        "all_gather",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "optimization_barrier",
        "pad",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "transpose",
    ]
)
"""Primitives that only move numbers: cheap to repeat, and what unsharded weights go through."""

Site = tuple[nn.Module, str]


@dataclass(eq=False)
class ProgramTrace:
    """One pass through the model inside a program that is being traced."""

    root: XlaUnit
    shards: Mapping[Stored, Any]
    reshard: bool


_OTHER_UNIT = "it reads a weight of another unit rather than calling the module itself"

_trace: ContextVar[ProgramTrace | None] = ContextVar("shardwright_xla_trace", default=None)


def current() -> ProgramTrace | None:
    """The trace that this thread is in."""
    return _trace.get()


@contextlib.contextmanager
def tracing(trace: ProgramTrace, key: Any) -> Iterator[None]:
    """Until the end, calls of units in this thread are recorded in ``trace``'s program.

    Raises: InputError naming the module where torchax lacks an operator.
    """
    if _trace.get() is not None:
        raise StageError("a step was called while another one is being traced in this thread")
    token = _trace.set(trace)
    try:
        with bridge.torch_mode(key):
            yield
    except Exception as error:
        reason = _OTHER_UNIT if isinstance(error, PlaceholderUsed) else bridge.unsupported_op(error)
        if reason is None:
            raise
        raise InputError(f"{_where(trace.root.module, error)} can't run on XLA: {reason}") from error
    finally:
        _trace.reset(token)


def _where(root: nn.Module, error: BaseException) -> str:
    """The innermost module on the error's traceback, by name."""
    names = {id(module): name for name, module in root.named_modules()}
    found, frame = root, error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            found = module
        frame = frame.tb_next
    kind = type(found).__name__.removeprefix("Xla")
    return f"module {names[id(found)]!r} ({kind})" if names[id(found)] else f"the model ({kind})"


def buffer_sites(module: nn.Module) -> list[list[Site]]:
    """Every buffer below ``module``: the sites that hold it (several where it is shared)."""
    found: dict[int, list[Site]] = {}
    for owner in module.modules():
        for name, buffer in buffers_of(owner).items():
            if buffer is not None:
                found.setdefault(id(buffer), []).append((owner, name))
    return list(found.values())


@contextlib.contextmanager
def installed(
    buffers: Sequence[tuple[list[Site], Any]], params: Sequence[tuple[list[Site], Any]]
) -> Iterator[None]:
    """Modules show these arrays as their buffers and parameters until the end."""
    before = []
    for tensors_of, pairs in ((buffers_of, buffers), (parameters_of, params)):
        for sites, array in pairs:
            tensor = bridge.as_torch(array)
            for owner, name in sites:
                tensors: Any = tensors_of(owner)
                before.append((tensors, name, tensors[name]))
                tensors[name] = tensor
    try:
        yield
    finally:
        for tensors, name, tensor in reversed(before):
            tensors[name] = tensor


def buffer_at(sites: list[Site]) -> Any:
    """The buffer that the modules hold there now."""
    owner, name = sites[0]
    return buffers_of(owner)[name]


def read_buffers(sites: Sequence[list[Site]]) -> list[Any]:
    """What the modules hold as buffers now (they may have replaced or changed them in place)."""
    return [bridge.as_jax(buffer_at(same)) for same in sites]


def enter(trace: ProgramTrace, unit: XlaUnit, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``call`` (the module's own ``__call__``) with the unit's parameters unsharded."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = [bridge.as_jax(leaves[i]) for i in places]
    sites = buffer_sites(unit.module)
    known: dict[str, Any] = {}

    def body(shards: list[Any], buffers: list[Any], key: Any, inputs: list[Any]) -> Any:
        shards, inputs = _tied(shards, inputs)
        whole = unit.unshard(shards)
        params = [(leaf.sites, array) for leaf, array in zip(unit.leaves, whole, strict=True)]
        with (
            bridge.random_key(key),
            installed(list(zip(sites, _cast(unit.options.buffer_dtype, buffers), strict=True)), params),
        ):
            given = list(leaves)
            for i, array in zip(places, _cast(unit.options.compute_dtype, inputs), strict=True):
                given[i] = bridge.as_torch(array)
            call_args, call_kwargs = tree_unflatten(given, spec)
            outputs, known["spec"] = tree_flatten(call(*call_args, **call_kwargs))
            known["places"] = [i for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)]
            known["rest"] = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
            results = [bridge.as_jax(outputs[i]) for i in known["places"]]
            after = [new.astype(old.dtype) for new, old in zip(read_buffers(sites), buffers, strict=True)]
            return results, after, bridge.current_key()

    if trace.reshard and unit.options.checkpoint_activations and unit.innermost:
        body = jax.checkpoint(body)
    elif trace.reshard and unit.options.reshard_after_forward and unit is not trace.root:
        body = jax.checkpoint(body, policy=lambda primitive, *_, **__: primitive.name not in MOVES)
    shards = [trace.shards[stored] for stored in unit.stored]
    results, after, key = body(shards, read_buffers(sites), bridge.current_key(), inputs)
    bridge.set_current_key(key)
    for same, array in zip(sites, after, strict=True):
        bridge.set_value(buffer_at(same), array)
    outputs = known["rest"]
    for i, array in zip(known["places"], results, strict=True):
        outputs[i] = bridge.as_torch(array)
    return tree_unflatten(outputs, known["spec"])


def _cast(dtype: torch.dtype | None, arrays: Sequence[Any]) -> list[Any]:
    if dtype is None:
        return list(arrays)
    target = bridge.jax_dtype(dtype)
    return [a.astype(target) if jax.numpy.issubdtype(a.dtype, jax.numpy.floating) else a for a in arrays]


def _tied(shards: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Shards and floating inputs behind one barrier: neither is used before both are there."""
    floats = [i for i, a in enumerate(inputs) if jax.numpy.issubdtype(a.dtype, jax.numpy.floating)]
    if not shards or not floats:
        return shards, inputs
    shards, tied = jax.lax.optimization_barrier((shards, [inputs[i] for i in floats]))
    inputs = list(inputs)
    for i, array in zip(floats, tied, strict=True):
        inputs[i] = array
    return shards, inputs
