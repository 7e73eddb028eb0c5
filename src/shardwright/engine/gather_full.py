"""Whole parameters on one rank, collected from the shards of all, straight to the host."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine.groups.decoding import EncodedPair, pairs_in
from shardwright.params.param import ShardedParam
from shardwright.params.subclass import copied
from shardwright.transport.collect import WINDOW_NBYTES
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
    ``dst``'s host, or 128 MiB of smaller ones of an accelerator, and at most 128 MiB on the way, on each
    host or device. The dtype is the one at rest.
    The members of a flat parameter come one after another, under their own names.
    decoded: yield quantised weights decoded to this dtype, under their names, in place of codes and scales.
    """
    pairs = [] if decoded is None else pairs_in(params.values())
    scales = {id(pair.codes.sharded): pair for pair in pairs}
    hidden = {id(pair.scales.sharded) for pair in pairs}
    shown = {name: v for name, v in state.items() if isinstance(v, torch.Tensor) and id(v) not in hidden}
    once = {id(value): value for value in shown.values()}
    wanted = []
    for value in once.values() if shared else shown.values():
        pair = scales.get(id(value))
        wanted += [value] if pair is None else [pair.codes.sharded, pair.scales.sharded]
    wholes = _wholes(((value, params.get(id(value))) for value in wanted), dst)
    collected: dict[int, torch.Tensor | None] = {}
    for name, value in shown.items():
        if id(value) not in collected:
            whole, pair = next(wholes), scales.get(id(value))
            if pair is not None and decoded is not None:
                whole = _decoded(pair, whole, next(wholes), decoded)
            collected[id(value)] = whole
        whole = collected[id(value)]
        if not shared:
            collected.clear()
        param = params.get(id(value))
        if whole is not None:
            yield from ((name, whole),) if param is None else param.entries(name, whole)


def _wholes(
    wanted: Iterable[tuple[torch.Tensor, ShardedParam | None]], dst: int
) -> Iterator[torch.Tensor | None]:
    """Each of them whole, on rank ``dst``. On an accelerator those that follow each other on one transport
    are gathered together, up to a window's bytes."""
    batch: list[ShardedParam] = []
    nbytes = 0
    for value, param in wanted:
        if param is None or param.inner is not None or param.extended or param.layout.dim is None:
            yield from _gathered(batch, dst)
            batch, nbytes = [], 0
            yield _whole(value, param, dst)
            continue
        size = param.layout.numel * param.local.element_size()
        # A host collects tensor by tensor, and a batch would only hold several whole ones at once.
        room = 0 if param.axis.comm.streams is None else WINDOW_NBYTES
        if batch and (param.axis.comm is not batch[0].axis.comm or nbytes + size > room):
            yield from _gathered(batch, dst)
            batch, nbytes = [], 0
        batch.append(param)
        nbytes += size
    yield from _gathered(batch, dst)


def _gathered(batch: list[ShardedParam], dst: int) -> Iterator[torch.Tensor | None]:
    if not batch:
        return
    axis, layouts = batch[0].axis, [param.layout for param in batch]
    shards = [
        param.local.detach().movedim(layout.dim or 0, 0).reshape(-1).to(axis.device)
        for param, layout in zip(batch, layouts, strict=True)
    ]
    found: list[torch.Tensor | None] = [None] * len(batch)
    flats = axis.comm.gather_many(shards, [layout.spans for layout in layouts], dst)
    if flats is not None:
        found = [f.as_strided(each.shape, each.strides) for f, each in zip(flats, layouts, strict=True)]
    # This stands still while the caller works with a tensor, and must not hold the others for so long.
    del shards, flats
    while found:
        yield found.pop(0)


def _decoded(
    pair: EncodedPair, codes: torch.Tensor | None, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    if codes is None or scales is None:
        return None
    shape = pair.encoding.shape
    place = pages_of_its_own(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
    return pair.encoding.codec.decode(codes, scales, shape, dtype, out=place)


def _whole(value: torch.Tensor, param: ShardedParam | None, dst: int) -> torch.Tensor | None:
    """The whole of a tensor that isn't gathered from plain shards."""
    if param is not None and param.inner is None and not param.extended:  # not sharded
        return param.local.detach().to("cpu", copy=True) if param.axis.rank == dst else None
    if param is not None and param.extended:
        extended: Any = param
        return copied(param.fqn, extended.whole()).to("cpu")
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    return whole.to("cpu", copy=True)
