"""A rank's time in slices that don't overlap, each with what it went to. Pure.

Records say what the training thread was in (compute, data, a wait, ...); what the kernel counts (``CoreUse``)
says how much of that it ran. The rest of it is taken out of these slices and has causes of its own:

    in line for a core      CPU quota, as far as a quota stopped the process then; else busy cores
    blocked                 paging, where pages were read from disk then (data and checkpoints may do that);
                            user code, where the forward or backward did not compute: it slept, or read
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.observe.ledger.causes import (
    CHECKPOINT,
    COMPUTE,
    CORES,
    DATA,
    GARBAGE,
    PAGING,
    QUOTA,
    SCHEDULE,
    SPANS,
    USER,
)
from shardwright.observe.ledger.late import doing
from shardwright.observe.steps.rings import CoreUse, Record, Ring

_NOTED_S = 100e-6  # less of it in a few milliseconds is left where it is
_BLOCKED_S = 1e-3  # so long no core is needed: less is a lock, or a copy by another thread
_FAULT_S = 0.01  # a page from disk takes at most so long: a thread that sleeps may have one, too
_FAULT_CPU_S = 30e-6  # and so much of the kernel's work (13 ms of 374 pages from a virtual disk)


class Slice(NamedTuple):
    """From ``start`` to ``end`` a rank's time went to ``cause``; or to what ``wait`` was for.

    detail: where. line: of the user's program, where the thread was seen in it. timed: of a wait, whether its
    end is when what it was for had come, so that a core was of no use before.
    """

    start: float
    end: float
    cause: str
    detail: str
    wait: Record | None = None
    line: str = ""
    timed: bool = False


def slices(ring: Ring) -> list[Slice]:
    """All of a rank's, by start."""
    return _without_core(_tiles(ring), ring.cores)


def _tiles(ring: Ring) -> list[Slice]:
    """What the records say: garbage collections before waits before what is around them."""
    tiles, inner = [], []
    came = {
        (each.transport, each.number): each.end
        for each in ring.records
        if each.kind == "collective" and each.link
    }
    for each in ring.records:
        if each.kind == "gc":
            inner.append(Slice(each.start, each.end, GARBAGE, ""))
        elif each.kind == "wait":
            there = came.get((each.transport, each.number), each.end)
            timed = each.start < there < each.end
            inner.append(Slice(each.start, there if timed else each.end, "", "", each, timed=timed))
        elif each.kind in ("compute", "outside", "span", "runtime"):
            tiles.append(Slice(each.start, each.end, *_cause(each), line=each.note))
    found, at = [], 0
    tiles.sort()
    inner.sort(key=lambda each: each[:2])
    clear: list[Slice] = []
    for each in inner:  # a collection inside of a wait, or the other way round: the first that began
        if clear and each.start < clear[-1].end:
            each = each._replace(start=clear[-1].end)
        if each.end > each.start:
            clear.append(each)
    for tile in tiles:
        start = max(tile.start, found[-1].end if found else tile.start)
        while at < len(clear) and clear[at].end <= start:
            at += 1
        place = at
        while place < len(clear) and clear[place].start < tile.end:
            cut = clear[place]
            if cut.start > start:
                found.append(tile._replace(start=start, end=cut.start))
            found.append(cut._replace(start=max(cut.start, start)) if cut.start < start else cut)
            start = max(start, cut.end)
            place += 1
        if tile.end > start:
            found.append(tile._replace(start=start))
    return found


def _without_core(found: Sequence[Slice], cores: Sequence[CoreUse]) -> list[Slice]:
    """The same, less the time in which the thread did not run although it did not wait for other ranks."""
    starts, ends = [each.start for each in found], [each.end for each in found]
    taken: list[dict[str, float]] = [{} for _ in found]
    for use in cores:
        first, last = bisect_left(ends, use.start), bisect_left(starts, use.end)
        shares = [min(ends[i], use.end) - max(starts[i], use.start) for i in range(first, last)]
        if use.end - use.start - use.ran_s < _NOTED_S or not sum(shares):
            continue
        parts = _parts(use, [found[i] for i in range(first, last)], shares)
        for place, part in enumerate(parts, first):
            for cause, seconds in part.items():
                taken[place][cause] = taken[place].get(cause, 0.0) + seconds
    result = []
    for each, part in zip(found, taken, strict=True):
        end = each.end
        for cause, seconds in part.items():  # from its end on: a thread that was woken is in line then
            start = max(end - seconds, each.start)
            whole = cause in (QUOTA, CORES)  # whatever the rank does
            result.append(Slice(start, end, cause, "" if whole else each.line or each.detail))
            end = start
        if end > each.start:
            result.append(each._replace(end=end))
    return sorted(result, key=lambda each: each[:2])


def _parts(use: CoreUse, found: Sequence[Slice], shares: Sequence[float]) -> list[dict[str, float]]:
    """Seconds that are to be taken from each of the slices between two looks, by cause."""
    parts: list[dict[str, float]] = [{} for _ in found]
    whole = use.end - use.start
    free_s = sum(share for each, share in zip(found, shares, strict=True) if each.timed)
    queued_s = min(use.queued_s, max(whole - free_s - use.ran_s, 0.0))
    if queued_s > _NOTED_S:
        stopped_s = min(use.throttled_s, queued_s)
        for part, each, share in zip(parts, found, shares, strict=True):
            for cause, seconds in ((QUOTA, stopped_s), (CORES, queued_s - stopped_s)):
                if seconds > 0 and not each.timed:
                    part[cause] = seconds * share / (whole - free_s)
    own_s = sum(share for each, share in zip(found, shares, strict=True) if each.wait is None)
    blocked_s = min(own_s, whole - use.ran_s - queued_s - (whole - own_s))
    waits_s = min(blocked_s, use.faults * _FAULT_S)
    idle_s = blocked_s - waits_s - use.others_s
    paging_s = waits_s + min(use.ran_s, use.faults * _FAULT_CPU_S)
    for part, each, share in zip(parts, found, shares, strict=True):
        if each.wait is not None or blocked_s < _BLOCKED_S:
            continue
        if use.faults and each.cause not in (DATA, CHECKPOINT):
            part[PAGING] = paging_s * share / own_s
        if each.cause == COMPUTE and idle_s > _BLOCKED_S:
            part[USER] = idle_s * share / own_s
    return parts


def _cause(each: Record) -> tuple[str, str]:
    of = f" of {', '.join(each.groups)}" if each.groups else ""
    if each.kind == "compute" or (each.kind == "outside" and each.action == "loss"):
        return COMPUTE, f"{each.phase or 'loss'}{of}"
    if each.kind == "outside":
        return USER, each.note
    if each.kind == "runtime":
        return SCHEDULE, doing(each)
    return SPANS.get(each.action, each.action), each.note
