"""The constants of the prices: what no data sheet says, fitted to published runs. Each has a unit."""

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.options import limited


@dataclass(frozen=True)
class Constants:
    """What was fitted (``bench/plan_fit.py`` does it again; docs/plan.md has the table).

    matmul: share of a device's best matmul that those of a model reach, were they infinitely wide.
    attention: share of what its fused attention reaches at best. memory: share of the memory's bandwidth that
        the counted passes of elementwise kernels reach; kernels that aren't counted lower it.
    narrow: a matmul whose least size is so many reaches half of the above share.
    optimizer: bytes that a step of the optimizer moves, for each parameter of a shard.
    wire: share of the bandwidth between hosts that a collective reaches. hop_s: seconds for each rank that a
        collective passes. launch_s: seconds of the host for one kernel.
    contention: seconds that compute loses for each second of a collective beside it.
    old_torch: seconds of compute in torch 1, for each second in torch 2.
    exchange: share of the links' bandwidth that exchanges of tp, cp, ep and pp reach, which torch's process
        groups make. exchange_s: seconds of one that moves nothing, besides. No published run says them; where
        links are measured, they are too.
    """

    matmul: float = limited(1.02, gt=0)
    attention: float = limited(0.479, gt=0)
    memory: float = limited(0.331, gt=0)
    narrow: float = limited(191.0, ge=0)
    optimizer: float = limited(87.0, gt=0)
    wire: float = limited(0.608, gt=0)
    hop_s: float = limited(10.7e-6, ge=0)
    launch_s: float = limited(6e-6, ge=0)
    contention: float = limited(0.0894, ge=0)
    old_torch: float = limited(1.045, gt=0)
    exchange: float = limited(1.0, gt=0)
    exchange_s: float = limited(0.0, ge=0)


class Accuracy(NamedTuple):
    """How far predicted seconds were off where the device's numbers were obtained in the same way.

    mean: the mean of relative errors; not a number where none is known. most: what nine of ten were within.
    why: what they are the errors of, or why none is known.
    """

    mean: float
    most: float
    why: str


ACCURACY = {
    "measured": Accuracy(0.06, 0.10, "nine of ten steps on a machine measured in the same way"),
    "fitted": Accuracy(0.04, 0.08, "nine of ten published runs of FSDP1 and FSDP2 on such devices"),
    "data sheet": Accuracy(
        0.17, 0.30, "nine of ten runs by a data sheet (shardwright bench compute measures)"
    ),
}
"""By a device's ``source`` (docs/plan.md, Accuracy, has the runs)."""
PUBLISHED_RANKS, PUBLISHED_NETWORK = 512, 50e9
"""Of the published runs the most ranks, and the least bytes/s between hosts."""
MEMORY_ERROR = 0.05
"""What the predicted bytes were off at most, where a run states its peak."""
