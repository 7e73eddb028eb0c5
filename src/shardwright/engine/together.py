"""All ranks together: a pass takes part in the collectives that all have agreed on (see ``Participant``)."""

import zlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from shardwright.engine.consensus import TableHands
from shardwright.engine.executor import GroupTable
from shardwright.engine.passes import Entry, Pass, StepPolicy
from shardwright.policy import SchedulePolicy
from shardwright.schedule.follower import Participant
from shardwright.schedule.recorded import Orders
from shardwright.schedule.schedule import BEGINS, Action, ActionKind, Event, EventKind, Phase, Schedule, Stop
from shardwright.transport.channel import Channel

unsettled: "WeakSet[Together]" = WeakSet()
"""Models whose last backward has not ended on all ranks: their gradients may not be stepped with."""


class Together:
    """The ``Way`` of ranks that agree. Every rank of the model's meshes begins and ends the same passes,
    except that one may have more evaluations than another."""

    def __init__(self, table: GroupTable, channel: Channel, policy: SchedulePolicy) -> None:
        self.table = table
        self.orders = Orders(policy, table.facts, len(table.groups))
        self.orders.replan()
        self.hands = TableHands(table, self.orders, channel)
        self.participant = Participant(self.hands, self.orders)
        self._entry = 0

    @property
    def schedule(self) -> Schedule:
        """See ``Way.schedule``: that of the last outermost module."""
        page = self.orders.pages.get(self._entry)
        return Schedule() if page is None else page.schedule

    def replan(self, policy: SchedulePolicy) -> None:
        """See ``Way.replan``; every rank does."""
        self.orders.policy = policy
        self.orders.replan()

    def abandon(self) -> None:
        """See ``Way.abandon``."""
        self.participant.abandon()

    def begin(self, current: Pass, entry: Entry) -> None:
        """The ranks meet. Raises: Diverged where they came for different things."""
        if current.phase is not Phase.BACKWARD:
            self._entry = zlib.crc32(entry.name.encode())
            self.hands.names[self._entry] = entry.name
        self.table.asked.clear()
        if current.phase is Phase.BACKWARD and not current.nested:
            unsettled.add(self)
        self.participant.begin(current.phase, self._entry)
        if current.phase is not Phase.BACKWARD:
            unsettled.discard(self)

    def at(self, current: Pass, event: Event, step: StepPolicy) -> list[Stop]:
        """See ``Way.at``."""
        self.participant.settles = self.hands.settles = step.is_last_backward
        return self.participant.at(event)

    def end(self, current: Pass, failed: bool) -> list[Stop]:
        """See ``Way.end``."""
        taken = self.participant.end(failed)
        if current.phase is Phase.BACKWARD and not current.nested:
            unsettled.discard(self)
        return taken

    def note(self, kind: ActionKind, group: int) -> None:
        """Inside of a pass the caller has unsharded or resharded a group, on every rank."""
        if kind is ActionKind.UNSHARD:
            self.participant.live.add(group)
        elif kind is ActionKind.RESHARD:
            self.participant.live.discard(group)

    def holds_any(self, params: Iterable[Any]) -> bool:
        """Whether any of these sharded parameters is the model's."""
        asked = {id(param) for param in params}
        return any(id(param.sharded) in asked for group in self.table.groups for param in group.params)


class Private:
    """The ``Way`` of a forward that finds all that it needs unsharded by its caller: no other rank is needed.

    So a rank may run such a module alone. What is resharded after it is resharded at its end.
    """

    def __init__(self, together: Together) -> None:
        self._together = together
        self._table = together.table

    @property
    def schedule(self) -> Schedule:
        """See ``Way.schedule``."""
        return self._together.schedule

    def replan(self, policy: SchedulePolicy) -> None:
        """See ``Way.replan``."""

    def abandon(self) -> None:
        """See ``Way.abandon``."""

    def begin(self, current: Pass, entry: Entry) -> None:
        """See ``Way.begin``."""
        current.planner = self._table.planner(self._together.orders.policy)

    def at(self, current: Pass, event: Event, step: StepPolicy) -> list[Stop]:
        """See ``Way.at``."""
        if event.kind in BEGINS:
            self._table.take(Action(ActionKind.WAIT, event.group))
        if event.kind is EventKind.FORWARD_BEGIN and current.phase is Phase.FORWARD:
            self._together.participant.used |= 1 << event.group
        return [Stop(event, ())]

    def end(self, current: Pass, failed: bool) -> list[Stop]:
        """See ``Way.end``."""
        if not failed and current.planner is not None:
            for action in current.planner.end_forward(current.phase):
                self._table.take(action, nearby=current.phase is Phase.FORWARD)
        return []
