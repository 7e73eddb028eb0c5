"""Tensors of a wrapped model as state dicts have them: whole, sharded, or this rank's plain shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.motion.unit import units_in
from shardwright.state.load import WRAPPED
from shardwright.state.param import ShardedParam
from shardwright.wrapper.options import OptimStateKeyType, StateDictSettings, StateDictType

INNER = WRAPPED
Whole = tuple[ShardedParam, nn.Parameter]


def clean(name: str) -> str:
    """A name in the model as it was before it was wrapped."""
    return name.replace(f"{INNER}.", "").removesuffix(f".{INNER}")


def params_in(model: nn.Module) -> list[ShardedParam]:
    """Every sharded parameter of a tree."""
    return [param for unit in units_in(model) for group in unit.groups for param in group.params]


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
    return value.cpu() if on_host else value


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
            wholes.append((param, nn.Parameter(whole, requires_grad=param.trainable)))
            wholes[-1][1].grad = grad
    for param, whole in wholes:
        param.show(whole)
    try:
        yield
    finally:
        for param, whole in wholes:
            if writeback:
                _write_back(param, whole, with_grads)
            param.show(param.sharded)


def _whole(value: Any, on_host: bool) -> torch.Tensor:
    whole = value.detach().full_tensor()
    # A world of one gives the shard itself; edits are only written back where that was asked for.
    return whole.to("cpu", copy=True) if on_host else whole.clone()


@torch.no_grad()
def _write_back(param: ShardedParam, whole: nn.Parameter, with_grads: bool) -> None:
    param.local.copy_(param.shard_of(whole.detach()))
    if with_grads and whole.grad is not None:
        param.sharded.grad = sharded_like(whole.grad, param)  # type: ignore[assignment]


# ---- optimizers


def names_of(model: nn.Module) -> dict[int, str]:
    """The clean name of each parameter, by identity; of tied ones the first."""
    return {id(param): clean(name) for name, param in model.named_parameters()}


def optim_state(
    model: nn.Module, state: Mapping[str, Any], optim: Any, settings: StateDictSettings
) -> dict[str, Any]:
    """The optimizer's state dict by parameter names. Every rank calls it where it is a full one."""
    names = [_name(names_of(model), p) for group in optim.param_groups for p in group["params"]]
    on_host, kind = settings.optim_state_dict_config.offload_to_cpu, settings.state_dict_type
    converted = {
        names[index]: {key: convert(value, kind, on_host) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": converted, "param_groups": groups}


def optim_state_to_load(model: nn.Module, optim: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes, from a state dict by names with whole, sharded or local tensors.

    Local; no communication. Raises: InputError for a parameter that the state dict doesn't have.
    """
    names = names_of(model)
    params = {id(param.sharded): param for param in params_in(model)}
    index, groups, entries = 0, [], {}
    for number, group in enumerate(optim.param_groups):
        members = [_name(names, p) for p in group["params"]]
        fits = [saved for saved in state["param_groups"] if set(saved["params"]) == set(members)]
        if not fits:
            raise InputError(f"optimizer group {number} has other parameters than any in the state dict")
        places = list(range(index, index + len(members)))
        groups.append({**fits[0], "params": places})
        for place, name, p in zip(places, members, group["params"], strict=True):
            if name in state["state"]:
                entries[place] = {
                    key: _to_shard(key, value, params.get(id(p)))
                    for key, value in state["state"][name].items()
                }
        index += len(members)
    return {"state": entries, "param_groups": groups}


# State of torch's optimizers that is a number per parameter, not a tensor like it: plain on every rank.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def _to_shard(key: str, value: Any, param: ShardedParam | None) -> Any:
    if param is None or key in _NUMBERS or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    fits = value.shape in (param.spec.shape, param.local.shape)
    return sharded_like(value, param) if fits else value


def _name(names: Mapping[int, str], param: torch.Tensor) -> str:
    if id(param) not in names:
        raise InputError(
            f"the optimizer has a parameter of shape {list(param.shape)} that is not the model's; build it "
            "from model.parameters(), after wrapping"
        )
    return names[id(param)]


def rekey(state: Mapping[str, Any], to: OptimStateKeyType, model: nn.Module) -> dict[str, Any]:
    """The same optimizer state with names in place of numbers, or numbers in place of names."""
    names = [clean(name) for name, _ in model.named_parameters()]
    table: dict[Any, Any] = dict(enumerate(names))
    if to is OptimStateKeyType.PARAM_ID:
        table = {name: number for number, name in table.items()}
    groups = [{**g, "params": [table.get(key, key) for key in g["params"]]} for g in state["param_groups"]]
    return {"state": {table.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups}
