"""The runtime of a model: every event of a step goes through it. The only mutable whole-model object.

The loop: the follower decides what an event leads to, the executor does it, and what one rank can't decide
alone the ranks decide by consensus, whose answer the follower is resumed with. One lock holds each of these
turns together: an event from another thread waits for its turn.
"""

import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakSet

from shardwright import clock
from shardwright.engine.groups.group import ParamGroup, Stage
from shardwright.engine.groups.table import GroupTable
from shardwright.engine.listeners import State, listeners
from shardwright.engine.step.consensus import Consensus, channel_of
from shardwright.engine.step.executor import Executor
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam
from shardwright.policy import Agreement, SchedulePolicy, Wire
from shardwright.schedule.follower import Follower
from shardwright.schedule.following import Mode
from shardwright.schedule.schedule import (
    BEGINS,
    Action,
    ActionKind,
    EventKind,
    GroupSpec,
    Phase,
    Schedule,
    event_in_words,
)
from shardwright.schedule.sync import Step
from shardwright.torch_private import beneath_transforms
from shardwright.transport.process import process_state
from shardwright.transport.recorder import ACTION, CALL, PHASE

unsettled: "WeakSet[Runtime]" = WeakSet()
"""Models whose last backward has not ended on all ranks: their gradients may not be stepped with."""


@dataclass(frozen=True)
class StepPolicy:
    """What the caller said of the step that is running.

    is_last_backward: False lets reductions run on after this backward; the last one waits for them all.
    finalizes_by_hand: so no backward is the last one, and ``finalize_backward`` ends the step.
    optimizer_event: recorded after the optimizer's step; the next forward's all-gathers wait for it.
    """

    is_last_backward: bool = True
    finalizes_by_hand: bool = False
    optimizer_event: Any = None


class Entry(NamedTuple):
    """The outermost module that runs: its name, and what lists the groups that it and its children need."""

    name: str = ""
    groups: Callable[[], Sequence[ParamGroup]] = tuple


NO_ENTRY = Entry()


@dataclass
class PhaseRun:
    """A phase as it runs. nested: inside of another one. lives: whether what it runs in hasn't ended."""

    phase: Phase
    nested: bool
    lives: Callable[[], bool]


class Runtime:
    """Where the step of one model stands; ``table`` holds its groups.

    groups: of the model, in the order in which they were sharded.
    depth: sharded modules that are in their forward now, one inside the other. phase: the one that is
    running, or None. backward: see ``backward_of``. pass_number: counts forwards. successor: the runtime that
    has taken this one's groups in, if one has. listed: units of several modules that have begun in the
    outermost module that runs. late: parameters that were found to be in no group, as of
    ``num_checked`` optimizers.
    """

    def __init__(self, policy: SchedulePolicy | None = None) -> None:
        self.policy = policy or SchedulePolicy()
        self.table = GroupTable()
        self.groups = self.table.groups
        self.executor = Executor(self.table)
        self.depth = self.pass_number = 0
        self.listed: list[Any] = []
        self.successor: Runtime | None = None
        self.step = StepPolicy()
        self.phase: Phase | None = None
        self.backward: Any = None
        self._runs: list[PhaseRun] = []
        self._follower: Follower | None = None
        self._consensus = Consensus(self.executor, None)
        self._entry = 0
        self.abandoned = False
        self.num_checked, self.late = -1, set[str]()
        self._turn = Turn(self._break_off)

    # ---- groups

    def add(self, group: ParamGroup, reshard_after_forward: bool | None) -> None:
        """Take a group into the model. Forgets the schedule: the next step records a new one."""
        self.table.add(group, GroupSpec(reshard_after_forward))
        self._forget()

    def absorb(self, other: "Runtime") -> None:
        """Take in the groups of a model that became part of this one; both at rest."""
        other.rest()
        self.table.absorb(other.table)
        memory = self.executor.memory
        memory.peak_nbytes = max(memory.peak_nbytes, other.executor.memory.peak_nbytes)
        memory.count(self.groups)
        self._forget()
        other.successor = self

    def regroup(self, group: ParamGroup, params: Sequence[ShardedParam]) -> None:
        """Give ``group`` other parameters; all at rest. Forgets the schedule."""
        group.regroup(params)
        self.table.chosen = False
        self.executor.memory.count([group])
        self._forget()

    def change(self, group: ParamGroup, **changes: Any) -> None:
        """Replace fields of what was asked of ``group``, from the next phase on."""
        self.table.requested[group] = replace(self.table.requested[group], **changes)
        self._replan()

    def requested(self, group: ParamGroup) -> GroupSpec:
        """What was asked of ``group``."""
        return self.table.requested[group]

    def effective(self, group: ParamGroup) -> GroupSpec:
        """What the scheduler knows of ``group``: what was asked of it, with what follows."""
        return self.table.effective(self.table.number(group))

    def do(self, kind: ActionKind, group: ParamGroup) -> None:
        """Take an action that the caller asks for; what is already so is left so.

        Asked for inside of another action (by a hook that runs in one) it is taken after that.
        """
        if not self._turn.queue(lambda: self.do(kind, group)):
            with self._turn:
                self._do(kind, group)

    def _do(self, kind: ActionKind, group: ParamGroup) -> None:
        index = self.table.number(group)
        if kind is ActionKind.UNSHARD:
            listeners.need("unshard()", State.PARAMS, groups=(group,))
            group.show_unsharded()
        follower = self._follower if self._runs else None
        if kind is ActionKind.UNSHARD and (follower is None or follower.mode is Mode.LOCAL):
            self.executor.asked.add(index)
        step = Step((Action(kind, (index,)),)) if follower is None else follower.call(kind, index)
        if kind is not ActionKind.UNSHARD or group.stage is Stage.SHARDED:
            self._follow(step)

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Follow another policy, from the next phase on.

        Raises: MissingExtra for a ``wire`` whose coder isn't installed.
        """
        if policy.wire is not Wire.PLAIN:
            from shardwright.extras import require  # noqa: PLC0415 coded wires

            require("wire", "zstandard")
        # The follower's mode and the channel are made for one way of agreeing.
        if policy.agreement is not self.policy.agreement:
            self._forget()
        self.policy = policy
        self.table.chosen = False
        self._replan()

    @property
    def schedule(self) -> Schedule:
        """Planned from the last recorded step of the last outermost module; empty before one."""
        if self._follower is None:
            return Schedule()
        planned = self._follower.recorded.schedule(self._entry)
        return replace(planned, names=tuple(group.name for group in self.groups))

    def _replan(self) -> None:
        if self._follower is not None:
            self._follower.replan(self.policy, self.table.specs())

    def _forget(self) -> None:
        """The groups, or how ranks agree, are others than before: whether all hold the same is asked anew."""
        self.executor.compared.clear()
        self._follower, self.table.labels = None, ()

    # ---- phases

    def begin(self, phase: Phase, lives: Callable[[], bool], entry: Entry = NO_ENTRY) -> None:
        """Enter a phase, by the outermost module ``entry``; maybe inside another (a backward in a forward).

        lives: whether what it runs in hasn't been ended by an exception since. Where ranks agree every rank
        of the model's meshes calls it. Raises: Diverged where others have called something else.
        """
        self.running()
        used = (State.PARAMS,) if phase is Phase.EVALUATION else (State.PARAMS, State.GRADS)
        if listeners.needs:
            listeners.need(f"this {phase}", *used, groups=self.groups)
        for tell in () if self._runs else tuple(self.table.around):
            tell(phase)
        if (start := clock.perf_counter()) > process_state.recorder.look_s:
            process_state.recorder.look(start)
        with self._turn:
            self.pass_number += phase is not Phase.BACKWARD
            nested = bool(self._runs)
            if phase is Phase.FORWARD and not nested:
                process_state.recorder.turn()
            if not nested and phase is not Phase.BACKWARD:
                self._start_afresh()
                self.executor.memory.in_step = True
            follower = self._ready_follower()
            held = False
            if phase is not Phase.BACKWARD:
                needed = self.executor.asked and {self.table.number(group) for group in entry.groups()}
                held = bool(needed) and needed <= self.executor.asked and follower.mode is Mode.AGREED
                # Also where nobody is asked: its backward has one entry on all ranks, whatever each evaluated
                # before. Not Python's hash, which differs from process to process (PYTHONHASHSEED).
                self._entry = zlib.crc32(entry.name.encode())
                self._consensus.names[self._entry] = entry.name
            if not held and follower.mode is Mode.AGREED:
                self.executor.asked.clear()
                self._consensus.settles = self.step.is_last_backward
                if phase is Phase.BACKWARD and not nested:
                    unsettled.add(self)
            self._runs.append(PhaseRun(phase, nested, lives))
            self._say_where()
            try:
                with beneath_transforms():
                    self._follow(follower.begin(phase, self._entry, self.executor.local(phase), held))
            except BaseException:
                self._runs.pop()
                self._say_where()
                raise
            if phase is not Phase.BACKWARD and not held:
                unsettled.discard(self)
            process_state.recorder.write(
                (PHASE, self.table.labels, phase, True, nested, start, clock.perf_counter())
            )

    def at(self, kind: EventKind, group: ParamGroup | None = None, holds: bool = False) -> None:
        """Take the actions of an event. After a begin event the group is unsharded, whatever was planned.
        holds: it stays so to the end of the next backward.

        Raises: StageError for an event from inside of an action: a hook that runs in one runs the model.
        """
        event, follower, start = self.table.events[kind, group], self._follower, clock.perf_counter()
        if start > process_state.recorder.look_s:
            process_state.recorder.look(start)
        with self._turn:
            self._turn.inside = kind
            if follower is None or not follower.cursors:
                raise StageError(
                    f"this {self.phase or 'phase'} can't go on, since an action of Shardwright failed in it "
                    "(the first exception says which): call the outermost module again"
                )
            if holds:
                follower.hold(event.group)
            if kind is EventKind.STEP_END:
                follower.settles = self._consensus.settles = self.step.is_last_backward
            memory = self.executor.memory
            if memory.budget is not None:
                memory.check(event_in_words(kind, "" if group is None else group.name))
            for watcher in memory.watchers:
                watcher(event, group, False)
            with beneath_transforms():
                self._follow(follower.on(event), start)
            for watcher in memory.watchers:
                watcher(event, group, True)
            if kind is EventKind.FORWARD_END:
                # What the caller sees between forward and backward doesn't depend on what is kept.
                if follower.recorded.specs[event.group].is_open and not holds:
                    self.groups[event.group].show_sharded()
            elif kind in BEGINS:
                self.groups[event.group].show_unsharded()
            memory.sample(start, self.groups[0].axis.device)

    def end(self, failed: bool = False) -> None:
        """Leave the phase.

        failed: it was cut short by an exception. Nothing is waited for then, since the ranks that would have
        to take part may be gone: what is in flight stays so until its group is next used.
        """
        with self._turn:
            run = self._runs.pop()
            self._say_where()
            if (start := clock.perf_counter()) > process_state.recorder.look_s:
                process_state.recorder.look(start)
            if failed:
                process_state.failed(sys.exc_info()[1])
            follower = self._ready_follower()
            with beneath_transforms():
                self._follow(follower.end(failed) if follower.cursors else Step(()), start)
                self.executor.end_phase(run.phase, run.nested)
            if run.phase is not Phase.FORWARD and not run.nested and not failed:
                self.executor.memory.in_step = False
            if run.phase is Phase.BACKWARD and not run.nested:
                unsettled.discard(self)
            if failed:
                if not self._runs:
                    self.executor.reshard_unsharded()
            elif not run.nested and run.phase is Phase.BACKWARD and self.step.is_last_backward:
                process_state.recorder.end_backward()
            inside = run.nested or failed
            process_state.recorder.write(
                (PHASE, self.table.labels, run.phase, False, inside, start, clock.perf_counter())
            )
        for tell in () if self._runs else tuple(self.table.around):
            tell(None)

    def join_evaluations(self) -> None:
        """Take part in the evaluations of other ranks until all ranks have called it."""
        with self._turn:
            follower = self._ready_follower()
            if follower.mode is Mode.AGREED:
                self._start_afresh()
                self._follow(follower.join_evaluations(self.executor.local(Phase.EVALUATION)))

    def abandon(self) -> None:
        """Forget a step that an exception ended: its phases, its unreduced gradients."""
        with self._turn:
            if self.backward is not None:
                self.backward.forget()
            self._break_off()
            self.depth = 0
            self.executor.drop()
            self._runs.clear()
            self._say_where()
            self.abandoned = False  # last: where this is interrupted it is done again

    def running(self) -> Phase | None:
        """The phase that runs. A step that an exception has ended, also where nobody was told (Ctrl-C, an
        error in a backward), is forgotten first: its phases, unreduced gradients, what was left half done."""
        if self._turn.holder is None and self._runs and self._runs[-1].lives():
            return self.phase
        self._turn.settle()  # first, since frames that an interrupted turn holds keep a backward alive
        if (self.abandoned or self._runs) and not (self._runs and self._runs[-1].lives()):
            self.abandon()
        return self.phase

    def rest(self) -> None:
        """Reshard every group, between phases (before parameters are saved, loaded, moved or cast)."""
        user = "what saves, loads, moves or casts parameters"
        listeners.need(user, State.PARAMS, groups=self.groups)
        if self.running() is None and not self._turn.queue(self.rest):
            with self._turn:
                self.executor.rest()

    def _follow(self, step: Step, began: float = 0.0) -> None:
        """The loop. What fails abandons all phases: the next outermost one starts clean. began: when that
        happened what it follows."""
        do, labels, write = self.executor.do, self.table.labels, process_state.recorder.write
        end = clock.perf_counter()
        try:
            while True:
                for action in step.actions:
                    start = end
                    do[action.kind](action)
                    end = clock.perf_counter()
                    write((ACTION, labels, action, start, end))
                if step.sync is None:
                    break
                assert self._follower is not None
                start = end
                step = self._follower.resume(self._consensus.exchange(step.sync))
                end = clock.perf_counter()
                write((ACTION, labels, None, start, end))
        except BaseException:
            self._break_off()
            raise
        for entry in step.taken:  # events that this rank left out were passed in no time of their own
            until = end if entry is step.taken[-1] else began
            write((CALL, labels, entry.event, entry.actions, began, until, self.executor.memory.now_nbytes))

    def _break_off(self) -> None:
        """An action has failed, or was interrupted: no phase can go on."""
        self.abandoned = True
        if self._follower is not None:
            self._follower.abandon()

    def _ready_follower(self) -> Follower:
        if self._follower is None:
            self.executor.agreement = self.policy.agreement
            agrees = self.policy.agreement is Agreement.STRICT
            channel = channel_of([group.axis for group in self.groups]) if agrees else None
            mode = Mode.LOCAL if channel is None else Mode.AGREED
            self.executor.participates = mode is Mode.AGREED
            self._consensus = Consensus(self.executor, channel)
            self.table.label()
            self._follower = Follower(self.policy, self.table.specs(), mode)  # last: then all of it is there
        return self._follower

    def _start_afresh(self) -> None:
        if self.step.optimizer_event is not None:
            self.step.optimizer_event.wait()
            self.step = replace(self.step, optimizer_event=None)
        self.executor.forget_stale()
        if not self.table.chosen:
            self.table.choose(self.policy)
            self._replan()

    def _say_where(self) -> None:
        """Say which phase is running, to the launch log too."""
        self.phase = self._runs[-1].phase if self._runs else None
        process_state.enter(self.phase or "", self.pass_number)


# ---- whose turn it is, and whether what began still runs: also after Ctrl-C, which may come before an end
# is noted


class CallingFrame:
    """A function that runs, further up in this thread's stack. What ends it without a hook of ours, as Ctrl-C
    does, is seen when it is asked for: ``CallingFrame(1)`` is who calls whoever makes this."""

    __slots__ = ("_frame", "_thread")

    def __init__(self, depth: int) -> None:
        self._frame, self._thread = sys._getframe(depth + 1), threading.get_ident()

    @property
    def is_here(self) -> bool:
        """Whether it is of this thread."""
        return self._thread == threading.get_ident()

    def runs(self) -> bool:
        """Whether it still runs, as far as this thread can tell."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None or not self.is_here


class Turn:
    """The lock of a runtime: one event at a time, with the actions that it leads to.

    holder: the function that has the turn, or that an interrupt ended in it; None: the turn is free.
    inside: the event whose actions are being taken. What is asked for from inside of them by the same thread
    waits in a queue until they are done, or is refused. A turn that Ctrl-C has ended, maybe before or after
    it was noted, is found by the next one of its thread; on_interrupt is called then, or at its end.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self.inside: EventKind | None = None
        self._on_interrupt = on_interrupt
        self._lock = threading.RLock()
        self.holder: CallingFrame | None = None
        self._queue: list[Callable[[], None]] = []

    def queue(self, call: Callable[[], None]) -> bool:
        """Have ``call`` made at the end of this thread's turn; False where it has none."""
        if not self._is_in_turn():
            return False
        self._queue.append(call)
        return True

    def _is_in_turn(self) -> bool:
        holder = self.holder
        return holder is not None and holder.is_here and holder.runs()

    def settle(self) -> None:
        """End this thread's turn, where an interrupt has left it."""
        if self._is_in_turn():
            return
        if self.holder is not None and self.holder.is_here:
            self._queue = []
            self._on_interrupt()
            self.holder = self.inside = None
        with suppress(RuntimeError):  # this thread doesn't hold it any more
            # As often as it was taken: an interrupt may have come after that, and before the holder was
            # noted.
            while True:
                self._lock.release()

    def __enter__(self) -> None:
        if self.holder is not None and self.holder.is_here:
            if self._is_in_turn():
                raise StageError(
                    "a hook that runs inside of an action of Shardwright (at event "
                    f"{self.inside or 'begin or end'}: a gradient hook, a communication hook, an optimizer "
                    "in the backward) ran the model itself; call it outside of such hooks"
                )
            self.settle()
        self._lock.acquire()
        self.holder = CallingFrame(1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._on_interrupt()
        queued, self._queue = self._queue, []
        self.holder = self.inside = None
        self._lock.release()
        # After the turn has ended, so that each has a turn of its own.
        for call in queued:
            call()
