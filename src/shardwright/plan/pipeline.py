"""A step of one rank, in time and in bytes, where the model may be a pipeline's stages. Pure.

As torch's ``pipelining`` runs stages that are sharded: parameters are gathered in the first microbatch and
stay, and gradients are reduced after the last one.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.observe.memory.report import Category
from shardwright.plan.axes import AxisSizes, in_flight
from shardwright.plan.memory import HeldBytes, Sharding, memory, peak
from shardwright.plan.presets import Preset
from shardwright.plan.prices import Prices, Seconds
from shardwright.plan.simulate import Timeline, simulate
from shardwright.plan.workload import Workload
from shardwright.schedule.schedule import Phase, Schedule


def timeline(
    schedule: Schedule, work: Workload, prices: Prices, microbatches: int, *, keeps: bool = False
) -> Timeline:
    """``simulate``; of a pipeline the last stage, which the others can't be slower than.

    It computes all microbatches one after another, and besides waits for the first one to come through the
    others, and for the last one's gradient to go back: (pp - 1) / chunks times what a microbatch takes there
    (Narayanan et al. 2021, section 2.2).
    """
    if work.earlier is None:
        return simulate(schedule, work, prices, microbatches, keeps=keeps)
    once = simulate(schedule, work, prices, 1, keeps=keeps)
    computed, waited = _microbatch(work, prices)
    bubble = sum(_microbatch(work.earlier, prices)) * (prices.axes.pp - 1) / prices.axes.chunks
    others = (microbatches - 1) * computed
    return replace(
        once,
        step_s=once.step_s + others + (microbatches - 1) * waited + bubble,
        compute_s=once.compute_s + others,
    )


def _microbatch(work: Workload, prices: Prices) -> tuple[Seconds, Seconds]:
    """Seconds of its compute, and of its exchanges."""
    stretches = [stretch for entries in work.phases.values() for _, stretch in entries]
    return sum(map(prices.compute, stretches)), sum(map(prices.exchanged, stretches))


def held(
    schedule: Schedule, work: Workload, preset: Preset, sharding: Sharding, axes: AxisSizes, microbatches: int
) -> Sequence[HeldBytes]:
    """``memory``; of a pipeline that of its first or its last stage, of which one holds most. Besides what a
    microbatch holds there are the activations of those on their way, and, once there is a second one, the
    gradients of all of the stage."""
    if work.earlier is None:
        return memory(schedule, work, preset, sharding)
    found = []
    for stage, each in ((0, work.earlier), (axes.pp - 1, work)):
        forward = each.phases[Phase.FORWARD]
        saved = sum(stretch.saved_nbytes for _, stretch in forward if not stretch.head)
        more = {
            Category.ACTIVATIONS: int(saved * (in_flight(axes, stage, microbatches) - 1)),
            Category.GRADIENTS: each.trained * each.itemsize * (microbatches > 1),
        }
        alone = memory(schedule, each, preset, replace(sharding, accumulates=False))
        found.append([_with(one, more) for one in alone])
    return max(found, key=lambda one: peak(one).total)


def _with(one: HeldBytes, more: dict[Category, int]) -> HeldBytes:
    both = {name: one.nbytes.get(name, 0) + more.get(name, 0) for name in {**one.nbytes, **more}}
    return one._replace(nbytes=both)
