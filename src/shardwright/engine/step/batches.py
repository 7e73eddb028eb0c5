"""Several groups in one collective: small ones, whose own would cost its latency and little else. And taking
part in a group's all-gather for the sake of other ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from shardwright.engine.groups.gradient_state import GradPlace, Grads
from shardwright.engine.groups.group import ParamGroup, Stage
from shardwright.engine.groups.reducer import Reducer, separated
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam
from shardwright.schedule.layout import ParamLayout
from shardwright.transport.base import Comm, Reduction, Segment, SharedGather, shared

Member = TypeVar("Member")


def unshard(groups: Sequence[ParamGroup], smaller: bool, for_others: bool = False) -> None:
    """Issue the all-gathers of groups, one for each transport that they use.

    Those that aren't at rest take part for others, with memory that is dropped; all of them ``for_others``.
    smaller: from the shards that the ranks of the smaller world have kept.
    Raises: StageError, before anything was issued (see ``ParamGroup.prepare``); what issuing raises, and then
        the groups that it had not come to are at rest.
    """
    at_rest = [group for group in groups if group.stage is Stage.SHARDED and not for_others]
    # All of them before any is filled: what is refused here is refused before something is issued.
    for group in at_rest:
        group.prepare()
    segments: dict[ParamGroup, list[Segment]] = {}
    try:
        for group in groups:
            own = group.fill(smaller) if group in at_rest else _fill_discarded(group, smaller)
            if own is not None:
                segments[group] = own
        for comm, members in _by_comm(segments, lambda group: group.gatherer.comm):
            parts = [part for group in members for part in segments[group]]
            gather = comm.all_gather(parts, _key("all-gather", members))
            flight = gather if len(members) == 1 else SharedGather(gather, parts)
            waiting = [group for group in members if group in at_rest]
            for group in waiting:
                group.gather = flight
            # Only other ranks need it, and its memory is dropped at the end of this call.
            if not waiting:
                flight.wait()
    except Exception:
        for group in at_rest:
            group.give_up()
        raise


def _fill_discarded(group: ParamGroup, smaller: bool) -> list[Segment] | None:
    """As ``ParamGroup.fill``, but into memory that nobody reads, whatever stage the group is in; it stays so.

    None where an all-gather of less was issued, and dropped: over the smaller world, or of rows in use.
    Raises: StageError for parameters that say themselves what is gathered: nobody else can fill in for them.
    """
    extended = group.gatherer.decoding.extended
    if extended:
        raise StageError(
            f"group {group.name!r} has {extended[0].fqn!r}, whose class says itself what is "
            "gathered; every rank must use such a group in every step"
        )
    if group.stage is Stage.SHARDED:
        group.prepare()
    gather = group.gatherer.gather_part(smaller, _empty, group.name)
    if gather is not None:
        gather.wait()
        return None
    return _filled([param for param in group.params if param.layout.dim is not None])


def _empty(param: ShardedParam, layout: ParamLayout) -> Segment:
    """Its part in an all-gather, in memory of its own that holds nothing yet."""
    flat = torch.empty(layout.padded_numel, dtype=param.own.dtype, device=param.own.device)
    return Segment(flat, layout.spans)


def _filled(params: Sequence[ShardedParam]) -> list[Segment]:
    """The segments of an all-gather, in memory of their own, with this rank's spans filled."""
    # What ``Bound.copy_in`` copies into the group's own memory: a change of either is one of both, or ranks
    # that only participate would send other bytes.
    segments: dict[int, Segment] = {}
    for param in params:
        bound = param.gather_segment()
        if id(bound) not in segments:
            # Of the same origin: a difference counts from the message before, whether or not that was used
            # here.
            segments[id(bound)] = Segment(torch.empty_like(bound.flat), bound.spans, origin=bound.origin)
        if param.own.numel():
            start = param.own.storage_offset() - bound.flat.storage_offset()
            own = segments[id(bound)].flat.as_strided(param.own.shape, param.own.stride(), start)
            with torch.no_grad():
                own.copy_(param.local, non_blocking=True)
    return list(segments.values())


def reduce(reducers: Sequence[Reducer]) -> None:
    """Issue the reduce-scatters of what was taken, one for each transport; on accelerators
    also the all-reduces over copies, each behind its reduce-scatter. Nothing of theirs may be in flight."""
    grads = {}
    for reducer in reducers:
        taken = reducer.gradients.at[GradPlace.TAKEN]
        if taken:
            grads[reducer] = taken
        else:  # in no collective, so that nobody would send it
            del reducer.gradients.at[GradPlace.TAKEN]
    for reducer, reduction in _issued(grads):
        reducer.send(reduction)
    copied = [reducer for reducer in grads if reducer.has_copies]
    followed = [(reducer, streams) for reducer in copied if (streams := reducer.follows_on) is not None]
    for _, members in _by_comm(followed, lambda each: each[0].copies):
        # Neither the host nor compute waits for the sums (rule 5 of streams.py).
        with members[0][1].following():
            for reducer, _ in members:
                reducer.follow()
            all_reduce([reducer for reducer, _ in members])


def rehearse(reducers: Sequence[Reducer]) -> Callable[[], None]:
    """Issue the reduce-scatters that ``reduce`` would, of ones; what it returns waits and drops the sums."""
    grads = {reducer: ones for reducer in reducers if (ones := reducer.ones())}
    flying = _issued(grads)

    def wait() -> None:
        for reducer, reduction in flying:
            totals = reduction.wait()
            if reducer.has_copies:
                reducer.copies.all_reduce(totals, f"all-reduce {reducer.name}").wait()

    return wait


def _issued(grads: Mapping[Reducer, Grads]) -> list[tuple[Reducer, Reduction]]:
    """One reduce-scatter for each transport; what each reducer waits for."""
    flying: list[tuple[Reducer, Reduction]] = []
    for comm, members in _by_comm(grads, lambda reducer: reducer.gatherer.comm):
        if len(members) == 1:
            flying.append((members[0], members[0].issue(grads[members[0]])))
            continue
        inputs = [reducer.inputs(grads[reducer]) for reducer in members]
        segments = [segment for own, *_ in inputs for segment in own]
        dtypes = [dtype for _, own, _ in inputs for dtype in own]
        whole = comm.reduce_scatter(segments, dtypes, _key("reduce-scatter", members))
        parts = shared(whole, [len(own) for own, *_ in inputs])
        for reducer, part, (*_, together) in zip(members, parts, inputs, strict=True):
            flying.append((reducer, separated(part, together, grads[reducer])))
    return flying


def all_reduce(reducers: Sequence[Reducer]) -> None:
    """Issue the all-reduces over copies of what reduce-scatters have brought, one for each transport."""
    due = {reducer: sums for reducer in reducers if (sums := reducer.gradients.at.get(GradPlace.DUE))}
    for comm, members in _by_comm(due, lambda reducer: reducer.copies):
        values = [total for reducer in members for total in due[reducer].values()]
        whole = comm.all_reduce(values, _key("all-reduce", members))
        parts = shared(whole, [len(due[reducer]) for reducer in members])
        for reducer, part in zip(members, parts, strict=True):
            reducer.send_copies(part)


def _by_comm(
    members: Iterable[Member], comm_of: Callable[[Member], Comm]
) -> Iterable[tuple[Comm, list[Member]]]:
    """Members by transport, in order."""
    found: dict[int, tuple[Comm, list[Member]]] = {}
    for member in members:
        comm = comm_of(member)
        found.setdefault(id(comm), (comm, []))[1].append(member)
    return found.values()


def _key(what: str, members: Sequence[ParamGroup] | Sequence[Reducer]) -> str:
    """The name of a collective in messages; the same on all ranks."""
    more = f" and {len(members) - 1} more, to {members[-1].name}" if len(members) > 1 else ""
    return f"{what} {members[0].name}{more}"
