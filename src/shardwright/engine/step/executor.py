"""The executor: takes the actions that the follower decides on, on the groups of one model by number; and
counts what they hold of memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwright import clock
from shardwright.engine.groups.gradient_state import GradPlace
from shardwright.engine.groups.group import ParamGroup, Stage, follow_freezing, restore
from shardwright.engine.groups.table import GroupTable
from shardwright.engine.listeners import listeners
from shardwright.engine.step import batches
from shardwright.policy import Agreement
from shardwright.schedule.recorded import bits
from shardwright.schedule.schedule import Action, ActionKind, Event, Phase
from shardwright.schedule.sync import Local
from shardwright.transport.base import Comm
from shardwright.transport.cpu.pages import allocated_nbytes
from shardwright.transport.host_memory import Budget, stated_budget
from shardwright.transport.process import process_state
from shardwright.transport.recorder import HELD

if TYPE_CHECKING:
    from shardwright.transport.streams import Streams

PAUSE = 500
"""The allocator isn't asked again for so many times as long as it took to ask it: 0.2% of a step's time."""
Watcher = Callable[[Event, ParamGroup | None, bool], None]


@dataclass
class Memory:
    """What a model's groups hold in unsharded buffers; what is checked and noted of memory as a step runs.

    Bytes of unsharded buffers, now and at most since the start; ``counted``: now, by group.

    other_nbytes: what the process was seen to hold besides, as a forward began; None: not seen, or not known.
    states_nbytes: of shards and of the optimizer's states, as seen then.
    in_step: a forward has begun, and its backward not ended. budget: of host memory, if there is one.
    watchers: called with each event and its group, before its actions (False) and after them (True).
    sample_s: when the allocator is asked next.
    """

    now_nbytes: int = 0
    peak_nbytes: int = 0
    counted: dict[ParamGroup, int] = field(default_factory=dict)
    other_nbytes: int | None = None
    states_nbytes: int = 0
    in_step: bool = False
    budget: Budget | None = field(default_factory=stated_budget)
    watchers: list[Watcher] = field(default_factory=list)
    sample_s: float = 0.0

    def sample(self, start: float, device: torch.device) -> None:
        """Write into the recorder, at an event that began at ``start``, what is held in all."""
        if start < self.sample_s:
            return
        start = clock.perf_counter()
        whole_nbytes = allocated_nbytes(device)
        self.sample_s = inf
        if whole_nbytes is not None:
            process_state.recorder.write(
                (HELD, start, whole_nbytes, self.states_nbytes, self.other_nbytes or 0)
            )
            # To ask an allocator takes 40 us, or with many free blocks milliseconds.
            self.sample_s = start + PAUSE * (clock.perf_counter() - start)

    def count(self, groups: Iterable[ParamGroup], freed_nbytes: int = 0) -> None:
        """Count what ``groups`` hold now, instead of what they held when they were counted before.

        freed_nbytes: what they gave back only once they held the rest.
        """
        before_nbytes = self.now_nbytes
        for group in groups:
            held_nbytes = group.held_nbytes
            self.now_nbytes += held_nbytes - self.counted.get(group, 0)
            self.counted[group] = held_nbytes
        self.peak_nbytes = max(self.peak_nbytes, before_nbytes, self.now_nbytes + freed_nbytes)

    def check(self, doing: str, more_nbytes: int = 0) -> None:
        """Raises: OutOfMemory where the budget has no room for ``more_nbytes``, which ``doing`` it takes."""
        assert self.budget is not None
        if not self.budget.has_room(more_nbytes):
            error = self.budget.error(more_nbytes, dist.get_rank() if dist.is_initialized() else 0, doing)
            listeners.amend(error)  # in a backward nobody else sees it on its way
            raise error


class Executor:
    """The actions on the groups of ``table``: ``do[kind](action)``. What is already so is left so.

    agreement: that of the schedule policy in force, which must be the same on all ranks.
    promote: bits of the groups whose gradients travel in the reduce dtype, since some rank has kept some of
        earlier microbatches in it. left: bits of the parameters of which some rank has. participates: other
        ranks may have gradients where this one has none.
    pending_steps: by group, the steps of optimizers that run inside of the backward, once their gradients are
        complete. asked: groups that the caller has unsharded, and nobody resharded since.
    """

    def __init__(self, table: GroupTable) -> None:
        self.table = table
        self.memory = Memory()
        self.agreement = Agreement.STRICT
        self.promote = self.left = 0
        self.participates = False
        self.pending_steps: dict[int, dict[Callable[[], None], None]] = {}
        self.asked: set[int] = set()
        self._paging: set[Streams] = set()  # by which steps inside of the backward put their state back
        self.compared: set[int] = set()  # ids of transports on which all ranks hold the same groups
        # Each by the method of its name: ``_wait_reduce`` for WAIT_REDUCE.
        self.do: dict[ActionKind, Callable[[Action], None]] = {
            kind: getattr(self, f"_{kind.name.lower()}") for kind in ActionKind
        }

    # ---- all-gathers

    def _unshard(self, action: Action) -> None:
        """Issue the all-gather of groups together; those that aren't at rest participate for other ranks."""
        groups = [self.table.groups[index] for index in action.groups]
        if self.memory.budget is not None:
            more_nbytes = sum([group.arriving_nbytes - group.held_nbytes for group in groups])
            self.memory.check(f"unsharding {', '.join(group.name for group in groups)}", more_nbytes)
        self._compare(group.axis.comm for group in groups)
        kept = [g.held_nbytes for g in groups if action.smaller and g.stage is Stage.SHARDED]
        try:
            batches.unshard(groups, action.smaller)
        finally:
            self.memory.count(groups, freed_nbytes=sum(kept))

    def _participate(self, action: Action) -> None:
        batches.unshard([self.table.groups[action.group]], action.smaller, for_others=True)

    def _wait(self, action: Action) -> None:
        for index in action.groups:
            group = self.table.groups[index]
            if group.stage is Stage.GATHERING:
                most_nbytes = group.wait()
                self.memory.count([group], freed_nbytes=most_nbytes - group.held_nbytes)

    def _reshard(self, action: Action) -> None:
        for index in action.groups:
            group = self.table.groups[index]
            self.asked.discard(index)
            if group.stage is not Stage.SHARDED:
                held_nbytes = group.held_nbytes
                keeps = group.gatherer.smaller_world is not None and (
                    action.smaller or group.reducer.keeps_grads  # the next microbatch has the same parameters
                )
                group.reshard(keeps)
                # What is kept is there before the rest is freed.
                self.memory.count([group], freed_nbytes=held_nbytes if keeps else 0)

    # ---- reductions

    def _hold(self, action: Action) -> None:
        """Take gradients, where that isn't done: zeros where this rank has none and others may have some."""
        at = {index: self.table.groups[index].reducer.gradients.at for index in action.groups}
        missing = [index for index in action.groups if GradPlace.TAKEN not in at[index]]
        self.land([self.table.groups[index] for index in missing])
        for index in missing:
            reducer = self.table.groups[index].reducer
            left = self.left and self.left >> sum(len(group.params) for group in self.table.groups[:index])
            reducer.hold(self.participates, bool(self.promote >> index & 1), left)

    def _reduce(self, action: Action) -> None:
        """Issue the reduce-scatter of groups together, of what was taken before or is there now."""
        self._hold(action)
        groups = [self.table.groups[index] for index in action.groups]
        self._compare(g.axis.replicate for g in groups if g.axis.replicate and g.reducer.policy.all_reduce)
        batches.reduce([group.reducer for group in groups])

    def _wait_reduce(self, action: Action) -> None:
        for index in action.groups:
            self.table.groups[index].reducer.land()

    def _all_reduce(self, action: Action) -> None:
        """Issue the all-reduce over copies of what was waited for, where it wasn't issued yet."""
        batches.all_reduce([self.table.groups[index].reducer for index in action.groups])

    def _step(self, action: Action) -> None:
        """Take the steps that are pending: each once, in the order in which their gradients came."""
        for index in action.groups:
            group = self.table.groups[index]
            if self.table.requested[group].steps:
                split = group.params[0].split
                # Where gradients go to the host the step reads them there: they have to be complete first.
                group.reducer.gradients.send()
                group.reducer.gradients.arrive()
                if split.pages_state and split.offload_streams is not None:
                    self._paging.add(split.offload_streams)
            for step in self.pending_steps.pop(index, ()):
                step()

    def _finalize(self, action: Action) -> None:
        """Wait for every reduction, and give the shards their gradients; drop those that no rank has."""
        self.land(self.table.groups)
        if action.grads is not None:
            mask = action.grads
            for group in self.table.groups:
                used = {param for place, param in enumerate(group.params) if mask >> place & 1}
                group.reducer.gradients.resolve(used)
                mask >>= len(group.params)
        for group in self.table.groups:
            if GradPlace.ON_DEVICE in group.reducer.gradients.at:
                group.reducer.gradients.send()
        awaited = [group for group in self.table.groups if GradPlace.ARRIVING in group.reducer.gradients.at]
        # The host waits once for all that was copied to it, and not for each group.
        for streams in {group.params[0].split.offload_streams for group in awaited}:
            if streams is not None:
                streams.settle()
        for group in awaited:
            group.reducer.gradients.arrive()
        if action.grads is not None:
            self._step(Action(ActionKind.STEP, tuple(self.pending_steps)))

    def land(self, groups: Sequence[ParamGroup]) -> None:
        """Wait for the reductions of groups that are in flight, and give the shards their gradients."""
        for group in groups:
            group.reducer.land()
        copied = [group.reducer for group in groups if group.reducer.has_copies]
        if copied:
            # Of all groups together, since those on one transport share an all-reduce.
            batches.all_reduce(copied)
            for reducer in copied:
                reducer.finalize()

    # ---- what is so on this rank

    def local(self, phase: Phase) -> Local:
        """What the groups are, at the begin of a phase."""
        groups = self.table.groups
        resharded = () if phase is Phase.EVALUATION else enumerate(groups)
        kept = [i for i, g in resharded if g.gatherer.smaller_world is not None and g.keeps_smaller]
        held = [index for index, group in enumerate(groups) if group.stage is not Stage.SHARDED]
        return Local(held=bits(held), smaller=bits(kept))

    def inspect(self, index: int) -> Local:
        """What the gradients of a group are."""
        group = self.table.groups[index]
        policy, bit = group.reducer.policy, 1 << index
        if not policy.reduce:
            return Local(accumulating=bit if group.has_grads else 0)
        unused = policy.unused_params and not group.reducer.done
        return Local(unreduced=bit if group.has_grads or group.reducer.keeps_grads or unused else 0)

    # ---- do all ranks hold the same model?

    def compare(self) -> None:
        """Compare the ranks' models on every axis, each once. Every rank of all axes calls it."""
        for axis in (group.axis for group in self.table.groups):
            self._compare(comm for comm in (axis.comm, axis.replicate) if comm is not None)

    def _compare(self, comms: Iterable[Comm]) -> None:
        """Before the first collective on an axis, which needs the same ranks."""
        for comm in comms:
            if comm.world > 1 and id(comm) not in self.compared:
                from shardwright.engine.step.same_model import check_same_model  # noqa: PLC0415 several ranks

                groups = [g for g in self.table.groups if comm is g.axis.comm or comm is g.axis.replicate]
                check_same_model(comm, groups, self.agreement)
                self.compared.add(id(comm))

    # ---- between phases

    def forget_stale(self) -> None:
        """Reshard what no longer shows the shards as they are, and what a phase that failed has left in
        flight, since when they may have been written without a mark; drop shards over a smaller world and
        copies of shards except between microbatches, which no step separates."""
        for index, group in enumerate(self.table.groups):
            has_copies = group.gatherer.smaller_world is not None or group.params[0].has_device_copy
            if has_copies and not group.reducer.keeps_grads:
                group.forget_copies()
            if group.stage is not Stage.SHARDED:
                follow_freezing(group)
            if group.is_stale or (group.stage is Stage.GATHERING and index not in self.asked):
                self._reshard(Action(ActionKind.RESHARD, (index,)))
        self.memory.count(self.table.groups)
        self.forget_versions()

    def rest(self) -> None:
        """Reshard every group."""
        self.asked.clear()
        self._reshard(Action(ActionKind.RESHARD, tuple(range(len(self.table.groups)))))

    def drop(self) -> None:
        """Forget a step that an exception ended: steps that are pending, gradients that are not reduced."""
        self.pending_steps.clear()
        for group in self.table.groups:
            group.reducer.drop()
        self.reshard_unsharded()
        for group in self.table.groups:
            restore(group)
        # Anew, and all of them: counting may have been interrupted.
        self.memory.now_nbytes = 0
        self.memory.counted.clear()
        self.memory.count(self.table.groups)

    def reshard_unsharded(self) -> None:
        """Reshard what is unsharded; what is still being gathered stays so, since nothing is waited for."""
        stages = enumerate(group.stage for group in self.table.groups)
        self._reshard(Action(ActionKind.RESHARD, tuple(i for i, stage in stages if stage is Stage.UNSHARDED)))

    def end_phase(self, phase: Phase, nested: bool) -> None:
        """A phase over these groups has ended, maybe inside of another."""
        if phase is Phase.BACKWARD:
            while self._paging:
                self._paging.pop().arrive()
            self.forget_versions()
            for index, group in enumerate(self.table.groups):
                group.reducer.reduces = False
                if group.reducer.gradients.at:
                    group.reducer.gradients.outlive()
                # Kept by set_reshard_after_backward(False): shards have gradients. Inside of a forward its
                # modules go on running.
                if not nested and index not in self.asked:
                    group.show_sharded()
        elif phase is Phase.EVALUATION and not nested:
            # What has stayed unsharded shows its shards: who clips, averages or edits by
            # ``model.parameters()`` finds there what an optimizer steps.
            for index, group in enumerate(self.table.groups):
                if group.stage is Stage.UNSHARDED and index not in self.asked:
                    group.show_sharded()

    def forget_versions(self) -> None:
        """From here on shards may be written in a way that leaves no mark (an edit of ``.data``)."""
        for group in self.table.groups:
            if group.stage is Stage.SHARDED:
                group.face_versions.gathered = ()
