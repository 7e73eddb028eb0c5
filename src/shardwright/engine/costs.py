"""What a sharded model costs on this rank: bytes held and sent, seconds of its collectives."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwright import clock
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.groups.table import GroupTable
from shardwright.engine.step import batches
from shardwright.engine.step.executor import Executor
from shardwright.engine.step.runtime import Runtime
from shardwright.errors import StageError
from shardwright.policy import SchedulePolicy
from shardwright.schedule.schedule import ActionKind, Event, EventKind, Phase, Schedule, ScheduleEntry
from shardwright.schedule.scheduler import scheduled
from shardwright.transport.base import Comm
from shardwright.transport.device_times import DeviceTimes
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
        exposed_s: seconds that the host was blocked in waits since the start; on an accelerator, that its
            compute stream was, as far as its events have been read. None where nothing counts it.
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
    comms = table.comms()
    executor.memory.count(table.groups)  # a setter may have dropped shards over a smaller world
    params = [param for group in table.groups for param in group.params]
    logical = [each for group in table.groups for each in _logical(group)]
    return Stats(
        num_groups=len(table.groups),
        param_numel=sum(math.prod(shape) for shape, _ in logical),
        full_nbytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in logical),
        at_rest_nbytes=sum(param.local.nbytes for param in params),
        unsharded_nbytes=executor.memory.now_nbytes,
        peak_unsharded_nbytes=executor.memory.peak_nbytes,
        sent_nbytes=sum(comm.sent_nbytes + comm.coded_nbytes for comm in comms),
        exposed_s=exposed_s(comms),
    )


def exposed_s(comms: Sequence[Comm]) -> float | None:
    """Seconds that were waited for the collectives of these transports; None where one of them doesn't know.
    Over a device its events say it, as far as they have been passed by now."""
    found, timed = 0.0, dict[int, DeviceTimes]()  # transports may share their streams
    for comm in comms:
        times = None if comm.streams is None or comm.world == 1 else comm.streams.times
        if comm.exposed_s is not None:
            found += comm.exposed_s
        elif times is not None:
            timed[id(times)] = times
        else:
            return None
    for times in timed.values():
        times.read()
    return found + sum(times.exposed_s for times in timed.values())


def _logical(group: ParamGroup) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of its parameters; of a quantised weight, those before it was quantised."""
    pairs = group.gatherer.decoding.frozen
    parts = {part for pair in pairs for part in pair.parts}
    plain = [(p.layout.shape, p.sharded.dtype) for p in group.params if p not in parts]
    return plain + [(pair.encoding.shape, pair.encoding.dtype) for pair in pairs]


def communication_s(runtime: Runtime) -> float:
    """Seconds that the collectives of one step take alone, in the order of the schedule; before there is one,
    each group's own. The median of three times. Raises: StageError inside of a step."""
    if runtime.running() is not None:
        raise StageError("communication_s was called inside a forward or backward; call it between steps")
    phases = runtime.schedule.phases
    if Phase.BACKWARD not in phases:
        phases = _one_by_one(runtime.table).phases
    runtime.rest()
    alone_s = sorted(_rehearse(runtime.executor, phases) for _ in range(3))[1]
    runtime.rest()
    return alone_s


def _one_by_one(table: GroupTable) -> Schedule:
    """Every group is run once, in the order of sharding."""
    groups = range(len(table.groups))
    forward = [Event(kind, g) for g in groups for kind in (EventKind.FORWARD_BEGIN, EventKind.FORWARD_END)]
    ends = (EventKind.BACKWARD_BEGIN, EventKind.GRADS_READY, EventKind.BACKWARD_END)
    backward = [Event(kind, g) for g in reversed(groups) for kind in ends] + [Event(EventKind.STEP_END)]
    orders = {Phase.FORWARD: tuple(forward), Phase.BACKWARD: tuple(backward)}
    return scheduled(orders, SchedulePolicy(), table.effective)


def _rehearse(executor: Executor, phases: dict[Phase, tuple[ScheduleEntry, ...]]) -> float:
    """Follow the schedule of a step without its compute, with gradients of ones that nobody gets."""
    start = clock.perf_counter()
    flying: dict[tuple[int, ...], Callable[[], None]] = {}
    entries = [entry for phase in (Phase.FORWARD, Phase.BACKWARD) for entry in phases.get(phase, ())]
    for action in (action for entry in entries for action in entry.actions):
        if action.kind is ActionKind.REDUCE:
            flying[action.groups] = batches.rehearse(
                [executor.table.groups[g].reducer for g in action.groups]
            )
        elif action.kind is ActionKind.WAIT_REDUCE:
            flying.pop(action.groups)()
        elif action.kind is not ActionKind.HOLD:
            executor.do[action.kind](action)
    wait_for_device()
    return clock.perf_counter() - start
