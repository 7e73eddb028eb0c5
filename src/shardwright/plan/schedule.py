"""The schedule: which collective is issued, waited for or dropped at which event of a step. Pure data.

A step is two *phases*, forward and backward (and a third for evaluation, a forward without gradients).
Each phase is a list of :class:`Stop` s: an :class:`Event`, and the :class:`Action` s that the runtime takes
there, in order. The text form is what ``print`` shows, and it parses back::

    forward
      F+ 0 : unshard 0, unshard 1, wait 0
      F- 0 : reshard 0
      F+ 1 : wait 1
    backward
      B+ 1 : unshard 0
      G  1 : reduce 1
      B- 1 : reshard 1
      B+ 0 : wait 0
      G  0 : reduce 0
      B- 0 : reshard 0
      E    : wait-reduce 1, wait-reduce 0

Events: ``F+``/``F-`` forward of a group begins/ends, ``B+``/``B-`` its backward begins/ends, ``R+`` a
recomputation (activation checkpointing) enters it, ``G`` all its gradients of this backward are there,
``E`` the backward has ended. One planner serves both uses: with the order of a recorded phase ahead it
prefetches, with nothing ahead (a first step, or one that departs from the plan) it unshards on demand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from shardwright.policy import BackwardPrefetch, SchedulePolicy


class EventKind(StrEnum):
    """What happens in a step; the value is its text form."""

    FORWARD_BEGIN = "F+"
    FORWARD_END = "F-"
    BACKWARD_BEGIN = "B+"
    RECOMPUTE = "R+"
    GRADS_READY = "G"
    BACKWARD_END = "B-"
    STEP_END = "E"


class ActionKind(StrEnum):
    """What the runtime does at an event; the value is its text form."""

    UNSHARD = "unshard"
    WAIT = "wait"
    RESHARD = "reshard"
    REDUCE = "reduce"
    WAIT_REDUCE = "wait-reduce"


class Phase(StrEnum):
    """The part of a step that a list of stops belongs to."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"


class Event(NamedTuple):
    """``kind`` at ``group`` (its index in the runtime; -1 for the end of a step)."""

    kind: EventKind
    group: int = -1

    def __str__(self) -> str:
        return f"{self.kind:<2}" if self.group < 0 else f"{self.kind:<2} {self.group}"


class Action(NamedTuple):
    """``kind`` done to ``group``."""

    kind: ActionKind
    group: int

    def __str__(self) -> str:
        return f"{self.kind} {self.group}"


class Stop(NamedTuple):
    """An event and what is done there, in order."""

    event: Event
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"{self.event} : {', '.join(map(str, self.actions))}".rstrip(" :")


@dataclass(frozen=True)
class GroupFacts:
    """What the planner knows of a group.

    reshard_after_forward: False keeps it unsharded from its forward to its backward; None leaves it open.
    nbytes: bytes of its unsharded parameters.
    ahead_in_forward, ahead_in_backward: groups to gather when it begins, instead of the next ones.
    reshard_after_backward: False keeps it unsharded into the next forward. unshard_in_backward: False says
        that its backward doesn't read its parameters (``check`` takes both for True).
    """

    reshard_after_forward: bool | None = None
    nbytes: int = 0
    ahead_in_forward: tuple[int, ...] | None = None
    ahead_in_backward: tuple[int, ...] | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True

    def shifted(self, by: int) -> "GroupFacts":
        """The same with every group's number raised, for a model that became part of another."""
        listed = (self.ahead_in_forward, self.ahead_in_backward)
        forward, backward = (None if groups is None else tuple(g + by for g in groups) for groups in listed)
        return replace(self, ahead_in_forward=forward, ahead_in_backward=backward)


@dataclass(frozen=True)
class Schedule:
    """The stops of each phase, in order. Compare, print, ``parse`` or ``check`` it; it holds no tensors."""

    phases: dict[Phase, tuple[Stop, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for phase, stops in self.phases.items():
            lines.append(str(phase))
            lines.extend(f"  {stop}" for stop in stops)
        return "\n".join(lines)

    @staticmethod
    def parse(text: str) -> "Schedule":
        """The schedule that prints as ``text``. Raises: ValueError naming the line that doesn't parse."""
        phases: dict[Phase, list[Stop]] = {}
        stops: list[Stop] | None = None
        for number, line in enumerate(text.splitlines(), 1):
            try:
                if line.strip() in list(Phase):
                    stops = phases.setdefault(Phase(line.strip()), [])
                elif line.strip():
                    assert stops is not None
                    stops.append(_parse_stop(line))
            except (ValueError, AssertionError) as error:
                raise ValueError(f"line {number} of the schedule doesn't parse: {line!r}") from error
        return Schedule({phase: tuple(stops) for phase, stops in phases.items()})


def _parse_stop(line: str) -> Stop:
    head, _, tail = line.partition(":")
    kind, *group = head.split()
    event = Event(EventKind(kind), int(group[0]) if group else -1)
    actions = []
    for part in filter(None, (part.strip() for part in tail.split(","))):
        verb, target = part.split()
        actions.append(Action(ActionKind(verb), int(target)))
    return Stop(event, tuple(actions))


BEGINS = (EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN, EventKind.RECOMPUTE)


class Planner:
    """Decides the actions of one event after another; holds only which groups are live and being reduced.

    live: groups whose all-gather has been issued and that have not been resharded since.
    waited: those of them that have been waited for.
    kept: groups that the backward needs first, which stay unsharded until then.
    """

    def __init__(
        self, policy: SchedulePolicy, facts: Callable[[int], GroupFacts], kept: frozenset[int] = frozenset()
    ) -> None:
        self.policy = policy
        self.facts = facts
        self.kept = kept
        self.live: dict[int, None] = {}
        self.waited: set[int] = set()
        self.reducing: list[int] = []

    def at(self, phase: Phase, event: Event, ahead: Iterable[int] = ()) -> tuple[Action, ...]:
        """Actions at ``event``; ``ahead`` are the groups of the phase's later begin events, in order."""
        actions: list[Action] = []
        group = event.group
        if event.kind in BEGINS:
            needed = event.kind is not EventKind.BACKWARD_BEGIN or self.facts(group).unshard_in_backward
            if needed:
                self._unshard(group, actions)
            if self._prefetches_at_begin(phase, event.kind):
                self._prefetch(phase, group, ahead, actions)
            if needed and group not in self.waited:
                self.waited.add(group)
                actions.append(Action(ActionKind.WAIT, group))
        elif event.kind is EventKind.FORWARD_END:
            if not self._keeps(phase, group):
                self._reshard(group, actions)
        elif event.kind is EventKind.GRADS_READY:
            self._reduce(group, actions)
        elif event.kind is EventKind.BACKWARD_END:
            if self.facts(group).reshard_after_backward:
                self._reshard(group, actions)
            if self.policy.backward_prefetch is BackwardPrefetch.POST:
                self._prefetch(phase, group, ahead, actions)
        else:
            actions += [Action(ActionKind.WAIT_REDUCE, reducing) for reducing in self.reducing]
            self.reducing.clear()
            for live in tuple(self.live):
                if self.facts(live).reshard_after_backward:
                    self._reshard(live, actions)
        return tuple(actions)

    def end_forward(self, phase: Phase) -> tuple[Action, ...]:
        """Actions after the last event of a forward: reshard what no policy keeps for the backward."""
        actions: list[Action] = []
        for group in tuple(self.live):
            if not self._keeps(phase, group):
                self._reshard(group, actions)
        return tuple(actions)

    def _keeps(self, phase: Phase, group: int) -> bool:
        if phase is Phase.EVALUATION:
            return False
        reshard = self.facts(group).reshard_after_forward
        return group in self.kept if reshard is None else not reshard

    def _unshard(self, group: int, actions: list[Action]) -> None:
        if group not in self.live:
            self.live[group] = None
            actions.append(Action(ActionKind.UNSHARD, group))

    def _reshard(self, group: int, actions: list[Action]) -> None:
        if group in self.live:
            del self.live[group]
            self.waited.discard(group)
            actions.append(Action(ActionKind.RESHARD, group))

    def _reduce(self, group: int, actions: list[Action]) -> None:
        if group in self.reducing:
            # A second backward through the group in one step (reentrant checkpointing of a shared layer).
            self.reducing.remove(group)
            actions.append(Action(ActionKind.WAIT_REDUCE, group))
        while len(self.reducing) >= self.policy.max_reductions:
            actions.append(Action(ActionKind.WAIT_REDUCE, self.reducing.pop(0)))
        self.reducing.append(group)
        actions.append(Action(ActionKind.REDUCE, group))

    def _prefetches_at_begin(self, phase: Phase, kind: EventKind) -> bool:
        """A recomputation prefetches nothing: the backward that asked for it needs the same group at once,
        and what a forward would need next is the wrong direction there."""
        if kind is EventKind.RECOMPUTE:
            return False
        if phase is Phase.BACKWARD:
            return self.policy.backward_prefetch is BackwardPrefetch.PRE
        return self.policy.forward_prefetch

    def _prefetch(self, phase: Phase, group: int, ahead: Iterable[int], actions: list[Action]) -> None:
        """Issue the all-gathers of the next ``depth`` distinct groups, or of those that were listed."""
        facts = self.facts(group)
        listed = facts.ahead_in_backward if phase is Phase.BACKWARD else facts.ahead_in_forward
        if listed is not None:
            for following in listed:
                self._prefetch_one(following, group, actions)
            return
        seen = {group}
        for following in ahead:
            if phase is Phase.BACKWARD and not self.facts(following).unshard_in_backward:
                continue
            if len(seen) > self.policy.depth:
                return
            if following not in seen:
                seen.add(following)
                if not self._prefetch_one(following, group, actions):
                    return

    def _prefetch_one(self, group: int, current: int, actions: list[Action]) -> bool:
        """Issue one all-gather ahead of its use, unless a limit is reached (then False)."""
        if group in self.live:
            return True
        in_flight = [g for g in self.live if g not in self.waited]
        if self.policy.max_gathers is not None and len(in_flight) >= self.policy.max_gathers:
            return False
        if self.policy.budget_nbytes is not None:
            held = sum(self.facts(g).nbytes for g in in_flight if g != current)
            if held + self.facts(group).nbytes > self.policy.budget_nbytes:
                return False
        self._unshard(group, actions)
        return True


def plan(
    orders: dict[Phase, tuple[Event, ...]], policy: SchedulePolicy, facts: Callable[[int], GroupFacts]
) -> Schedule:
    """The schedule for recorded ``orders`` (the events of each phase as they happened).

    The backward is planned from what the forward leaves unsharded. Each phase's plan is a pure function
    of its arguments, so every rank that recorded the same order plans the same collectives.
    """
    step = Planner(policy, facts, needed_first(orders, policy, facts))
    planners = {Phase.FORWARD: step, Phase.BACKWARD: step, Phase.EVALUATION: Planner(policy, facts)}
    return Schedule(
        {phase: _plan_phase(planners[phase], phase, orders[phase]) for phase in planners if phase in orders}
    )


def needed_first(
    orders: dict[Phase, tuple[Event, ...]], policy: SchedulePolicy, facts: Callable[[int], GroupFacts]
) -> frozenset[int]:
    """The first ``keep_last`` groups of the recorded backward, of those that may be kept for it."""
    backward = (event.group for event in orders.get(Phase.BACKWARD, ()) if event.kind in BEGINS)
    open_groups = [g for g in dict.fromkeys(backward) if facts(g).reshard_after_forward is None]
    return frozenset(open_groups[: policy.keep_last])


def _plan_phase(planner: Planner, phase: Phase, order: tuple[Event, ...]) -> tuple[Stop, ...]:
    begins = [event.group for event in order if event.kind in BEGINS]
    passed = 0
    stops = []
    for event in order:
        passed += event.kind in BEGINS
        ahead = (begins[index] for index in range(passed, len(begins)))
        stops.append(Stop(event, planner.at(phase, event, ahead)))
    if phase is not Phase.BACKWARD and stops:
        last = stops.pop()
        stops.append(Stop(last.event, last.actions + planner.end_forward(phase)))
    return tuple(stops)


def check(schedule: Schedule) -> None:
    """Prove that a schedule is sound, or raise AssertionError saying where it is not.

    Nothing is used before it is waited for, nothing is unsharded twice or resharded while at rest, each
    reduction is waited for, and a step ends with every group at rest and no reduction in flight.
    """
    for start in (Phase.EVALUATION, Phase.FORWARD):
        stops = list(schedule.phases.get(start, ()))
        if start is Phase.FORWARD:
            stops += schedule.phases.get(Phase.BACKWARD, ())
        live: dict[int, bool] = {}
        reducing: set[int] = set()
        for stop in stops:
            for action in stop.actions:
                _check_action(stop, action, live, reducing)
            if stop.event.kind in BEGINS:
                assert live.get(stop.event.group), f"{stop}: group {stop.event.group} is used before its wait"
        complete = start is Phase.EVALUATION or Phase.BACKWARD in schedule.phases
        assert not (complete and stops and (live or reducing)), f"left at the end: {live=} {reducing=}"


def _check_action(stop: Stop, action: Action, live: dict[int, bool], reducing: set[int]) -> None:
    kind, group = action
    if kind is ActionKind.UNSHARD:
        assert group not in live, f"{stop}: group {group} is unsharded twice"
        live[group] = False
    elif kind is ActionKind.WAIT:
        assert group in live, f"{stop}: waits for group {group}, which nothing has unsharded"
        live[group] = True
    elif kind is ActionKind.RESHARD:
        assert group in live, f"{stop}: reshards group {group}, which is at rest"
        del live[group]
    elif kind is ActionKind.REDUCE:
        assert group not in reducing, f"{stop}: group {group} is already being reduced"
        reducing.add(group)
    else:
        assert group in reducing, f"{stop}: waits for the reduction of group {group}, which is not in flight"
        reducing.remove(group)
