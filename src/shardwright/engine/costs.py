"""What a sharded model costs on this rank: bytes held and sent, seconds of its collectives."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwright.engine import batches
from shardwright.engine.executor import Executor
from shardwright.engine.group import ParamGroup
from shardwright.engine.group_table import GroupTable
from shardwright.policy import SchedulePolicy
from shardwright.schedule.planner import plan
from shardwright.schedule.schedule import ActionKind, Event, EventKind, Phase, Schedule, ScheduleEntry
from shardwright.transport.streams import wait_for_device


@dataclass(frozen=True)
class Stats:
    """Bytes and seconds of a sharded model on this rank.

    Attributes:
        num_groups: how many groups it has.
        param_numel: elements of all sharded parameters, by their logical shapes.
        full_nbytes: bytes of these elements, in the dtype at rest.
        at_rest_nbytes: bytes of this rank's shards.
        unsharded_nbytes: bytes that the buffers of unsharded parameters hold now.
        peak_unsharded_nbytes: the peak of ``unsharded_nbytes`` since the start, in bytes.
        sent_nbytes: bytes that this rank has sent since the start.
        exposed_s: seconds that the host was blocked in waits since the start; None on CUDA, where a stream
            waits instead of the host.
    """

    num_groups: int
    param_numel: int
    full_nbytes: int
    at_rest_nbytes: int
    unsharded_nbytes: int
    peak_unsharded_nbytes: int
    sent_nbytes: int
    exposed_s: float | None


def stats(executor: Executor) -> Stats:
    """Bytes and seconds so far; no communication."""
    table = executor.table
    executor.memory.count(table.groups)  # a setter may have dropped shards over a smaller world
    params = [param for group in table.groups for param in group.params]
    logical = [each for group in table.groups for each in _logical(group)]
    exposed = [comm.exposed_s for comm in table.comms()]
    return Stats(
        num_groups=len(table.groups),
        param_numel=sum(math.prod(shape) for shape, _ in logical),
        full_nbytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in logical),
        at_rest_nbytes=sum(param.local.nbytes for param in params),
        unsharded_nbytes=executor.memory.now_nbytes,
        peak_unsharded_nbytes=executor.memory.peak_nbytes,
        sent_nbytes=sum(comm.sent_nbytes + comm.coded_nbytes for comm in table.comms()),
        exposed_s=None if None in exposed else sum(value for value in exposed if value is not None),
    )


def _logical(group: ParamGroup) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of its parameters; of a quantised weight, those before it was quantised."""
    pairs = group.gatherer.decoding.frozen
    parts = {part for pair in pairs for part in pair.parts}
    plain = [(p.layout.shape, p.sharded.dtype) for p in group.params if p not in parts]
    return plain + [(pair.encoding.shape, pair.encoding.dtype) for pair in pairs]


def communication_s(executor: Executor, schedule: Schedule) -> float:
    """Seconds that the collectives of one step take alone: the median of three times. All groups at rest.

    schedule: what is launched and waited for, in its order; before there is one, each group's own.
    """
    phases = schedule.phases if Phase.BACKWARD in schedule.phases else _one_by_one(executor.table).phases
    return sorted(_rehearse(executor, phases) for _ in range(3))[1]


def _one_by_one(table: GroupTable) -> Schedule:
    """Every group is run once, in the order of sharding."""
    groups = range(len(table.groups))
    forward = [Event(kind, g) for g in groups for kind in (EventKind.FORWARD_BEGIN, EventKind.FORWARD_END)]
    ends = (EventKind.BACKWARD_BEGIN, EventKind.GRADS_READY, EventKind.BACKWARD_END)
    backward = [Event(kind, g) for g in reversed(groups) for kind in ends] + [Event(EventKind.STEP_END)]
    orders = {Phase.FORWARD: tuple(forward), Phase.BACKWARD: tuple(backward)}
    return plan(orders, SchedulePolicy(), table.effective)


def _rehearse(executor: Executor, phases: dict[Phase, tuple[ScheduleEntry, ...]]) -> float:
    """Follow the schedule of a step without its compute, with gradients of ones that nobody gets."""
    start = time.perf_counter()
    flying: dict[tuple[int, ...], Callable[[], None]] = {}
    stops = [stop for phase in (Phase.FORWARD, Phase.BACKWARD) for stop in phases.get(phase, ())]
    for action in (action for stop in stops for action in stop.actions):
        if action.kind is ActionKind.REDUCE:
            flying[action.groups] = batches.rehearse(
                [executor.table.groups[g].reducer for g in action.groups]
            )
        elif action.kind is ActionKind.WAIT_REDUCE:
            flying.pop(action.groups)()
        elif action.kind is not ActionKind.HOLD:
            executor.do[action.kind](action)
    wait_for_device()
    return time.perf_counter() - start
