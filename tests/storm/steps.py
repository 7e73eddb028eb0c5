"""The ranks of one job as explicit state machines, in one thread: real followers, schedules and consensus.

Behind them the launches and exchanges in which ranks meet are simulated (``Night``), and what the engine
makes of actions: a group is a stage and a few integers (``Group``). Each use of a group in a backward brings
a number that nothing else brings, so that sums tell whose gradients they hold. ``Rank.advance`` does one
thing of one rank, or says that it has to wait; nothing else moves a night, so that it can be copied,
compared, and taken up anywhere.

The real ``Consensus`` asks its channel from within a call. Here the call is made again for each of its
rounds, with the answers that have come (``Rank.exchange``): it changes nothing before it returns.
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, reduce
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from shardwright.engine.groups.group import Stage
from shardwright.engine.step import consensus
from shardwright.engine.step.consensus import Consensus
from shardwright.errors import Diverged
from shardwright.policy import SchedulePolicy
from shardwright.schedule import recorded
from shardwright.schedule.follower import DONE, Follower
from shardwright.schedule.following import Mode
from shardwright.schedule.recorded import RecordedSchedules, bits
from shardwright.schedule.schedule import BEGINS, ENDS, Action, ActionKind, Event, EventKind, GroupSpec, Phase
from shardwright.schedule.sync import (
    AllReduceMin,
    Answer,
    Broadcast,
    ConsensusResult,
    Local,
    Recorded,
    Step,
    Sync,
    Synchronize,
    SyncPoint,
)
from shardwright.transport.channel import COMBINE, Combine
from shardwright.transport.process import process_state

HEALTHY, DIVERGES, ALONE = "healthy", "diverges", "alone"
"""What a night may come to: every rank ends; every rank raises ``Diverged``; one rank is killed or raises,
and the others may wait or raise."""


Names = tuple[tuple[ActionKind, int], ...]


class Broken(AssertionError):
    """A promise is broken."""

    def __str__(self) -> str:
        return " ".join(self.args)


class Elsewhere(Exception):
    """Ranks are in different collectives or exchanges: what a transport tells them."""


class _Said(BaseException):
    """This rank has said its words of an exchange. It ends the call of the consensus."""


class Plan(NamedTuple):
    """All of a night that is drawn. programs: of each rank, instructions (see ``Rank._instruct``); entries:
    by number, the groups of a module that may be the outermost one. restarts: the plan of another world, in
    which the job goes on."""

    seed: int
    mode: Mode
    policy: SchedulePolicy
    specs: tuple[GroupSpec, ...]
    entries: tuple[frozenset[int], ...]
    programs: tuple[tuple[tuple[Any, ...], ...], ...]
    expects: str = HEALTHY
    forget_after: int = recorded.FORGET_AFTER
    restarts: Any = None


def require(holds: object, *complaint: object) -> None:
    """Raises: Broken where it doesn't hold. complaint: in parts, since most hold, and words take time."""
    if not holds:
        raise Broken(*map(str, complaint))


class Group:
    """A group of one rank, with one parameter, as the consensus sees it. gather, flight: the launches that it
    waits for. grad, kept, taken, total: gradients from autograd, of earlier microbatches, taken to be
    reduced, and summed; made, result: those of this step on this rank, and of all ranks; given: those of
    ``made`` that other ranks know of; None: there is none.
    """

    gatherer = reducer = gradients = policy = axis = mesh = property(lambda self: self)
    all_reduce, unused_params, params = True, False, (None,)

    def __init__(self, number: int, rank: int, spec: GroupSpec) -> None:
        self.number, self.rank, self.spec = number, rank, spec
        self.smaller_world = spec.smaller_world or None
        self.stage = Stage.SHARDED
        self.gather = 0
        self.is_laid_out = self.keeps_smaller = self.is_stale = self.runs = self.is_due = self.brought = False
        self.trainable, self.reduce = 1, True
        self.flight = self.grad = self.kept = self.taken = self.total = None
        self.made = self.given = self.result = None

    def __copy__(self) -> "Group":
        copied = object.__new__(Group)
        copied.__dict__.update(self.__dict__)
        return copied

    def get_rank(self) -> int:
        """Of the mesh."""
        return self.rank

    @property
    def gradient_mask(self) -> int:
        """A bit where this rank has had a gradient."""
        return int(self.brought)

    @property
    def left_mask(self) -> int:
        """A bit where gradients of earlier microbatches are kept."""
        return int(self.kept is not None)

    def of(self, _: object) -> bool:
        """Whether gradients of earlier microbatches are kept."""
        return self.kept is not None

    def hold(self, participates: bool, left: int) -> None:
        """As ``Reducer.hold``."""
        require(self.flight is None, "what is held while it is reduced: group", self.number)
        grad, trained = plus(self.kept, self.grad), self.trainable or left or self.kept is not None
        self.grad = self.kept = None
        if not self.reduce:
            self.kept = grad
            return
        self.brought |= grad is not None
        self.taken = 0 if grad is None and participates and trained else grad

    def drop(self) -> None:
        """A step has failed here, and its gradients are cleared."""
        self.grad = self.kept = self.taken = self.total = self.result = self.flight = None
        self.brought = self.is_due = False
        self.made = self.given


def plus(first: int | None, second: int | None) -> int | None:
    """The sum of gradients, of which either may be none."""
    return second if first is None else first if second is None else first + second


class Rank:
    """One rank: its program, follower and groups, and what it is about: the ``actions`` and the ``sync`` of a
    step of the follower, and what it waits for. For the consensus it is executor, table and channel."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number, self.plan, self.program = number, plan, plan.programs[number]
        self.agrees = plan.mode is Mode.AGREED
        self.groups = [Group(index, number, spec) for index, spec in enumerate(plan.specs)]
        self.table = self
        self.consensus = Consensus(self, self if self.agrees else None)  # type: ignore[arg-type]
        self.consensus.names = {1: "part"}
        self.follower = Follower(plan.policy, self.specs(), plan.mode)
        self.promote = self.left = 0
        self.actions = self.answers = self.phases = self.marks = ()  # marks: how often it had asked
        self.todo: tuple[tuple[Any, ...], ...] = ()  # before the rest of the program
        self.num_done = self.place = self.heard = self.entry = 0
        self.num_launched = self.num_said = self.num_asked = self.num_settled = 0
        self.sync = self.round = self.awaits = self.raises_at = self.began = self.error = None
        self.asked: frozenset[int] = frozenset()
        self.words: tuple[list[int], Combine, str] = ([], "or", "")
        self.is_last, self.enters, self.failed = True, False, False
        self.has_ended = False  # by an error, or killed
        self.num_steps = 0

    def __copy__(self) -> "Rank":
        copied = object.__new__(Rank)
        copied.__dict__.update(self.__dict__)
        copied.groups = [copy.copy(group) for group in self.groups]
        copied.table = copied
        copied.follower, copied.consensus = copy.copy(self.follower), copy.copy(self.consensus)
        copied.consensus._executor = copied.consensus._table = copied  # type: ignore[assignment]
        copied.consensus._channel = copied if self.agrees else None
        return copied

    def state(self) -> tuple[Any, ...]:
        """All that its next steps depend on, hashable."""
        own = (self.place, self.actions[self.num_done :], self.sync, self.todo)
        waits = (self.round, self.awaits, self.began, tuple(map(tuple, self.answers)))
        counts = (self.num_launched, self.num_said, self.num_settled, self.num_steps, self.has_ended)
        groups = tuple(tuple(group.__dict__.values()) for group in self.groups)
        return (*own, *waits, *counts, groups, self.asked, self.is_last, self.follower.snapshot())

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        if self.has_ended or self.todo or self.place < len(self.program):
            return self.has_ended
        return self.num_done == len(self.actions) and self.sync is None and self.awaits is None

    # ---- as executor, table and channel

    def comms(self) -> list[Any]:
        """No transport needs to go on."""
        return []

    def compare(self) -> None:
        """The models of all ranks are the same here."""

    def specs(self) -> tuple[GroupSpec, ...]:
        """What is known of the groups now: before it is laid out a group has no bytes."""
        return tuple(group.spec if group.is_laid_out else _unknown(group.spec) for group in self.groups)

    def inspect(self, index: int) -> Local:
        """As ``Executor.inspect``."""
        group, bit = self.groups[index], 1 << index
        if not group.reduce:
            return Local(accumulating=0 if group.grad is None else bit)
        return Local(unreduced=0 if group.grad is None and group.kept is None else bit)

    def local(self, phase: Phase) -> Local:
        """As ``Executor.local``."""
        kept = () if phase is Phase.EVALUATION else [g.number for g in self.groups if g.keeps_smaller]
        held = [group.number for group in self.groups if group.stage is not Stage.SHARDED]
        return Local(held=bits(held), smaller=bits(kept))

    def exchange(self, words: list[int], combine: Combine = "or", what: str = "") -> list[int]:
        """The answer of a round that has been; the first that hasn't ends the call."""
        if self.heard < len(self.answers):
            self.heard += 1
            return self.answers[self.heard - 1]
        self.words = words, combine, what
        raise _Said

    # ---- one thing after another

    def advance(self, night: "Night") -> bool:
        """Do the next thing; False where it has to wait for other ranks, with nothing done."""
        if self.has_ended:
            return False
        if self.awaits is not None:
            if not night.is_done(self.awaits):
                return False
            self.awaits = None
        elif self.num_done < len(self.actions):
            if not self._act(self.actions[self.num_done], night):
                return False
            self.num_done += 1
        elif self.sync is not None:
            if not self._ask(self.sync, night):
                return False
        elif self.todo or self.place < len(self.program):
            self._instruct(night)
        else:
            return False
        if self.raises_at is not None and self.num_launched >= self.raises_at:
            self.fail(night, within=True)
        if self.num_done == len(self.actions) and self.sync is None and self.awaits is None:
            self._look()
        return True

    def _take(self, step: Step) -> None:
        self.actions, self.num_done, self.sync = step.actions, 0, step.sync

    def _look(self) -> None:
        """An event, or the begin of a phase, has been followed to its end."""
        follower = self.follower
        if follower.cursors and not follower._exact:
            held = bits(group.number for group in self.groups if group.stage is not Stage.SHARDED)
            require(follower.groups.states.held == held, "what the follower derives isn't what is so")
        if self.began is not None:
            event, self.began = self.began, None
            group = self.groups[event.group]
            if self.plan.specs[event.group].reads(event.kind):
                require(group.stage is Stage.UNSHARDED, event, "runs, and it isn't unsharded")
                require(not group.is_stale, event, "reads parameters of an earlier step")
                group.runs = True
        if self.enters:
            self.enters = False
            phase = self.phases[-1][0]
            exact = self.agrees and follower._exact
            planned = self._planned(phase) if exact else None
            self.phases = (*self.phases[:-1], (phase, self.num_launched, self.num_asked, planned))

    def _planned(self, phase: Phase) -> Names:
        """The groups of the collectives of its schedule, by kind; without those that it began with before
        ranks met."""
        planned = self.follower.recorded.planned(self.entry, phase)
        is_begun = planned.ahead and self.follower._exact is planned.steps_after
        entries, begun = planned.entries, len(planned.ahead) if is_begun else 0
        sent = {group.number for group in self.groups if group.trainable and group.reduce}
        kinds = {ActionKind.UNSHARD: {*range(len(self.groups))}, ActionKind.REDUCE: sent}
        actions = [action for entry in entries for action in entry.actions if action.kind in kinds][begun:]
        return tuple(sorted((a.kind, group) for a in actions for group in a.groups if group in kinds[a.kind]))

    def _ask(self, sync: Sync, night: "Night") -> bool:
        if self.round is not None:
            if not night.is_answered(self.round):
                return False
            self.answers += (night.rounds[self.round][2],)
            self.round = None
        elif night.history is not None:
            night.tell(self, "asks", _in_words(sync))
        self.heard = 0
        try:
            answer = self.consensus.exchange(sync)
        except _Said:
            self.round = night.say(self, *self.words)
            if isinstance(sync, Synchronize) and sync.point is SyncPoint.BACKWARD_END:
                for group in filter(lambda each: each.reduce, self.groups):
                    group.given = group.made
            return True
        self.num_asked += isinstance(sync, AllReduceMin)
        self.answers = ()
        if night.history is not None:
            night.tell(self, "hears", _in_words(answer))
        self._take(self.follower.resume(answer))
        return True

    # ---- actions, as the executor takes them

    def _act(self, action: Action, night: "Night") -> bool:
        groups = [self.groups[index] for index in action.groups]
        match action.kind:
            case ActionKind.UNSHARD | ActionKind.PARTICIPATE:
                self._gather(action, groups, night)
            case ActionKind.WAIT | ActionKind.RESHARD:
                if any(each.stage is Stage.GATHERING and not night.is_done(each.gather) for each in groups):
                    return False
                for group in groups:
                    if action.kind is ActionKind.RESHARD:
                        self._reshard(group, action)
                    elif group.stage is Stage.GATHERING:
                        group.stage = Stage.UNSHARDED
            case ActionKind.HOLD:
                self._hold(groups)
            case ActionKind.REDUCE:
                self._hold(groups)
                sent = {group.number: group.taken for group in groups if group.taken is not None}
                number = night.launch(self, Action(ActionKind.REDUCE, tuple(sent)), sent) if sent else None
                for group in groups:
                    group.flight = None if group.taken is None else number
                    group.taken = None
            case ActionKind.WAIT_REDUCE:
                if not all(each.flight is None or night.is_done(each.flight) for each in groups):
                    return False
                self._land(groups, night)
            case ActionKind.STEP:
                require(all(each.flight is None for each in groups), action, "while it is reduced")
            case ActionKind.ALL_REDUCE:
                self._all_reduce(groups, night)
            case ActionKind.FINALIZE:
                self._finalize(action, night)
        if night.history is not None:
            night.tell(self, "does", action)
        return True

    def _gather(self, action: Action, groups: list[Group], night: "Night") -> None:
        own = [g for g in groups if g.stage is Stage.SHARDED] if action.kind is ActionKind.UNSHARD else []
        needed = self.agrees or own == groups or self.follower.groups.states.kept
        require(needed, action, "and nobody else needs it")
        number = night.launch(self, action._replace(kind=ActionKind.UNSHARD))
        for group in groups:
            require(group.keeps_smaller or not action.smaller, action, "and this rank keeps no shard")
            group.keeps_smaller &= not action.smaller
            group.is_laid_out = True
        for group in own:
            group.stage, group.gather, group.is_stale = Stage.GATHERING, number, False
        if not own:
            self.awaits = number

    def _reshard(self, group: Group, action: Action) -> None:
        self.asked -= {group.number}
        if group.stage is not Stage.SHARDED:
            require(not group.runs, "what is resharded runs: group", group.number)
            group.stage = Stage.SHARDED
            group.keeps_smaller |= group.spec.smaller_world and (action.smaller or group.kept is not None)

    def _hold(self, groups: list[Group]) -> None:
        for group in groups:
            if group.taken is None:
                group.hold(self.agrees, self.left >> group.number & 1)

    def _land(self, groups: list[Group], night: "Night") -> None:
        for group in groups:
            if group.flight is not None:
                group.total = plus(group.total, night.total(group.flight, group.number))
                group.is_due |= group.spec.needs_copies_reduced
                group.flight = None

    def _all_reduce(self, groups: list[Group], night: "Night") -> None:
        due = [group.number for group in groups if group.is_due]
        if due:
            night.launch(self, Action(ActionKind.ALL_REDUCE, tuple(due)))
        for number in due:
            self.groups[number].is_due = False

    def _finalize(self, action: Action, night: "Night") -> None:
        require(all(group.flight is None for group in self.groups), "a reduction is in flight at the end")
        self._all_reduce(self.groups, night)
        if action.grads is None:
            return
        for group in self.groups:
            if action.grads >> group.number & 1:
                group.result = plus(group.result, group.total)
            else:
                require(not group.total, "gradients are lost, of group", group.number)
            group.total, group.brought = None, False

    # ---- the program, as the runtime takes it

    def _instruct(self, night: "Night") -> None:
        if self.todo:
            instruction, self.todo = self.todo[0], self.todo[1:]
        else:
            instruction, self.place = self.program[self.place], self.place + 1
        if night.history is not None:
            night.tell(self, *instruction)
        match instruction:
            case ["at", event, *holds]:
                self._at(event, bool(holds))
            case ["bring", number, grad]:
                group = self.groups[number]
                if group.trainable:
                    group.grad, group.made = plus(group.grad, grad), plus(group.made, grad)
            case ["left"]:
                left = filter(self._has_gradients, self.groups)
                self.todo = tuple(("at", Event(EventKind.GRADS_READY, each.number)) for each in left)
            case ["begin", phase, _] if phase is not Phase.BACKWARD and not self.phases:
                self._take(Step(self._afresh()))
                self.todo = (("enter", *instruction[1:]), *self.todo)
            case ["begin" | "enter", phase, entry]:
                self._enter(phase, entry)
            case ["end"]:
                self._leave()
            case ["join"] if self.agrees:
                self._take(Step(self._afresh()))
                self.todo = (("joined",), *self.todo)
            case ["joined"]:
                self._take(self.follower.join_evaluations(self.local(Phase.EVALUATION)))
            case ["step"]:
                self._step(night)
            case ["do", kind, number]:
                self._do(kind, number)
            case ["rest"]:
                self.asked = frozenset()
                self._take(Step(tuple(Action(ActionKind.RESHARD, (g.number,)) for g in self.groups)))
            case ["set", name, value, *of]:
                for number in of or range(len(self.groups)):
                    setattr(self.groups[number], name, value)
            case ["last", value]:
                self.is_last = value
            case ["replan", policy]:
                self.follower.replan(policy, self.specs())
            case ["mark"]:
                self.marks += (self.num_asked,)
            case ["asks nobody"]:
                require(self.num_asked == self.marks[-1], "ranks ask for what all of them have told")
            case ["ended", before, asked, planned]:
                if planned is not None and asked == self.num_asked:
                    launched = night.names(before, self.num_launched)
                    require(launched == planned, "launched", launched, "planned", planned)
            case ["forget"]:
                self.follower = Follower(self.follower.recorded.policy, self.specs(), self.plan.mode)
            case ["raise"]:
                self.fail(night, within=False)
            case ["raise after", launches]:
                self.raises_at = self.num_launched + launches
            case ["die"]:
                self.has_ended = True

    def _afresh(self) -> tuple[Action, ...]:
        """As ``Executor.forget_stale``."""
        stale = []
        for group in self.groups:
            group.keeps_smaller &= group.kept is not None
            is_left = group.stage is Stage.GATHERING and group.number not in self.asked
            if group.stage is not Stage.SHARDED and (group.is_stale or is_left):
                stale.append(Action(ActionKind.RESHARD, (group.number,)))
        return tuple(stale)

    def _enter(self, phase: Phase, entry: int) -> None:
        """As ``Runtime.begin``."""
        held = False
        if phase is not Phase.BACKWARD:
            held = bool(self.asked) and self.plan.entries[entry] <= self.asked and self.agrees
            self.entry = entry
        if not held and self.agrees:
            self.asked, self.consensus.settles = frozenset(), self.is_last
        self.phases += ((phase, 0, 0, None),)
        self.enters = not held
        self._take(self.follower.begin(phase, self.entry, self.local(phase), held))

    def _at(self, event: Event, holds: bool) -> None:
        """As ``Runtime.at``, and what the hooks look at before."""
        group = self.groups[event.group]
        if event.kind in ENDS:
            group.runs = False
            # With the outermost module those end of which not all has run.
            if event == Event(EventKind.FORWARD_END, len(self.groups) - 1):
                self._stop_running()
        elif event.kind is EventKind.STEP_END:
            self.follower.settles = self.consensus.settles = self.is_last
            self._stop_running()
        elif event.kind is EventKind.GRADS_READY and not self._has_gradients(group):
            return
        if holds:
            self.follower.hold(event.group)
        self.began = event if event.kind in BEGINS else None
        self._take(self.follower.on(event))

    def _has_gradients(self, group: Group) -> bool:
        return group.grad is not None or (group.reduce and group.kept is not None)

    def _stop_running(self) -> None:
        if len(self.phases) == 1:
            for group in self.groups:
                group.runs = False

    def _leave(self) -> None:
        self._stop_running()
        self.todo = (("ended", *self.phases[-1][1:]), *self.todo)
        self.phases = self.phases[:-1]
        self._take(self.follower.end())

    def _do(self, kind: ActionKind, number: int) -> None:
        """As ``Runtime.do``."""
        if kind is ActionKind.UNSHARD and not (self.phases and self.agrees):
            self.asked |= {number}
        self.phases = tuple((*each[:3], None) for each in self.phases)  # no schedule has it
        step = self.follower.call(kind, number) if self.phases else Step((Action(kind, (number,)),))
        if kind is not ActionKind.UNSHARD or self.groups[number].stage is Stage.SHARDED:
            self._take(step)

    def _step(self, night: "Night") -> None:
        """The optimizer steps, and gradients are cleared."""
        self.raises_at = None
        night.settle(self)
        self.num_steps += 1
        for group in self.groups:
            if group.stage is not Stage.SHARDED:
                stays = group.spec.keeps(Phase.BACKWARD) or self.plan.expects == DIVERGES
                require(stays, "the step leaves unsharded group", group.number)
                group.is_stale |= group.result is not None
            group.result = None

    def fail(self, night: "Night", within: bool) -> None:
        """The program raises, clears its gradients, and goes on with its next step. within: in an action."""
        night.tell(self, "fails", "within an action" if within else "")
        runs = within or self.phases
        if within or any(phase is Phase.BACKWARD for phase, *_ in self.phases):
            self.follower.abandon()
        for _ in self.follower.cursors:
            require(self.follower.end(failed=True) == Step(()), "a phase that failed launches something")
        self._take(Step(()))
        self.answers, self.todo, self.phases = (), (), ()
        self.raises_at = self.round = self.awaits = self.began = None
        self.enters = False
        for group in self.groups:
            group.runs = False
            if group.stage is Stage.UNSHARDED and runs:
                self._reshard(group, Action(ActionKind.RESHARD, (group.number,)))
            group.drop()
        end = self.program.index(("step",), self.place)
        if night.expects == HEALTHY:
            for group in self.groups:
                group.made = group.given = None
        # Of what it has given before others know: it counts in the step that they are in.
        elif not any(each[:2] == ("begin", Phase.BACKWARD) for each in self.program[self.place : end]):
            night.note(self)
        self.place, self.failed = end + 1, True


@lru_cache(1024)
def _unknown(spec: GroupSpec) -> GroupSpec:
    return replace(spec, nbytes=0, grad_nbytes=0)


_MOST_AT_ONCE = 16


def _in_words(said: Sync | Answer) -> str:
    """A question or an answer, for a history."""
    match said:
        case AllReduceMin(code) | int(code):
            group = code & 0xFFFFFFFF
            return "nothing more" if code == DONE else f"{'needs' if code >> 32 else 'reduces'} {group}"
        case Synchronize(point, entry, used) | ConsensusResult(point, entry, used=used):
            return f"{point.name} of {entry}, used {used:b}"
        case Broadcast(order) if order is not None:
            return f"tells {order.phase}: {' '.join(map(str, order.events))}"
        case Recorded(orders):
            return f"{len(orders)} orders"
    return str(said)


class Night:
    """The ranks of one job, and the launches and exchanges in which they meet.

    launches: ``(action, how many ranks have launched it, sums of what they sent)``. rounds: ``(how many ranks
    have said them, their kind, words)``. history: of what happens, a line each, where it is wanted.
    """

    def __init__(self, plan: Plan, history: list[str] | None = None) -> None:
        self.plan, self.history, self.expects = plan, history, plan.expects
        self.world = len(plan.programs)
        self.ranks = [Rank(number, plan) for number in range(self.world)]
        self.launches: list[tuple[Action, int, tuple[int, ...]]] = []
        self.rounds: list[tuple[int, str, list[int]]] = []
        self.made: list[list[tuple[int | None, ...] | None]] = []
        self.progress = 0

    def after(self, number: int) -> "Night":
        """A copy, of which one rank can be advanced: it shares the others."""
        copied = object.__new__(Night)
        copied.__dict__.update(self.__dict__)
        copied.ranks = [*self.ranks]
        copied.ranks[number] = copy.copy(self.ranks[number])
        copied.launches, copied.rounds = [*self.launches], [*self.rounds]
        copied.made = [[*each] for each in self.made]
        return copied

    def state(self) -> tuple[Any, ...]:
        """All that comes of it depends on, hashable: of ranks, and of what not all have come to."""
        launched, said = (min(r.num_launched for r in self.ranks), min(r.num_said for r in self.ranks))
        rounds = [(count, *words) for count, _, words in self.rounds[max(said - 1, 0) :]]
        ranks = tuple(rank.state() for rank in self.ranks)
        return (*ranks, *self.launches[launched:], *rounds, self.expects)

    def tell(self, rank: Rank, *what: object) -> None:
        """Write it down."""
        if self.history is not None:
            self.history.append(f"{len(self.history):5}  rank {rank.number}  {' '.join(map(str, what))}")

    def launch(self, rank: Rank, action: Action, sent: dict[int, int] = {}) -> int:  # noqa: B006 is not kept
        """A collective; its number. Raises: Elsewhere where other ranks have launched another one."""
        number, rank.num_launched = rank.num_launched, rank.num_launched + 1
        self.progress += 1
        if number == len(self.launches):
            self.launches.append((action, 1, tuple(sent.values())))
            return number
        first, count, totals = self.launches[number]
        if first != action:
            raise Elsewhere(f"{action} is launched, and on other ranks {first}")
        self.launches[number] = action, count + 1, tuple(map(sum, zip(totals, sent.values(), strict=True)))
        return number

    def is_done(self, number: int) -> bool:
        """Whether all ranks have launched it."""
        return self.launches[number][1] == self.world

    def total(self, number: int, group: int) -> int:
        """The sum of what ranks have sent of a group."""
        action, _, totals = self.launches[number]
        return totals[action.groups.index(group)]

    def names(self, start: int, stop: int) -> Names:
        """The kinds and groups of what was launched, sorted, but for all-reduces."""
        actions = [action for action, *_ in self.launches[start:stop]]
        kinds = (ActionKind.UNSHARD, ActionKind.REDUCE)
        return tuple(sorted((a.kind, group) for a in actions if a.kind in kinds for group in a.groups))

    def say(self, rank: Rank, words: list[int], combine: Combine, what: str) -> int:
        """Words of an exchange; the number of the round. Raises: Elsewhere where others say other ones."""
        number, rank.num_said = rank.num_said, rank.num_said + 1
        self.progress += 1
        kind = f"{len(words)} words{what} by {combine}"
        if number == len(self.rounds):
            self.rounds.append((1, kind, words))
            return number
        count, first, said = self.rounds[number]
        if first != kind:
            raise Elsewhere(f"{kind} are exchanged, and on other ranks {first}")
        self.rounds[number] = count + 1, kind, list(map(COMBINE[combine], said, words))
        return number

    def is_answered(self, number: int) -> bool:
        """Whether all ranks have said their words."""
        return self.rounds[number][0] == self.world

    def note(self, rank: Rank) -> None:
        """A step ends on this rank, maybe by an error: the gradients that it has made in it."""
        if rank.num_settled == len(self.made):
            self.made.append([None] * self.world)
        self.made[rank.num_settled][rank.number] = tuple(group.made for group in rank.groups)
        rank.num_settled += 1
        for group in rank.groups:
            group.made = group.given = None

    def settle(self, rank: Rank) -> None:
        """A step has been settled: its gradients are the sums of what all ranks have made in it."""
        step = rank.num_settled
        self.note(rank)
        made = self.made[step]
        for other in self.ranks:
            is_in_step = other.num_settled == step  # its program has come to the end of the backward
            own = tuple(group.made for group in other.groups) if is_in_step else made[other.number]
            require(own is not None, f"a step ends, to which rank {other.number} hasn't come")
            made = [*made[: other.number], own, *made[other.number + 1 :]]
        for group, each in zip(rank.groups, zip(*made, strict=True), strict=True):
            expected = reduce(plus, each)
            is_right = group.result == expected or (rank.failed and self.expects == ALONE)
            require(is_right, "of group", group.number, "there is", group.result, "not", expected)

    def advance(self, rank: Rank) -> bool:
        """``Rank.advance``; what it raises is noted. Raises: Broken."""
        try:
            return rank.advance(self)
        except Exception as error:
            if isinstance(error, Broken):
                raise
            rank.error, rank.has_ended = error, True
            self.tell(rank, "raises", type(error).__name__, str(error))
            return True

    def pass_by(self) -> None:
        """Until nobody can go on. Which rank goes next is drawn."""
        random = Random(self.plan.seed).random
        awake, asleep = [*self.ranks], []
        while awake:
            place, progress = int(random() * len(awake)), self.progress
            rank, times = awake[place], int(random() * _MOST_AT_ONCE)
            while times and self.advance(rank):
                times -= 1
            if times and not rank.is_over:
                asleep.append(rank)
            if times:
                del awake[place]
            if self.progress > progress:
                awake, asleep = awake + asleep, []

    def judge(self) -> None:
        """Whether it has come to what may come of it. Raises: Broken."""
        errors = [rank.error for rank in self.ranks]
        for error in errors:
            if error is not None and not isinstance(error, Diverged | Elsewhere):
                raise Broken(f"a rank raises {type(error).__name__}: {error}") from error
        match self.expects:
            case "healthy":
                accused = next((error for error in errors if error is not None), None)
                require(accused is None, f"a rank is accused: {accused}")
                waiting = [rank.number for rank in self.ranks if not rank.is_over]
                require(not waiting, f"ranks {waiting} wait for ever")
                alone = [action for action, count, _ in self.launches if count < self.world]
                require(not alone, f"not all ranks have launched {alone}")
            case "diverges":
                told = {str(error) for error in errors}
                is_told = all(isinstance(error, Diverged) for error in errors) and len(told) == 1
                require(is_told, f"ranks diverge, and are told {errors}")


def run(plan: Plan, history: list[str] | None = None) -> Night:
    """A whole night. Raises: Broken."""
    with doors(plan):
        night = Night(plan, history)
        night.pass_by()
        night.judge()
    return night if plan.restarts is None else run(plan.restarts, history)


@contextmanager
def doors(plan: Plan) -> Iterator[None]:
    """Inside of it groups are forgotten as the plan says; and what one rank has planned others take over, of
    the same orders: to plan it anew on each takes a third of the time."""
    collects, own = gc.isenabled(), RecordedSchedules.replan
    known: dict[object, tuple[Any, ...]] = {}

    def replan(self: Any, policy: SchedulePolicy, specs: tuple[GroupSpec, ...]) -> None:
        orders = tuple((entry, *self._orders[entry].items()) for entry in sorted(self._orders))
        key = orders, policy, specs
        if key not in known:
            own(self, policy, specs)
            known[key] = self._schedules, self._planned, self.digest
        self.policy, self.specs = policy, specs
        self._schedules, self._planned, self.digest = known[key]

    with (
        mock.patch.object(recorded, "FORGET_AFTER", plan.forget_after),
        mock.patch.object(RecordedSchedules, "replan", replan),
        # What an error says of the process would make nights of two processes differ.
        mock.patch.object(process_state, "step", 0),
        mock.patch.object(consensus, "_user_line", lambda: "program"),
    ):
        gc.disable()  # a night has few circles, and to look for them takes a fifth of the time
        try:
            yield
        finally:
            if collects:
                gc.enable()
