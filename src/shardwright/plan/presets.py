"""Who runs the step: this package, or one of torch's two. Each is a policy of the same scheduler. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from shardwright.errors import ConfigError
from shardwright.plan.workload import Workload
from shardwright.policy import BackwardPrefetch, SchedulePolicy
from shardwright.schedule.schedule import GroupSpec, Schedule
from shardwright.schedule.scheduler import scheduled


@dataclass(frozen=True)
class Preset:
    """A runtime, to the scheduler and the simulation.

    policy: what its schedules are planned by. root_stays: the root isn't resharded after a forward.
    reshards: whether the other groups are; None leaves that open for those that the backward needs first.
    limit: the host waits until so many groups, freed by it, are freed by the device too, before it gathers
        one more; None: an all-gather itself waits, for ``releases``.
    releases: "reshard": for the memory of the last group that was resharded. "wait": for the last group that
        was waited for, out of whose buffer it is copied.
    one_communicator: all-gathers and reduce-scatters run one after another.
    gather_copies, reduce_copies: bytes that the device moves for each element besides the collective: out of
        the buffer of an all-gather, and into that of a reduce-scatter. divides: gradients are divided in
        place before that; the others divide in the collective.
    host_computes: the host is the device: what it launches it has computed when it goes on.
    """

    policy: SchedulePolicy
    root_stays: bool = False
    reshards: bool | None = True
    limit: int | None = None
    releases: str = "reshard"
    one_communicator: bool = False
    gather_copies: int = 0
    reduce_copies: int = 4
    divides: bool = False
    host_computes: bool = False

    def reduce_nbytes(self, own: int, itemsize: int) -> int:
        """Bytes that the device moves for each element, of ``own`` bytes, before a reduce-scatter in
        ``itemsize`` bytes."""
        cast = 0 if itemsize == own else own + itemsize
        return self.reduce_copies + cast + self.divides * 2 * itemsize


PRESETS = {
    "shardwright": Preset(SchedulePolicy(), root_stays=True, reshards=None),
    "shardwright-cpu": Preset(
        SchedulePolicy(), root_stays=True, reshards=None, one_communicator=True, host_computes=True
    ),
    "fsdp2": Preset(
        SchedulePolicy(forward_prefetch=False, max_reductions=1, keep_last=0, bucket_cap_mb=0.0),
        root_stays=True,
        releases="wait",
        one_communicator=True,
        gather_copies=4,
        reduce_copies=0,
    ),
    "fsdp1": Preset(
        SchedulePolicy(
            forward_prefetch=False,
            backward_prefetch=BackwardPrefetch.PRE,
            max_reductions=2,
            keep_last=0,
            bucket_cap_mb=0.0,
        ),
        root_stays=True,
        limit=2,
        one_communicator=True,
        divides=True,
    ),
}
"""By name. ``shardwright-cpu``: parameters and gradients share one network. ``fsdp1``: with
``limit_all_gathers``, as its users run it."""


def preset(name: str) -> Preset:
    """Raises: ConfigError for a name that isn't one of ``PRESETS``."""
    if name not in PRESETS:
        raise ConfigError(f"no runtime is called {name!r}; there is: {', '.join(PRESETS)}")
    return PRESETS[name]


def _spec(workload: Workload, preset: Preset, index: int, reshard_after_forward: bool | int) -> GroupSpec:
    """What the scheduler knows of a group."""
    group, is_root = workload.groups[index], index in workload.of_root
    is_smaller = not (isinstance(reshard_after_forward, bool) or is_root)
    return GroupSpec(
        reshard_after_forward=_reshards(preset, reshard_after_forward, is_root),
        nbytes=group.at(workload.itemsize),
        grad_nbytes=group.trained * workload.itemsize,
        bucket_key=None if is_smaller else 0,  # it gathers by itself
        part_of=group.part_of,
        smaller_world=is_smaller,
    )


def _reshards(preset: Preset, reshard_after_forward: bool | int, is_root: bool) -> bool | None:
    if not reshard_after_forward or (is_root and preset.root_stays):
        return False
    if not isinstance(reshard_after_forward, bool):
        return True
    return preset.reshards


def schedule(
    workload: Workload,
    preset: Preset,
    reshard_after_forward: bool | int = True,
    kept: Collection[int] = (),
) -> Schedule:
    """The schedule of a step, by the scheduler that the runtime itself uses. kept: the groups that stay
    unsharded until their backward; the others are resharded as is said of all."""
    known = [
        _spec(workload, preset, index, index not in kept and reshard_after_forward)
        for index in range(len(workload.groups))
    ]
    return scheduled(workload.orders, preset.policy, known.__getitem__)
