"""Putting what a load filled in its place: parameters, the optimizer's state and groups, extra objects."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.flat import base_tensor
from shardwright.checkpoint.target import LoadPlan, Target
from shardwright.checkpoint.tree import decode, keys_in
from shardwright.errors import CheckpointError
from shardwright.torch_private import COMPILED, EXTRA_STATE, buffers_of, look_up_again, parameters_of


def install_whole(todo: LoadPlan, small: Mapping[str, torch.Tensor]) -> None:
    """Restore what code of the user's does, from whole tensors: extra state of modules, and extra objects
    that hold nothing sharded. Before any weight is touched, so that what fails here leaves those. Local.

    Raises: CheckpointError, saying which object, and which were restored before it.
    """
    restored: list[str] = []
    for name, module in todo.model.named_modules():
        key = f"{name}.{EXTRA_STATE}".lstrip(".").replace(COMPILED, "")
        if key in todo.state.get("model", {}):
            state = decode(todo.state["model"][key], small.__getitem__)
            _restore(f"set_extra_state of {name or 'the model'}", module.set_extra_state, state, restored)
    sharded = _sharded_extra(todo)
    for key, value in todo.extra.items():
        if key not in sharded:
            state = decode(todo.state["extra"][key], small.__getitem__)
            _restore(f"load_state_dict of extra/{key}", value.load_state_dict, state, restored)


def _sharded_extra(todo: LoadPlan) -> set[str]:
    """Keys of extra objects of which tensors are filled in place: these are restored after the fill."""
    filled = {target.key for target in todo.targets}
    return {key for key in todo.extra if not filled.isdisjoint(keys_in(todo.state["extra"][key]))}


def _restore(what: str, restore: Callable[[Any], object], state: Any, restored: list[str]) -> None:
    try:
        restore(state)
    except Exception as error:
        before = f" Restored before it: {', '.join(restored)}." if restored else ""
        raise CheckpointError(
            f"{what} raised {type(error).__qualname__}: {error}. Model and optimizer are as they were; what "
            f"the object itself has changed by then stays changed.{before}"
        ) from error
    restored.append(what)


def install(todo: LoadPlan, filled: Mapping[str, Target], small: Mapping[str, torch.Tensor]) -> None:
    """Put what was allocated in place, and set the small state: groups, steps, sharded extra objects. Local.

    Raises: CheckpointError, where an extra object can't take what the model and the optimizer have by then.
    """

    def value_of(key: str) -> torch.Tensor:
        if key in todo.wholes:  # filled by what it is made of
            return todo.wholes[key]
        return base_tensor(filled[key].whole) if key in filled else small[key]

    _replace_meta(todo, filled)
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
    for key in _sharded_extra(todo):
        try:
            todo.extra[key].load_state_dict(decode(todo.state["extra"][key], value_of))
        except Exception as error:
            raise CheckpointError(
                f"load_state_dict of extra/{key} raised {type(error).__qualname__}: {error}. Model and "
                "optimizer are restored, and so are the sharded tensors of this object; the rest of it isn't"
            ) from error


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
