"""One clock for the records of all ranks, from what they exchanged anyway.

Nobody leaves a collective that all must enter before all have entered it. So where rank i left one at x by
its own clock, and rank j had entered it at y by its own, clock j is at most as far ahead of clock i as
``y <= x + (j - i)``, that is ``j - i >= y - x``; and the same with both exchanged. Over the collectives of a
ring the offset of two clocks is bounded from both sides: it is taken to be the middle, and is wrong by at
most half of the width. (Cristian, Probabilistic clock synchronization, 1989, bounds it by round trips.)
Ranks that share no transport are compared by way of others, along which errors add up.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from math import inf
from typing import NamedTuple

from shardwright.observe.steps.rings import Ring


class ClockOffset(NamedTuple):
    """How far a rank's clock is ahead of the first rank's, and by how much that may be wrong, in seconds.
    ``error_s`` is infinite where nothing says it; below 0 never: where clocks drift it is the drift seen."""

    offset_s: float
    error_s: float


def offsets(rings: Sequence[Ring]) -> dict[int, ClockOffset]:
    """Of the clocks of all ranks to that of the first of ``rings``. Pure."""
    pairs = _pairs(rings)
    first = rings[0].rank
    known = {each.rank: ClockOffset(0.0, inf) for each in rings}
    queue = [(0.0, first, 0.0)]
    done: set[int] = set()
    while queue:  # Dijkstra's, by error
        error_s, rank, offset_s = heapq.heappop(queue)
        if rank in done:
            continue
        done.add(rank)
        known[rank] = ClockOffset(offset_s, error_s)
        for other, (more_s, width_s) in pairs[rank].items():
            if other not in done:
                heapq.heappush(queue, (error_s + width_s, other, offset_s + more_s))
    return known


def _pairs(rings: Sequence[Ring]) -> dict[int, dict[int, tuple[float, float]]]:
    """Return by rank and other rank how far the other's clock is ahead, and the error of that."""
    met: dict[tuple[str, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for ring in rings:
        for each in ring.records:
            if each.kind == "collective" and each.met:
                met[each.transport, each.number][ring.rank] = (each.issue, each.end)
    least: dict[tuple[int, int], float] = {}
    for at in met.values():
        for i, j in permutations(at, 2):
            bound = at[j][0] - at[i][1]  # j - i is at least that
            least[i, j] = max(bound, least.get((i, j), -inf))
    found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for (i, j), low in least.items():
        high = -least[j, i]
        found[i][j] = (low + high) / 2, abs(high - low) / 2
    return found


def on_one_clock(rings: Sequence[Ring]) -> list[Ring]:
    """The same rings, with all times by the clock of the first one."""
    ahead = offsets(rings)
    return [ring.shifted(ahead[ring.rank].offset_s) for ring in rings]
