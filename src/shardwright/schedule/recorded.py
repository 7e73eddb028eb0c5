"""What all ranks have agreed on: the order of each phase's events, and the schedule planned from it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.policy import SchedulePolicy
from shardwright.schedule.merge_orders import supersequence
from shardwright.schedule.planner import plan
from shardwright.schedule.schedule import Event, GroupFacts, Phase, Schedule, Stop

_TRAINING = {Phase.FORWARD, Phase.BACKWARD}

Told = tuple[int, Phase, tuple[Event, ...]]


@dataclass
class Page:
    """The orders of the phases that begin in one module, and their schedule."""

    orders: dict[Phase, tuple[Event, ...]] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)


class Orders:
    """The pages by *entry*: a number for the outermost module that runs (a model's parts may run alone).

    digest: 63 bits that are equal on two ranks where they have agreed on the same.
    """

    def __init__(self, policy: SchedulePolicy, facts: Callable[[int], GroupFacts], num_groups: int) -> None:
        self.policy = policy
        self.facts = facts
        self.num_groups = num_groups
        self.pages: dict[int, Page] = {}
        self.digest = 0
        self._idle = [0] * num_groups  # backwards since some rank last used the group
        self._planned: set[int] = set()

    def stops(self, entry: int, phase: Phase) -> tuple[Stop, ...]:
        """The schedule of a phase; empty before it is known."""
        page = self.pages.get(entry)
        return () if page is None else page.schedule.phases.get(phase, ())

    def widen(self, told: Sequence[Told]) -> None:
        """Plan anew, so that the orders that were told are served too."""
        for entry, phase, order in told:
            orders = self.pages.setdefault(entry, Page()).orders
            known = orders.get(phase)
            orders[phase] = order if known is None else supersequence(known, order)
        self.replan()

    def note_used(self, used: int) -> None:
        """A backward has ended, of the groups that have a bit in ``used`` on some rank; every rank says so.

        Those that no rank has used for ``forget_after`` backwards leave the forwards and backwards (not the
        evaluations: what those have used no exchange tells).
        """
        self._idle = [0 if used >> group & 1 else idle + 1 for group, idle in enumerate(self._idle)]
        gone = {group for group in self._planned if self._idle[group] >= self.policy.forget_after}
        if not gone:
            return
        for page in self.pages.values():
            for phase in _TRAINING & page.orders.keys():
                page.orders[phase] = tuple(event for event in page.orders[phase] if event.group not in gone)
        self.replan()

    def replan(self) -> None:
        """Plan every page from its orders, by the policy and the facts as they are now."""
        texts = [repr(self.policy), str(self.num_groups)]
        for entry, page in sorted(self.pages.items()):
            page.schedule = plan(page.orders, self.policy, self.facts)
            texts.append(f"{entry}\n{page.schedule}")
        orders = [page.orders.get(phase, ()) for page in self.pages.values() for phase in _TRAINING]
        self._planned = {event.group for order in orders for event in order if event.group >= 0}
        digest = hashlib.sha256("\n".join(texts).encode()).digest()
        self.digest = int.from_bytes(digest[:8], "big") >> 1
