"""An optimizer's state as state dicts have it: by names, whole, sharded, or as this rank's shards; and back.

A flat parameter's state is that of its members: under each of their names, its part of each tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.flat_param import original_name
from shardwright.params.param import ShardedParam
from shardwright.wrapper.options import OptimStateKeyType, StateDictSettings, StateDictType
from shardwright.wrapper.states import convert, names_of, params_by_id, sharded_like, split


def optim_state(
    model: nn.Module, state: Mapping[str, Any], optim: Any, settings: StateDictSettings
) -> dict[str, Any]:
    """The optimizer's state dict by parameter names. Every rank calls it where it is a full one, or of flat
    parameters. Raises: InputError for an optimizer with parameters that aren't the model's."""
    on_host, kind = settings.optim_state_dict_config.offload_to_cpu, settings.state_dict_type
    listed = _listed(model, optim)
    as_they_lie = kind is StateDictType.LOCAL_STATE_DICT
    converted: dict[str, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        name, param = listed[index]
        for key, value in entry.items():
            if param is not None and isinstance(value, DTensor):
                parts = split(param, name, value, kind, on_host)
            else:
                value = convert(value, kind, on_host)
                parts = dict.fromkeys([name] if as_they_lie else _own_names(name, param), value)
            for own, part in parts.items():
                converted.setdefault(own, {})[key] = part
    names = [[name] if as_they_lie else _own_names(name, param) for name, param in listed]
    groups = [{**g, "params": [own for i in g["params"] for own in names[i]]} for g in state["param_groups"]]
    return {"state": converted, "param_groups": groups}


def optim_state_to_load(model: nn.Module, optim: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes, from a state dict by names with whole, sharded or local tensors.

    Communicates only for sharded tensors of flat parameters, which every rank passes.
    Raises: InputError for a parameter that the state dict doesn't have.
    """
    listed = _listed(model, optim)
    index, groups, entries = 0, [], {}
    for number, group in enumerate(optim.param_groups):
        members = listed[index : index + len(group["params"])]
        as_they_lie = {name for name, _ in members}
        by_name = {own for name, param in members for own in _own_names(name, param)}
        fits = [saved for saved in state["param_groups"] if set(saved["params"]) in (by_name, as_they_lie)]
        if not fits:
            raise InputError(f"optimizer group {number} has other parameters than any in the state dict")
        groups.append({**fits[0], "params": list(range(index, index + len(members)))})
        for place, (name, param) in enumerate(members, index):
            if name in state["state"]:
                entry = state["state"][name]
                entries[place] = {key: _to_shard(key, value, param) for key, value in entry.items()}
            elif param is not None and param.names(name)[0] in state["state"]:
                entries[place] = _joined(param, param.names(name), state["state"])
        index += len(members)
    return {"state": entries, "param_groups": groups}


def rekey(state: Mapping[str, Any], to: OptimStateKeyType, model: nn.Module) -> dict[str, Any]:
    """The same optimizer state with names in place of numbers, or numbers in place of names."""
    names = [original_name(name) for name, _ in model.named_parameters()]
    table: dict[Any, Any] = dict(enumerate(names))
    if to is OptimStateKeyType.PARAM_ID:
        table = {name: number for number, name in table.items()}
    groups = [{**g, "params": [table.get(key, key) for key in g["params"]]} for g in state["param_groups"]]
    return {"state": {table.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups}


def _listed(model: nn.Module, optim: Any) -> list[tuple[str, ShardedParam | None]]:
    """The optimizer's parameters in order, by name. Raises: InputError for one that is not the model's."""
    names, params = names_of(model), params_by_id(model)
    found = []
    for param in (p for group in optim.param_groups for p in group["params"]):
        if id(param) not in names:
            raise InputError(
                f"the optimizer has a parameter of shape {list(param.shape)} that is not the model's; build "
                "it from model.parameters(), after wrapping"
            )
        found.append((names[id(param)], params.get(id(param))))
    return found


def _own_names(name: str, param: ShardedParam | None) -> list[str]:
    return [name] if param is None else param.names(name)


# State of torch's optimizers that is a number per parameter, not a tensor like it: plain on every rank.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def _to_shard(key: str, value: Any, param: ShardedParam | None) -> Any:
    if key in _NUMBERS and isinstance(value, torch.Tensor):
        return value.clone()  # optimizers take it as it is, and count up in place
    if param is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    fits = value.shape in (param.spec.shape, param.local.shape)
    return sharded_like(value, param) if fits else value


def _joined(param: ShardedParam, names: Sequence[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """One entry for a flat parameter from those of its members. Raises: InputError where one is missing."""
    absent = [name for name in names if name not in state]
    if absent:
        raise InputError(
            f"the optimizer state has nothing of {absent[:5]}, which lie in one flat parameter with "
            f"{names[0]!r}; load the state of all of them"
        )
    entry: dict[str, Any] = {}
    for key, first in state[names[0]].items():
        values = [state[name][key] for name in names]
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in values]
        if key in _NUMBERS or shapes != [member.shape for member in param.members]:
            entry[key] = _to_shard(key, first, param)
            continue
        local, span = torch.zeros_like(param.local, dtype=first.dtype), param.layout.span(param.axis.rank)
        for member, value in zip(param.members, values, strict=True):
            member.fill(local, span, value.full_tensor() if isinstance(value, DTensor) else value)
        entry[key] = param.dtensor(local)
    return entry
