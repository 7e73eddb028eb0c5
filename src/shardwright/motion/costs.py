"""What a sharded model costs on this rank: bytes held and sent, seconds of its collectives."""

import math
import time
from dataclasses import dataclass

import torch

from shardwright.motion.table import GroupTable
from shardwright.plan.schedule import Action, ActionKind
from shardwright.state.group import ParamGroup


@dataclass(frozen=True)
class Stats:
    """Bytes and seconds of a sharded model on this rank.

    param_numel: logical elements of all sharded parameters. full_nbytes: their bytes unsharded, at rest's
    dtype. at_rest_nbytes: bytes of this rank's shards. unsharded_nbytes, peak_unsharded_nbytes: buffers of
    unsharded parameters held now, and at most since the start. sent_nbytes: sent by this rank since the
    start. exposed_s: seconds that the host was blocked in waits since the start (None on CUDA, where a
    stream waits and not the host).
    """

    num_groups: int
    param_numel: int
    full_nbytes: int
    at_rest_nbytes: int
    unsharded_nbytes: int
    peak_unsharded_nbytes: int
    sent_nbytes: int
    exposed_s: float | None


def stats(table: GroupTable) -> Stats:
    """Bytes and seconds so far; no communication."""
    params = [param for group in table.groups for param in group.params]
    logical = [each for group in table.groups for each in _logical(group)]
    exposed = [comm.exposed_s for comm in table.comms()]
    return Stats(
        num_groups=len(table.groups),
        param_numel=sum(math.prod(shape) for shape, _ in logical),
        full_nbytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in logical),
        at_rest_nbytes=sum(param.local.nbytes for param in params),
        unsharded_nbytes=table.memory.now_nbytes,
        peak_unsharded_nbytes=table.memory.peak_nbytes,
        sent_nbytes=sum(comm.sent_nbytes for comm in table.comms()),
        exposed_s=None if None in exposed else sum(value for value in exposed if value is not None),
    )


def _logical(group: ParamGroup) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of its parameters; of a quantised weight, those before it was quantised."""
    pairs = group.decoding.frozen
    parts = {part for pair in pairs for part in pair.parts}
    plain = [(p.layout.shape, p.sharded.dtype) for p in group.params if p not in parts]
    return plain + [(pair.encoding.shape, pair.encoding.dtype) for pair in pairs]


def communication_s(table: GroupTable) -> float:
    """Seconds that the collectives of one step take alone: the median of three times. All groups at rest."""
    return sorted(_rehearse(table) for _ in range(3))[1]


def _rehearse(table: GroupTable) -> float:
    start = time.perf_counter()
    for index, group in enumerate(table.groups):
        for _ in range(1 if table.facts(index).reshard_after_forward is False else 2):
            for kind in (ActionKind.UNSHARD, ActionKind.WAIT, ActionKind.RESHARD):
                table.take(Action(kind, index))
        group.reducer.rehearse()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start
