"""Bytes of a step, by category, counted at the same events that the simulation in time goes through. Pure.

The order is the host's: an allocator counts a block from the call that takes it to the call that drops it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from shardwright.observe.memory.report import Category
from shardwright.plan.cluster import FULL, DeviceSpec
from shardwright.plan.presets import Preset
from shardwright.plan.workload import GroupSize, Stretch, Workload
from shardwright.policy import DEFAULT_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwright.schedule.schedule import Action, ActionKind, Event, EventKind, Phase, Schedule

MASTER, ADAM = 4, 8
"""Bytes of an element of a shard, or of its gradient, and of its state in the optimizer."""


class HeldBytes(NamedTuple):
    """Bytes held at one moment: ``at`` an event, and by category."""

    at: str
    nbytes: dict[Category, int]

    @property
    def total(self) -> int:
        """Of all categories."""
        return sum(self.nbytes.values())


class AtRest(NamedTuple):
    """Bytes at rest on one rank: on its device of parameters, of the optimizer's state and of reduced
    gradients, and on its host of all. lent: of the state, on the device while that steps."""

    params: int
    state: int
    grads: int
    on_host: int = 0
    lent: int = 0


@dataclass(frozen=True)
class Sharding:
    """What bytes on a rank depend on: ranks that share a parameter, bytes of an element of gradients on the
    wire, whether gradients of earlier microbatches are there already, what is on the host at rest, and over
    how many ranks shards are kept from a forward to its backward."""

    shards: int
    reduce_itemsize: int = 4
    accumulates: bool = False
    offload: OffloadPolicy = DEFAULT_OFFLOAD
    smaller_world: int | None = None

    def keeps(self, workload: Workload) -> "AtRest":
        """Bytes at rest."""
        trained = (workload.trained + workload.elsewhere) // self.shards
        at_rest = sum(map(_at_rest, workload.groups)) // self.shards
        offload = self.offload if isinstance(self.offload, CPUOffloadPolicy) else None
        device = AtRest(at_rest, trained * ADAM, trained * MASTER)
        if offload is None:
            return device
        copies = sum(group.at(workload.itemsize) for group in workload.groups)
        copies = (copies + workload.elsewhere * workload.itemsize) // self.shards
        params = (0 if offload.params else copies) if offload.shards_on_host else at_rest
        grads = 0 if offload.grads else trained * MASTER
        on_host = sum(device) - (0 if offload.shards_on_host else at_rest) - grads
        return AtRest(params, 0, grads, on_host, 0 if offload.shards_on_host else trained * ADAM)


def _at_rest(group: GroupSize) -> int:
    """Bytes of a group's parameters: float32, and frozen ones in their own dtype where that is known."""
    if not group.params:
        return group.at(MASTER) + group.elsewhere * MASTER
    frozen = [param for param in group.params if not param.trained]
    itemsize = max((param.itemsize for param in frozen), default=0)
    plain = sum(prod(param.shape) * param.itemsize for param in frozen) - group.coded[0] * itemsize
    return group.trained * MASTER + plain + group.coded[1]


def memory(schedule: Schedule, workload: Workload, preset: Preset, sharding: Sharding) -> list[HeldBytes]:
    """What is held after each event of a steady step, and, at its most, inside of what is computed there."""
    ledger = _Ledger(workload, preset, sharding)
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for entry, (event, stretch) in zip(schedule.phases[phase], workload.phases[phase], strict=True):
            if event.kind is EventKind.GRADS_READY:
                ledger.gradients(event.group)
            for action in entry.actions:
                ledger.act(action)
                found.append(HeldBytes(f"{event} {action}", dict(ledger.held)))
            if event.kind is EventKind.BACKWARD_BEGIN:
                ledger.gradients(event.group)
            found.append(ledger.compute(event, stretch))
    return found


def decoded_while_read(workload: Workload, event: Event) -> int:
    """Bytes of the largest weight that is decoded only while it is read, in the pass that begins there."""
    if event.kind not in (EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN) or event.group < 0:
        return 0
    return workload.groups[event.group].per_use * workload.itemsize


CONTEXT_NBYTES = 2**30
"""Of the device's driver and of kernels, which no tensor has."""


def reserved(active: float, device: DeviceSpec) -> float:
    """Bytes that torch's caching allocator takes for a peak of ``active`` bytes in use.

    It keeps freed blocks of sizes that don't fit again, until there is no more memory. An estimate of what
    was seen in few runs (docs/plan.md).
    """
    return max(active, min(active * device.reserved, FULL * device.memory_nbytes))


def fits(active: float, device: DeviceSpec) -> bool:
    """Whether a peak of ``active`` bytes has a place on the device at all, without a reserve: nine published
    runs, predicted to hold 87 to 92% of it, ran."""
    return active + CONTEXT_NBYTES <= device.memory_nbytes


def peak(found: Sequence[HeldBytes]) -> HeldBytes:
    """The moment at which most is held."""
    return max(found, key=lambda held: held.total)


@dataclass
class _Ledger:
    workload: Workload
    preset: Preset
    sharding: Sharding
    held: Counter[Category] = field(default_factory=Counter)
    unreduced: dict[int, int] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = self.sharding.keeps(self.workload)
        self.held[Category.STATES] = kept.params + kept.state
        self.held[Category.GRADIENTS] = kept.grads if self.sharding.accumulates else 0

    def act(self, action: Action) -> None:
        """One action of the schedule."""
        held, kind = self.held, action.kind
        for group in action.groups:
            size, itemsize = self.workload.groups[group], self.workload.itemsize
            nbytes, decoded = size.at(itemsize), size.decoded(itemsize)
            staged = nbytes + nbytes // self.sharding.shards if self.preset.gather_copies else 0
            if kind is ActionKind.UNSHARD:
                held[Category.UNSHARDED] -= self.kept.pop(group, 0)
                held[Category.TRANSPORT if staged else Category.UNSHARDED] += staged or nbytes
            elif kind is ActionKind.WAIT:
                held[Category.TRANSPORT] -= staged
                held[Category.UNSHARDED] += decoded + (nbytes if staged else 0)
            elif kind is ActionKind.RESHARD:
                self._reshard(nbytes + decoded)
                if action.smaller:
                    self.kept[group] = nbytes // (self.sharding.smaller_world or self.sharding.shards)
                    held[Category.UNSHARDED] += self.kept[group]
            elif kind in (ActionKind.HOLD, ActionKind.REDUCE):
                self._reduce(group)
            elif kind is ActionKind.WAIT_REDUCE:
                self._reduced(group)

    def _reshard(self, nbytes: int) -> None:
        """Free it; where the host runs ahead by a number of groups, those count until the device is there."""
        self.freed.append(nbytes)
        if len(self.freed) > (self.preset.limit or 0):
            self.held[Category.UNSHARDED] -= self.freed.pop(0)

    def gradients(self, group: int) -> None:
        """The backward of a group makes them, from its begin on."""
        if group in self.unreduced:
            return
        nbytes = self.workload.groups[group].trained * self.workload.itemsize
        self.held[Category.GRADIENTS] += nbytes
        self.unreduced[group] = nbytes

    def _reduce(self, group: int) -> None:
        if group in self.unreduced:
            trained, size = self.workload.groups[group].trained, self.sharding.reduce_itemsize
            self.held[Category.GRADIENTS] -= self.unreduced.pop(group)
            self.held[Category.TRANSPORT] += trained * size + trained * size // self.sharding.shards

    def _reduced(self, group: int) -> None:
        trained, size = self.workload.groups[group].trained, self.sharding.reduce_itemsize
        self.held[Category.TRANSPORT] -= trained * size + trained * size // self.sharding.shards
        offload = self.sharding.offload
        if not (self.sharding.accumulates or (isinstance(offload, CPUOffloadPolicy) and offload.grads)):
            whole = trained + self.workload.groups[group].elsewhere
            self.held[Category.GRADIENTS] += whole * MASTER // self.sharding.shards

    def compute(self, event: Event, stretch: Stretch) -> HeldBytes:
        """A stretch: what it holds at most, and what remains of it."""
        category = Category.HEAD if stretch.head else Category.ACTIVATIONS
        most = dict(self.held)
        most[category] = most.get(category, 0) + max(stretch.saved_nbytes, 0) + stretch.transient_nbytes
        self.held[category] += stretch.saved_nbytes
        read = decoded_while_read(self.workload, event)
        most[Category.UNSHARDED] = most.get(Category.UNSHARDED, 0) + read
        return HeldBytes(f"{event}", most)
