"""Who owns which matrix: weights that are whole on one rank, spread so that bytes and arithmetic are even.

Pure arithmetic on integers, so that every rank comes to the same answer without asking the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Matrices:
    """A weight, or a stack of ``count`` of one shape (experts). nbytes, flops: of one of them, at rest and
    in an optimizer's step."""

    count: int
    nbytes: int
    flops: int


@dataclass
class Load:
    """What one rank owns so far."""

    nbytes: int = 0
    flops: int = 0


def owners(weights: Sequence[Matrices], loads: Sequence[Load]) -> list[list[int]]:
    """Give each matrix to a rank; greedy, the costliest first, each to the rank that is least loaded with it.

    A load is the larger of a rank's shares in all bytes and in all FLOPs; of ranks alike the first is taken.
    Of a stack every rank gets ``count // world``, and the rest goes matrix by matrix.
    May be called again for weights that come later, whose costs needn't be known before.

    Method: list scheduling (Graham, 1969). Where FLOPs are in proportion to bytes, the busiest rank has at
    most 4/3 of the least that is possible, or twice that least if weights come in several calls; where they
    aren't, three times, in one call. What is above the mean is at most one matrix, so with few matrices a
    rank one call for all weights is the better one: of 12 blocks of a transformer on 8 ranks the busiest
    has up to 1.03 of the mean, and block by block 1.07 of the bytes and 1.10 of the FLOPs.

    Args:
        weights: those of one group, or of many.
        loads: one for each rank; updated.

    Returns:
        For each of ``weights`` how many of its matrices each rank owns. The ranks' matrices of a stack follow
            one another in the order of ranks.
    """
    world = len(loads)
    rest = []
    counts = []
    for number, weight in enumerate(weights):
        each, left = divmod(weight.count, world)
        counts.append([each] * world)
        rest += [number] * left
        for load in loads:
            load.nbytes += each * weight.nbytes
            load.flops += each * weight.flops
    nbytes = sum(load.nbytes for load in loads) + sum(weights[number].nbytes for number in rest)
    flops = sum(load.flops for load in loads) + sum(weights[number].flops for number in rest)

    def shares(cost: Load | Matrices, more: Matrices) -> tuple[int, int]:
        # Each times the other's total: the same order as of fractions, without their rounding.
        parts = (cost.nbytes + more.nbytes) * flops, (cost.flops + more.flops) * nbytes
        return max(parts), sum(parts)

    nothing = Load()
    for number in sorted(rest, key=lambda number: shares(nothing, weights[number]), reverse=True):
        weight = weights[number]
        rank = min(range(world), key=lambda rank: shares(loads[rank], weight))
        counts[number][rank] += 1
        loads[rank].nbytes += weight.nbytes
        loads[rank].flops += weight.flops
    return counts


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> int:
    """FLOPs of the quintic Newton-Schulz iterations that orthogonalise matrices, a multiplication and an
    addition being two: of a step of Muon nearly all.

    With m <= n the sides of a matrix, an iteration multiplies [m, n] by [n, m], [m, m] by [m, m], and [m, m]
    by [m, n].

    Args:
        shape: [out, in] of a matrix, or [..., out, in] of a stack.
        steps: iterations.

    Returns:
        Those of all its matrices.
    """
    m, n = sorted(shape[-2:])
    return prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
