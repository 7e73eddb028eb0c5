"""The groups of one model by number, and what is asked of each: by the caller, or of itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any
from weakref import WeakSet

from shardwright.engine.groups.gatherer import has_lookup
from shardwright.engine.groups.group import ParamGroup, gathered_nbytes, grad_nbytes
from shardwright.policy import SchedulePolicy, Wire
from shardwright.schedule.schedule import Event, EventKind, GroupSpec, Phase
from shardwright.transport.base import Comm
from shardwright.transport.differences import WHOLE, Sends
from shardwright.transport.link import free_nbytes, measured, what_pays
from shardwright.transport.recorder import Label

_NO_ROOM = (
    "its copy doesn't fit beside those before it: all copies on a host take at most a quarter of its free "
    "memory"
)

tables: "WeakSet[GroupTable]" = WeakSet()
"""The tables of every sharded model that is alive."""


class GroupTable:
    """``groups`` in the order in which they were sharded; a group's number is its place there.

    requested: what was asked of each.
    root: the groups of the outermost module, which stay unsharded after a forward by default.
    chosen: whether it is up to date which groups move rows in use only.
    num_steps: how often optimizers have stepped its parameters, outside of a backward.
    around: told of a phase outside of any other before it begins, and None when it has ended.
    events: the events of each group, ready-made. labels: what records call the groups; () before ``label``.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.root: tuple[ParamGroup, ...] = ()
        self.chosen = False
        self.num_steps = 0
        self.events: dict[tuple[EventKind, ParamGroup | None], Event] = {
            (EventKind.STEP_END, None): Event(EventKind.STEP_END)
        }
        self.labels: tuple[Label, ...] = ()
        self.around: list[Callable[[Phase | None], None]] = []
        self.requested: dict[ParamGroup, GroupSpec] = {}
        self._index: dict[ParamGroup, int] = {}
        tables.add(self)

    def add(self, group: ParamGroup, requested: GroupSpec) -> None:
        """Number one more group."""
        index = self._index[group] = len(self.groups)
        self.events |= {
            (kind, group): Event(kind, index) for kind in EventKind if kind is not EventKind.STEP_END
        }
        self.groups.append(group)
        self.requested[group] = requested
        self.chosen = False

    def absorb(self, other: "GroupTable") -> None:
        """Number the groups of another table after those of this one."""
        shift = len(self.groups)
        for group in other.groups:
            self.add(group, other.requested[group].shifted(shift))

    def label(self) -> None:
        """Have records name the groups as they are called now."""
        groups = self.groups
        self.labels = tuple(Label(each.name, gathered_nbytes(each), grad_nbytes(each)) for each in groups)

    def holds_any(self, params: Sequence[Any]) -> bool:
        """Whether any of these sharded parameters is one of its groups'."""
        asked = {id(param) for param in params}
        return any(id(param.sharded) in asked for group in self.groups for param in group.params)

    def number(self, group: ParamGroup) -> int:
        """The group's place in ``groups``."""
        return self._index[group]

    def effective(self, index: int) -> GroupSpec:
        """What the scheduler knows of a group: what was asked of it, with what follows for rows in use; its
        bytes, and what it may share collectives with."""
        group = self.groups[index]
        spec = self.requested[group]
        if group.gatherer.rows is not None:  # of other rows than those of the next batch
            spec = replace(spec, reshard_after_forward=True, no_prefetch=True)
        return replace(
            spec,
            is_root=group in self.root,
            nbytes=group.unsharded_nbytes,
            grad_nbytes=grad_nbytes(group),
            # Groups share the collectives of one transport, and only those that are gathered whole.
            bucket_key=id(group.gatherer.comm) if group.gatherer.is_whole else None,
            needs_copies_reduced=group.axis.replicate is not None,
            smaller_world=group.gatherer.smaller_world is not None,
            words_wait=group.axis.comm.streams is None,
        )

    def specs(self) -> tuple[GroupSpec, ...]:
        """``effective`` of every group."""
        return tuple(self.effective(index) for index in range(len(self.groups)))

    def choose(self, policy: SchedulePolicy) -> None:
        """Have groups move rows in use only, or send what has changed, as ``policy`` says."""
        # Bytes that the copies of all groups may take on this rank.
        comms = [group.axis.comm.network for group in self.groups if _may_code(group, policy)]
        left = min((free_nbytes(comm) / 4 for comm in comms), default=inf)
        for group in self.groups:
            sends, nbytes = _sends(group, policy), gathered_nbytes(group)
            if sends.changes and nbytes > left:
                sends = Sends(why=_NO_ROOM)
            asks = policy.row_wise
            if asks is None:  # what has changed of an embedding is less than the rows in use of it
                asks = group.axis.comm.over_network and not sends.codes
            asks = asks and has_lookup(group.params)
            stays = replace(self.requested[group], is_root=group in self.root).keeps(Phase.FORWARD)
            group.request(row_wise=policy if asks else None, stays=asks and stays, sends=sends)
            left -= nbytes if group.gatherer.sends.changes else 0
        self.chosen = True

    def comms(self) -> list[Comm]:
        """The transports in use, each once."""
        used = [
            (group.axis.comm, *group.axis.hops, group.axis.replicate, group.gatherer.options.smaller_world)
            for group in self.groups
        ]
        return list({id(comm): comm for comms in used for comm in comms if comm is not None}.values())


def _may_code(group: ParamGroup, policy: SchedulePolicy) -> bool:
    """Whether the group's ranks may send less than whole shards; the same on all ranks."""
    return policy.wire is not Wire.PLAIN and group.axis.world > 1 and not group.axis.comm.why_plain


def _sends(group: ParamGroup, policy: SchedulePolicy) -> Sends:
    """What the group's collectives are to send, by ``SchedulePolicy.wire``."""
    if policy.wire is Wire.AUTO and _may_code(group, policy):  # all ranks measure the link together
        frozen = sum(p.layout.numel for p in group.params if not p.sharded.requires_grad)
        share = frozen / sum(p.layout.numel for p in group.params)
        return what_pays(measured(group.axis.comm.network), share)
    return WHOLE if policy.wire is Wire.PLAIN else Sends(changes=True, codes=True, gradients=True)
