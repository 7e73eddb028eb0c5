"""Proof that a schedule is sound, whoever made it: by following what its actions do to every group."""

from dataclasses import dataclass, field

from shardwright.errors import ScheduleError
from shardwright.schedule.schedule import BEGINS, Action, ActionKind, Phase, Schedule, ScheduleEntry


def check(schedule: Schedule) -> None:
    """Prove that a schedule is sound, or say where it is not.

    Nothing is used before it is waited for, nothing is unsharded twice or resharded while at rest, each
    reduction is waited for, gradients that are held back are reduced, a group is stepped once after each
    reduction and never before, and a step ends with every group at rest and no reduction in flight. After an
    evaluation groups may stay unsharded, with no all-gather in flight.

    Raises: ScheduleError that names the stop and the group.
    """
    for start in (Phase.EVALUATION, Phase.FORWARD):
        stops = list(schedule.phases.get(start, ()))
        if start is Phase.FORWARD:
            stops += schedule.phases.get(Phase.BACKWARD, ())
        state = _State()
        for stop in stops:
            for action in stop.actions:
                for group in action.groups:
                    state.take(stop, action, group)
            if stop.event.kind in BEGINS:
                group = stop.event.group
                _require(state.live.get(group), f"{stop}: group {group} is used before its wait")
        if stops and (start is Phase.EVALUATION or Phase.BACKWARD in schedule.phases):
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

    def take(self, stop: ScheduleEntry, action: Action, group: int) -> None:
        """What ``action`` does to one of its groups."""
        live, kind = self.live, action.kind
        if kind is ActionKind.UNSHARD:
            _require(group not in live, f"{stop}: group {group} is unsharded twice")
            live[group] = False
        elif kind is ActionKind.WAIT:
            _require(group in live, f"{stop}: waits for group {group}, which nothing has unsharded")
            live[group] = True
        elif kind is ActionKind.RESHARD:
            _require(group in live, f"{stop}: reshards group {group}, which is at rest")
            del live[group]
        elif kind is ActionKind.WAIT_REDUCE:
            _require(group in self.reducing, f"{stop}: group {group} has no reduction in flight to wait for")
            self.reducing.remove(group)
            self.reduced.add(group)
        elif kind is ActionKind.ALL_REDUCE:
            _require(
                group in self.reduced, f"{stop}: all-reduces group {group}, whose gradients aren't reduced"
            )
        elif kind is ActionKind.STEP:
            _require(group in self.reduced, f"{stop}: steps group {group}, whose gradients aren't reduced")
            self.reduced.remove(group)
        elif kind in (ActionKind.HOLD, ActionKind.REDUCE):
            _require(group not in self.reducing, f"{stop}: group {group} is already being reduced")
            if kind is ActionKind.HOLD:
                _require(group not in self.held, f"{stop}: gradients of group {group} are held already")
                self.held.add(group)
            else:
                self.held.discard(group)
                self.reducing.add(group)
