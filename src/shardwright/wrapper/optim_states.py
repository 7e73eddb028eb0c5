"""An optimizer's state as state dicts have it: by names, whole, sharded, or as this rank's shards; and back.

A flat parameter's state is that of its members: under each of their names, its part of each tensor.

An optimizer lists parameters as it was given them, which may be another order on each rank (a set, groups
that were built by a filter). So whatever ranks do together they do in the order of the model's names, with
the keys of a state sorted; ranks that have different states learn it before anything is gathered.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.load_plain import original_name
from shardwright.params.param import ShardedParam
from shardwright.transport.channel import check_same_lines
from shardwright.wrapper.from_first import Sent
from shardwright.wrapper.options import OptimStateKeyType, StateDictSettings, StateDictType, adopt
from shardwright.wrapper.states import (
    as_it_lies,
    convert,
    is_sharded,
    names_of,
    params_by_id,
    params_in,
    sharded_like,
    split,
    whole_of,
)


class Listed(NamedTuple):
    """A parameter as an optimizer lists it: its number there, its name, how it is sharded (None: it
    isn't)."""

    number: int
    name: str
    param: ShardedParam | None

    @property
    def names(self) -> list[str]:
        """Of the parameters of the model as it was: of a flat one the members'."""
        return [self.name] if self.param is None else self.param.names(self.name)

    @property
    def is_flat(self) -> bool:
        return self.param is not None and bool(self.param.members)


def groups_of(model: nn.Module, optim: Any, optim_input: Any = None) -> list[list[nn.Parameter]]:
    """The parameters of each group of an optimizer, of what it was built from or, without both, of one that
    was built from ``model.parameters()``. Raises: InputError for an ``optim_input`` of nothing."""
    if optim_input is None:
        if optim is not None:
            return [list(group["params"]) for group in optim.param_groups]
        optim_input = model.parameters()
    given = list(optim_input)
    if not given:
        raise InputError(
            "optim_input has no parameters; pass what the optimizer was built from anew (an iterator is "
            "empty after that), or leave it out and pass optim"
        )
    if isinstance(given[0], Mapping):
        return [list(group["params"]) for group in given]
    return [given]


def optim_state(
    model: nn.Module, state: Mapping[str, Any], groups: Sequence[Sequence[Any]], settings: StateDictSettings
) -> dict[str, Any]:
    """The optimizer's state dict by parameter names. Every rank calls it where it is a full one, or of flat
    parameters. groups: see ``groups_of``. With ``rank0_only`` it is empty on other ranks than the
    mesh's first.

    Raises: InputError for an optimizer with parameters that aren't the model's. Diverged, on all ranks, where
    they have state of different parameters, keys or shapes.
    """
    config, kind = settings.optim_state_dict_config, settings.state_dict_type
    listed = [each for group in _listed(model, groups) for each in group]
    as_they_lie = kind is StateDictType.LOCAL_STATE_DICT
    rest = dict(state["state"])
    entries = [
        (each, rest.pop(key))
        for each in _in_order(model, listed)
        for key in (each.number, each.name)  # torch's _NamedOptimizer has names
        if key in rest
    ]
    if kind is StateDictType.FULL_STATE_DICT or (not as_they_lie and any(e.is_flat for e in listed)):
        _check_alike(model, entries)
    converted: dict[Any, dict[str, Any]] = {}
    for each, entry in entries:
        for key in sorted(entry, key=str):
            value = entry[key]
            if each.param is not None and isinstance(value, DTensor):
                parts = split(each.param, each.name, value, kind, config.offload_to_cpu)
            else:
                names = [each.name] if as_they_lie else each.names
                parts = {name: convert(value, kind, config.offload_to_cpu) for name in names}
            for name, part in parts.items():
                converted.setdefault(name, {})[key] = part
    if getattr(config, "rank0_only", False) and not all(param.is_first for param in params_in(model)):
        return {}
    found: dict[str, Any] = {"state": {**converted, **rest}}
    if "param_groups" in state:
        named: dict[Any, list[str]] = {}
        for each in listed:
            named[each.number] = named[each.name] = [each.name] if as_they_lie else each.names
        found["param_groups"] = [
            {**group, "params": [own for key in group["params"] for own in named[key]]}
            for group in state["param_groups"]
        ]
    return found


def optim_state_to_load(
    model: nn.Module, state: Mapping[str, Any], groups: Sequence[Sequence[Any]], compares: bool
) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes, from a state dict by names with whole, sharded or local tensors.

    Communicates for what ``from_first`` has left to receive, for sharded tensors of flat parameters, and with
    ``compares``, which is for these: every rank calls it then. groups: see ``groups_of``.
    Raises: InputError for a parameter that the state dict doesn't have. Diverged, as ``optim_state``.
    """
    table = _listed(model, groups)
    saved = {original_name(k) if isinstance(k, str) else k: v for k, v in state["state"].items()}
    ready: dict[str, Any] = {"state": {}}
    if "param_groups" in state:
        ready["param_groups"] = [
            _group_to_load(number, group, state["param_groups"]) for number, group in enumerate(table)
        ]
    entries = []
    for each in _in_order(model, [each for group in table for each in group]):
        names = [each.name] if each.name in saved else each.names
        if names[0] in saved:
            entries.append((each, _joined(names, saved)))
    if compares:
        _check_alike(model, entries)
    for each, entry in entries:
        ready["state"][each.number] = {
            key: _to_shard(key, entry[key], each.param) for key in sorted(entry, key=str)
        }
    [everything] = _listed(model, groups_of(model, None))
    known = {name for each in everything for name in (each.name, *each.names)}
    ready["state"] |= {key: value for key, value in saved.items() if key not in known}
    return ready


def rekey(
    state: Mapping[str, Any], to: OptimStateKeyType, model: nn.Module, groups: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """The same optimizer state with names in place of numbers, or numbers in place of names. groups: see
    ``groups_of``. Raises: InputError for flat parameters, which no plain optimizer has."""
    listed = [each for group in _listed(model, groups) for each in group]
    flat = [each.name for each in listed if each.is_flat]
    if flat:
        raise InputError(
            f"rekey_optim_state_dict takes the model that isn't wrapped, and its optimizer: {flat[0]!r} "
            "holds several parameters, and no number of a plain optimizer is all of theirs"
        )
    table: dict[Any, Any] = {each.number: each.name for each in listed}
    if adopt(to) is OptimStateKeyType.PARAM_ID:
        table = {name: number for number, name in table.items()}
    # In the order of numbers: an optimizer that loads it takes the params of a group one after another.
    order = {key: place for place, pair in enumerate(table.items()) for key in pair}
    saved = [sorted(group["params"], key=lambda key: order.get(key, 0)) for group in state["param_groups"]]
    groups_to = [
        {**group, "params": [table.get(key, key) for key in keys]}
        for group, keys in zip(state["param_groups"], saved, strict=True)
    ]
    return {"state": {table.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups_to}


def _listed(model: nn.Module, groups: Iterable[Sequence[Any]]) -> list[list[Listed]]:
    """The optimizer's parameters in order, by group. Raises: InputError for one that is not the model's."""
    names, params = names_of(model), params_by_id(model)
    found, number = [], 0
    for group in groups:
        found.append([])
        for param in group:
            if id(param) not in names:
                raise InputError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is not the model's; "
                    "build it from model.parameters(), after wrapping"
                )
            found[-1].append(Listed(number, names[id(param)], params.get(id(param))))
            number += 1
    return found


def _in_order(model: nn.Module, listed: Iterable[Listed]) -> list[Listed]:
    """Return them in the order of the model's names, which is the same on every rank."""
    places = {name: place for place, name in enumerate(names_of(model).values())}
    return sorted(listed, key=lambda each: places[each.name])


def _check_alike(model: nn.Module, entries: Iterable[tuple[Listed, Mapping[str, Any]]]) -> None:
    """Before collectives for these. Every rank calls it. Raises: Diverged, on all ranks, where they
    differ."""
    lines: dict[Any, list[str]] = {param.axis.comm: [] for param in params_in(model)}
    for each, entry in entries:
        if each.param is not None:
            lines[each.param.axis.comm].append(f"{each.name!r}: {', '.join(sorted(map(str, entry)))}")
    what = "ranks have optimizers with different states"
    remedy = (
        "Build the optimizer from the same parameters on every rank (their order may differ), and load or "
        "step it on all of them"
    )
    for comm, own in lines.items():
        check_same_lines(comm, own, "compare optimizer states", what, remedy)


def _group_to_load(
    number: int, group: Sequence[Listed], saved: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The saved group of the same parameters. Raises: InputError where there is none."""
    as_they_lie = {each.name for each in group}
    by_name = {own for each in group for own in each.names}
    for other in saved:
        names = {original_name(key) if isinstance(key, str) else key for key in other["params"]}
        if names in (by_name, as_they_lie):
            return {**other, "params": [each.number for each in group]}
    raise InputError(
        f"optimizer group {number} has other parameters than any in the state dict; a state dict by numbers "
        "is first made one by names, with rekey_optim_state_dict"
    )


# State of torch's optimizers that is a number per parameter, not a tensor like it: plain on every rank.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


class _OfMembers(list[Any]):
    """Holds the values that a flat parameter's members have of one key."""


def _joined(names: Sequence[str], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """One entry of those under several names. Raises: InputError where one is missing."""
    absent = [name for name in names if name not in state]
    if absent:
        raise InputError(
            f"the optimizer state has nothing of {absent[:5]}, which lie in one flat parameter with "
            f"{names[0]!r}; load the state of all of them"
        )
    first = state[names[0]]
    return (
        first if len(names) == 1 else {key: _OfMembers(state[name][key] for name in names) for key in first}
    )


def _to_shard(key: str, value: Any, param: ShardedParam | None) -> Any:
    """What an optimizer has of a saved value, in memory of its own, which it changes in place."""
    if isinstance(value, _OfMembers):
        return _flat_shard(key, value, param)
    if isinstance(value, Sent):
        value = value.receive()
    if not isinstance(value, torch.Tensor):
        return value
    if param is not None and is_sharded(value):
        return as_it_lies(value, param)
    if param is None or key in _NUMBERS or value.shape not in (param.spec.shape, param.local.shape):
        return value.detach().clone()
    return sharded_like(value, param)


def _flat_shard(key: str, values: _OfMembers, param: Any) -> Any:
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor | Sent) else None for value in values]
    if key in _NUMBERS or shapes != [member.shape for member in param.members]:
        received = [value.receive() if isinstance(value, Sent) else value for value in values]
        return _to_shard(key, received[0], param)
    local, span = torch.zeros_like(param.local, dtype=values[0].dtype), param.layout.span(param.axis.rank)
    for member, value in zip(param.members, values, strict=True):
        member.fill(local, span, whole_of(value.receive() if isinstance(value, Sent) else value, param))
    return param.dtensor(local)
