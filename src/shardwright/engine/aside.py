"""Taking part in a group's all-gathers for the sake of other ranks: into memory that nobody reads."""

import torch

from shardwright.engine.group import ParamGroup, Stage
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam
from shardwright.params.smaller_world import Near
from shardwright.schedule.layout import ParamLayout
from shardwright.transport.base import Segment


def fill_aside(group: ParamGroup, nearby: bool) -> list[Segment] | None:
    """As ``ParamGroup.fill``, whatever stage the group is in; it stays so.

    None where an all-gather of another kind was issued, and dropped: among neighbours, or of rows in use.
    Raises: StageError for parameters that say themselves what is gathered: nobody else can fill in for them.
    """
    if group.decoding.extended:
        raise StageError(
            f"group {group.name!r} has {group.decoding.extended[0].fqn!r}, whose class says itself what is "
            "gathered; every rank must use such a group in every step"
        )
    if group.stage is Stage.SHARDED:
        group.prepare()
    key = f"all-gather {group.name}"
    if nearby and group.near is not None:
        _gather_near(group.near, f"{key} nearby")
        return None
    if group.rows is not None:
        first = group.params[0]
        gather = group.rows.gather(group.comm, first.local, _empty(first, first.layout).flat, key)
        if gather is not None:
            gather.wait()
            return None
    return [_filled(param) for param in group.params if param.layout.dim is not None]


def _gather_near(near: Near, key: str) -> None:
    segments = []
    for param, layout, shard in near.kept():
        if layout.dim is not None:
            segments.append(_empty(param, layout))
            segments[-1].part(near.comm.rank).copy_(shard)
    near.forget()
    near.comm.all_gather(segments, key).wait()


def _empty(param: ShardedParam, layout: ParamLayout) -> Segment:
    """Its part in an all-gather, in memory of its own that holds nothing yet."""
    flat = torch.empty(layout.padded_numel, dtype=param.own.dtype, device=param.own.device)
    return Segment(flat, layout.spans)


def _filled(param: ShardedParam) -> Segment:
    """The same over the axis, with this rank's span filled."""
    layout, rank = param.layout, param.axis.rank
    segment = _empty(param, layout)
    start, stop = layout.span(rank)
    if stop > start:
        with torch.no_grad():
            own = segment.flat.as_strided(layout.shard_shape(rank), layout.strides, start)
            own.copy_(param.local, non_blocking=True)
    return segment
