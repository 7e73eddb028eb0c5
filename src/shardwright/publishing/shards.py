"""What this rank sends of a version: its own shards, under the names that receivers get, never whole weights.

As checkpoints see a model (``checkpoint/live.py``), so that every way to shard one comes with it. A quantised
weight is decoded, and an adapter added, row by row, each rank its own; only adapters are gathered for that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.api import between_steps
from shardwright.checkpoint.agree import made, plain
from shardwright.checkpoint.flat import FlatSlice, base_tensor
from shardwright.checkpoint.format import Box, TensorEntry, overlaps
from shardwright.checkpoint.live import Part, model_tensors, part_of
from shardwright.checkpoint.shardfile import DTYPE_NAME, TORCH_DTYPE
from shardwright.engine.unit import units_in
from shardwright.errors import InputError
from shardwright.lora import LoraStacked, adapters_in, merged_weight, parts_of, stored_weight
from shardwright.quantized import encodings
from shardwright.quantized.codec import Encoding, scales_name
from shardwright.torch_private import parameters_of

Names = Literal["adapters", "merged"] | Callable[[str], str | None] | None
Held = Sequence[tuple[str, Box]]
"""The pieces that a rank sends, in order: of which tensor, and which part of it."""


@dataclass(frozen=True)
class Shard:
    """What this rank holds of one tensor. views: each box with its values, on any device, not yet cast."""

    entry: TensorEntry
    dtype: torch.dtype
    owner: bool
    views: Sequence[tuple[Box, torch.Tensor]]


def come_to_rest(model: nn.Module, caller: str) -> None:
    """Bring a sharded model to rest. Local. Raises: InputError, StageError."""
    between_steps(model, caller)
    for unit in units_in(model):
        unit.runtime.rest()


def shards_of(model: nn.Module, dtype: torch.dtype | None, names: Names) -> Iterator[tuple[str, Shard]]:
    """What is sent of a model now, in one order on all ranks; of each tensor this rank's part.

    With "merged" each adapter is gathered, so that all ranks iterate to the end.
    Raises: InputError for what can't be sent; CheckpointError for a dtype or placement without boxes.
    """
    named, aliases = model_tensors(model)
    rename = names if callable(names) else str
    plain = _Plain(model, merged=names == "merged")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, value in named.items():
        if not isinstance(value, torch.Tensor | FlatSlice):
            if hasattr(value, "whole"):
                raise InputError(
                    f"{name} is of the tensor subclass {type(value.whole).__name__}, which can't be "
                    "published; quantise with quantize_, or leave it out by names="
                )
            continue  # get_extra_state() of a module
        wanted = names != "adapters" or base_tensor(value).requires_grad
        if isinstance(value, FlatSlice) and plain.hidden:
            raise InputError(f'{name} lies in a flat parameter: names="merged" needs use_orig_params=True')
        new = rename(name) if wanted and id(value) not in plain.hidden else None
        if new is None:
            continue
        part = part_of(name, value, rank)
        shape, found, views = plain.of(name, value, part)
        floats = found.is_floating_point and id(value) not in plain.scales
        cast = dtype if floats and dtype is not None else found
        others = tuple(each for alias in aliases.get(name, ()) if (each := rename(alias)) is not None)
        yield new, Shard(TensorEntry(shape, DTYPE_NAME[cast], (), others), cast, part.owner, views)


class _Plain:
    """The weights of a model; with ``merged`` decoded and with their adapters added.

    hidden: what isn't sent then, by id: adapters and scales. scales: those of quantised weights, which keep
        their dtype.
    """

    def __init__(self, model: nn.Module, merged: bool) -> None:
        self.hidden, self.scales = set[int](), set[int]()
        self._codes: dict[int, tuple[Encoding, Any]] = {}
        self._layers: dict[int, Any] = {}
        for module in model.modules():
            params: Mapping[str, Any] = parameters_of(module)
            for name, encoding in encodings(module).items():
                scales = params[scales_name(name, encoding.codec)]
                self.scales.add(id(scales))
                if merged:
                    self._codes[id(params[name])] = encoding, scales
        if merged:
            self.hidden |= self.scales
            for layer in adapters_in(model).values():
                self._layers[id(stored_weight(layer))] = layer
                self.hidden |= {id(param) for param in parts_of(layer).values()}

    def of(
        self, name: str, value: Any, part: Part
    ) -> tuple[tuple[int, ...], torch.dtype, Sequence[tuple[Box, torch.Tensor]]]:
        """Shape, dtype and this rank's values of what is sent for a tensor."""
        views, dtype, shape = [*part.views()], part.local.dtype, part.shape
        if id(value) in self._codes:
            encoding, scales = self._codes[id(value)]
            shape, dtype = encoding.shape, encoding.dtype
            parts = part_of(name, scales, 0)
            views = [_decoded(name, encoding, box, part, view, parts) for box, view in views]
        if (layer := self._layers.get(id(value))) is not None:
            whole = {end: _whole(param) for end, param in parts_of(layer).items()}
            if part.owner:
                views = [(box, _merged(name, box, view, layer, whole, shape)) for box, view in views]
        return shape, dtype, views


def _whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def _decoded(
    name: str, encoding: Encoding, box: Box, codes: Part, view: torch.Tensor, scales: Part
) -> tuple[Box, torch.Tensor]:
    """A rank's rows of a quantised weight; rows are encoded each by itself."""
    if box.shape[-1] != codes.shape[-1]:
        raise InputError(
            f"{name} is quantised and sharded along its last dim: blocks of a codec lie along it, so that "
            "ranks can't decode their own; shard it along another dim, or publish codes and scales"
        )
    shape = (*box.shape[:-1], encoding.shape[-1])
    decoded = encoding.codec.decode(view, scales.local, shape, encoding.dtype)
    return Box((*box.offset[:-1], 0), shape), decoded


def _merged(
    name: str, box: Box, view: torch.Tensor, layer: Any, whole: Mapping[str, torch.Tensor], shape: Any
) -> torch.Tensor:
    """A box of a weight with its adapter added, rounded once."""
    *experts, rows, columns = box.slices_in(Box.whole(shape))
    lora = layer.lora
    if lora.dora and box.shape[1] != shape[1]:
        raise InputError(f"{name}: merging DoRA needs whole rows; shard it along dim 0")
    if experts:
        assert isinstance(layer, LoraStacked)
        into, out = (rows, columns) if layer.transposed else (columns, rows)
        a = whole["lora_A.weight"].unflatten(0, (shape[0], -1))[experts[0], :, into].flatten(0, 1)
        b = whole["lora_B.weight"].unflatten(1, (-1, shape[0]))[out, :, experts[0]].flatten(1)
        parts = {"lora_A.weight": a, "lora_B.weight": b}
        return merged_weight(view, lora, parts, layer.transposed).to(view.dtype)
    parts = {**whole, "lora_A.weight": whole["lora_A.weight"][:, columns]}
    parts |= {end: parts[end][rows] for end in parts if end != "lora_A.weight"}
    return merged_weight(view, lora, parts).to(view.dtype)


@dataclass(frozen=True)
class Layout:
    """What a version has. held: the pieces of each rank, none of them twice."""

    entries: Mapping[str, TensorEntry]
    held: Sequence[Held]

    def nbytes_of(self, rank: int) -> int:
        """Bytes of what a rank sends."""
        return sum(box.numel * self.itemsize(name) for name, box in self.held[rank])

    def told(self) -> dict[str, Any]:
        """As JSON, which ``heard`` takes."""
        return {"entries": plain(dict(self.entries)), "held": plain([list(held) for held in self.held])}

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> "Layout":
        """What another process has told. Raises: ValueError, KeyError, TypeError."""
        return cls(made(told["entries"]), made(told["held"]))

    def itemsize(self, name: str) -> int:
        """Bytes of one element of a tensor."""
        return self.entries[name].nbytes // max(1, self.entries[name].numel)


def layout_of(entries: Mapping[str, TensorEntry], told: Sequence[Held]) -> Layout:
    """What ranks send, of what each has told that it owns: what several own, the first of them sends.

    Raises: InputError where an element of a tensor is sent by nobody, or two names are one.
    """
    names = [n for key, entry in entries.items() for n in (key, *entry.aliases)]
    if len(names) > len({*names}):
        raise InputError(f"names= gives {next(n for n in names if names.count(n) > 1)!r} to two tensors")
    if not names:
        raise InputError("no tensor is left to be published; give names= that keep some")
    seen: dict[str, list[Box]] = {name: [] for name in entries}
    held: list[list[tuple[str, Box]]] = []
    for own in told:
        held.append([(name, box) for name, box in own if box not in seen[name]])
        for name, box in held[-1]:
            seen[name].append(box)
    for name, boxes in seen.items():
        if sum(box.numel for box in boxes) != entries[name].numel or overlaps(boxes):
            raise InputError(
                f"{name} of shape {list(entries[name].shape)} is held in the boxes {boxes[:8]}, expected "
                "each element once; give all ranks the same model and names="
            )
    return Layout(entries, held)


class Staging:
    """This rank's shards of one version, cast, in memory of the host that is kept for the next one."""

    def __init__(self, layout: Layout, rank: int, pinned: bool) -> None:
        self._layout, self._held = layout, layout.held[rank]
        self.pieces = [
            torch.empty(box.shape, dtype=TORCH_DTYPE[layout.entries[name].dtype], pin_memory=pinned)
            for name, box in self._held
        ]
        self.nbytes = layout.nbytes_of(rank)

    def fill(self, shards: Iterator[tuple[str, Shard]]) -> bool:
        """Copy what is sent now; whether an accelerator is still copying.

        Raises: InputError where the model isn't what was published at first.
        """
        places = {(name, box): piece for (name, box), piece in zip(self._held, self.pieces, strict=True)}
        entries, left, on_device = dict(self._layout.entries), dict(places), False
        for name, shard in shards:
            if entries.pop(name, None) != shard.entry:
                raise InputError(
                    f"{name} is {shard.entry.dtype} {list(shard.entry.shape)} now, and the model was "
                    f"{self._layout.entries.get(name, 'without it')} when it was published; close this "
                    "publisher and publish the model anew"
                )
            for box, view in shard.views if shard.owner else ():
                if (place := left.pop((name, box), None)) is not None:
                    there = view.device.type != "cpu"
                    on_device |= there
                    # Cast where it lies: a copy that casts on its way isn't asynchronous.
                    place.copy_(view.to(place.dtype) if there else view, non_blocking=there)
        if entries or left:
            raise InputError(
                f"{next(iter(entries), None) or next(iter(left))[0]} isn't in the model any more, or cut "
                "otherwise; close this publisher and publish the model anew"
            )
        return on_device
