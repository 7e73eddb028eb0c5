"""Parameters, gradients and optimizer state that the caller has put on the host between two phases of
training, so that something else can have the device's memory (generation, another model).

The objects stay: only the local tensor of each DTensor is another one, in pinned memory. What would use it
meanwhile is refused here. Loaded once something is put there.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.listeners import State, listeners
from shardwright.engine.optimizers.registry import registry
from shardwright.errors import StageError
from shardwright.params.offload import empty_on_host
from shardwright.params.placement import Split
from shardwright.torch_private import current_graph_task, foreach_copy_, local_of, set_local, spec_of
from shardwright.transport.streams import Streams


class _Entry(NamedTuple):
    """A tensor that was put on the host: weakly, since the caller may drop it there.

    place: its local tensor there. moved: whether the device has had it.
    """

    tensor: Any
    place: Any
    moved: bool

    @property
    def is_there(self) -> bool:
        """Whether it is in use, and nobody has given it other memory since."""
        tensor = self.tensor()
        return tensor is not None and _local(tensor) is self.place()


def _refuse(
    user: str, states: tuple[State, ...], groups: Iterable[ParamGroup], params: Iterable[Any]
) -> None:
    """Raises: StageError where one of these states of a group is on the host, and ``user`` would need it."""
    if not registry.away:
        return
    ids = {id(param) for param in params}
    of_params = [
        group for group in tuple(registry.away) if any(id(param.sharded) in ids for param in group.params)
    ]
    for group in (*groups, *of_params):
        there = registry.away.get(group, {})
        found = [state for state in states if any(entry.is_there for entry in there.get(state, ()))]
        if found:
            raise StageError(
                f"{user} needs the {' and the '.join(found)} of group {group.name!r}, which offload_states "
                "has put on the host; call shardwright.reload_states(model) first"
            )


listeners.needs.append(_refuse)


def check_reduced(groups: Sequence[ParamGroup]) -> None:
    """Raises: StageError where gradients of a microbatch are unsharded yet, or on their way."""
    names = [group.name for group in groups if not group.reducer.gradients.is_idle]
    if names:
        raise StageError(
            f"offload_states was called between the microbatches of a step: gradients of group {names[0]!r} "
            "are not reduced yet. Call it after the step's last backward, before which "
            "set_requires_gradient_sync(True) and set_is_last_backward(True) hold"
        )


@torch.no_grad()
def put_away(groups: Sequence[ParamGroup], states: Sequence[State], optimizer: Optimizer | None) -> None:
    """Copy them to pinned memory, wait once for all copies, and let go of the device's; groups at rest."""
    found: list[tuple[ParamGroup, State, Any, list[torch.Tensor]]] = []
    used: dict[Streams, None] = {}
    for group in groups:
        new = [(state, tensor) for state in states for tensor in _new(group, state, optimizer)]
        leaves = [_movable(group, state, tensor) for state, tensor in new]
        sources, streams = [*chain(*leaves)], group.axis.comm.streams
        places = empty_on_host(sources)
        if sources and streams is not None:
            foreach_copy_(places, sources, non_blocking=True)
            used[streams] = None
        for (state, tensor), each in zip(new, leaves, strict=True):
            found.append((group, state, tensor, [places.pop(0) for _ in each]))
    # One wait after all copies are queued: each stops the host until the device has caught up.
    for streams in used:
        streams.settle()
    for group, state, tensor, places in found:
        moved = bool(places)
        _put(tensor, places)
        entry = _Entry(ref(tensor), ref(_local(tensor)), moved)
        registry.away.setdefault(group, {}).setdefault(state, []).append(entry)
    if State.PARAMS in states:
        for group in groups:
            # What lists its shards would keep the device's memory alive.
            group.let_go()


@torch.no_grad()
def bring_back(groups: Sequence[ParamGroup], states: Sequence[State]) -> None:
    """Copy them to the device again, on the current stream; the host doesn't wait."""
    for group in groups:
        there = registry.away.get(group, {})
        for state in states:
            tensors = [entry.tensor() for entry in there.get(state, ()) if entry.is_there and entry.moved]
            sources = [list(_leaves(_local(tensor))) for tensor in tensors]
            device = group.axis.device
            places = [[torch.empty(s.shape, dtype=s.dtype, device=device) for s in each] for each in sources]
            if tensors:
                foreach_copy_([*chain(*places)], [*chain(*sources)], non_blocking=True)
            for tensor, each in zip(tensors, places, strict=True):
                _put(tensor, each)
            there.pop(state, None)
            if state is State.PARAMS:
                group.let_go()
        if not there:
            registry.away.pop(group, None)


def _new(group: ParamGroup, state: State, optimizer: Optimizer | None) -> list[Any]:
    """The tensors of a group's state, except those that were put away before."""
    tensors: list[Any] = [param.sharded for param in group.params]
    if state is State.GRADS:
        tensors = [shard.grad for shard in tensors if shard.grad is not None]
    elif state is State.OPTIMIZER:
        tensors = [] if optimizer is None else [value for *_, value in state_of(optimizer, tensors)]
    before = {id(entry.tensor()) for entry in registry.away.get(group, {}).get(state, ()) if entry.is_there}
    return [tensor for tensor in tensors if id(tensor) not in before]


def _movable(group: ParamGroup, state: State, tensor: Any) -> list[torch.Tensor]:
    """What it is made of, where the device has it; none where a policy has it on the host."""
    split = group.params[0].split
    on_host = split.on_host or (state is State.OPTIMIZER and split.pages_state)
    if on_host or group.axis.comm.streams is None:
        return []
    leaves = list(_leaves(_local(tensor)))
    there = [type(leaf) is torch.Tensor and leaf.device == group.axis.device for leaf in leaves]
    return leaves if all(there) else []


def _local(tensor: Any) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _inner_names(tensor: Any) -> Sequence[str]:
    """The attributes that a tensor subclass has its tensors in; () where it is no such class."""
    return tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()


def _leaves(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that a tensor is made of; itself, where it says of none."""
    names = _inner_names(tensor)
    for name in names:
        yield from _leaves(getattr(tensor, name))
    if not names:
        yield tensor


def _put(tensor: Any, leaves: list[torch.Tensor]) -> None:
    """Have it lie in the memory of the next of these, and let go of what it has; nothing, where none are."""
    local = _local(tensor)
    for name in _inner_names(local) if leaves else ():
        inner = getattr(local, name)
        if _inner_names(inner):
            _put(inner, leaves)
        else:
            setattr(local, name, leaves.pop(0))
    if leaves and not _inner_names(local):
        if isinstance(tensor, DTensor):
            set_local(tensor, leaves.pop(0))
        else:
            tensor.data = leaves.pop(0)


# ---- state of optimizers that lies on the host outside of steps: brought before one, put back after it.
# Of a parameter's state all that grows with it is moved (momenta, variances), to pinned memory that stays the
# same from step to step. The device computes the step; the host waits when the state is put back.


Moved = dict[Any, Split]
"""Parameters, and how each is sharded."""
OnHost = dict[tuple[int, Any], torch.Tensor]
"""By parameter and key, memory of the host for a part of an optimizer's state."""


def page_out(optimizer: Optimizer, moved: Moved, hosts: OnHost) -> None:
    """After a step: put it on the host again. Inside of a backward the host waits for that at its end."""
    put_state_back(optimizer, moved, hosts)
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
def bring_state(optimizer: Optimizer, moved: Moved, hosts: OnHost) -> None:
    """Copy the state that lies on the host to the device, on the current stream."""
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
def put_state_back(optimizer: Optimizer, moved: Moved, hosts: OnHost) -> None:
    """Copy the state that lies on the device to the host, which may read it once it has waited."""
    for streams in dict.fromkeys(split.offload_streams for split in moved.values()):
        members = [param for param, split in moved.items() if split.offload_streams is streams]
        found = [e for e in state_of(optimizer, members) if hosts.get(_key(e)) is not _local(e[2])]
        sources = [_local(value) for *_, value in found]
        # Pinned memory is dear to take, and is kept from step to step.
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


def _replace(optimizer: Optimizer, found: list[tuple[Any, Any, Any]], places: list[torch.Tensor]) -> None:
    for (param, key, value), place in zip(found, places, strict=True):
        made: Any = place
        if isinstance(value, DTensor):
            made = DTensor(place, spec_of(value), requires_grad=False)  # type: ignore[call-arg]
        optimizer.state[param][key] = made
