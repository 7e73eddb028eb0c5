"""Tensors of a wrapped model as state dicts have them: whole, sharded, or this rank's plain shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.unit import units_in
from shardwright.errors import InputError
from shardwright.params.at_rest import keep_per_rank
from shardwright.params.flat_param import WRAPPED, cut_by_rows, original_name
from shardwright.params.gather_full import stream_full
from shardwright.params.param import ShardedParam
from shardwright.wrapper.options import StateDictSettings, StateDictType

INNER = WRAPPED
Params = Mapping[int, ShardedParam]


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the model as it was, by identity; of tied ones the first."""
    return {id(param): original_name(name) for name, param in model.named_parameters()}


def params_in(model: nn.Module) -> list[ShardedParam]:
    """Every sharded parameter of a tree."""
    return [param for unit in units_in(model) for group in unit.groups for param in group.params]


def params_by_id(model: nn.Module) -> dict[int, ShardedParam]:
    """Every sharded parameter of a tree, by the identity of what modules show at rest."""
    return {id(param.sharded): param for param in params_in(model)}


def convert(value: Any, kind: StateDictType, on_host: bool) -> Any:
    """A tensor as a state dict of this kind has it; anything else as it is. Every rank calls it for FULL."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor) and kind is StateDictType.FULL_STATE_DICT:
        local, value = value.to_local(), value.full_tensor()
        # A world of one gives the shard's own memory, which the next step would change.
        value = value.clone() if value.data_ptr() == local.data_ptr() else value
    elif isinstance(value, DTensor) and kind is StateDictType.LOCAL_STATE_DICT:
        value = value.to_local()
    return keep_per_rank(value.cpu() if on_host else value)


def entries(key: str, value: Any, params: Params, settings: StateDictSettings) -> dict[str, Any]:
    """What a state dict has in the place of one live entry: see ``split``. Every rank calls it for whole
    tensors."""
    config, kind = settings.state_dict_config, settings.state_dict_type
    if isinstance(value, DTensor) and getattr(config, "rank0_only", False):
        return dict(stream_full({key: value}, params))
    param = params.get(id(value))
    if param is None:
        return {key: convert(value, kind, config.offload_to_cpu)}
    return split(param, key, value, kind, config.offload_to_cpu)


def split(
    param: ShardedParam, key: str, value: torch.Tensor, kind: StateDictType, on_host: bool
) -> dict[str, Any]:
    """A parameter, or a DTensor that lies like it, by the names of the model: converted; of a flat one each
    member, whole or cut by rows. Local state has them as they lie, in one. Every rank calls it."""
    is_cut = kind is StateDictType.SHARDED_STATE_DICT and param.members
    if not is_cut and kind is not StateDictType.FULL_STATE_DICT:
        return {key: convert(value, kind, on_host)}
    whole = convert(value, StateDictType.FULL_STATE_DICT, on_host)
    parts = param.entries(key, whole)
    if kind is StateDictType.FULL_STATE_DICT:
        return dict(parts)
    return {name: keep_per_rank(cut_by_rows(part, param.axis)) for name, part in parts}


def sharded_like(value: torch.Tensor, param: ShardedParam) -> DTensor:
    """The DTensor of a plain tensor: of the whole one, or of this rank's shard. Raises: InputError."""
    if value.shape == param.spec.shape:
        local = param.shard_of(value)
    elif value.shape == param.local.shape:
        local = value
    else:
        raise InputError(
            f"{param.fqn!r}: a tensor of shape {list(value.shape)} is neither the whole parameter "
            f"{list(param.spec.shape)} nor this rank's shard {list(param.local.shape)}"
        )
    return param.dtensor(local.to(param.local.device, copy=True).contiguous())


# ---- whole parameters


@contextmanager
def shown_whole(
    params: list[ShardedParam], is_shown: bool, on_host: bool, writeback: bool, with_grads: bool
) -> Iterator[None]:
    """Modules show whole parameters in the dtype at rest; edits are kept if ``writeback``. At rest before."""
    wholes = []
    for param in params:
        param.adopt()
        whole = _whole(param.sharded, on_host)
        grad = _whole(param.sharded.grad, on_host) if with_grads and param.sharded.grad is not None else None
        if is_shown:
            wholes.append((param, whole, grad))
    shown = [(param, param.show_whole(whole, grad)) for param, whole, grad in wholes]
    try:
        yield
    finally:
        for param, parts in shown:
            if writeback:
                _write_back(param, parts, with_grads)
            param.show(param.sharded)


def _whole(value: Any, on_host: bool) -> torch.Tensor:
    whole = value.detach().full_tensor()
    # A world of one gives the shard itself; edits are only written back where that was asked for.
    return whole.to("cpu", copy=True) if on_host else whole.clone()


@torch.no_grad()
def _write_back(param: ShardedParam, parts: list[nn.Parameter], with_grads: bool) -> None:
    param.local.copy_(param.shard_of(param.join(parts)))
    grads = [part.grad for part in parts if part.grad is not None]
    if with_grads and len(grads) == len(parts):
        param.sharded.grad = sharded_like(param.join(grads), param)  # type: ignore[assignment]
