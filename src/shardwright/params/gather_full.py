"""Whole parameters on one rank: each is collected from its shards, one at a time, straight to the host."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.params.param import ShardedParam
from shardwright.params.quantized.group import EncodedPair, pairs_in
from shardwright.params.subclass import copied
from shardwright.transport.cpu.pages import pages_of_its_own


def stream_full(
    state: Mapping[str, Any],
    params: Mapping[int, ShardedParam],
    dst: int = 0,
    decoded: torch.dtype | None = None,
    shared: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of all tensors in ``state``, whole, on the CPU; sharded ones only on rank ``dst``.

    state: a model's ``state_dict(keep_vars=True)`` at rest, in the same order on every rank; every rank
        iterates to the end. params: what is sharded, by the id of its parameter.
    A tensor that several names show is collected for each anew, or once where they are to share it
    (``shared``), which keeps it to the end. Memory beside what the caller keeps: one whole parameter on
    ``dst``, of its device too where that isn't the CPU, and on a host at most 128 MiB on the way. The dtype
    is the one at rest.
    The members of a flat parameter come one after another, under their own names.
    decoded: yield quantised weights decoded to this dtype, under their names, in place of codes and scales.
    """
    pairs = [] if decoded is None else pairs_in(params.values())
    scales = {id(pair.codes.sharded): pair for pair in pairs}
    hidden = {id(pair.scales.sharded) for pair in pairs}
    collected: dict[int, torch.Tensor | None] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or id(value) in hidden:
            continue
        if id(value) not in collected:
            whole = _whole(value, params.get(id(value)), dst)
            if decoded is not None and id(value) in scales:
                whole = _decoded(scales[id(value)], whole, dst, decoded)
            collected[id(value)] = whole
        whole = collected[id(value)]
        if not shared:
            collected.clear()
        param = params.get(id(value))
        if whole is not None:
            yield from ((name, whole),) if param is None else param.entries(name, whole)


def _decoded(
    pair: EncodedPair, codes: torch.Tensor | None, dst: int, dtype: torch.dtype
) -> torch.Tensor | None:
    scales = _whole(pair.scales.sharded, pair.scales, dst)
    if codes is None or scales is None:
        return None
    shape = pair.encoding.shape
    place = pages_of_its_own(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
    return pair.encoding.codec.decode(codes, scales, shape, dtype, out=place)


def _whole(value: torch.Tensor, param: ShardedParam | None, dst: int) -> torch.Tensor | None:
    if param is None or param.inner is not None or param.extended:
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        is_extended = param is not None and param.extended
        return copied(whole).to("cpu") if is_extended else whole.to("cpu", copy=True)
    layout, axis = param.layout, param.axis
    local = param.local.detach()
    if layout.dim is None:
        return local.to("cpu", copy=True) if axis.rank == dst else None
    flat = axis.comm.gather(local.movedim(layout.dim, 0).reshape(-1), layout.spans, dst)
    return None if flat is None else flat.cpu().as_strided(layout.shape, layout.strides)
