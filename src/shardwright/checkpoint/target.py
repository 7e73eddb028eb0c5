"""Where a checkpoint's tensors go: the plan of a load, what doesn't fit, and putting the filled tensors in
place."""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from shardwright.checkpoint.format import Box, Manifest, TensorEntry
from shardwright.checkpoint.live import Stateful, box_at, model_tensors
from shardwright.checkpoint.shardfile import TORCH_DTYPE, bits_of
from shardwright.checkpoint.tree import Tensors, decode, encode, keys_in
from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class Target:
    """One tensor to fill: ``whole`` (plain or DTensor; on the meta device until ``allocated``) from
    ``entry``.

    ``box`` is this rank's part, None if it has none. ``live`` says that ``whole`` is in use already.
    """

    key: str
    entry: TensorEntry
    whole: torch.Tensor
    box: Box | None
    live: bool
    device: torch.device

    @property
    def local(self) -> torch.Tensor:
        return self.whole.to_local() if isinstance(self.whole, DTensor) else self.whole.detach()

    @property
    def casts(self) -> bool:
        return self.whole.dtype != TORCH_DTYPE[self.entry.dtype]

    def bits(self, box: Box) -> np.ndarray:
        """The live elements of ``box``, as unsigned integers."""
        assert self.box is not None
        with torch.no_grad():
            return bits_of(self.local[box.slices_in(self.box)])

    def allocated(self) -> "Target":
        """This target with memory: itself if it is live, else with uninitialised memory on ``device``."""
        if not self.whole.is_meta:
            return self
        whole = torch.empty_like(self.whole, device=self.device, requires_grad=False)
        return replace(self, whole=whole)


@dataclass(frozen=True)
class Plan:
    """What a load will do: ``targets`` to fill, ``small`` tensors to read whole, and what to install
    afterwards."""

    targets: tuple[Target, ...]
    small: tuple[str, ...]
    model: nn.Module
    optimizer: Optimizer | None
    extra: Mapping[str, Any]
    state: Mapping[str, Any]
    names: MutableMapping[int, str]
    groups: tuple[int, ...]
    replaced: Mapping[int, str] = field(default_factory=dict)


class _Planner:
    """Collects targets, and everything that doesn't fit, before anything is touched."""

    def __init__(self, manifest: Manifest, model: nn.Module) -> None:
        self.manifest = manifest
        self.model = model
        self.targets: dict[str, Target] = {}
        self.small: list[str] = []
        self.problems: list[str] = []
        self.names: dict[int, str] = {}
        self.replaced: dict[int, str] = {}
        self.device = _device_of(model)
        self.stored_of = manifest.keys_of("model/")

    def add(self, key: str, stored: str, whole: torch.Tensor, live: bool) -> None:
        """``key`` is the live tensor's, ``stored`` the checkpoint's."""
        entry = self.manifest.tensors[stored]
        dtype = TORCH_DTYPE[entry.dtype]
        if tuple(whole.shape) != entry.shape:
            self.problems.append(
                f"misshapen {key}: {list(entry.shape)} in the checkpoint, {list(whole.shape)} expected"
            )
        elif whole.dtype != dtype and not (whole.is_floating_point() and dtype.is_floating_point):
            self.problems.append(f"wrong dtype {key}: {dtype} in the checkpoint, {whole.dtype} expected")
        else:
            device = whole.device
            if isinstance(whole, DTensor):
                device = torch.device(whole.device_mesh.device_type)
            elif whole.is_meta:
                device = self.device
            self.targets[key] = Target(key, entry, whole, _box_of(key, whole), live, device)

    def plan_model(self) -> None:
        named, aliases = model_tensors(self.model)
        stored_of = self.stored_of
        used: set[str] = set()
        for name, value in named.items():
            if not isinstance(value, torch.Tensor):
                if name not in self.manifest.state.get("model", {}):
                    self.problems.append(f"missing model/{name} (a module's extra state)")
                continue
            known = [n for n in (name, *aliases.get(name, ())) if f"model/{n}" in stored_of]
            stored = list(dict.fromkeys(stored_of[f"model/{n}"] for n in known))
            self.names[id(value)] = known[0] if known else name
            used.update(stored)
            if not stored:
                self.problems.append(f"missing model/{name}: {list(value.shape)} {value.dtype}")
                continue
            if len({tuple(p.crc32 for p in self.manifest.tensors[s].pieces) for s in stored}) > 1:
                self.problems.append(f"tied in the model, different in the checkpoint: {', '.join(stored)}")
            self.add(f"model/{name}", stored[0], value, live=True)
            if value.is_meta:
                self.replaced[id(value)] = f"model/{name}"
        unused = sorted(set(stored_of.values()) - used)
        self.problems += [f"unexpected {key}: {list(self.manifest.tensors[key].shape)}" for key in unused]
        self.problems += [
            f"buffer {name} is on the meta device and not persistent: no checkpoint has it; "
            "initialise it before load"
            for name, buffer in self.model.named_buffers()
            if buffer.is_meta and id(buffer) not in self.replaced
        ]

    def plan_optimizer(self, optimizer: Optimizer) -> tuple[int, ...]:
        """Returns which saved group each live group takes its hyper-parameters from."""
        saved = self.manifest.state.get("optimizer")
        if saved is None:
            self.problems.append("missing optimizer state: the checkpoint was saved without an optimizer")
            return ()
        if saved["kind"] != type(optimizer).__qualname__:
            self.problems.append(
                f"optimizer state is of {saved['kind']}, the optimizer is {type(optimizer).__qualname__}"
            )
            return ()
        groups = []
        for i, group in enumerate(optimizer.param_groups):
            names = {self.names.get(id(p), "a parameter that is not the model's") for p in group["params"]}
            fits = [j for j, g in enumerate(saved["groups"]) if set(g["params"]) == names]
            if not fits:
                self.problems.append(
                    f"optimizer group {i} has other parameters than any saved one: {_other(names, saved)}"
                )
                continue
            groups.append(i if i in fits else fits[0])
            self.small += keys_in({k: v for k, v in saved["groups"][groups[-1]].items() if k != "params"})
            for p in group["params"]:
                self.plan_param_state(optimizer, p, group, saved["state"].get(self.names[id(p)]))
        if len(saved["groups"]) != len(optimizer.param_groups):
            self.problems.append(
                f"{len(saved['groups'])} optimizer groups saved, {len(optimizer.param_groups)} expected"
            )
        return tuple(groups)

    def plan_param_state(
        self, optimizer: Optimizer, p: torch.Tensor, group: Mapping[str, Any], tree: Any
    ) -> None:
        live: Tensors = {}
        name = self.names[id(p)]
        if p in optimizer.state:
            encode(optimizer.state[p], f"optimizer/{name}", live)
        for key in keys_in(tree):
            entry = self.manifest.tensors[key]
            spec = self.spec_of(key, entry, p, group)
            present = live.get(key)
            if present is not None and present.shape == spec.shape and type(present) is type(spec):
                self.add(key, key, present, live=True)
            else:
                self.add(key, key, spec, live=False)
                if key in self.targets:
                    self.targets[key] = replace(
                        self.targets[key], device=_state_device(key, p, group, self.device)
                    )

    def spec_of(
        self, key: str, entry: TensorEntry, p: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """A meta tensor as the optimizer would have made it for ``p``: distributed like ``p`` where the
        shapes allow, replicated where not; a scalar (``step``) is plain."""
        dtype = TORCH_DTYPE[entry.dtype]
        saved = self.manifest.tensors.get(self.stored_of.get(f"model/{self.names[id(p)]}", ""))
        if saved is not None and entry.shape and (entry.shape, entry.dtype) == (saved.shape, saved.dtype):
            dtype = p.dtype  # state in the parameter's precision follows it
        if not isinstance(p, DTensor) or (not entry.shape and not entry.sharded):
            return torch.empty(entry.shape, dtype=dtype, device="meta")
        placements = [
            q
            if isinstance(q, Shard) and entry.shape[q.dim : q.dim + 1] == tuple(p.shape[q.dim : q.dim + 1])
            else Replicate()
            for q in p.placements
        ]
        return _meta_dtensor(key, entry.shape, dtype, p.device_mesh, placements)

    def plan_extra(self, extra: Mapping[str, Any]) -> None:
        saved = self.manifest.state.get("extra") or {}
        for key, value in extra.items():
            if key not in saved:
                self.problems.append(f"missing extra/{key}: saved were {sorted(saved)}")
            elif not isinstance(value, Stateful):
                self.problems.append(
                    f"extra/{key}: a {type(value).__qualname__} has no load_state_dict(); read Restored.extra"
                )
            else:
                live: Tensors = {}
                encode(value.state_dict(), f"extra/{key}", live)
                for name in keys_in(saved[key]):
                    if isinstance(live.get(name), DTensor):
                        self.add(name, name, live[name], live=True)
        self.small += [name for name in keys_in(saved) if name not in self.targets]


def plan(
    manifest: Manifest,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank: int,
) -> Plan:
    """Match a checkpoint with the live state. Local; nothing is changed.

    Raises:
        CheckpointError: listing everything that doesn't fit.
    """
    planner = _Planner(manifest, model)
    planner.plan_model()
    groups = planner.plan_optimizer(optimizer) if optimizer is not None else ()
    planner.plan_extra(extra or {})
    planner.small += keys_in(manifest.state.get("model", {}))
    rng = manifest.state.get("rng", [])
    planner.small += keys_in(rng[rank]) if rank < len(rng) else []
    if planner.problems:
        raise CheckpointError(
            f"the checkpoint doesn't fit ({len(planner.problems)} differences):\n    "
            + "\n    ".join(planner.problems)
        )
    return Plan(
        tuple(planner.targets.values()),
        tuple(dict.fromkeys(planner.small)),
        model,
        optimizer,
        extra or {},
        manifest.state,
        planner.names,
        groups,
        planner.replaced,
    )


def install(todo: Plan, filled: Mapping[str, Target], small: Mapping[str, torch.Tensor]) -> None:
    """Put what was allocated in place, and set the small state: groups, steps, extra objects. Local."""

    def value_of(key: str) -> torch.Tensor:
        return filled[key].whole if key in filled else small[key]

    _replace_meta(todo, filled)
    for name, module in todo.model.named_modules():
        key = f"{name}.{nn.modules.module._EXTRA_STATE_KEY_SUFFIX}".lstrip(".").replace("_orig_mod.", "")
        if key in todo.state.get("model", {}):
            module.set_extra_state(decode(todo.state["model"][key], value_of))
    if todo.optimizer is not None:
        saved = todo.state["optimizer"]
        for group, index in zip(todo.optimizer.param_groups, todo.groups, strict=True):
            _set_group(
                group, decode({k: v for k, v in saved["groups"][index].items() if k != "params"}, value_of)
            )
            for p in group["params"]:
                tree = saved["state"].get(todo.names[id(p)])
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


def _replace_meta(todo: Plan, filled: Mapping[str, Target]) -> None:
    if not todo.replaced:
        return
    new: dict[int, Any] = {}
    for module in todo.model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None or id(old) not in todo.replaced:
                    continue
                if id(old) not in new:  # tied parameters stay one object
                    whole: Any = filled[todo.replaced[id(old)]].whole
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
    todo.model._apply(lambda tensor: tensor)  # sharded modules look up their parameters again after an _apply


def _box_of(key: str, tensor: torch.Tensor) -> Box | None:
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape))
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    return box_at(key, tuple(tensor.shape), tensor.placements, tuple(mesh.shape), tuple(coordinate))


def _meta_dtensor(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh, placements: list[Any]
) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"{key}: this rank is not in the mesh of its parameter"
    box = box_at(key, shape, placements, tuple(mesh.shape), tuple(coordinate))
    whole = torch.empty(shape, dtype=dtype, device="meta")
    local = torch.empty(box.shape, dtype=dtype, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors live that are not on the meta device."""
    tensors: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def _state_device(key: str, p: torch.Tensor, group: Mapping[str, Any], default: torch.device) -> torch.device:
    """torch.optim keeps ``step`` on the host unless the step runs captured or fused on the device."""
    device = default if p.is_meta else p.device
    if key.endswith("/step") and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return device


def _other(names: set[str], saved: Mapping[str, Any]) -> str:
    known = {name for group in saved["groups"] for name in group["params"]}
    absent = sorted(names - known)
    return f"not saved: {absent[:5]}" if absent else "all are saved, in other groups"
