"""Where a checkpoint's tensors go in the live state, and what doesn't fit."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwright.checkpoint.apart import Apart, dtensor_over, made_state, state_device
from shardwright.checkpoint.flat import FlatSlice, Saved, are_like, base_tensor, is_like, views_of
from shardwright.checkpoint.format import Box, Manifest, TensorEntry
from shardwright.checkpoint.live import (
    Stateful,
    as_shards,
    box_at,
    boxes_of,
    check_extra,
    device_of,
    local_part,
    model_tensors,
    state_of,
)
from shardwright.checkpoint.shardfile import TORCH_DTYPE
from shardwright.checkpoint.tree import Tensors, encode, keys_in, kinds_in
from shardwright.errors import CheckpointError
from shardwright.params.placement import Cut, shard_behind
from shardwright.torch_private import local_of
from shardwright.transport.cpu.pages import advise_huge


@dataclass(frozen=True)
class Target:
    """One tensor to fill from ``entry``: ``whole`` is plain, a DTensor, or lies in a flat parameter; on the
    meta device until ``allocated``, if it is new.

    ``boxes`` are this rank's part, none if it has none. ``device``: where it is allocated.
    """

    key: str
    entry: TensorEntry
    whole: Saved
    boxes: tuple[Box, ...]
    device: torch.device

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory of it."""
        return local_part(self.key, self.whole)

    @property
    def casts(self) -> bool:
        return self.whole.dtype != TORCH_DTYPE[self.entry.dtype]

    def views(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box, with the memory that holds it."""
        return views_of(self.local, self.boxes)


def allocated(targets: Iterable[Target]) -> dict[str, Target]:
    """The targets by key, with memory on ``device`` for what is on the meta device: uninitialised,
    except that in flat parameters zeros lie between the tensors."""
    made: dict[int, torch.Tensor] = {}
    found = {}
    for target in targets:
        base = base_tensor(target.whole)
        if base.is_meta and id(base) not in made:
            make = torch.zeros_like if isinstance(target.whole, FlatSlice) else torch.empty_like
            made[id(base)] = whole = make(base, device=target.device, requires_grad=False)
            advise_huge((whole.to_local() if isinstance(whole, DTensor) else whole).untyped_storage())
        new = made.get(id(base), base)
        whole = replace(target.whole, flat=new) if isinstance(target.whole, FlatSlice) else new
        found[target.key] = replace(target, whole=whole)
    return found


def overlapping(targets: Iterable[Target]) -> set[str]:
    """Keys of targets in whose memory, or between whose elements, another one lies."""
    spans = []
    for target in targets:
        local = target.local
        span = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
        begin = local.data_ptr()
        spans.append((str(local.device), begin, begin + span * local.element_size(), target.key))
    found, last = set[str](), ("", 0, 0, "")
    for span in sorted(spans):
        if span[0] == last[0] and span[1] < last[2]:
            found |= {span[3], last[3]}
        last = max(last, span, key=lambda each: each[2]) if span[0] == last[0] else span
    return found


class LoadTargets:
    """What a load will do: collected, with everything that doesn't fit, before anything is touched.

    ``targets`` are filled, ``small`` tensors read whole. ``held``: what is in each parameter and buffer, by
    the checkpoint's names. ``elsewhere``: of which this rank holds nothing. ``groups``: of which saved group
    each of the optimizer's takes what it has. ``replaced``: keys of what is on the meta device. ``wholes``:
    what is filled by what it is made of. ``unused``: of a pipeline's stage, keys of what it hasn't; in any
    other model that is a problem.
    """

    def __init__(
        self, manifest: Manifest, model: nn.Module, optimizer: Any, extra: Any, is_stage: bool
    ) -> None:
        self.manifest = manifest
        self.is_stage = is_stage
        self.unused: set[str] = set()
        self.model = model
        self.optimizer = optimizer
        self.extra = extra or {}
        self.targets: dict[str, Target] = {}
        self.small: set[str] = set()
        self.held: dict[int, dict[str, Saved]] = {}
        self.elsewhere: set[str] = set()
        self.groups: list[int] = []
        self.replaced: dict[int, str] = {}
        self.wholes: dict[str, torch.Tensor] = {}
        self.problems: list[str] = []
        self._device = device_of(model)

    def add(self, key: str, whole: Saved, stored: str = "", device: torch.device | None = None) -> None:
        """``key`` is the live tensor's. stored: the checkpoint's; device: where a new one is allocated; both
        only where they are others."""
        entry = self.manifest.tensors[stored or key]
        dtype, base = TORCH_DTYPE[entry.dtype], base_tensor(whole)
        if device is None:
            is_cut = isinstance(base, DTensor)
            device = torch.device(base.device_mesh.device_type) if is_cut else self._device
        if tuple(whole.shape) != entry.shape:
            self.problems.append(
                f"misshapen {key}: {list(entry.shape)} in the checkpoint, {list(whole.shape)} expected"
            )
        elif whole.dtype != dtype and not (whole.dtype.is_floating_point and dtype.is_floating_point):
            self.problems.append(f"wrong dtype {key}: {dtype} in the checkpoint, {whole.dtype} expected")
        else:
            self.targets[key] = Target(key, entry, whole, boxes_of(key, whole), device)

    def match_model(self, left_out: Collection[str] = ()) -> None:
        named, aliases = model_tensors(self.model)
        stored_of, used = self.manifest.keys_of("model/"), set[str]()
        for name, value in named.items():
            if name in left_out:
                continue
            if isinstance(value, Apart):
                self.match_apart(name, value)
                continue
            if not isinstance(value, Saved):
                if name not in self.manifest.state.get("model", {}):
                    self.problems.append(f"missing model/{name} (a module's extra state)")
                continue
            known = [n for n in (name, *aliases.get(name, ())) if f"model/{n}" in stored_of]
            stored = list(dict.fromkeys(stored_of[f"model/{n}"] for n in known))
            whole = base_tensor(value)
            base, held = id(whole), known[0] if known else name
            self.held.setdefault(base, {})[held] = value
            if isinstance(whole, DTensor) and not local_of(whole).numel():
                self.elsewhere.add(held)
            used.update(stored)
            if not stored:
                self.problems.append(f"missing model/{name}: {list(value.shape)} {value.dtype}")
                continue
            if len({tuple(p.crc32 for p in self.manifest.tensors[s].pieces) for s in stored}) > 1:
                self.problems.append(f"tied in the model, different in the checkpoint: {', '.join(stored)}")
            self.add(f"model/{name}", value, stored[0])
            if value.is_meta:
                self.replaced[base] = f"model/{name}"
        unused = set(stored_of.values()) - used
        if self.is_stage:
            self.unused, unused = unused, set()
        tensors = self.manifest.tensors
        self.problems += [f"unexpected {key}: {list(tensors[key].shape)}" for key in sorted(unused)]
        self.problems += [
            f"buffer {name} is on the meta device and not persistent: no checkpoint has it; "
            "initialise it before load"
            for name, buffer in self.model.named_buffers()
            if buffer.is_meta and id(buffer) not in self.replaced
        ]

    def match_apart(self, name: str, value: Apart) -> None:
        """A parameter or buffer of a subclass; what it is made of has names of its own."""
        self.held[id(value.whole)] = {name: value.whole}
        saved = self.manifest.state.get("model", {}).get(name, "")
        if saved != value.kind:
            self.problems.append(
                f"wrong kind model/{name}: {saved or 'plain'} in the checkpoint, {value.kind} expected"
            )
        if value.whole.is_meta:
            self.problems.append(
                f"model/{name} is of a class of its own and on the meta device: call to_empty() before load"
            )

    def match_optimizer(self) -> None:
        saved, optimizer = self.manifest.state.get("optimizer"), self.optimizer
        if saved is None:
            self.problems.append("missing optimizer state: the checkpoint was saved without an optimizer")
            return
        if saved["kind"] != type(optimizer).__qualname__:
            self.problems.append(
                f"optimizer state is of {saved['kind']}, the optimizer is {type(optimizer).__qualname__}"
            )
            return
        for i, group in enumerate(optimizer.param_groups):
            foreign = ("a parameter that is not the model's",)
            shards = {p: shard_behind(p) for p in group["params"]}
            names = {name for shard in shards.values() for name in self.held.get(id(shard), foreign)}
            params = [{*g["params"]} for g in saved["groups"]]
            fits = [
                j
                for j, each in enumerate(params)
                if names <= each and (self.is_stage or each - names <= self.elsewhere)
            ]
            if not fits:
                self.problems.append(
                    f"optimizer group {i} has other parameters than any saved one: {_other(names, saved)}"
                )
                continue
            self.groups.append(i if i in fits else fits[0])
            self.small.update(keys_in(without_params(saved["groups"][self.groups[-1]])))
            for p, shard in shards.items():
                trees = [saved["state"].get(name) for name in self.held[id(shard)]]
                if any(isinstance(part, FlatSlice) for part in self.held[id(shard)].values()):
                    self.match_flat_state(p, group, trees)
                else:
                    self.match_param_state(p, group, keys_in(trees[0]), trees[0])
        number, expected = len(saved["groups"]), len(optimizer.param_groups)
        if number != expected:
            self.problems.append(f"{number} optimizer groups saved, {expected} expected")

    def match_param_state(
        self, p: torch.Tensor, group: Mapping[str, Any], keys: Iterable[str], tree: Any = None
    ) -> None:
        live: Tensors = {}
        apart: dict[str, Apart] = {}
        shard = shard_behind(p)
        name, kinds, held = next(iter(self.held[id(shard)])), kinds_in(tree), p in self.optimizer.state
        state = state_of(self.optimizer, p, name, shard) if held else {}
        if kinds and not held:
            try:
                state = made_state(self.optimizer, p, group, self._device)
                state = state if shard is p else as_shards(state, p, name)
            except Exception as error:
                self.problems.append(
                    f"optimizer/{name}: take one step before load; load's own failed: {error!r}"
                )
        encode(state, f"optimizer/{name}", live, apart)
        inner = {
            key for path, saved in kinds.items() for key in self.match_apart_state(path, saved, live, apart)
        }
        for key in [each for each in keys if each not in inner]:
            spec = self.spec_of(key, shard)
            present = live.get(key) if held else None
            if present is not None and present.shape == spec.shape and type(present) is type(spec):
                self.add(key, present)
            else:
                self.add(key, spec, device=state_device(key, p, group, self._device))

    def match_apart_state(
        self, path: str, saved: Mapping[str, Any], live: Tensors, apart: Mapping[str, Apart]
    ) -> list[str]:
        """State that is a tensor of a subclass, which the optimizer has made; the keys of its tensors."""
        found, plain, keys = apart.get(path), live.get(path), keys_in(saved)
        if isinstance(plain, DTensor) and not local_of(plain).numel():
            self.wholes[path] = plain  # of nothing, optimizers make no tensor of a subclass
        elif found is None or found.kind != saved["kind"]:
            got = found.kind if found is not None else "a plain tensor" if plain is not None else "nothing"
            self.problems.append(
                f"wrong kind {path}: {saved['kind']} in the checkpoint, the optimizer has {got} for this "
                "rank's part; load on as many ranks as saved it, with the same optimizer"
            )
        else:
            self.wholes[path] = found.whole
            for key in keys:
                self.add(key, live[key])
        return keys

    def match_flat_state(self, p: torch.Tensor, group: Mapping[str, Any], trees: Sequence[Any]) -> None:
        """State of a flat parameter, from that of the tensors in it: of its shape, or one number for all."""
        names = [*self.held[id(p)]]
        slices = [part for part in self.held[id(p)].values() if isinstance(part, FlatSlice)]
        if kinds := kinds_in([*trees]):
            self.problems.append(
                f"optimizer state {next(iter(kinds))} is of a class of its own, which no part of a flat "
                "parameter can be: wrap the model with use_orig_params=True, or use fully_shard"
            )
            return
        prefixes = [f"optimizer/{name}/" for name in names]
        of_each = zip(prefixes, trees, strict=True)
        kept = [json.dumps(tree).replace(json.dumps(at)[1:-1], "") for at, tree in of_each]
        if len(set(kept)) > 1:
            other = next(i for i, tree in enumerate(kept) if tree != kept[0])
            self.problems.append(
                f"optimizer state of {names[0]} and {names[other]} is not of one kind, and both lie in one "
                f"flat parameter: {kept[0][:60]}, {kept[other][:60]}"
            )
            return
        for suffix in [key.removeprefix(prefixes[0]) for key in keys_in(trees[0])]:
            entries = [self.manifest.tensors[prefix + suffix] for prefix in prefixes]
            if not are_like(entries, slices):
                self.match_param_state(p, group, [prefixes[0] + suffix])
                if len({tuple(piece.crc32 for piece in entry.pieces) for entry in entries}) > 1:
                    self.problems.append(
                        f"optimizer state {suffix!r} of {', '.join(names)} differs, and they lie in one flat "
                        "parameter, which has one"
                    )
                continue
            base = self.optimizer.state[p].get(suffix) if p in self.optimizer.state else None
            new = torch.empty_like(p, dtype=TORCH_DTYPE[entries[0].dtype], device="meta")
            flat = base if isinstance(base, torch.Tensor) and is_like(base, p) else new
            for prefix, part in zip(prefixes, slices, strict=True):
                key = prefix + suffix
                device = state_device(key, p, group, self._device)
                self.add(key, FlatSlice(flat, part.entry), device=device)

    def spec_of(self, key: str, p: torch.Tensor) -> torch.Tensor:
        """A meta tensor as the optimizer would have made it for ``p``: distributed like ``p`` where the
        shapes allow, replicated where not; a scalar (``step``) is plain."""
        entry = self.manifest.tensors[key]
        dtype = TORCH_DTYPE[entry.dtype]
        saved = self.manifest.tensors.get(f"model/{next(iter(self.held[id(p)]))}")
        if saved is not None and entry.shape and (entry.shape, entry.dtype) == (saved.shape, saved.dtype):
            dtype = p.dtype  # state in the parameter's precision follows it
        if not isinstance(p, DTensor) or (not entry.shape and not entry.sharded):
            return torch.empty(entry.shape, dtype=dtype, device="meta")
        placements = [
            q
            if isinstance(q, Cut) and entry.shape[q.dim : q.dim + 1] == tuple(p.shape[q.dim : q.dim + 1])
            else Replicate()
            for q in p.placements
        ]
        mesh, coordinate = p.device_mesh, p.device_mesh.get_coordinate()
        assert coordinate is not None, f"{key}: this rank is not in the mesh of its parameter"
        box = box_at(key, entry.shape, placements, tuple(mesh.shape), tuple(coordinate))
        local = torch.empty(box.shape, dtype=dtype, device="meta")
        return dtensor_over(local, mesh, placements, entry.shape, type(p.detach()))

    def match_extra(self) -> None:
        check_extra(self.extra)
        saved = self.manifest.state.get("extra") or {}
        for key, value in self.extra.items():
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
                        self.add(name, live[name])
        self.small.update(name for name in keys_in(saved) if name not in self.targets)


def matched(
    manifest: Manifest,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank: int,
    left_out: Collection[str] = (),
    is_stage: bool = False,
) -> LoadTargets:
    """Match a checkpoint with the live state. Local; nothing is changed.

    left_out: names of the model's tensors that are not to be loaded, and may be missing. is_stage: the model
    is a pipeline's stage, and other stages have what it hasn't.
    Raises:
        CheckpointError: listing everything that doesn't fit.
    """
    todo = LoadTargets(manifest, model, optimizer, extra, is_stage)
    todo.match_model(left_out)
    if optimizer is not None:
        todo.match_optimizer()
    todo.match_extra()
    rng = manifest.state.get("rng", [])
    todo.small.update(keys_in([*manifest.state.get("model", {}).values(), *rng[rank : rank + 1]]))
    if todo.problems:
        raise CheckpointError(
            f"the checkpoint doesn't fit ({len(todo.problems)} differences):\n    "
            + "\n    ".join(todo.problems)
        )
    return todo


def without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved group of an optimizer has beside its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _other(names: set[str], saved: Mapping[str, Any]) -> str:
    known = {name for group in saved["groups"] for name in group["params"]}
    absent = sorted(names - known)
    return f"not saved: {absent[:5]}" if absent else "all are saved, in other groups"
