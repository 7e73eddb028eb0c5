"""What of a schedule no computation hides. Pure."""

from typing import NamedTuple

from shardwright.schedule.schedule import BEGINS, ActionKind, Phase, Schedule


class Exposed(NamedTuple):
    """A collective of ``group`` in ``phase`` that nothing is computed beside: its all-gather, or
    (``reduces``) its reduce-scatter."""

    group: int
    phase: Phase
    reduces: bool = False


def exposed(schedule: Schedule) -> tuple[Exposed, ...]:
    """The collectives of one step of training that nothing is computed beside, in order.

    That is an all-gather that is waited for at the event that issues it, and a reduce-scatter that is issued
    when no module's backward is left to begin. What is issued earlier is exposed only by as much as it takes
    longer than what is computed beside it, which a schedule doesn't know.
    """
    found: list[Exposed] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        entries = schedule.phases.get(phase, ())
        begins = [place for place, entry in enumerate(entries) if entry.event.kind in BEGINS]
        for place, entry in enumerate(entries):
            issued = [group for a in entry.actions if a.kind is ActionKind.UNSHARD for group in a.groups]
            waited = [group for a in entry.actions if a.kind is ActionKind.WAIT for group in a.groups]
            found += [Exposed(group, phase) for group in issued if group in waited]
            if begins and place > begins[-1]:
                reduced = [group for a in entry.actions if a.kind is ActionKind.REDUCE for group in a.groups]
                found += [Exposed(group, phase, reduces=True) for group in reduced]
    return tuple(found)
