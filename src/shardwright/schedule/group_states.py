"""Where the groups of a model stand as a phase runs, and the actions that lead from there to the next.
Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardwright.schedule.recorded import bits
from shardwright.schedule.schedule import Action, ActionKind


class GroupStates(NamedTuple):
    """Where the groups stand; bits of groups, except the last two.

    live: gathered by collectives that were agreed on, so that it is the same on all ranks. smaller: those
    that every rank can gather over the smaller world. held: those that this rank holds, more than
    ``live`` or the same. kept: those that this rank doesn't reshard before the end of the next backward.
    used_by_some: those that some rank may have gradients of; the others are not
    reduced. held_back: groups whose gradients wait for a collective to go with. in_flight: reductions in
    flight, of groups together.
    """

    live: int = 0
    smaller: int = 0
    held: int = 0
    kept: int = 0
    used_by_some: int = 0
    held_back: tuple[int, ...] = ()
    in_flight: tuple[tuple[int, ...], ...] = ()


class Groups:
    """What the agreed actions have made of the groups (``states``), and those that an event has led to so
    far.

    copied: bits of those whose shards have copies, over which gradients are summed too.
    ``states`` is replaced and never edited, so a shallow copy is a copy.
    """

    def __init__(self, copied: int) -> None:
        self.copied = copied
        self.states = GroupStates()
        self.actions: tuple[Action, ...] = ()

    def set(self, **changes: Any) -> None:
        """Replace fields of ``states``."""
        self.states = self.states._replace(**changes)

    def do(self, kind: ActionKind, groups: Sequence[int], smaller: bool = False) -> None:
        """One more action."""
        self.actions += (Action(kind, tuple(groups), smaller),)

    # ---- all-gathers

    def unshard(self, groups: Iterable[int]) -> None:
        """Launch the agreed all-gather of groups, of those that aren't live."""
        groups = [group for group in groups if not self.states.live >> group & 1]
        self.set(live=self.states.live | bits(groups))
        self.gather(groups)

    def gather(self, groups: Sequence[int]) -> None:
        """Launch an all-gather of groups; over the smaller world where all ranks have shards over that."""
        states, taken = self.states, bits(groups)
        others = [group for group in groups if not states.smaller >> group & 1]
        for group in groups:
            if group not in others:
                self.do(ActionKind.UNSHARD, (group,), smaller=True)
        if others:
            self.do(ActionKind.UNSHARD, others)
        self.set(held=states.held | taken, smaller=states.smaller & ~taken)

    def participate(self, group: int) -> None:
        """Launch an all-gather that other ranks need."""
        self.do(ActionKind.PARTICIPATE, (group,), bool(self.states.smaller >> group & 1))
        self.set(smaller=self.states.smaller & ~(1 << group))

    def drop_live(self, group: int) -> None:
        """The agreed actions reshard it."""
        self.set(live=self.states.live & ~(1 << group))

    def reshard(self, group: int, smaller: bool) -> None:
        """Reshard what this rank holds, if nobody keeps it. smaller: keep shards over the smaller world."""
        if (self.states.held & ~self.states.kept) >> group & 1:
            self.do(ActionKind.RESHARD, (group,), smaller)
            self.set(held=self.states.held & ~(1 << group))

    # ---- reductions

    def pass_reduction(self, action: Action) -> None:
        """An action of the schedule on gradients, of the groups that some rank may have gradients of."""
        groups = [group for group in action.groups if self.states.used_by_some >> group & 1]
        if action.kind in (ActionKind.STEP, ActionKind.ALL_REDUCE):
            self.actions += (action,)
        elif action.kind is ActionKind.WAIT_REDUCE:
            self.wait_reduce(action.groups, planned=True)
        elif action.kind is ActionKind.REDUCE:
            self.reduce(groups)
        elif groups and action.group not in self.states.held_back:
            self.wait_reduce(groups)
            self.do(ActionKind.HOLD, groups)
            self.set(held_back=(*self.states.held_back, *groups))

    def reduce(self, groups: Sequence[int], max_reductions: int | None = None) -> None:
        """Launch the reduce-scatter of groups together, after those of theirs that are in flight.

        max_reductions: after as many others, too, that no more than these are in flight; None: that is
        planned.
        """
        while max_reductions is not None and len(self.states.in_flight) >= max_reductions:
            self.wait_reduce(self.states.in_flight[0])
        if groups:
            self.wait_reduce(groups)
            self.do(ActionKind.REDUCE, groups)
            self.set(
                held_back=tuple(group for group in self.states.held_back if group not in groups),
                in_flight=(*self.states.in_flight, tuple(groups)),
            )

    def wait_reduce(self, groups: Sequence[int], planned: bool = False) -> None:
        """Wait for all reductions in flight that have any of these groups, and step with what they brought.

        planned: the schedule says itself where that is.
        """
        for together in self.states.in_flight:
            if not set(together).isdisjoint(groups):
                self.do(ActionKind.WAIT_REDUCE, together)
                copied = [group for group in together if self.copied >> group & 1]
                if not planned:
                    self.do(ActionKind.STEP, together)
                    if copied:
                        self.do(ActionKind.ALL_REDUCE, copied)
                self.set(in_flight=tuple(each for each in self.states.in_flight if each is not together))

    def finalize(self, grad_mask: int | None) -> None:
        """Wait for all reductions in flight, and give the shards their gradients (see ``Action.grads``)."""
        for together in self.states.in_flight:
            self.wait_reduce(together)
        self.actions += (Action(ActionKind.FINALIZE, (), grads=grad_mask),)
