"""Who was late: for each wait the rank that launched its collective last, and what it did meanwhile."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.observe.steps.rings import Record, Ring, coordinates
from shardwright.schedule.schedule import EventKind, event_in_words


class LateRank(NamedTuple):
    """rank: that waited in ``wait``. late: the rank that came last, at ``came_s``; it did ``did``, a record
    of its own (None where its ring has none). place: its coordinate on the axis of the wait. By the clock of
    the rings."""

    rank: int
    wait: Record
    late: int
    came_s: float
    did: Record | None
    place: int | None = None

    @property
    def fault_s(self) -> float:
        """Seconds of the wait until the late rank came; the rest is the link's."""
        return max(0.0, min(self.came_s, self.wait.end) - self.wait.start)

    def text(self) -> str:
        """In words."""
        waited = f"rank {self.rank} waits {1e3 * (self.wait.end - self.wait.start):.2f} ms"
        what = collective(self.wait)
        if self.fault_s <= 0:
            return f"{waited} in {what}: all had come, the link is at work"
        did = "" if self.did is None else f", which was in {doing(self.did)}"
        late = f"rank {self.late}" + ("" if self.place is None else f" ({self.wait.axis} {self.place})")
        return f"{waited} in {what}, {1e3 * self.fault_s:.2f} ms of them for {late}{did}"


def late_ranks(rings: Sequence[Ring]) -> list[LateRank]:
    """Of every wait whose collective another rank has on record. rings: on one clock."""
    launched: dict[tuple[str, int], dict[int, float]] = {}
    for ring in rings:
        for each in ring.records:
            if each.kind == "collective":
                launched.setdefault((each.transport, each.number), {})[ring.rank] = each.issue
    tiles, found, places = {}, [], coordinates(rings)
    for ring in rings:
        own = [each for each in ring.records if each.kind in (*_TILES, "action", "wait")]
        tiles[ring.rank] = own, [each.start for each in own]
    for ring in rings:
        for wait in ring.records:
            others = {**launched.get((wait.transport, wait.number), {})}
            others.pop(ring.rank, None)
            if wait.kind == "wait" and others:
                late = max(others, key=others.__getitem__)
                own, starts = tiles[late]
                did = _most(own, starts, wait.start, others[late])
                place = places.get(late, {}).get(wait.axis)
                found.append(LateRank(ring.rank, wait, late, others[late], did, place))
    return found


_LONGEST = 48  # characters of names
_TILES = ("compute", "outside", "span")


def _most(records: Sequence[Record], starts: Sequence[float], start: float, end: float) -> Record | None:
    """What took most of the time from ``start`` to ``end``; a wait in an action goes before the action."""
    best, most = None, (0.0, False)
    for place in range(bisect_left(starts, end) - 1, -1, -1):
        each = records[place]
        share = min(each.end, end) - max(each.start, start), each.kind == "wait"
        if share > most:
            best, most = each, share
        if each.kind in _TILES and each.end <= start:
            break
    return best


def collective(record: Record) -> str:
    """A collective in words, or a wait for one."""
    what = "an agreement of ranks" if record.action == "words" else record.action
    return " ".join(filter(None, (what, called(record.groups), over(record.axis))))


def over(*axes: str) -> str:
    """The axes of a mesh in words; "" of none."""
    named = ", ".join(filter(None, axes))
    return f"over {named}" if named else ""


def called(groups: Sequence[str]) -> str:
    """Names of groups, so that they fit into a line."""
    text = ", ".join(groups)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def doing(record: Record) -> str:
    """A record in words, as what a rank was in."""
    of = f" of {called(record.groups)}" if record.groups else ""
    line = f" ({record.note})" if record.note else ""
    if record.kind == "compute":
        return f"its {record.phase}{of}{line}"
    if record.kind == "outside":
        return ("its loss" if record.action == "loss" else "code outside of the model") + line
    if record.kind == "wait":
        return f"a wait of its own, in {collective(record)}"
    if record.action == "words":
        return collective(record)
    if record.kind == "gc":
        return "a collection of garbage"
    if record.kind == "runtime":
        if record.action in ("begin", "end"):
            return f"the {record.action} of the {record.phase}"
        return event_in_words(EventKind(record.action), called(record.groups))
    return f"{record.action}{of}{line if record.kind == 'span' else ''}"
