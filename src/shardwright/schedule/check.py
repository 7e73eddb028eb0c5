"""What a schedule says without being run, whoever made it: whether it is sound, by following what its actions
do to every group; and what of it no computation hides. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.errors import ScheduleError
from shardwright.schedule.schedule import BEGINS, Action, ActionKind, Phase, Schedule, ScheduleEntry


def check(schedule: Schedule) -> None:
    """Prove that a schedule is sound, or say where it is not.

    Nothing is used before it is waited for, nothing is unsharded twice or resharded while at rest, each
    reduction is waited for, gradients that are held back are reduced, a group is stepped once after each
    reduction and never before, and a step ends with every group at rest and no reduction in flight. After an
    evaluation groups may stay unsharded, with no all-gather in flight.

    Raises: ScheduleError that names the entry and the group.
    """
    for start in (Phase.EVALUATION, Phase.FORWARD):
        entries = list(schedule.phases.get(start, ()))
        # A backward finds what its forward has left unsharded, an evaluation nothing.
        if start is Phase.FORWARD:
            entries += schedule.phases.get(Phase.BACKWARD, ())
        state = _State()
        for entry in entries:
            for action in entry.actions:
                for group in action.groups:
                    state.take(entry, action, group)
            if entry.event.kind in BEGINS:
                group = entry.event.group
                _require(state.live.get(group), f"{entry}: group {group} is used before its wait")
        if entries and (start is Phase.EVALUATION or Phase.BACKWARD in schedule.phases):
            stays = start is Phase.EVALUATION
            live = {group for group, waited in state.live.items() if not (stays and waited)}
            left = (live, state.held, state.reducing)
            _require(not any(left), "left at the end: live={} held={} reducing={}".format(*left))


def _require(holds: object, complaint: str) -> None:
    if not holds:
        raise ScheduleError(complaint)


@dataclass
class _State:
    """live: groups that are not at rest, and whether they were waited for. held: groups whose gradients wait
    to be reduced; reducing: those that are. reduced: those whose gradients nothing was stepped with since."""

    live: dict[int, bool] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    reducing: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)

    def take(self, entry: ScheduleEntry, action: Action, group: int) -> None:
        """What ``action`` does to one of its groups."""
        live, kind = self.live, action.kind
        if kind is ActionKind.UNSHARD:
            _require(group not in live, f"{entry}: group {group} is unsharded twice")
            live[group] = False
        elif kind is ActionKind.WAIT:
            _require(group in live, f"{entry}: waits for group {group}, which nothing has unsharded")
            live[group] = True
        elif kind is ActionKind.RESHARD:
            _require(group in live, f"{entry}: reshards group {group}, which is at rest")
            del live[group]
        elif kind is ActionKind.WAIT_REDUCE:
            _require(group in self.reducing, f"{entry}: group {group} has no reduction in flight to wait for")
            self.reducing.remove(group)
            self.reduced.add(group)
        elif kind is ActionKind.ALL_REDUCE:
            _require(
                group in self.reduced, f"{entry}: all-reduces group {group}, whose gradients aren't reduced"
            )
        elif kind is ActionKind.STEP:
            _require(group in self.reduced, f"{entry}: steps group {group}, whose gradients aren't reduced")
            self.reduced.remove(group)
        elif kind in (ActionKind.HOLD, ActionKind.REDUCE):
            _require(group not in self.reducing, f"{entry}: group {group} is already being reduced")
            if kind is ActionKind.HOLD:
                _require(group not in self.held, f"{entry}: gradients of group {group} are held already")
                self.held.add(group)
            else:
                self.held.discard(group)
                self.reducing.add(group)


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
