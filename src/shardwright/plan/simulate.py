"""A step in time: a schedule's actions and a workload's compute, on lanes that run beside each other. Pure.

The host goes through the events in order and launches; each lane does what was launched on it in that order,
as early as what it waits for is there::

    host       | F+0 | F+1 |  ...                        runs ahead of the device
    gather     | all-gather 0 | all-gather 1 |
    compute                   | forward 0    | forward 1 |
    reduce                                     ... reduce-scatter 1 |
"""

from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import numpy as np

from shardwright.plan.memory import ADAM, MASTER
from shardwright.plan.presets import Preset
from shardwright.plan.prices import CollectiveCost, Prices, Seconds
from shardwright.plan.workload import Stretch, Workload
from shardwright.policy import CPUOffloadPolicy
from shardwright.schedule.schedule import Action, ActionKind, Phase, Schedule

LANES = ("host", "compute", "gather", "reduce", "all-reduce", "copies")


class Interval(NamedTuple):
    """What a lane did from ``start`` to ``end``, in seconds since the begin of the step."""

    lane: str
    label: str
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """A step as it was simulated.

    step_s: seconds of it, with the optimizer's. compute_s: seconds in which the device computes. exposed_s:
    the others. intervals: what was done when, where that was asked for.
    """

    step_s: Seconds
    compute_s: Seconds
    intervals: tuple[Interval, ...] = ()

    @property
    def exposed_s(self) -> Seconds:
        """Seconds of the step in which the device doesn't compute."""
        return self.step_s - self.compute_s


@dataclass
class _Lanes:
    """Where each lane stands: seconds at which it is free. ``busy``: of the last collectives, from and to."""

    free: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    busy: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    keeps: bool = False

    def run(self, lane: str, label: str, seconds: Seconds, after: Seconds) -> Seconds:
        """Do it as early as the lane and ``after`` allow; returns when it has ended."""
        start = np.maximum(self.free[lane], after)
        end = self.free[lane] = start + seconds
        if self.keeps:
            self.intervals.append(Interval(lane, label, start, end))
        return end


def simulate(
    schedule: Schedule, workload: Workload, prices: Prices, microbatches: int = 1, *, keeps: bool = False
) -> Timeline:
    """One step: so many times a forward and a backward, each with its reductions, and once the optimizer's.

    From the second microbatch on all are the same, so no more than two are gone through. keeps: with all
    intervals of those, for a picture.
    """
    step = _Step(workload, prices, _Lanes(keeps=keeps))
    ends = []
    for _ in range(min(microbatches, 2)):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for entry, (_, stretch) in zip(schedule.phases[phase], workload.phases[phase], strict=True):
                for action in entry.actions:
                    step.act(action)
                step.compute(str(entry.event), stretch)
        ends.append((step.now(), step.computed))
    return step.end(ends, microbatches)


class _Step:
    def __init__(self, workload: Workload, prices: Prices, lanes: _Lanes) -> None:
        self.workload, self.prices, self.lanes = workload, prices, lanes
        self.offload = prices.offload if isinstance(prices.offload, CPUOffloadPolicy) else None
        self.gathered: dict[int, Seconds] = {}
        self.reduced: dict[int, Seconds] = {}
        self.freed: list[Seconds] = []
        self.kept: set[int] = set()
        self.released: Seconds = 0.0
        self.computed: Seconds = 0.0
        self._priced: dict[int, tuple[Seconds, Seconds, Seconds]] = {}
        self._collectives: dict[tuple[int, int], Seconds] = {}

    @property
    def preset(self) -> Preset:
        """Who runs the step."""
        return self.prices.preset

    def compute(self, label: str, stretch: Stretch) -> None:
        """Launch the kernels of a stretch, and run them."""
        if not stretch.ops:
            return
        if id(stretch) not in self._priced:
            prices = self.prices
            self._priced[id(stretch)] = (
                prices.compute(stretch),
                prices.launch(stretch),
                prices.exchanged(stretch),
            )
        seconds, launch, waits = self._priced[id(stretch)]
        lanes = self.lanes
        begun = lanes.free["host"]
        lanes.run("host", label, launch, 0.0)
        start = np.maximum(lanes.free["compute"], begun)
        beside = sum(
            np.maximum(np.minimum(end, start + seconds) - np.maximum(since, start), 0.0)
            for since, end in lanes.busy
        )
        seconds = seconds + self.prices.constants.contention * beside
        seconds = seconds + launch if self.preset.host_computes else np.maximum(seconds, launch)
        self.computed += seconds
        lanes.run("compute", label, seconds + waits, begun)
        self._keep_up()
        del lanes.busy[:-4]

    def _keep_up(self) -> None:
        """Where the host computes, it is where compute is."""
        if self.preset.host_computes:
            both = np.maximum(self.lanes.free["host"], self.lanes.free["compute"])
            self.lanes.free["host"] = self.lanes.free["compute"] = both

    def act(self, action: Action) -> None:
        """One action of the schedule."""
        lanes, kind = self.lanes, action.kind
        self._keep_up()
        if kind is ActionKind.UNSHARD:
            self._gather(action)
        elif kind is ActionKind.WAIT:
            for group in action.groups:
                lanes.free["compute"] = np.maximum(lanes.free["compute"], self.gathered[group])
                size = self.workload.groups[group]
                decoded = size.coded[0] * self.workload.itemsize + size.coded[1]
                self._copy(action, size.numel * self.preset.gather_copies + decoded)
            if self.preset.releases == "wait":
                self.released = lanes.free["compute"]
        elif kind is ActionKind.RESHARD:
            if action.smaller:
                self.kept.update(action.groups)
            self.freed.append(lanes.free["compute"])
            if self.preset.releases == "reshard":
                self.released = lanes.free["compute"]
        elif kind is ActionKind.REDUCE:
            self._reduce(action)
        elif kind is ActionKind.WAIT_REDUCE:
            for group in action.groups:
                lanes.free["compute"] = np.maximum(lanes.free["compute"], self.reduced.pop(group))

    def _gather(self, action: Action) -> None:
        lanes, after = self.lanes, self.released
        if self.preset.limit is not None:
            after = 0.0
            if len(self.freed) >= self.preset.limit:
                lanes.run("host", "limit", 0.0, self.freed.pop(0))
        kept, sizes = self.kept.intersection(action.groups), self.workload.groups
        self.kept -= kept
        nbytes = sum(sizes[group].at(self.prices.gather_itemsize) for group in action.groups)
        if self.offload is not None and self.offload.params:
            after = self._host_copy(
                action, nbytes // self.prices.shards, np.maximum(after, lanes.free["host"])
            )
        cost = self.prices.gathering_kept if kept else self.prices.gathering
        end = self._collective("gather", str(action), nbytes, np.maximum(after, lanes.free["host"]), cost)
        self.gathered |= dict.fromkeys(action.groups, end)

    def _reduce(self, action: Action) -> None:
        lanes = self.lanes
        numel = sum(self.workload.groups[group].trained for group in action.groups)
        per_element = self.preset.reduce_nbytes(self.workload.itemsize, self.prices.reduce_itemsize)
        self._copy(action, numel * per_element)
        after = np.maximum(lanes.free["compute"], lanes.free["host"])
        prices = self.prices
        nbytes = numel * prices.reduce_itemsize
        end = self._collective("reduce", str(action), nbytes, after, prices.gathering)
        if prices.cluster.ranks > prices.shards:
            seconds = prices.all_reduce(numel // prices.shards * prices.reduce_itemsize)
            end = lanes.run("all-reduce", str(action), seconds, end)
            if self.preset.host_computes:  # a device's is bound by the network, and takes few of its units
                lanes.busy.append((end - seconds, end))
        if self.offload is not None and self.offload.grads:
            self._host_copy(action, numel // prices.shards * MASTER, end)
        self.reduced |= dict.fromkeys(action.groups, end)

    def _host_copy(self, action: Action, nbytes: int, after: Seconds) -> Seconds:
        """Between the device and its host, beside compute and collectives."""
        return self.lanes.run("copies", str(action), self.prices.host_copy(nbytes), after)

    def _copy(self, action: Action, nbytes: int) -> None:
        if nbytes:
            seconds = self.prices.copy(nbytes)
            self.computed += seconds
            self.lanes.run("compute", str(action), seconds, 0.0)

    def _collective(
        self, lane: str, label: str, nbytes: int, after: Seconds, cost: CollectiveCost
    ) -> Seconds:
        key = (id(cost), nbytes)
        if key not in self._collectives:
            self._collectives[key] = cost.seconds(nbytes)
        lane = "gather" if self.preset.one_communicator else lane
        end = self.lanes.run(lane, label, self._collectives[key], after)
        self.lanes.busy.append((end - self._collectives[key], end))
        return end

    def _optimizer_beside_host(self, numel: int, seconds: Seconds) -> Seconds:
        """The host steps, and the device is given what it keeps of that; or the device, which is lent the
        state."""
        assert self.offload is not None
        run, copy = self.lanes.run, self.prices.host_copy
        if not self.offload.shards_on_host:
            here = run("copies", "state", copy(numel * ADAM), self.now())
            return run("copies", "state", copy(numel * ADAM), run("compute", "optimizer", seconds, here))
        stepped = run("host", "optimizer", seconds, self.now())
        if self.offload.params:
            return stepped
        return run("copies", "parameters", copy(numel * self.prices.gather_itemsize), stepped)

    def now(self) -> Seconds:
        """When all that was launched has ended."""
        return reduce(np.maximum, self.lanes.free.values())

    def end(self, ends: list[tuple[Seconds, Seconds]], microbatches: int) -> Timeline:
        """Step when all gradients are there; what more microbatches take is what the last one took."""
        prices, trained = self.prices, self.workload.trained + self.workload.elsewhere
        numel = trained // prices.shards
        seconds = prices.optimizer(numel)
        if self.offload is None:
            step_s = self.lanes.run("compute", "optimizer", seconds, self.now())
            computed = self.computed + seconds
        else:
            step_s, computed = self._optimizer_beside_host(numel, seconds), self.computed
        for _ in range(microbatches - len(ends)):
            step_s, computed = (
                a + b - c for a, b, c in zip((step_s, computed), *reversed(ends), strict=True)
            )
        plain = [
            each._replace(start=_plain(each.start), end=_plain(each.end)) for each in self.lanes.intervals
        ]
        return Timeline(_plain(step_s), _plain(computed), tuple(plain))


def _plain(seconds: Seconds) -> Seconds:
    """A float, where it is no array of variants."""
    return float(seconds) if np.ndim(seconds) == 0 else seconds
