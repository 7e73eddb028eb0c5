"""What all ranks have agreed on: the order of each phase's events, and the schedule planned from it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.plan.planner import plan
from shardwright.plan.schedule import Event, GroupFacts, Phase, Schedule, Stop
from shardwright.plan.supersequence import supersequence
from shardwright.policy import SchedulePolicy

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

    def replan(self) -> None:
        """Plan every page from its orders, by the policy and the facts as they are now."""
        texts = [repr(self.policy), str(self.num_groups)]
        for entry, page in sorted(self.pages.items()):
            page.schedule = plan(page.orders, self.policy, self.facts)
            texts.append(f"{entry}\n{page.schedule}")
        digest = hashlib.sha256("\n".join(texts).encode()).digest()
        self.digest = int.from_bytes(digest[:8], "big") >> 1
