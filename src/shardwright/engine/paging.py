"""The state of optimizers that lies on the host outside of steps: brought before a step, put back after it.

Of a parameter's state all that grows with it is moved (momenta, variances), to pinned memory that stays the
same from step to step. The device computes the step; the host waits when the state is put back.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardwright.engine.group import offloaded
from shardwright.params.offload import empty_on_host
from shardwright.params.placement import Split
from shardwright.torch_private import current_graph_task, foreach_copy_, local_of, spec_of

Moved = dict[Any, Split]
"""Parameters, and how each is sharded."""

_on_host: WeakKeyDictionary[Optimizer, dict[tuple[int, Any], torch.Tensor]] = WeakKeyDictionary()


def _paged(optimizer: Optimizer) -> Moved:
    """Its parameters whose policy says so."""
    groups = [group for group in tuple(offloaded) if group.params[0].split.pages_state]
    splits = {id(param.sharded): param.split for group in groups for param in group.params}
    params = [param for group in optimizer.param_groups for param in group["params"]] if splits else []
    return {param: splits[id(param)] for param in params if id(param) in splits}


def page_in(optimizer: Optimizer) -> None:
    """Before a step: the state of offloaded parameters is on their device."""
    moved = _paged(optimizer)
    if moved:
        bring_state(optimizer, moved)


def page_out(optimizer: Optimizer, *_: Any) -> None:
    """After a step: it is on the host. Inside of a backward the host waits for that at its end."""
    moved = _paged(optimizer)
    if moved:
        put_state_back(optimizer, moved)
        if current_graph_task() == -1:
            for streams in {split.offload_streams for split in moved.values()}:
                assert streams is not None
                streams.arrive()


def state_of(optimizer: Optimizer, params: Iterable[Any]) -> list[tuple[Any, Any, Any]]:
    """``(parameter, key, tensor)`` of all that is moved."""
    return [
        (param, key, value)
        for param in params
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim())
    ]


@torch.no_grad()
def bring_state(optimizer: Optimizer, moved: Moved) -> None:
    """Copy the state that lies on the host to the device, on the current stream."""
    hosts = _on_host.get(optimizer, {})
    found = [each for each in state_of(optimizer, moved) if hosts.get(_key(each)) is _local(each[2])]
    sources = [_local(value) for *_, value in found]
    places = [
        torch.empty(source.shape, dtype=source.dtype, device=moved[param].axis.device)
        for (param, *_), source in zip(found, sources, strict=True)
    ]
    _replace(optimizer, found, places)
    if places:
        foreach_copy_(places, sources, non_blocking=True)


@torch.no_grad()
def put_state_back(optimizer: Optimizer, moved: Moved) -> None:
    """Copy the state that lies on the device to the host, which may read it once it has waited."""
    hosts = _on_host.setdefault(optimizer, {})
    for streams in dict.fromkeys(split.offload_streams for split in moved.values()):
        members = [param for param, split in moved.items() if split.offload_streams is streams]
        found = [e for e in state_of(optimizer, members) if hosts.get(_key(e)) is not _local(e[2])]
        sources = [_local(value) for *_, value in found]
        new = [
            (each, source)
            for each, source in zip(found, sources, strict=True)
            if _key(each) not in hosts or hosts[_key(each)].shape != source.shape
        ]
        hosts.update(
            zip([_key(e) for e, _ in new], empty_on_host([source for _, source in new]), strict=True)
        )
        places = [hosts[_key(each)] for each in found]
        if streams is not None and places:
            with streams.offloading(sources):
                foreach_copy_(places, sources, non_blocking=True)
        _replace(optimizer, found, places)


def _key(entry: tuple[Any, Any, Any]) -> tuple[int, Any]:
    return id(entry[0]), entry[1]


def _local(value: Any) -> torch.Tensor:
    return local_of(value) if isinstance(value, DTensor) else value


def _replace(optimizer: Optimizer, found: list[tuple[Any, Any, Any]], places: list[torch.Tensor]) -> None:
    for (param, key, value), place in zip(found, places, strict=True):
        made: Any = place
        if isinstance(value, DTensor):
            made = DTensor(place, spec_of(value), requires_grad=False)  # type: ignore[call-arg]
        optimizer.state[param][key] = made
