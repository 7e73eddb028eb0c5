"""The scheduler: decides the actions of every event of a step, from the order in which groups ran. Pure.

Small groups travel together, up to ``bucket_cap_mb`` besides the one that they go with:

    all-gathers   a collective that is issued ahead of its use takes the groups that follow in the order along
    reductions    gradients of small groups are held back, and go with the next group that doesn't fit

A limit of the policy that counts groups ahead or collectives in flight counts them as one.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

from shardwright.policy import BackwardPrefetch, SchedulePolicy
from shardwright.schedule.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupSpec,
    Phase,
    Schedule,
    ScheduleEntry,
)


class Scheduler:
    """Decides the actions of one event after another; holds only which groups are live and being reduced.

    live: groups whose all-gather has been issued and that have not been resharded since, with the number of
        that collective.
    waited: those of them that have been waited for.
    held: groups whose gradients wait for a collective to go with. reducing: those in flight, together.
    unstepped: groups whose reduced gradients are stepped with at the end of the backward.
    kept: groups that the backward needs first, which stay unsharded until then.
    """

    def __init__(
        self, policy: SchedulePolicy, spec_of: Callable[[int], GroupSpec], kept: frozenset[int] = frozenset()
    ) -> None:
        self.policy = policy
        self.spec_of = spec_of
        self.kept = kept
        self.live: dict[int, int] = {}
        self.waited: set[int] = set()
        self.held: list[int] = []
        self.reducing: list[tuple[int, ...]] = []
        self.unstepped: list[int] = []
        self._issued = 0

    def at(self, phase: Phase, event: Event, ahead: Iterable[int]) -> tuple[Action, ...]:
        """Actions at ``event``; ``ahead`` are the groups of the phase's later begin events, in order."""
        actions: list[Action] = []
        group = event.group
        if event.kind in BEGINS:
            self._begin(phase, event, ahead, actions)
        elif event.kind is EventKind.FORWARD_END:
            self._reshard(phase, group, actions)
        elif event.kind is EventKind.GRADS_READY:
            self._reduce(group, actions)
        elif event.kind is EventKind.BACKWARD_END:
            self._reshard(phase, group, actions)
            if self.policy.backward_prefetch is BackwardPrefetch.POST:
                self._prefetch(phase, group, ahead, actions)
        else:
            self._end_step(actions)
        return tuple(actions)

    def end_forward(self, phase: Phase) -> tuple[Action, ...]:
        """Actions after the last event of a forward: reshard what no policy keeps for the backward, and after
        an evaluation what was gathered ahead and not used."""
        actions: list[Action] = []
        for group in tuple(self.live):
            is_idle = phase is Phase.EVALUATION and group not in self.waited
            self._reshard(phase, group, actions, is_idle)
        return tuple(actions)

    def _begin(self, phase: Phase, event: Event, ahead: Iterable[int], actions: list[Action]) -> None:
        group = event.group
        needed = self.spec_of(group).reads(event.kind)
        # First, since a transport runs collectives in the order of their launches: what is gathered ahead
        # must not delay what is needed now.
        if needed and group not in self.live:
            self._issued += 1
            self.live[group] = self._issued
            actions.append(Action(ActionKind.UNSHARD, (group,)))
        if self._prefetches_at_begin(phase, event.kind):
            self._prefetch(phase, group, ahead, actions)
        # Last: what is gathered ahead is launched before anything waits for this group.
        if needed and group not in self.waited:
            self.waited.add(group)
            actions.append(Action(ActionKind.WAIT, (group,)))

    def _end_step(self, actions: list[Action]) -> None:
        for bucket_key in dict.fromkeys(self.spec_of(group).bucket_key for group in self.held):
            self._issue_reduction([g for g in self.held if self.spec_of(g).bucket_key == bucket_key], actions)
        for together in tuple(self.reducing):
            self._wait_reduce(together, actions)
        if self.unstepped:
            actions.append(Action(ActionKind.STEP, tuple(self.unstepped)))
            self.unstepped.clear()
        # Groups whose end no event has told: of conditional code, or of modules whose inputs ask for no
        # gradient.
        for live in tuple(self.live):
            self._reshard(Phase.BACKWARD, live, actions)

    def _reshard(self, phase: Phase, group: int, actions: list[Action], is_idle: bool = False) -> None:
        """Reshard the group, unless it is kept. is_idle: it was gathered for nothing."""
        if group in self.live and (is_idle or not self.spec_of(group).keeps(phase, group in self.kept)):
            del self.live[group]
            self.waited.discard(group)
            smaller = phase is Phase.FORWARD and self.spec_of(group).smaller_world
            actions.append(Action(ActionKind.RESHARD, (group,), smaller))

    # ---- reductions

    def _reduce(self, group: int, actions: list[Action]) -> None:
        """Hold the group's gradients back where they are small, else reduce them with those held so far."""
        if group in self.held:
            # A second backward through the group in one step (reentrant checkpointing of a shared layer).
            self._issue_reduction(self._companions(group), actions)
        for together in tuple(self.reducing):
            if group in together:
                self._wait_reduce(together, actions)
        spec, cap = self.spec_of(group), self.policy.bucket_cap_nbytes
        held = self._companions(group)
        sizes = (self.spec_of(other).grad_nbytes for other in held)
        if spec.bucket_key is None or not fits(sizes, spec.grad_nbytes, cap):
            self._issue_reduction([*held, group], actions)
        else:
            self.held.append(group)
            actions.append(Action(ActionKind.HOLD, (group,)))

    def _companions(self, group: int) -> list[int]:
        bucket_key = self.spec_of(group).bucket_key
        return (
            []
            if bucket_key is None
            else [other for other in self.held if self.spec_of(other).bucket_key == bucket_key]
        )

    def _issue_reduction(self, groups: Sequence[int], actions: list[Action]) -> None:
        while len(self.reducing) >= self.policy.max_reductions:
            self._wait_reduce(self.reducing[0], actions)
        self.held = [group for group in self.held if group not in groups]
        self.reducing.append(tuple(groups))
        actions.append(Action(ActionKind.REDUCE, tuple(groups)))

    def _wait_reduce(self, together: tuple[int, ...], actions: list[Action]) -> None:
        """Wait for the reduction, and step with what is complete by it."""
        self.reducing.remove(together)
        actions.append(Action(ActionKind.WAIT_REDUCE, together))
        steps = [group for group in together if self.spec_of(group).steps]
        ready = [group for group in steps if not self.spec_of(group).needs_copies_reduced]
        if ready:
            actions.append(Action(ActionKind.STEP, tuple(ready)))
        copied = tuple(group for group in together if self.spec_of(group).needs_copies_reduced)
        if copied:
            actions.append(Action(ActionKind.ALL_REDUCE, copied))
        self.unstepped += [group for group in steps if group not in (*ready, *self.unstepped)]

    # ---- gathering ahead

    def _prefetches_at_begin(self, phase: Phase, kind: EventKind) -> bool:
        """Whether a begin event of this kind gathers ahead."""
        # The backward that asked for a recomputation needs the same group at once, and what a forward would
        # need next lies in the wrong direction there.
        if kind is EventKind.RECOMPUTE:
            return False
        if phase is Phase.BACKWARD:
            return self.policy.backward_prefetch is BackwardPrefetch.PRE
        return self.policy.forward_prefetch

    def _prefetch(self, phase: Phase, group: int, ahead: Iterable[int], actions: list[Action]) -> None:
        """Issue the next ``depth`` all-gathers, or those of the groups that were listed."""
        spec = self.spec_of(group)
        listed = spec.ahead_in_backward if phase is Phase.BACKWARD else spec.ahead_in_forward
        if listed is not None:
            self._gather_ahead(listed, group, len(listed), actions)
        elif phase is Phase.BACKWARD:
            # Not those whose backward reads no weight, as a lookup's: they would be gathered for nothing.
            needed = (following for following in ahead if self.spec_of(following).unshard_in_backward)
            self._gather_ahead(needed, group, self.policy.depth, actions)
        else:
            self._gather_ahead(ahead, group, self.policy.depth, actions)

    def _gather_ahead(
        self, following: Iterable[int], current: int, depth: int, actions: list[Action]
    ) -> None:
        """Unshard what follows ``current``, until ``depth`` collectives are ahead of its own or a limit is
        reached. Each takes along what follows it, up to the cap; those of one module count as one."""
        seen = {current}
        ahead: set[int] = set()
        batches: list[list[int]] = []
        for group in following:
            if group in seen or self.spec_of(group).no_prefetch:
                continue
            seen.add(group)
            if group in self.live:
                # By collectives, of which those that small groups share count once. What came with the
                # current group's own isn't ahead of it.
                ahead |= {self.live[group]} - {self.live.get(current)}
                if len(ahead) + len(batches) > depth:
                    break
                continue
            joins = bool(batches) and self._joins(group, batches[-1])
            begun = self.spec_of(group).part_of in seen - {current, None}
            is_full = len(ahead) + len(batches) >= depth and not begun
            if (is_full and not joins) or not self._within_budget(group, current):
                break
            if joins:
                batches[-1].append(group)
            else:
                self._issued += 1
                batches.append([group])
            self.live[group] = self._issued
        actions += [Action(ActionKind.UNSHARD, tuple(batch)) for batch in batches]

    def _joins(self, group: int, batch: Sequence[int]) -> bool:
        """Whether the group's all-gather may be part of that of ``batch``."""
        bucket_key = self.spec_of(group).bucket_key
        if bucket_key is None or bucket_key != self.spec_of(batch[0]).bucket_key:
            return False
        sizes = (self.spec_of(other).nbytes for other in batch[1:])
        return fits(sizes, self.spec_of(group).nbytes, self.policy.bucket_cap_nbytes)

    def _within_budget(self, group: int, current: int) -> bool:
        if self.policy.budget_nbytes is None:
            return True
        held = [g for g in self.live if g not in self.waited and g != current]
        return sum(self.spec_of(g).nbytes for g in (*held, group)) <= self.policy.budget_nbytes


def scheduled(
    orders: dict[Phase, tuple[Event, ...]], policy: SchedulePolicy, spec_of: Callable[[int], GroupSpec]
) -> Schedule:
    """The schedule for recorded ``orders`` (the events of each phase as they happened).

    The backward is planned from what the forward leaves unsharded. It is a pure function, so every rank that
    recorded the same orders plans the same collectives.
    """
    spec_of = functools.cache(spec_of)
    step = Scheduler(policy, spec_of, kept_for_backward(orders, policy, spec_of))
    # No backward follows an evaluation: it begins with nothing gathered, and nothing is kept for one.
    schedulers = {Phase.FORWARD: step, Phase.BACKWARD: step, Phase.EVALUATION: Scheduler(policy, spec_of)}
    return Schedule(
        {
            phase: _plan_phase(schedulers[phase], phase, orders[phase])
            for phase in schedulers
            if phase in orders
        }
    )


def kept_for_backward(
    orders: dict[Phase, tuple[Event, ...]], policy: SchedulePolicy, spec_of: Callable[[int], GroupSpec]
) -> frozenset[int]:
    """The ``keep_last`` groups that the backward needs first, of those that may be kept for it."""
    backward = dict.fromkeys(event.group for event in orders.get(Phase.BACKWARD, ()) if event.kind in BEGINS)
    may = [group for group in backward if spec_of(group).is_open]
    return frozenset(may[: policy.keep_last])


def _plan_phase(scheduler: Scheduler, phase: Phase, order: tuple[Event, ...]) -> tuple[ScheduleEntry, ...]:
    begins = [event.group for event in order if event.kind in BEGINS]
    passed = 0
    entries = []
    for event in order:
        passed += event.kind in BEGINS
        ahead = (begins[index] for index in range(passed, len(begins)))
        entries.append(ScheduleEntry(event, scheduler.at(phase, event, ahead)))
    if phase is not Phase.BACKWARD and entries:
        last = entries.pop()
        entries.append(ScheduleEntry(last.event, last.actions + scheduler.end_forward(phase)))
    return tuple(entries)


def fits(held: Iterable[int], more: int, cap: int) -> bool:
    """Whether one of size ``more`` may join those of sizes ``held``: together at most ``cap``, in one unit.

    A cap of 0: nothing is joined.
    """
    return cap > 0 and sum(held) + more <= cap
