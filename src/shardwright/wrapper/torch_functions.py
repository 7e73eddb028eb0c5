"""``torch.distributed.checkpoint.state_dict`` on models with our wrapper, as on those with torch's.

Its functions know torch's wrapper by its class, which they imported by name, and ask it for its state dicts.
From the first of our wrappers on they find ours, too; models without one are torch's own, as before.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from shardwright.params.flat_param import NAME
from shardwright.params.load_plain import original_name
from shardwright.torch_private import STATE_FUNCTIONS, state_functions
from shardwright.wrapper import states
from shardwright.wrapper.from_first import Sent, from_first
from shardwright.wrapper.saving import StatefulWrapper, wrappers_in


@cache
def _theirs() -> dict[str, Any]:
    """Torch's own, as they were before ``teach``; to import them takes 80 modules."""
    module = state_functions()
    return {name: getattr(module, name) for name in STATE_FUNCTIONS}


def teach() -> None:
    """Have torch's functions know our wrapper, in this process. A second call does nothing."""
    ours = (_Wrapper, _state_of, _names_of, _tensors_of, _load_model)
    for name, function in zip(_theirs(), ours, strict=True):
        setattr(state_functions(), name, function)


_CLASS, _STATE, _NAMES, _TENSORS, _LOAD = STATE_FUNCTIONS


class _Class(type):
    def __instancecheck__(cls, each: object) -> bool:
        return isinstance(each, (StatefulWrapper, _theirs()[_CLASS]))


class _Wrapper(metaclass=_Class):
    """What the functions take for the class of all wrappers: ours where a model has some, else torch's."""

    @staticmethod
    def fsdp_modules(module: nn.Module) -> Any:
        return wrappers_in(module) or _theirs()[_CLASS].fsdp_modules(module)

    @staticmethod
    def state_dict_type(module: nn.Module, **options: Any) -> AbstractContextManager[None]:
        return _class_for(module).state_dict_type(module, **options)

    @staticmethod
    def optim_state_dict(model: nn.Module, *args: Any, **options: Any) -> Any:
        return _class_for(model).optim_state_dict(model, *args, **options)

    @staticmethod
    def optim_state_dict_to_load(model: nn.Module, *args: Any, **options: Any) -> Any:
        return _class_for(model).optim_state_dict_to_load(model, *args, **options)


def _has_ours(model: nn.Module) -> bool:
    return any(isinstance(each, StatefulWrapper) for each in model.modules())


def _class_for(model: nn.Module) -> Any:
    return StatefulWrapper if _has_ours(model) else _theirs()[_CLASS]


def _state_of(module: nn.Module) -> Any:
    return module if isinstance(module, StatefulWrapper) else _theirs()[_STATE](module)


def _names_of(model: nn.Module, name: str, *args: Any, **options: Any) -> set[str]:
    """A tensor's names in state dicts, from its path: a flat parameter has those of its members."""
    if _has_ours(model):
        own = original_name(name)
        if own.rpartition(".")[2].startswith(NAME):
            param = states.params_by_name(model).get(own)
            return set(param.names(own)) if param is not None else {own}
        if own == name:
            return {name}
        if "skip_ddp_prefix" not in options:
            # An optimizer's state, which our wrapper takes by its own names. Torch would replace these in all
            # keys, also inside of longer ones, and of a rank that has no state.
            options.pop("skip_compiler_prefix", None)
    return _theirs()[_NAMES](model, name, *args, **options)


def _tensors_of(model: nn.Module, *args: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of a state dict with its path, a flat parameter once for each place of each member."""
    flat = {id(param.sharded): param for param in states.params_in(model) if param.members}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False) if flat else ():
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    for path, value in _theirs()[_TENSORS](model, *args):
        param = flat.get(id(value))
        if param is None:
            yield path, value
            continue
        for site in (site for member in param.members for site in member.sites):
            for prefix in paths[id(site.module)]:
                yield prefix + site.name, value


def _load_model(model: nn.Module, state: Mapping[str, Any], info: Any) -> Any:
    """Our wrapper takes whole tensors as they are. Those of rank 0 alone are received one by one, and kept
    as shards; those of flat parameters whole until all are there."""
    if not _has_ours(model):
        return _theirs()[_LOAD](model, state, info)
    if info.broadcast_from_rank0:
        params = states.params_by_name(model)
        received: dict[str, Any] = {}
        for name, value in from_first(state, states.mesh_of(model), always=True).items():
            whole, param = value.receive() if isinstance(value, Sent) else value, params.get(name)
            received[name] = whole if param is None else states.sharded_like(whole, param)
        state = received
    info = replace(info, full_state_dict=False, broadcast_from_rank0=False)
    return _theirs()[_LOAD](model, state, info)
