"""Whose link is slow, of how long messages took. Pure.

Of each collective a rank has on record which message took longest to come, from its first byte to its last;
so who was late with it, or computes meanwhile, doesn't count. What it took longer than such messages usually
do is counted for both of its ends: its sender sends slowly, its receiver receives slowly, or a receiver's
acknowledgements come back slowly. Where several took as long it is counted for the receiver, whose link they
share. A rank whose link is slow is an end of almost all that is slow, and the others each of a share of it.
Where all links are slow, all ranks are ends of as much. Of two that are slow in the same collectives neither
is named.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from shardwright.observe.ledger.causes import NOBODY
from shardwright.observe.steps.rings import Record, Ring

_CLEARLY = 3.0  # times what is slow between the other ranks: of three equally slow ones it is twice that
_RECEIVER = 0.9  # of a second from one sender alone: what is received slowly comes so from all of them
_SLOWER = 1.5  # than usual


def slow_links(rings: Sequence[Ring]) -> dict[int, str]:
    """The ranks whose links are slower than the others', and which way; of fewer than three ranks none can be
    told."""
    left = _longer(rings)
    found: dict[int, str] = {}
    others = {ring.rank for ring in rings}
    while len(others) > 2:
        about = _by_rank(left)
        rank = max(others, key=lambda each: about.get(each, 0.0))
        others.discard(rank)
        sent_s = sum(seconds for ends, seconds in left.items() if ends[0] == rank and len(ends) > 1)
        left = {ends: seconds for ends, seconds in left.items() if rank not in ends}
        between = _by_rank(left)
        if about.get(rank, 0.0) <= _CLEARLY * median(between.get(each, 0.0) for each in others):
            break
        found[rank] = "what it sends" if sent_s > about[rank] / 2 else "what it receives"
    return found


def whose_link(ends: tuple[int, ...], slow: Mapping[int, str]) -> tuple[int, str]:
    """To whom of the ``slow`` what is between these is booked, and where. Nobody's is said with its path."""
    for rank in ends:
        if rank in slow:
            return rank, slow[rank]
    return NOBODY, f"rank {ends[0]} to rank {ends[1]}" if len(ends) > 1 else ""


def _longer(rings: Sequence[Ring]) -> dict[tuple[int, ...], float]:
    """Seconds that messages took longer than such messages usually do, those of the fastest tenth."""
    alike: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for ring in rings:
        for each in ring.records:
            if each.kind == "collective" and each.link:
                alike[each.transport, each.action, each.nbytes].append(each)
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for records in alike.values():
        usual_s = sorted(each.link_s for each in records)[len(records) // 10]
        for each in records:
            if each.link_s > _SLOWER * usual_s:
                found[each.link] += each.link_s - usual_s
    return found


def _by_rank(longer_s: Mapping[tuple[int, ...], float]) -> dict[int, float]:
    """What of these seconds is about each rank's link."""
    found: dict[int, float] = defaultdict(float)
    for (first, *to), seconds in longer_s.items():
        found[first] += seconds
        for rank in to:
            found[rank] += _RECEIVER * seconds
    return found
