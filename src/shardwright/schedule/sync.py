"""What the follower asks of all ranks, and what it is answered. Pure data.

A *sync* is what one rank can't decide alone. The engine asks the other ranks (``engine.consensus``), a test
asks simulated ones. The answer to each kind is the same on every rank:

    sync            answer
    Synchronize     :class:`ConsensusResult`: the sync point of all ranks, and the union of what they said
    AllReduceMin    the smallest of all ranks' numbers
    Broadcast       :class:`Recorded`: the orders that ranks have recorded, each once, in the same sequence
    Diverge         none: it raises ``Diverged`` on every rank
    Describe        :class:`Recorded` with this order: the groups as they are now; no other rank takes part
    Inspect         :class:`Local`: what a group's gradients are on this rank; no other rank takes part
"""

from enum import IntFlag
from typing import NamedTuple

from shardwright.schedule.schedule import Action, Event, GroupSpec, Phase, ScheduleEntry


class SyncPoint(IntFlag):
    """What ranks synchronize for. FORWARD_END: the end of a forward or evaluation. JOIN_EVALUATIONS: this
    rank takes part in the evaluations of others. DEVIATES: a rank needs what its schedule doesn't have."""

    DEVIATES = 1
    FORWARD = 2
    EVALUATION = 4
    BACKWARD = 8
    BACKWARD_END = 16
    JOIN_EVALUATIONS = 32
    FORWARD_END = 64


BEGIN_OF = {
    Phase.FORWARD: SyncPoint.FORWARD,
    Phase.EVALUATION: SyncPoint.EVALUATION,
    Phase.BACKWARD: SyncPoint.BACKWARD,
}
PHASE_OF = {point: phase for phase, point in BEGIN_OF.items()}


class RecordedOrder(NamedTuple):
    """The events of one phase as they happened. ``entry``: the number of the outermost module that ran."""

    entry: int
    phase: Phase
    events: tuple[Event, ...]


class Synchronize(NamedTuple):
    """Every rank synchronizes at ``point``. ``used``: bits of the groups that this rank's forwards have run
    since the last backward. digest: equal on two ranks where they have agreed on the same schedules."""

    point: SyncPoint
    entry: int
    used: int
    digest: int


class AllReduceMin(NamedTuple):
    """Every rank has a number (``code``)."""

    code: int


class Broadcast(NamedTuple):
    """Every rank tells the order that it has recorded, or None."""

    order: RecordedOrder | None


class Diverge(NamedTuple):
    """Ranks are at different sync points: every rank raises, and names that of each."""

    point: SyncPoint
    entry: int
    digest: int


class Describe(NamedTuple):
    """What are the groups now? Asked before a schedule is planned from what this rank alone has recorded."""

    order: RecordedOrder


class Inspect(NamedTuple):
    """What are the gradients of a group on this rank? Asked where no schedule says so. tries: how often its
    reduction was asked for in this event."""

    group: int
    tries: int = 0


Sync = Synchronize | AllReduceMin | Broadcast | Diverge | Describe | Inspect


class ConsensusResult(NamedTuple):
    """What the ranks said when they synchronized; the same on all of them.

    points: what for. entry: the outermost module that runs (a number made of its name).
    missing: bits of the groups that some rank doesn't hold. not_smaller: of those of which some rank has
    kept no shard over the smaller world. used: of those that some rank has used since the last backward.
    grad_mask: bits of the parameters that have a gradient on some rank.
    """

    points: SyncPoint
    entry: int = 0
    missing: int = 0
    not_smaller: int = 0
    used: int = 0
    grad_mask: int = 0


class Recorded(NamedTuple):
    """Recorded orders, and what the scheduler knows of each group now."""

    orders: tuple[RecordedOrder, ...]
    specs: tuple[GroupSpec, ...]


class Local(NamedTuple):
    """What groups are on this rank: bits of groups.

    held: unsharded, or being gathered. smaller: with shards of them over the smaller world. unreduced:
    with gradients that have to be reduced over ranks. accumulating: with gradients to be kept here,
    unsharded.
    """

    held: int = 0
    smaller: int = 0
    unreduced: int = 0
    accumulating: int = 0


Answer = ConsensusResult | int | Recorded | Local


class Step(NamedTuple):
    """What an event leads to: ``actions`` in order, then a ``sync``, whose answer the follower is resumed
    with.

    sync: None where nothing is left to be decided. taken: the entries of the schedule that the event has led
    to, for the trace: those that this rank has left out come first. Complete in the last step of an event.
    """

    actions: tuple[Action, ...]
    sync: Sync | None = None
    taken: tuple[ScheduleEntry, ...] = ()
