"""The groups of one model by number: what the planner knows of each, and the actions taken on them."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

from shardwright.engine import batches as together
from shardwright.engine import edits
from shardwright.engine.group import ParamGroup, Stage, follow_freezing
from shardwright.engine.lookups import choose_row_wise
from shardwright.engine.model_fingerprint import check_same_model
from shardwright.errors import InputError
from shardwright.params.param import ShardedParam
from shardwright.policy import Agreement, SchedulePolicy
from shardwright.schedule.planner import Planner
from shardwright.schedule.schedule import Action, ActionKind, GroupFacts, Phase
from shardwright.transport.base import Comm


@dataclass
class Memory:
    """Bytes of unsharded buffers, now and at most since the start; ``counted``: now, by group."""

    now_nbytes: int = 0
    peak_nbytes: int = 0
    counted: dict[ParamGroup, int] = field(default_factory=dict)

    def touch(self, nbytes: int) -> None:
        """Count ``nbytes`` more that were held for a moment."""
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes + nbytes)

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


tables: "WeakSet[GroupTable]" = WeakSet()
"""Of every sharded model that is alive."""


class GroupTable:
    """``groups`` in the order in which they were sharded; a group's number is its place there.

    agreement: that of the schedule policy in force, which all ranks must have alike.
    root: the groups of the outermost module, which stay unsharded after a forward by default.
    chosen: whether it is up to date which groups move rows in use only.
    asked: groups that the caller has unsharded, and nobody resharded since.
    due: by group, the steps of optimizers that run inside of the backward, once their gradients are complete.
    listed: what the policy has gathered ahead of a group: field of ``GroupFacts`` -> group -> groups.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.agreement = Agreement.STRICT
        self.root: tuple[ParamGroup, ...] = ()
        self.memory = Memory()
        self.chosen = False
        self.asked: set[int] = set()
        self.due: dict[int, dict[Callable[[], None], None]] = {}
        self.listed: dict[str, dict[int, tuple[int, ...]]] = {}
        self._settings: list[GroupFacts] = []
        self._index: dict[ParamGroup, int] = {}
        self._compared: set[int] = set()  # ids of transports on which all ranks hold the same groups

    def add(self, group: ParamGroup, facts: GroupFacts) -> None:
        """Number one more group."""
        self.compare_again()
        self.chosen = False
        self._index[group] = len(self.groups)
        self.groups.append(group)
        self._settings.append(facts)

    def regroup(self, group: ParamGroup, params: Sequence[ShardedParam]) -> None:
        """Give ``group`` other parameters; all at rest."""
        group.regroup(params)
        self.memory.count([group])
        self.chosen = False
        self.compare_again()

    def compare_again(self) -> None:
        """Groups are others than before: ask anew whether all ranks hold the same."""
        self._compared.clear()

    def absorb(self, other: "GroupTable") -> None:
        """Number the groups of another table after those of this one."""
        shift = len(self.groups)
        for group, facts in zip(other.groups, other._settings, strict=True):
            self.add(group, facts.shifted(shift))
        self.memory.peak_nbytes = max(self.memory.peak_nbytes, other.memory.peak_nbytes)
        self.memory.count(self.groups)

    def number(self, group: ParamGroup) -> int:
        """The group's place in ``groups``."""
        return self._index[group]

    def settings(self, group: ParamGroup) -> GroupFacts:
        """What was asked of ``group``."""
        return self._settings[self._index[group]]

    def change(self, group: ParamGroup, **changes: Any) -> None:
        """Replace fields of what was asked of ``group``."""
        index = self._index[group]
        self._settings[index] = replace(self._settings[index], **changes)

    def wishes(self, index: int) -> GroupFacts:
        """What was asked of a group, with what follows for the root; without its bytes."""
        group, facts = self.groups[index], self._settings[index]
        for name, ahead in self.listed.items():
            if index in ahead and getattr(facts, name) is None:
                facts = replace(facts, **{name: ahead[index]})
        root_stays = facts.reshard_after_forward is None and group in self.root
        on_use = group.rows is not None
        if not root_stays and not on_use:
            return facts
        return replace(facts, reshard_after_forward=on_use, on_use=on_use)

    def facts(self, index: int) -> GroupFacts:
        """What the planner knows of a group: ``wishes``, its bytes, what it may share collectives with."""
        group = self.groups[index]
        return replace(
            self.wishes(index),
            nbytes=group.unsharded_nbytes,
            grad_nbytes=group.grad_nbytes,
            lane=id(group.comm) if group.near is None and group.rows is None else None,
            late=group.axis.replicate is not None,
        )

    def list_ahead(self, policy: SchedulePolicy) -> None:
        """Take over the policy's lists of groups to gather ahead. Raises: InputError for a name of no group,
        before anything has changed."""
        numbers = {group.name: index for index, group in enumerate(self.groups)}
        named = {
            name for lists in policy.ahead.values() for item in lists.items() for name in (item[0], *item[1])
        }
        unknown = sorted(named - numbers.keys())
        if unknown:
            raise InputError(
                f"SchedulePolicy.ahead names groups that the model hasn't: {unknown}; it has {[*numbers]}"
            )
        self.listed = {
            f"ahead_in_{phase}": {
                numbers[key]: tuple(map(numbers.__getitem__, names)) for key, names in lists.items()
            }
            for phase, lists in policy.ahead.items()
        }

    def choose(self, policy: SchedulePolicy) -> None:
        """Have groups move rows in use only, where ``policy`` says so and they can."""
        choose_row_wise(self.groups, self.facts, policy)
        self.chosen = True

    def planner(self, policy: SchedulePolicy) -> Planner:
        """A planner that knows what is live, held and being reduced at this moment."""
        planner = Planner(policy, self.facts)
        stages = [(index, group.stage) for index, group in enumerate(self.groups)]
        planner.suppose(
            live=(index for index, stage in stages if stage is not Stage.SHARDED),
            waited=(index for index, stage in stages if stage is Stage.UNSHARDED),
        )
        for index, group in enumerate(self.groups):
            if group.reducer.in_flight:
                planner.reducing.append((index,))
            elif group.reducer.holds:
                planner.held.append(index)
        return planner

    def take(self, action: Action, nearby: bool = False) -> None:
        """Take one action; what is already so is left so.

        nearby: a reshard keeps shards over a smaller world, where the group has one.
        """
        if action.kind is ActionKind.UNSHARD:
            for index in action.groups:
                self.groups[index].uncover()
            at_rest = [i for i in action.groups if self.groups[i].stage is Stage.SHARDED]
            self.unshard(at_rest)
        elif action.kind is ActionKind.REDUCE:
            self.reduce(action.groups)
        elif action.kind is ActionKind.HOLD:
            self.hold(action.groups)
        elif action.kind is ActionKind.WAIT_REDUCE:
            together.land([self.groups[index].reducer for index in action.groups])
        elif action.kind is ActionKind.STEP:
            self.step(action.groups)
        else:
            for index in action.groups:
                self._wait_or_reshard(action.kind, index, nearby)

    def _wait_or_reshard(self, kind: ActionKind, index: int, nearby: bool) -> None:
        group = self.groups[index]
        if kind is not ActionKind.WAIT:
            self.asked.discard(index)
        if group.stage is Stage.SHARDED or (kind is ActionKind.WAIT and group.stage is Stage.UNSHARDED):
            return
        held_nbytes = group.held_nbytes
        if kind is ActionKind.WAIT:
            self.memory.touch(group.wait() - held_nbytes)
        else:
            edits.reshard(group, nearby)
        kept = kind is not ActionKind.WAIT and nearby and group.near is not None  # before the rest is freed
        self.memory.count([group], freed_nbytes=held_nbytes if kept else 0)

    def unshard(self, indices: Sequence[int], near: AbstractSet[int] | None = None) -> None:
        """Issue the all-gather of groups together; those that aren't at rest are gathered aside, for others.

        near: those that are gathered among neighbours; None: what this rank has kept nearby.
        """
        groups = [self.groups[index] for index in indices]
        for comm in dict.fromkeys(group.axis.comm for group in groups):
            self._compare(comm)
        near_nbytes = _near_nbytes(groups)
        try:
            if groups:
                together.unshard(groups, None if near is None else {self.groups[index] for index in near})
        finally:
            self.memory.count(groups, freed_nbytes=near_nbytes - _near_nbytes(groups))

    def hold(self, indices: Sequence[int], join: bool = False, widen: int = 0) -> None:
        """Take gradients, where that isn't done; join and widen (bits of groups): see ``Reducer.hold``."""
        missing = [index for index in indices if not self.groups[index].reducer.holds]
        self._settle([self.groups[index] for index in missing])
        for index in missing:
            self.groups[index].reducer.hold(join, bool(widen >> index & 1))

    def reduce(self, indices: Sequence[int], join: bool = False, widen: int = 0) -> None:
        """Issue the reduce-scatter of groups together, of what was taken before or is there now."""
        self.hold(indices, join, widen)
        for group in (self.groups[index] for index in indices):
            if group.axis.replicate is not None and group.reducer.policy.all_reduce:
                self._compare(group.axis.replicate)
        together.reduce([self.groups[index].reducer for index in indices])

    def step(self, indices: Sequence[int]) -> None:
        """Take the steps that are due of groups: each once, in the order in which their gradients landed."""
        for index in indices:
            for step in self.due.pop(index, ()):
                step()

    def compare(self) -> None:
        """Do the ranks of every axis hold the same groups? Asked once, by every rank of all axes."""
        for axis in (group.axis for group in self.groups):
            self._compare(axis.comm)
            if axis.replicate is not None:
                self._compare(axis.replicate)

    def cover(self, index: int) -> None:
        """After its forward a group shows its shards, also where the planner chose to keep it: what the
        caller sees between forward and backward doesn't depend on the plan."""
        if self.wishes(index).reshard_after_forward is None:
            self.groups[index].cover()

    def _compare(self, comm: Comm) -> None:
        """Before the first collective on an axis, which needs the same ranks: do they hold the same model?"""
        if id(comm) not in self._compared:
            groups = [g for g in self.groups if comm is g.axis.comm or comm is g.axis.replicate]
            check_same_model(comm, groups, self.agreement)
            self._compared.add(id(comm))

    def settle(self) -> None:
        """Wait for every reduction, and add its result to the shards' gradients."""
        self._settle(self.groups)

    def _settle(self, groups: list[ParamGroup]) -> None:
        together.land([group.reducer for group in groups])
        for group in groups:
            group.reducer.settle()

    def forget_stale(self) -> None:
        """Reshard what no longer shows the shards as they are, and drop shards over a smaller world."""
        for index, group in enumerate(self.groups):
            if group.near is not None:
                group.near.forget()
            if group.stage is not Stage.SHARDED:
                follow_freezing(group)
            if group.stage is Stage.UNSHARDED and group.is_stale:
                self.take(Action(ActionKind.RESHARD, index))
        self.memory.count(self.groups)
        self.forget_versions()

    def forget_versions(self) -> None:
        """From here on shards may be written in a way that leaves no mark."""
        for group in self.groups:
            group.forget_versions()

    def comms(self) -> list[Comm]:
        """The transports in use, each once."""
        used = [
            (group.axis.comm, group.axis.replicate, group.near and group.near.comm) for group in self.groups
        ]
        return list({id(comm): comm for comms in used for comm in comms if comm is not None}.values())


def _near_nbytes(groups: Sequence[ParamGroup]) -> int:
    """Bytes of shards over smaller worlds."""
    return sum(group.near.held_nbytes for group in groups if group.near is not None)


def end_pass(table: GroupTable, phase: Phase, nested: bool) -> None:
    """A pass over these groups has ended, maybe inside of another."""
    if phase is Phase.BACKWARD:
        table.forget_versions()
    elif phase is Phase.EVALUATION and not nested:
        # Between a backward and its step the shards have gradients, and who clips or reads them by
        # ``model.parameters()`` would miss those of what has stayed unsharded.
        for index, group in enumerate(table.groups):
            kept = group.stage is Stage.UNSHARDED and index not in table.asked
            if kept and any(param.sharded.grad is not None for param in group.params):
                table.take(Action(ActionKind.RESHARD, index))
            elif kept:
                edits.show(group)
