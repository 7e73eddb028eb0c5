"""What a participant works with: what ranks say when they meet, the cursor of a phase, and ``Hands``."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntFlag
from typing import NoReturn, Protocol

from shardwright.schedule.recorded import Told
from shardwright.schedule.schedule import Action, Event, EventKind, GroupFacts, Phase, Stop

ENDS = (EventKind.FORWARD_END, EventKind.BACKWARD_END)


class Call(IntFlag):
    """What ranks meet for. END: of a forward or evaluation. SETTLE: the end of a backward. REST: the others'
    evaluations. DEVIATES: a rank needs what its schedule doesn't have."""

    DEVIATES = 1
    FORWARD = 2
    EVALUATION = 4
    BACKWARD = 8
    SETTLE = 16
    REST = 32
    END = 64


CALLS = {Phase.FORWARD: Call.FORWARD, Phase.EVALUATION: Call.EVALUATION, Phase.BACKWARD: Call.BACKWARD}


@dataclass(frozen=True)
class Said:
    """What the ranks said when they met; the same on all of them.

    calls: what for. entry: the outermost module that runs (a number made of its name).
    missing, far: bits of the groups that some rank doesn't hold, or not nearby. used: bits of those that some
    rank has used since the last backward. brought: bits of the parameters that have a gradient on some rank.
    """

    calls: Call
    entry: int = 0
    missing: int = 0
    far: int = 0
    used: int = 0
    brought: int = 0


class Hands(Protocol):
    """What is done for the :class:`Participant` of one rank."""

    def meet(self, call: Call, entry: int, used: int) -> Said:
        """Say what this rank comes for, which groups it has used, and how they stand; every rank does.

        Raises: where ranks came for the same but have agreed on something else (see ``diverged``).
        """
        ...

    def least(self, code: int) -> int:
        """The smallest of all ranks' numbers."""
        ...

    def tell(self, order: Told | None) -> list[Told]:
        """The orders that ranks have to tell, each once and in the same sequence on all."""
        ...

    def diverged(self, call: Call, entry: int) -> NoReturn:
        """Ranks came for different things: every rank raises, with the calls of all."""
        ...

    def unshard(self, groups: Sequence[int], near: AbstractSet[int]) -> None:
        """Launch the all-gather of groups together, of those in ``near`` among neighbours.

        Those that this rank holds already are gathered aside and dropped.
        """
        ...

    def join(self, group: int, near: bool) -> None:
        """Launch its all-gather for others: wait for it and drop it."""
        ...

    def hold(self, group: int) -> None:
        """Take its gradients for ``reduce``, zeros where this rank has none (or keep them here)."""
        ...

    def reduce(self, groups: Sequence[int]) -> None:
        """Launch the reduce-scatter of groups together: of what was taken, else of what is there now."""
        ...

    def take(self, action: Action) -> None:
        """Wait, reshard, wait for a reduction or step; what is already so is left so."""
        ...

    def settle(self, brought: int | None) -> None:
        """Give the shards of these parameters their reduced gradients, and step what is left to be stepped in
        the backward; gradients of others are dropped.

        None: it is not known yet which they are.
        """
        ...

    def holds(self, group: int) -> bool:
        """Whether it is unsharded, or being gathered, on this rank."""
        ...

    def must_reduce(self, group: int) -> bool:
        """Whether gradients are left on this rank that others have to help to reduce.

        Those that are to be kept here are kept.
        """
        ...

    def facts(self, group: int) -> GroupFacts:
        """What the planner knows of it."""
        ...

    def keep_near(self, group: int, reshard: bool) -> None:
        """Keep its shards over the smaller world, if it has one; and reshard it, or leave it as it is."""
        ...


@dataclass
class Leg:
    """One phase as this rank goes through it.

    place: the next of ``stops``. busy: groups whose modules run now; a passed event doesn't reshard them.
    asking: the rest of it is asked for. inner: it runs within another one, which asks then.
    """

    phase: Phase
    entry: int
    stops: tuple[Stop, ...]
    inner: bool = False
    place: int = 0
    asking: bool = False
    busy: set[int] = field(default_factory=set)
    order: list[Event] = field(default_factory=list)

    def find(self, event: Event) -> int | None:
        """Where ``event`` is, at the cursor or ahead. The end of a module is only looked for among ends: it
        needs no collective, so nothing is passed for it that may still be needed."""
        for place in range(self.place, len(self.stops)):
            found = self.stops[place].event
            if found == event:
                return place
            if event.kind in ENDS and found.kind not in ENDS:
                return None
        return None


def reads(facts: GroupFacts, event: Event) -> bool:
    """Whether what begins with ``event`` needs the group unsharded."""
    return event.kind is not EventKind.BACKWARD_BEGIN or facts.unshard_in_backward


def keeps(facts: GroupFacts, phase: Phase) -> bool:
    """Whether the group was asked to stay unsharded after the phase."""
    if phase is Phase.BACKWARD:
        return not facts.reshard_after_backward
    return facts.reshard_after_forward is False


def bits(groups: Iterable[int]) -> int:
    """One bit for each of the numbers."""
    total = 0
    for group in groups:
        total |= 1 << group
    return total
