"""A simulated step in time, as text (fixtures/steps.txt): what each lane does from when to when.

Where a step is to be simulated otherwise: ``python -m tests.pure.test_simulate_written`` writes it again.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.plan.cluster import Cluster, DeviceSpec
from shardwright.plan.constants import Constants
from shardwright.plan.presets import PRESETS, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import simulate
from shardwright.plan.workload import GroupSize, Op, OpKind, Stretch, Workload
from shardwright.policy import CPUOffloadPolicy
from shardwright.schedule.schedule import Event, EventKind, Phase

TEXT = Path(__file__).parent / "fixtures/steps.txt"
# A device on which a byte takes a second, beside a host that launches in a quarter of one.
WHOLE = {"matmul": 1.0, "attention": 1.0, "ring": 1.0}
DEVICE = DeviceSpec("slow", 1.0, 1e3, 1.0, 1.0, **WHOLE, host_link=4.0, host_memory=2.0)
FAST = replace(DEVICE, peak_flops=1e3, memory_bandwidth=1e3, link_bandwidth=1e3)
CONSTANTS = Constants(1.0, 1.0, 1.0, 0.0, 8.0, 1.0, 0.0, 0.25, 0.5, 1.0)
CODED = GroupSize("b", 16, 8, coded=(4, 2))
GROUPS = (GroupSize("a", 8, 8), CODED, GroupSize("c", 8, 8), GroupSize("d", 8, 8))


def work():
    """Four groups, one after another."""
    ahead, back = (Stretch((Op(OpKind.MATMUL, flops),)) for flops in (4.0, 8.0))
    numbers = range(len(GROUPS))
    begins = EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN
    forward = [(kind, g) for g in numbers for kind in (begins[0], EventKind.FORWARD_END)]
    kinds = begins[1], EventKind.GRADS_READY, EventKind.BACKWARD_END
    backward = [(kind, g) for g in reversed(numbers) for kind in kinds] + [(EventKind.STEP_END, -1)]
    stretches = {begins[0]: ahead, begins[1]: back}
    phases = {
        phase: tuple((Event(kind, g), stretches.get(kind, Stretch())) for kind, g in order)
        for phase, order in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward))
    }
    return Workload(GROUPS, phases)


ONE = Cluster(DEVICE, 2, 2)
CASES = {name: (preset, Prices(ONE, CONSTANTS, preset, 2)) for name, preset in PRESETS.items()}
_ours = PRESETS["shardwright"]
STATE = CPUOffloadPolicy(params=False, grads=False)
CASES |= {
    "a fast device": (PRESETS["fsdp2"], Prices(Cluster(FAST, 2, 2), CONSTANTS, PRESETS["fsdp2"], 2)),
    "limit of one": (each := replace(PRESETS["fsdp1"], limit=1), Prices(ONE, CONSTANTS, each, 2)),
    "copies of shards": (_ours, Prices(Cluster(DEVICE, 4, 2, 1.0), CONSTANTS, _ours, 2)),
    "kept over fewer": (_ours, Prices(Cluster(DEVICE, 4, 2, 1.0), CONSTANTS, _ours, 4, smaller_world=2)),
    "offloaded": (_ours, Prices(ONE, CONSTANTS, _ours, 2, offload=CPUOffloadPolicy())),
    "state on the host": (_ours, Prices(ONE, CONSTANTS, _ours, 2, offload=STATE)),
}


def text_of(name):
    """What each lane does from when to when, and the sums."""
    preset, prices = CASES[name]
    planned = schedule(work(), preset, prices.smaller_world or True)
    found = simulate(planned, work(), prices, keeps=True)
    assert {type(found.step_s), type(found.compute_s)} == {float}
    lines = [f"{each.lane}: {each.label} {each.start:.4f} to {each.end:.4f}" for each in found.intervals]
    sums = [f"step {found.step_s:.4f} compute {found.compute_s:.4f} exposed {found.exposed_s:.4f}"]
    more = [simulate(planned, work(), prices, count, keeps=True) for count in (2, 3)]
    sums += [f"{each.step_s:.4f} {each.compute_s:.4f} {len(each.intervals)} intervals" for each in more]
    return "\n".join([*lines, *sums])


def written():
    """By case the text that is written down."""
    parts = TEXT.read_text().removeprefix("# ").split("\n# ")
    return {part.partition("\n")[0]: part.partition("\n")[2].strip("\n") for part in parts}


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_step_takes_the_time_that_is_written_down(name):
    assert text_of(name) == written()[name]


if __name__ == "__main__":
    TEXT.write_text("\n\n".join(f"# {name}\n{text_of(name)}" for name in CASES) + "\n")
