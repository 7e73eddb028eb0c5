"""Putting what a load filled in its place: parameters, the optimizer's state and groups, extra objects."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.flat import base_tensor
from shardwright.checkpoint.target import LoadPlan, Target
from shardwright.checkpoint.tree import decode
from shardwright.torch_private import COMPILED, EXTRA_STATE, buffers_of, look_up_again, parameters_of


def install(todo: LoadPlan, filled: Mapping[str, Target], small: Mapping[str, torch.Tensor]) -> None:
    """Put what was allocated in place, and set the small state: groups, steps, extra objects. Local."""

    def value_of(key: str) -> torch.Tensor:
        return base_tensor(filled[key].whole) if key in filled else small[key]

    _replace_meta(todo, filled)
    for name, module in todo.model.named_modules():
        key = f"{name}.{EXTRA_STATE}".lstrip(".").replace(COMPILED, "")
        if key in todo.state.get("model", {}):
            module.set_extra_state(decode(todo.state["model"][key], value_of))
    if todo.optimizer is not None:
        saved = todo.state["optimizer"]
        for group, index in zip(todo.optimizer.param_groups, todo.groups, strict=True):
            _set_group(
                group, decode({k: v for k, v in saved["groups"][index].items() if k != "params"}, value_of)
            )
            for p in group["params"]:
                tree = saved["state"].get(todo.names[id(p)][0])
                if tree is None:
                    todo.optimizer.state.pop(p, None)
                else:
                    todo.optimizer.state[p] = decode(tree, value_of)
    for key, value in todo.extra.items():
        value.load_state_dict(decode(todo.state["extra"][key], value_of))


def _set_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):  # in place: compiled and captured steps hold on to it
            group[key].fill_(value)
        else:
            group[key] = value


def _replace_meta(todo: LoadPlan, filled: Mapping[str, Target]) -> None:
    if not todo.replaced:
        return
    new: dict[int, Any] = {}
    for module in todo.model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, old in tensors.items():
                if old is None or id(old) not in todo.replaced:
                    continue
                if id(old) not in new:  # tied parameters stay one object
                    whole: Any = base_tensor(filled[todo.replaced[id(old)]].whole)
                    if isinstance(old, nn.Parameter):
                        whole = nn.Parameter(whole, requires_grad=old.requires_grad)
                        whole.__dict__.update(old.__dict__)
                    new[id(old)] = whole
                tensors[name] = new[id(old)]
    for group in todo.optimizer.param_groups if todo.optimizer else ():
        for i, p in enumerate(group["params"]):
            if id(p) in new:
                group["params"][i] = new[id(p)]
                todo.names[id(new[id(p)])] = todo.names[id(p)]
    look_up_again(todo.model)
