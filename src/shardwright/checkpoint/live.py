"""The live state as checkpoints see it: names, logical shapes, and the part of each tensor that this rank
holds."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from shardwright.checkpoint.apart import Apart, dtensor_over, taken_apart
from shardwright.checkpoint.flat import FlatSlice, Saved, base_tensor, is_like, layout_of, views_of
from shardwright.checkpoint.format import Box
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.checkpoint.tree import Tensors, encode, put
from shardwright.errors import CheckpointError
from shardwright.params.placement import RaggedShard, cuts_of, held_by, shard_behind
from shardwright.torch_private import COMPILED, StridedShard, local_of
from shardwright.xla.placeholder import Placeholder


@runtime_checkable
class Stateful(Protocol):
    """Anything with state: a scheduler, a data loader, an average of the weights."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Whole(nn.Module):
    """What ``save`` and ``load`` take for the model: its whole tensors, under its names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.tensors)


@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor: ``local`` (any device) fills ``boxes`` of the logical ``shape``.

    One box; several, one after another, of a tensor in a flat parameter; none where nothing is held.
    ``owner`` says whether this rank writes it: of equal copies one is written.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    owner: bool
    sharded: bool

    def views(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box, with the memory that holds it."""
        return views_of(self.local, self.boxes)


def part_of(key: str, tensor: Saved, rank: int) -> Part:
    """The part of ``tensor`` on this rank; a plain tensor is taken to be the same on every rank, and rank 0
    owns it.

    Raises:
        CheckpointError: a dtype or a placement that can't be saved.
    """
    if tensor.dtype not in DTYPE_NAME:
        raise CheckpointError(
            f"{key}: dtype {tensor.dtype} can't be saved; convert it to one of {sorted(DTYPE_NAME.values())}"
        )
    base, local, boxes = base_tensor(tensor), local_part(key, tensor), boxes_of(key, tensor)
    if local.is_meta or local.layout is not torch.strided:
        raise CheckpointError(
            f"{key}: a tensor on {local.device} with layout {local.layout} can't be saved; give it memory, "
            "or make it dense"
        )
    if not isinstance(base, DTensor):
        return Part(local, tuple(tensor.shape), boxes, rank == 0, False)
    box, held = box_of(key, base), list(local_of(base).shape)
    if box is not None and held != list(box.shape):
        raise CheckpointError(
            f"{key}: by its placements {base.placements} this rank holds {held}, expected "
            f"{list(box.shape)}; cut it as torch.distributed.tensor.distribute_tensor does"
        )
    at = base.device_mesh.get_coordinate() or ()
    copies = [c for c, p in zip(at, base.placements, strict=False) if isinstance(p, Replicate)]
    return Part(local, tuple(tensor.shape), boxes, box is not None and not any(copies), True)


def boxes_of(key: str, tensor: Saved) -> tuple[Box, ...]:
    """The boxes of ``tensor`` that this rank holds; see ``Part``."""
    box = box_of(key, base_tensor(tensor))
    if box is None or not box.numel:
        return ()
    return tensor.held(box) if isinstance(tensor, FlatSlice) else (box,)


def local_part(key: str, tensor: Saved) -> torch.Tensor:
    """This rank's memory of ``tensor``: of its box, or 1-D of its boxes in a flat parameter."""
    base, box = base_tensor(tensor), box_of(key, base_tensor(tensor))
    local = (local_of(base) if isinstance(base, DTensor) else base).detach()
    return tensor.local(local, box) if isinstance(tensor, FlatSlice) and box is not None else local


def box_of(key: str, tensor: torch.Tensor) -> Box | None:
    """The box of ``tensor`` that this rank holds; None on a rank that is no part of its mesh."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape))
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return box_at(key, tuple(tensor.shape), tensor.placements, tuple(mesh.shape), tuple(coordinate))


def box_at(
    key: str, shape: tuple[int, ...], placements: Any, mesh_shape: tuple[int, ...], at: tuple[int, ...]
) -> Box:
    """The box of a tensor held at coordinate ``at`` of a mesh. Raises: CheckpointError for placements that
    give it none."""
    for axis, placement in enumerate(placements):
        if not _has_boxes(axis, placements, mesh_shape):
            raise CheckpointError(
                f"{key}: placement {placement} can't be saved; redistribute it to Shard or Replicate"
            )
    offset, size = held_by(placements, shape, mesh_shape, at)
    return Box(tuple(offset), tuple(size))


def _has_boxes(axis: int, placements: Any, mesh_shape: tuple[int, ...]) -> bool:
    """Whether a rank holds a box: a strided cut must be of what the plain cuts of its dim have left."""
    placement = placements[axis]
    if not isinstance(placement, StridedShard):
        return isinstance(placement, (Shard, Replicate, RaggedShard))
    others = [(a, p) for a, p in cuts_of(placements) if a != axis and p.dim == placement.dim]
    before = prod(mesh_shape[a] for a, _ in others if a > axis)
    return placement.split_factor == before and all(isinstance(p, Shard) for _, p in others)


@dataclass(frozen=True)
class Live:
    """The state of a model, and of its optimizer and extra state if given.

    ``tensors`` maps keys to live tensors (DTensor or plain; the same memory, not copies), ``aliases`` a
    stored key to the further keys of the same tensor, ``state`` is the small state as JSON. ``owned``: the
    parameters in the optimizer that this rank alone may have there, since it owns them.
    """

    tensors: Tensors
    aliases: Mapping[str, tuple[str, ...]]
    state: Mapping[str, Any]
    owned: frozenset[str] = frozenset()


def collect(model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any] | None) -> Live:
    """References to all state. Local; nothing is copied, except state that a ``Stateful`` builds for us.

    Raises:
        CheckpointError: state that can't be saved without pickling; a parameter of the optimizer that is
            not the model's.
    """
    tensors: Tensors = {}
    state: dict[str, Any] = {"model": {}}
    owned = set[str]()
    named, aliases = model_tensors(model)
    for name, value in named.items():
        if isinstance(value, Saved):
            put(value, f"model/{name}", tensors)
        elif isinstance(value, Apart):
            state["model"] |= {name: value.kind} if value.kind else {}
        else:  # get_extra_state() of a module
            state["model"][name] = encode(value, f"model/{name}", tensors)
    if optimizer is not None:
        state["optimizer"] = _collect_optimizer(optimizer, names_of(named), tensors, owned)
    if extra is not None:
        check_extra(extra)
        given = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in extra.items()}
        state["extra"] = encode(given, "extra", tensors)
    return Live(
        tensors,
        {f"model/{k}": tuple(f"model/{a}" for a in v) for k, v in aliases.items()},
        state,
        frozenset(owned),
    )


def check_extra(extra: Any) -> None:
    """Raise CheckpointError unless ``extra`` is what ``save`` and ``load`` take."""
    if not isinstance(extra, Mapping):
        raise CheckpointError(f"extra is a {type(extra).__name__}, expected a dict of values by name")


def model_tensors(model: nn.Module) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """``(state, aliases)``: the model's state dict under its own names, tied tensors once, under the first
    name. Raises: CheckpointError for a model of ``xla.fully_shard``."""
    named: dict[str, Any] = {}
    first: dict[int, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Placeholder):
            raise CheckpointError(
                f"{raw} is of an XLA model: use save_xla or load_xla of shardwright.checkpoint.xla"
            )
        name = raw.replace(COMPILED, "")
        if isinstance(value, torch.Tensor) and id(value) in first:
            original = first[id(value)]
            aliases[original] = (*aliases.get(original, ()), name)
            continue
        first[id(value)] = name
        layout = layout_of(value) if isinstance(value, torch.Tensor) else None
        if layout is None:
            named |= _parts_of(name, value)
            continue
        prefix = name[: name.rfind(".") + 1]
        for entry in layout.entries:
            named[prefix + entry.name] = FlatSlice(value, entry)
            if entry.aliases:
                aliases[prefix + entry.name] = tuple(prefix + alias for alias in entry.aliases)
    return named, aliases


def _parts_of(name: str, value: Any) -> dict[str, Any]:
    """What a model has of a value: itself; a tensor of a subclass, and what it is made of by both names."""
    apart = taken_apart(name, value) if isinstance(value, torch.Tensor) else None
    if apart is None:
        return {name: value}
    return {name: apart, **{f"{name}.{each}": part for each, part in apart.inner.items()}}


def names_of(named: Mapping[str, Any]) -> dict[int, dict[str, Saved]]:
    """What each parameter holds, by its identity: one tensor by its name, or those of a flat parameter."""
    found: dict[int, dict[str, Saved]] = {}
    for name, value in named.items():
        value = value.whole if isinstance(value, Apart) else value
        if isinstance(value, Saved):
            found.setdefault(id(base_tensor(value)), {})[name] = value
    return found


def _collect_optimizer(
    optimizer: Optimizer, held: Mapping[int, Mapping[str, Saved]], tensors: Tensors, owned: set[str]
) -> dict[str, Any]:
    groups, state = [], {}
    places = {identity: place for place, identity in enumerate(held)}
    for i, group in enumerate(optimizer.param_groups):
        shards = {p: shard_behind(p) for p in group["params"]}
        unknown = [tuple(p.shape) for p, shard in shards.items() if id(shard) not in held]
        if unknown:
            raise CheckpointError(
                f"optimizer group {i} has {len(unknown)} parameters that are not the model's "
                f"(shapes {unknown[:5]}); state is saved by name: build the optimizer from "
                "model.parameters(), after sharding the model"
            )
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        # An optimizer may list them in an order of its own on each rank, as one that was built from a set.
        params = sorted(shards, key=lambda p: places[id(shards[p])])
        names = [name for p in params for name in held[id(shards[p])]]
        owned.update(name for p, shard in shards.items() if p is not shard for name in held[id(shard)])
        groups.append({"params": names, **encode(hyper, f"optimizer/<group {i}>", tensors)})
        for p in params:
            for name, value in held[id(shards[p])].items() if p in optimizer.state else ():
                own = state_of(optimizer, p, name, value)
                state[name] = encode(own, f"optimizer/{name}", tensors, {})
    return {"kind": type(optimizer).__qualname__, "groups": groups, "state": state}


def state_of(optimizer: Optimizer, p: torch.Tensor, name: str, value: Saved) -> Mapping[str, Any]:
    """The state of the tensor ``name`` in the optimizer's state of ``p``, which is or holds it.

    Raises:
        CheckpointError: state of a flat parameter that can't be told apart by its tensors.
    """
    state = optimizer.state[p]
    if shard_behind(p) is not p:
        return as_shards(state, p, name)
    if not isinstance(value, FlatSlice):
        return state
    for key, found in state.items():
        at = f"optimizer/{name}/{key}"
        if not isinstance(found, torch.Tensor) or not found.ndim:
            continue
        if not is_like(found, p) or taken_apart(at, found) is not None:
            raise CheckpointError(
                f"{at}: state of shape {list(found.shape)} belongs to a flat parameter of {p.numel()} "
                "elements as a whole, not to the tensors in it; use an elementwise optimizer with plain "
                "tensors as state, or wrap the model with use_orig_params=True"
            )
    return {k: FlatSlice(v, value.entry) if is_like(v, p) and p.ndim else v for k, v in state.items()}


def as_shards(state: Mapping[str, Any], p: torch.Tensor, name: str) -> dict[str, Any]:
    """The state of a matrix that this rank owns, as the shard's: what has as many rows is cut as that is.

    Raises: CheckpointError for what belongs to some experts of a stack, and doesn't say to which.
    """
    shard: DTensor = shard_behind(p)

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if len(value) == len(p):
            shape = (len(shard), *value.shape[1:])
            return dtensor_over(value, shard.device_mesh, shard.placements, shape, type(shard.detach()))
        if len(p) < len(shard):
            raise CheckpointError(
                f"optimizer/{name}: state of shape {list(value.shape)} for the {len(p)} experts of a stack "
                f"that this rank has, expected {len(p)} in its first dim; keep state for each expert"
            )
        return value

    return {key: placed(value) for key, value in state.items()}


def rng_state() -> dict[str, Any]:
    """The random state of this process: torch (host and the current accelerator), Python, NumPy's global
    one."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    kind, accelerator = _accelerator()
    if getattr(accelerator, "is_initialized", bool)():
        state[kind] = accelerator.get_rng_state()
    return state


def _accelerator() -> tuple[str, Any]:
    """What kind the accelerator is of, and torch's module for that kind; None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return ("", None) if found is None else (found.type, torch.get_device_module(found))


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The inverse of ``rng_state``, for this process."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    kind, accelerator = _accelerator()
    if accelerator is not None and kind in state:
        accelerator.set_rng_state(state[kind])


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors live that are not on the meta device."""
    tensors: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
