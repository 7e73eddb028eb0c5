"""The state of a sharded model as whole host tensors, and what it takes in memory."""
# pyright: reportMissingImports=false

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.torch_private import buffers_of, parameters_of
from shardwright.xla.spmd_model import SpmdModel, spmd_model_of
from shardwright.xla.torch_bridge import from_numpy, to_numpy
from shardwright.xla.trace import buffer_at


@dataclass(frozen=True)
class XlaStats:
    """Sizes of a sharded model.

    Attributes:
        num_units: units with parameters.
        num_arrays: arrays at rest.
        param_numel: elements of all parameters.
        at_rest_nbytes: bytes of the arrays on each device, padding included.
        padding_nbytes: bytes of padding, averaged over the devices.
    """

    num_units: int
    num_arrays: int
    param_numel: int
    at_rest_nbytes: int
    padding_nbytes: int


def stats(model: nn.Module) -> XlaStats:
    """Sizes of a sharded model, with or without values; no communication.

    Args:
        model: the outermost module given to ``fully_shard``.

    Returns:
        The ``XlaStats``.

    Raises:
        InputError: the module isn't sharded.
    """
    spmd = spmd_model_of(model)
    padding = sum(
        (s.layout.padded_numel - s.numel) * s.shard_nbytes // s.shard_numel
        for s in spmd.stored
        if s.shard_numel
    )
    return XlaStats(
        num_units=sum(bool(unit.stored) for unit in spmd.units),
        num_arrays=len(spmd.stored),
        param_numel=sum(s.numel for s in spmd.stored),
        at_rest_nbytes=sum(s.shard_nbytes for s in spmd.stored),
        padding_nbytes=padding // spmd.axes.world,
    )


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and persistent buffers as host tensors, under the names of the unsharded model.

    Every process must call it, and each gets all. One stored array at a time is unsharded on the devices.
    Shared parameters are one tensor under each name. Buffers are those of the first device.

    Args:
        model: the outermost module given to ``fully_shard``.

    Returns:
        Names and tensors, in their full shapes and the dtype at rest.

    Raises:
        InputError: the module isn't sharded.
        StageError: it has no values yet.
    """
    spmd = spmd_model_of(model)
    spmd.require_values()
    found: dict[str, torch.Tensor] = {}
    for stored in spmd.stored:
        for leaf, value in zip(stored.leaves, stored.values(), strict=True):
            tensor = from_numpy(value)
            found |= dict.fromkeys(spmd.names[leaf], tensor)
    spmd.store_buffers()
    found |= buffers_by_name(model)
    return {name: found[name] for name in model.state_dict(keep_vars=True) if name in found}


def buffers_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict of the model has."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    }


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Set all parameters and persistent buffers from whole host tensors; each process places its own shards.

    Args:
        model: the outermost module given to ``fully_shard``.
        state_dict: tensors of the shapes of the unsharded model by its names, the same on every process;
            dtypes are converted.

    Raises:
        InputError: the module isn't sharded, or a name is missing, unexpected or of another shape; all are
            listed, and the model is as it was.
    """
    spmd = spmd_model_of(model)
    expected = {
        name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)
    }
    problems = [f"missing {name}" for name in expected if name not in state_dict]
    problems += [f"unexpected {name}" for name in state_dict if name not in expected]
    problems += [
        f"{name}: shape {list(value.shape)}, expected {list(expected[name].shape)}"
        for name, value in state_dict.items()
        if name in expected and value.shape != expected[name].shape
    ]
    if problems:
        raise InputError("the state dict doesn't fit the model:\n  " + "\n  ".join(problems))
    for stored in spmd.stored:
        values = [state_dict[spmd.names[leaf][0]].detach().cpu().to(stored.dtype) for leaf in stored.leaves]
        stored.array = stored.place(values)
    _set_buffers(spmd, state_dict)


def _set_buffers(spmd: SpmdModel, state_dict: Mapping[str, torch.Tensor]) -> None:
    for same, names in zip(spmd.sites, spmd.buffer_names, strict=True):
        known = next((name for name in names if name in state_dict), None)
        if known is not None:
            new = state_dict[known].detach().cpu().to(buffer_at(same).dtype, copy=True)
            for owner, name in same:
                buffers_of(owner)[name] = new
    if not any(buffer_at(same).is_meta for same in spmd.sites):
        spmd.load_buffers()


def random_state(model: nn.Module) -> torch.Tensor:
    """The random key of a sharded model: what dropout will draw from."""
    return from_numpy(np.asarray(spmd_model_of(model).key))


def set_random_state(model: nn.Module, key: torch.Tensor) -> None:
    """Go on from what ``random_state`` returned. Every process must call it with the same key."""
    spmd = spmd_model_of(model)
    spmd.key = spmd.place(to_numpy(key))


def materialize(model: nn.Module) -> None:
    """Initialise a model that was built on the meta device, unit by unit, with ``reset_parameters``.

    Every process must call it, after the same ``torch.manual_seed``. Host memory: one unit. Every module that
    owns parameters or buffers must have a ``reset_parameters()`` (all of ``torch.nn`` do).

    Args:
        model: the outermost module given to ``fully_shard``.

    Raises:
        InputError: the module isn't sharded, or modules have no ``reset_parameters``; they are named, and
            nothing is changed.
    """
    spmd = spmd_model_of(model)
    owners = [m for m in model.modules() if any(t.is_meta for t in (*m.parameters(False), *m.buffers(False)))]
    lacking = sorted({type(m).__name__ for m in owners if not callable(getattr(m, "reset_parameters", None))})
    if lacking:
        raise InputError(
            f"{', '.join(lacking)}: no reset_parameters(), so its meta parameters can't be initialised; "
            "define it, or call xla.load_full_state_dict(model, ...)"
        )
    for unit in spmd.units:
        _materialize([owner for leaf in unit.leaves for owner, _ in leaf.sites], spmd)
    _materialize([m for m in owners if any(b.is_meta for b in m.buffers(False))], spmd)
    spmd.load_buffers()


def _materialize(owners: list[nn.Module], spmd: SpmdModel) -> None:
    """Initialise ``owners`` on the host and place what they have; they show placeholders again afterwards."""
    shown = {id(leaf.placeholder): leaf for stored in spmd.stored for leaf in stored.leaves}
    before = [
        (m, name, p) for m in dict.fromkeys(owners) for name, p in parameters_of(m).items() if p is not None
    ]
    made: dict[int, nn.Parameter] = {}
    for m, name, p in before:
        if id(p) not in made:
            made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
        parameters_of(m)[name] = made[id(p)]
    for m in dict.fromkeys(owners):
        for name, buffer in buffers_of(m).items():
            if buffer is not None and buffer.is_meta:
                buffers_of(m)[name] = torch.empty_like(buffer, device="cpu")
        m.reset_parameters()  # type: ignore[operator]
    for m, name, p in before:
        parameters_of(m)[name] = p
    values = {shown[key]: parameter for key, parameter in made.items()}
    for stored in spmd.stored:
        if stored.array is None and all(leaf in values for leaf in stored.leaves):
            stored.array = stored.place([values[leaf].detach() for leaf in stored.leaves])
