"""Bytes of the phases of a job: load, first step, steady step, evaluation, save and resume. Pure."""

from collections import Counter
from typing import NamedTuple

from shardwright.columns import in_columns
from shardwright.observe.memory.report import Category
from shardwright.plan.cluster import GIB
from shardwright.plan.memory import AtRest, HeldBytes, Sharding, decoded_while_read
from shardwright.plan.workload import Workload
from shardwright.schedule.schedule import ActionKind, Phase, Schedule


class PhaseBytes(NamedTuple):
    """Bytes of one phase.

    Attributes:
        nbytes: of a device at the peak of the phase, by category.
        host: of a rank's host: what is offloaded, and in a save the copy that ``async_save`` makes.
        disk: of the checkpoint that is written or read, by all ranks together.
    """

    nbytes: dict[Category, int]
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device, of all categories."""
        return sum(self.nbytes.values())


def phases_of(
    schedule: Schedule, workload: Workload, kept: AtRest, step: HeldBytes, shards: int
) -> dict[str, PhaseBytes]:
    """By the name of the phase. step: the moment of a steady step at which most is held. shards: ranks that a
    parameter is sharded over."""
    host, whole = kept.on_host, Sharding(1).keeps(workload)
    saved = whole.params + whole.state
    ranks_have = workload.numel + workload.elsewhere  # those of one stage, and of a part of each layer
    saved = saved * workload.parameters // ranks_have if workload.parameters else saved
    states = {Category.STATES: kept.params + kept.state}
    first = step.nbytes | {Category.STATES: step.nbytes[Category.STATES] - kept.state}
    stepped = {Category.STATES: kept.params + kept.state + kept.lent, Category.GRADIENTS: kept.grads}
    return {
        "load": PhaseBytes({Category.STATES: kept.params}, host),
        "first step": PhaseBytes(_larger(first, stepped), host),
        "step": PhaseBytes(_larger(step.nbytes, stepped), host),
        "evaluation": PhaseBytes(states | _evaluation(schedule, workload), host),
        "save": PhaseBytes(states, host + (whole.params + whole.state) // shards, saved),
        "resume": PhaseBytes(states, host, saved),
    }


def _larger(one: dict[Category, int], other: dict[Category, int]) -> dict[Category, int]:
    return max(one, other, key=lambda nbytes: sum(nbytes.values()))


def _evaluation(schedule: Schedule, workload: Workload) -> dict[Category, int]:
    """Return the phase of a forward that keeps nothing, besides the states."""
    most: dict[Category, int] = {}
    unsharded = set[int]()
    forward = zip(schedule.phases[Phase.FORWARD], workload.phases[Phase.FORWARD], strict=True)
    for entry, (event, stretch) in forward:
        for action in entry.actions:
            if action.kind is ActionKind.UNSHARD:
                unsharded.update(action.groups)
            elif action.kind is ActionKind.RESHARD:
                unsharded.difference_update(action.groups)
        sizes = [workload.groups[group] for group in unsharded]
        gathered = sum(size.at(workload.itemsize) + size.decoded(workload.itemsize) for size in sizes)
        computed = max(stretch.saved_nbytes, 0) + stretch.transient_nbytes
        gathered += decoded_while_read(workload, event)
        category = Category.HEAD if stretch.head else Category.ACTIVATIONS
        most = _larger(most, {Category.UNSHARDED: gathered, category: computed})
    return most


def in_table(phases: dict[str, PhaseBytes], ranks: int) -> str:
    """GiB of each phase and category, as text; of a host with its ``ranks``. A category that no phase has is
    left out."""
    totals = Counter[Category]()
    for phase in phases.values():
        totals.update(phase.nbytes)
    categories = [category for category in Category if totals[category]]
    rows = [["GiB", "device", *categories, "host", "disk"]]
    for name, phase in phases.items():
        parts = (phase.nbytes.get(each, 0) for each in categories)
        sizes = [phase.total, *parts, phase.host * ranks, phase.disk]
        rows.append([name, *(f"{nbytes / GIB:.1f}" if nbytes else "" for nbytes in sizes)])
    return "\n".join(in_columns(rows, ">"))
