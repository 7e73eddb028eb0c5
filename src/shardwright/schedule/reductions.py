"""The agreed reductions of a model on their way: held back, or in flight."""

from collections.abc import Sequence

from shardwright.schedule.hands import Hands
from shardwright.schedule.schedule import Action, ActionKind


class Reductions:
    """The same on all ranks, as it follows from the agreed actions alone.

    held: groups whose gradients wait for a collective to go with. flying: those in flight, together.
    used: bits of the groups that some rank may have gradients of; the others are not reduced.
    """

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self.held: list[int] = []
        self.flying: list[tuple[int, ...]] = []
        self.used = 0

    def take(self, action: Action) -> None:
        """Take an action of the schedule on gradients."""
        groups = [group for group in action.groups if self.used >> group & 1]
        if action.kind is ActionKind.STEP:
            self.hands.take(action)
        elif action.kind is ActionKind.WAIT_REDUCE:
            self.wait(action.groups, planned=True)
        elif action.kind is ActionKind.REDUCE:
            self.reduce(groups)
        elif groups and action.group not in self.held:
            self.wait(groups)
            self.held += groups
            self.hands.hold(action.group)

    def reduce(self, groups: Sequence[int]) -> None:
        """Launch the reduce-scatter of groups together, after those of theirs that are in flight."""
        if groups:
            self.wait(groups)
            self.held = [group for group in self.held if group not in groups]
            self.flying.append(tuple(groups))
            self.hands.reduce(groups)

    def make_room(self, most: int) -> None:
        """Wait for the oldest, until one more makes no more than ``most`` in flight."""
        while len(self.flying) >= most:
            self.wait(self.flying[0])

    def wait(self, groups: Sequence[int], planned: bool = False) -> None:
        """Wait for all reductions in flight that have any of these groups, and step with what they brought.

        planned: the schedule says itself where that is.
        """
        for together in tuple(self.flying):
            if not set(together).isdisjoint(groups):
                self.flying.remove(together)
                self.hands.take(Action(ActionKind.WAIT_REDUCE, together[0], together[1:]))
                if not planned:
                    self.hands.take(Action(ActionKind.STEP, together[0], together[1:]))

    def release(self) -> None:
        """Launch what is held back, together."""
        self.reduce(tuple(self.held))

    def finish(self, brought: int | None) -> None:
        """Wait for all in flight, and settle (see ``Hands.settle``)."""
        for together in tuple(self.flying):
            self.wait(together)
        self.hands.settle(brought)
