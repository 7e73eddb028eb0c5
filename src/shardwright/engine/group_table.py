"""The groups of one model by number, and what is asked of each: by the caller, and by what follows from
that."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any
from weakref import WeakSet

from shardwright.engine.gatherer import has_lookup
from shardwright.engine.group import ParamGroup, gathered_nbytes
from shardwright.errors import InputError
from shardwright.params.param import ShardedParam
from shardwright.policy import SchedulePolicy, Wire
from shardwright.schedule.schedule import Event, EventKind, GroupSpec
from shardwright.transport.base import Comm

tables: "WeakSet[GroupTable]" = WeakSet()
"""Of every sharded model that is alive."""


class GroupTable:
    """``groups`` in the order in which they were sharded; a group's number is its place there.

    root: the groups of the outermost module, which stay unsharded after a forward by default.
    chosen: whether it is up to date which groups move rows in use only.
    listed: what the policy has gathered ahead of a group: field of ``GroupSpec`` -> group -> groups.
    events: the events of each group, ready-made.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.root: tuple[ParamGroup, ...] = ()
        self.chosen = False
        self.listed: dict[str, dict[int, tuple[int, ...]]] = {}
        self.events: dict[tuple[EventKind, ParamGroup | None], Event] = {
            (EventKind.STEP_END, None): Event(EventKind.STEP_END)
        }
        self._requested: list[GroupSpec] = []
        self._index: dict[ParamGroup, int] = {}
        tables.add(self)

    def add(self, group: ParamGroup, requested: GroupSpec) -> None:
        """Number one more group."""
        index = self._index[group] = len(self.groups)
        self.events |= {
            (kind, group): Event(kind, index) for kind in EventKind if kind is not EventKind.STEP_END
        }
        self.groups.append(group)
        self._requested.append(requested)
        self.chosen = False

    def absorb(self, other: "GroupTable") -> None:
        """Number the groups of another table after those of this one."""
        shift = len(self.groups)
        for group, requested in zip(other.groups, other._requested, strict=True):
            self.add(group, requested.shifted(shift))

    def regroup(self, group: ParamGroup, params: Sequence[ShardedParam]) -> None:
        """Give ``group`` other parameters; all at rest."""
        group.regroup(params)
        self.chosen = False

    def number(self, group: ParamGroup) -> int:
        """The group's place in ``groups``."""
        return self._index[group]

    def requested(self, group: ParamGroup) -> GroupSpec:
        """What was asked of ``group``."""
        return self._requested[self._index[group]]

    def change(self, group: ParamGroup, **changes: Any) -> None:
        """Replace fields of what was asked of ``group``."""
        index = self._index[group]
        self._requested[index] = replace(self._requested[index], **changes)

    def effective(self, index: int) -> GroupSpec:
        """What the planner knows of a group: what was asked of it, with what follows for the root and for
        rows in use; its bytes, and what it may share collectives with."""
        group, spec = self.groups[index], self._requested[index]
        for field, ahead in self.listed.items():
            if index in ahead and getattr(spec, field) is None:
                spec = replace(spec, **{field: ahead[index]})
        by_rows = group.gatherer.rows is not None
        if by_rows or self._stays_as_root(group):
            spec = replace(spec, reshard_after_forward=by_rows, no_prefetch=by_rows)
        return replace(
            spec,
            nbytes=group.unsharded_nbytes,
            grad_nbytes=group.grad_nbytes,
            bucket_key=id(group.gatherer.comm) if group.gatherer.is_whole else None,
            needs_copies_reduced=group.axis.replicate is not None,
            smaller_world=group.gatherer.smaller_world is not None,
        )

    def _stays_as_root(self, group: ParamGroup) -> bool:
        return self.requested(group).reshard_after_forward is None and group in self.root

    def specs(self) -> tuple[GroupSpec, ...]:
        """``effective`` of every group."""
        return tuple(self.effective(index) for index in range(len(self.groups)))

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
        """Have groups move rows in use only, or send what has changed, where ``policy`` says so and they
        can."""
        left = inf if policy.wire_nbytes is None else policy.wire_nbytes
        for group in self.groups:
            asks = policy.row_wise
            if asks is None:  # what has changed of an embedding is less than the rows in use of it
                asks = group.axis.comm.over_network and policy.wire is Wire.PLAIN
            asks = asks and has_lookup(group.params)
            stays = self.requested(group).reshard_after_forward is False or self._stays_as_root(group)
            nbytes = gathered_nbytes(group)
            group.request(
                row_wise=policy if asks else None,
                stays=asks and stays,
                wire=policy.wire,
                copy_fits=nbytes <= left or policy.wire is Wire.PLAIN,
            )
            left -= nbytes if group.gatherer.sends_changes else 0
        self.chosen = True

    def comms(self) -> list[Comm]:
        """The transports in use, each once."""
        used = [
            (group.axis.comm, *group.axis.hops, group.axis.replicate, group.gatherer.options.smaller_world)
            for group in self.groups
        ]
        return list({id(comm): comm for comms in used for comm in comms if comm is not None}.values())
