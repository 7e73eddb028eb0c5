"""Laying the unsharded faces of a group's parameters into one buffer, and lists of what lies where."""

from collections.abc import Container, Sequence

import torch
from torch import nn

from shardwright.params.buffer import Buffer, ReorderedBuffer
from shardwright.params.param import ShardedParam
from shardwright.params.subclass import extensions_changed
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import GroupLayout, contiguous_strides
from shardwright.torch_private import foreach_copy_, local_of, parameters_of
from shardwright.transport.base import Segment

Typed = Sequence[tuple[ShardedParam, torch.dtype]]
"""Parameters, and the dtypes that they have while unsharded."""


def layout_of(bound: Typed) -> GroupLayout:
    """Where they lie, one after another."""
    return GroupLayout(tuple(param.layout for param, _ in bound), tuple(dtype.itemsize for _, dtype in bound))


def own_buffer(bound: Typed, device: torch.device) -> Buffer:
    """A buffer of this rank's own that they lie in, each contiguous, freed."""
    layout = layout_of(bound)
    across = [(param, dtype) for param, dtype in bound if not param.layout.in_order]
    where = layout_of(across)
    wire, places = Buffer(where.nbytes, device), dict(zip(across, where.offsets_nbytes, strict=True))
    buffer = ReorderedBuffer(layout.nbytes, wire, device) if across else Buffer(layout.nbytes, device)
    buffer.alloc()
    for each, offset in zip(bound, layout.offsets_nbytes, strict=True):
        param, dtype = each
        if isinstance(buffer, ReorderedBuffer) and each in places:
            strides = contiguous_strides(param.layout.shape)
            face, filled = (buffer.tensor(dtype, offset, param.layout.shape, strides) for _ in range(2))
            param.bind(wire, places[each], dtype, face)
            gathered = wire.tensor(dtype, places[each], param.layout.shape, param.layout.strides)
            buffer.pairs.append((filled, gathered))  # not the face: filling is no in-place change of a weight
        else:
            param.bind(buffer, offset, dtype)
    buffer.free()
    return buffer


class Bound:
    """A group's parameters as they were found before a gather, in lists that are ready to be read: what is
    copied, what is gathered, what modules show. It holds until a parameter is replaced, cast or regrouped.

    policy: the dtypes it was made for. segments: of the group's buffers, for its all-gather.
    """

    def __init__(
        self, params: Sequence[ShardedParam], policy: MixedPrecisionPolicy, decoded: Container[ShardedParam]
    ) -> None:
        """decoded: those that modules don't show while unsharded: what is decoded from them is shown."""
        self.policy = policy
        self._params = params
        self._found: list[tuple[ShardedParam, dict[str, nn.Parameter | None], str, int]] = []
        self._shards: list[tuple[nn.Parameter, torch.Tensor, torch.dtype, torch.device]] = []
        self._sites: tuple[list[_Shown], list[_Shown]] = [], []
        self._show_themselves: list[tuple[ShardedParam, bool]] = []
        self._copies: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._other_copies: list[ShardedParam] = []
        self.segments: list[Segment] = []
        for param in params:
            first, sharded, local = param.sites[0], param.sharded, param.local
            self._found.append((param, parameters_of(first.module), first.name, len(param.sites)))
            self._shards.append((sharded, local, sharded.dtype, local.device))
            self._list_sites(param, param in decoded)
            if not param.extended:
                self._list_copy(param, local)
                if param.layout.dim is not None:
                    self.segments.append(param.gather_segment())

    def _list_sites(self, param: ShardedParam, decoded: bool) -> None:
        if param.shows_itself:
            self._show_themselves.append((param, decoded))
            return
        for site in param.sites:
            self._sites[0].append((parameters_of(site.module), site.name, param.sharded))
            if not decoded:
                self._sites[1].append((parameters_of(site.module), site.name, param.unsharded))

    def _list_copy(self, param: ShardedParam, local: torch.Tensor) -> None:
        own = param.own
        if param.has_device_copy or type(local) is not torch.Tensor:
            self._other_copies.append(param)
        elif own.numel():
            # One kernel copies lists of tensors only where pairs have the same strides, and sides one dtype.
            key = own.dtype, local.dtype, local.device, own.stride() == local.stride()
            places, sources = self._copies.setdefault(key, ([], []))
            places.append(own)
            sources.append(local)

    def is_current(self) -> bool:
        """Whether every parameter is still the one that was found, with its memory, dtype and sites."""
        for param, shown, name, num_sites in self._found:
            if shown.get(name) is not param.sharded or len(param.sites) != num_sites:
                return False
        for (param, *_), (sharded, local, dtype, device) in zip(self._found, self._shards, strict=True):
            if param.sharded is not sharded or local_of(sharded) is not local:
                return False
            if sharded.dtype != dtype or local.device != device:
                return False
        return not extensions_changed(self._params)

    def follow_freezing(self) -> int:
        """Unsharded faces ask for a gradient where the shards do; bits of those that do."""
        trainable = 0
        for place, param in enumerate(self._params):
            asks = param.sharded.requires_grad
            trainable |= asks << place
            if param.bound is not None and param.bound.param.requires_grad != asks:
                param.bound.param.requires_grad_(asks)
        return trainable

    def copy_in(self) -> None:
        """Copy the shards to this rank's part of the buffers; under ``no_grad``."""
        for places, sources in self._copies.values():
            foreach_copy_(places, sources, non_blocking=True)
        for param in self._other_copies:
            source = param.device_copy if param.has_device_copy else param.local
            param.own.copy_(source, non_blocking=True)

    def show(self, unsharded: bool) -> None:
        """Modules show the shards, or the unsharded parameters that are not decoded. Past
        ``nn.Module.__setattr__``, which costs 5 us a parameter."""
        for shown, name, param in self._sites[unsharded]:
            shown[name] = param
        for param, decoded in self._show_themselves:
            if not (unsharded and decoded):
                param.show(param.unsharded if unsharded else param.sharded)


_Shown = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]
