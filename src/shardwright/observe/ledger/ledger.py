"""The ledger of waits: every millisecond of a rank's step booked to a cause. Pure: from records to a table.

What a rank does by itself is measured: compute, data, optimizer, checkpoint, garbage collection, user code,
the runtime's own launches and copies, and what kept it from running (paging, a CPU quota,
busy cores; see ``slices.py``). A wait is taken apart:

    |-- until the last rank has launched it --|-- until its bytes are there --|
      late rank: what it did more than I did    link; launches and copies, if launched only when needed;
                                                or what held up a rank's threads that send: a quota, a
                                                collection of garbage

What a late rank did more: both ranks' time is compared from the last collective that both launched at the
same time up to this one. Where the late rank itself waited there, the causes of that wait are the causes of
this one, so the rank at the end of a chain of waits is named. What nobody has recorded is "rest".
Whose link it is that is slow: ``slow_links.py``.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwright.columns import in_columns
from shardwright.observe.ledger.causes import GARBAGE, LINK, NOBODY, QUOTA, REMEDIES, REST, SCHEDULE, WORK
from shardwright.observe.ledger.late import over
from shardwright.observe.ledger.slices import Slice, slices
from shardwright.observe.ledger.slow_links import slow_links, whose_link
from shardwright.observe.steps.rings import Record, Ring, coordinates

_IN_STEP = 0.1  # of the lateness: ranks that launched nearer to each other than that were in step
_FAR_BACK = 400  # collectives
_NOTED_S = 50e-6  # lateness below it is the clocks'
_ON_DEMAND = 0.1  # of a transfer: launched so shortly before it was needed, it hides behind nothing
_IN_PLACE = 0.25  # of the seconds: fewer in one place, and none is said
_SLOWER = 1.5  # than the link usually is
_STOPPED_S = 1e-3  # by a quota, between two looks; or by a collection of garbage


class Line(NamedTuple):
    """``seconds`` of a step of ``rank`` went to ``cause``.

    whose: doing that is: its own, or a late rank's; of a link that is slower than the others its rank's, else
    NOBODY's. detail: where: a module, a line of the user's, a transport. axis: of the mesh, over which was
    waited; "" where nobody did, or the axis has no name.
    """

    rank: int
    step: int
    cause: str
    whose: int
    seconds: float
    detail: str = ""
    axis: str = ""


class Loss(NamedTuple):
    """What a cause at a rank has cost all ranks together, in seconds. axes: over which they waited for it."""

    cause: str
    whose: int
    seconds: float
    detail: str = ""
    axes: tuple[str, ...] = ()


class Ledger(NamedTuple):
    """lines: of all ranks and steps. seconds: how long each (rank, step) took. hosts: by rank. places: by
    rank on the axes of meshes."""

    lines: list[Line]
    seconds: Mapping[tuple[int, int], float]
    hosts: Mapping[int, str]
    places: Mapping[int, Mapping[str, int]] = {}

    def named(self, rank: int) -> str:
        """A rank with its host and its coordinates."""
        places = "".join(f", {axis} {place}" for axis, place in self.places.get(rank, {}).items())
        return f"rank {rank} ({self.hosts[rank]}{places})"

    def of(self, rank: int, step: int) -> list[Line]:
        """The lines of one step of one rank, the largest first. Their sum is the step."""
        found = [line for line in self.lines if (line.rank, line.step) == (rank, step)]
        return sorted(found, key=lambda line: -line.seconds)

    def losses(self, steps: Iterable[int] | None = None) -> list[Loss]:
        """What the steps lost, and to whom, the largest first: all but a rank's own work."""
        wanted = None if steps is None else set(steps)
        cost: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        waited: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for line in self.lines:
            own_work = line.whose == line.rank and line.cause in WORK
            if line.cause != REST and not own_work and (wanted is None or line.step in wanted):
                cost[line.cause, line.whose][line.detail] += line.seconds
                waited[line.cause, line.whose][line.axis] += line.seconds
        found = [
            Loss(*key, sum(parts.values()), _where(parts), _axes(waited[key])) for key, parts in cost.items()
        ]
        return sorted(found, key=lambda loss: -loss.seconds)

    def late(self) -> dict[int, float]:
        """Seconds that each rank made the others wait, per other rank: what steps would be shorter by."""
        world = len({line.rank for line in self.lines})
        waited: dict[int, float] = defaultdict(float)
        for line in self.lines:
            if line.whose not in (line.rank, NOBODY) and line.cause != REST:
                waited[line.whose] += line.seconds / max(world - 1, 1)
        return dict(waited)


def booked(rings: Sequence[Ring], steps: Iterable[int] | None = None) -> Ledger:
    """The ledger of the steps that all ``rings`` (on one clock) have whole, or of those of ``steps``.

    Of itself without the first step, which began as the process did.
    """
    books = _Books(rings)
    common = set.intersection(*({step.number for step in ring.steps[:-1]} for ring in rings))
    wanted = common - {1} if steps is None else common & set(steps)
    lines, seconds = [], {}
    for ring in rings:
        for step in ring.steps:
            if step.number in wanted:
                seconds[ring.rank, step.number] = step.end - step.start
                lines += books.step(ring.rank, step.number, step.start, step.end)
    return Ledger(lines, seconds, {ring.rank: ring.host for ring in rings}, coordinates(rings))


class _Parts(NamedTuple):
    """A wait, taken apart, in seconds.

    late_s: until ``late`` launched it, the last rank that did. usual_s: from then on, no longer than such
    transfers usually take. on_demand: whether that had nothing to hide behind. held_s: longer than that,
    while ``held`` (a cause, and a rank) held up its messages. slow_s: the rest, by who its link is between.
    """

    late: int
    late_s: float
    usual_s: float
    on_demand: bool
    held: tuple[str, int]
    held_s: float
    slow_s: tuple[tuple[tuple[int, ...], float], ...]


class _Books:
    """Slices of each rank's time, and what each wait was for."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._issues: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._order: dict[int, list[tuple[float, tuple[str, int]]]] = {}
        self._members = {name: ranks for ring in rings for name, ranks in ring.transports.items()}
        self._slices = {ring.rank: slices(ring) for ring in rings}
        self._holdups = {ring.rank: _holdups(ring) for ring in rings}
        self._starts = {rank: [each.start for each in own] for rank, own in self._slices.items()}
        for ring in rings:
            own = [each for each in ring.records if each.kind == "collective"]
            for each in own:
                self._issues[each.transport, each.number][ring.rank] = each.issue
            self._order[ring.rank] = [(each.issue, (each.transport, each.number)) for each in own]
            self._order[ring.rank].sort()
        self._usual = _usual_rates(rings, self._issues)
        waits = [(each, rank) for rank, own in self._slices.items() for each in own if each.wait is not None]
        waits.sort(key=lambda found: (found[0].end, found[1]))
        parts = [self._apart(rank, each, each.wait) for each, rank in waits if each.wait is not None]
        self._slow = slow_links(rings)
        self._waits: dict[tuple[int, float], list[Line]] = {}
        for (each, rank), part in zip(waits, parts, strict=True):
            assert each.wait is not None
            self._waits[rank, each.start] = self._wait(rank, each.wait, part)

    def step(self, rank: int, number: int, start: float, end: float) -> list[Line]:
        """All of one step; what no slice covers is the rest."""
        profile = self._profile(rank, start, end)
        lines = [Line(rank, number, *key, *said) for key, said in profile.items()]
        rest = end - start - sum(line.seconds for line in lines)
        return [*lines, Line(rank, number, REST, rank, max(rest, 0.0))]

    def _profile(self, rank: int, start: float, end: float) -> dict[tuple[str, int], tuple[float, str, str]]:
        """Seconds by (cause, whose) between two times, with the detail and axis that most of them have."""
        own, starts = self._slices[rank], self._starts[rank]
        spent: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        waited: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for each in own[max(bisect_right(starts, start) - 1, 0) : bisect_left(starts, end)]:
            seconds = min(each.end, end) - max(each.start, start)
            if seconds <= 0:
                continue
            if each.wait is None:
                spent[each.cause, rank][each.detail] += seconds
                waited[each.cause, rank][""] += seconds
                continue
            lines = self._waits.get((rank, each.start), ())
            total = sum(line.seconds for line in lines) or 1.0
            for line in lines:
                spent[line.cause, line.whose][line.detail] += seconds * line.seconds / total
                waited[line.cause, line.whose][line.axis] += seconds * line.seconds / total
        return {
            key: (sum(parts.values()), _where(parts), max(waited[key], key=waited[key].__getitem__))
            for key, parts in spent.items()
        }

    def _apart(self, rank: int, each: Slice, wait: Record) -> _Parts:
        key = wait.transport, wait.number
        issues = self._issues.get(key, {})
        came, late = max(((at, other) for other, at in issues.items()), default=(each.start, rank))
        total_s, took_s = each.end - each.start, each.end - min(max(came, wait.issue), each.end)
        # Had all come when this rank did, its bytes would have been there so much after the wait began.
        left_s = min(max(wait.issue + took_s - each.start, 0.0), total_s)
        if late == rank or total_s - left_s < _NOTED_S:
            left_s = total_s
        took_s = max(took_s, left_s)
        usual_s = self._usual.get((wait.transport, wait.action, wait.nbytes), took_s)
        slower_s = min(took_s - usual_s, left_s) if took_s > _SLOWER * usual_s else 0.0
        members = wait.link or (rank, *self._members.get(wait.transport, ()))
        held_s, cause, who = max(self._held(member, each.end - took_s, each.end) for member in members)
        held_s = min(held_s, slower_s)
        slow_s = slower_s - held_s
        link_s = min(max(each.end - wait.end + wait.link_s, 0.0), slow_s)
        return _Parts(
            late,
            late_s=total_s - left_s,
            usual_s=left_s - slower_s,
            on_demand=not wait.is_torchs and each.start - wait.issue < _ON_DEMAND * took_s,
            held=(cause, who),
            held_s=held_s,
            slow_s=((wait.link, link_s), ((rank,), slow_s - link_s)),
        )

    def _wait(self, rank: int, wait: Record, part: _Parts) -> list[Line]:
        lines = []
        if part.late_s:
            shares = self._more(rank, part.late, (wait.transport, wait.number), part.late_s)
            lines += [
                Line(rank, 0, *who, part.late_s * share, detail) for who, (share, detail) in shares.items()
            ]
        if part.on_demand:
            lines.append(Line(rank, 0, SCHEDULE, rank, part.usual_s, f"{wait.action} on demand"))
        else:
            lines.append(Line(rank, 0, LINK, NOBODY, part.usual_s, wait.transport))
        lines.append(Line(rank, 0, *part.held, part.held_s))
        for ends, seconds in part.slow_s:
            whose, where = whose_link(ends, self._slow)
            lines.append(Line(rank, 0, LINK, whose, seconds, where or wait.transport))
        return [line._replace(axis=wait.axis) for line in lines if line.seconds > 0]

    def _held(self, rank: int, start: float, end: float) -> tuple[float, str, int]:
        """Seconds between two times, at most, in which something held up a rank with all of its threads, what
        that was, and the rank: when between two looks a quota stopped it isn't known."""
        spent = {QUOTA: 0.0, GARBAGE: 0.0}
        for cause, each_start, each_end, seconds in self._holdups.get(rank, ()):
            if each_start < end and each_end > start:
                spent[cause] += min(seconds, min(each_end, end) - max(each_start, start))
        cause = max(spent, key=spent.__getitem__)
        return spent[cause], cause, rank

    def _more(
        self, rank: int, late: int, key: tuple[str, int], late_s: float
    ) -> dict[tuple[str, int], tuple[float, str]]:
        """What a late rank did more than this one before a collective: shares of it, by (cause, whose)."""
        own_from, late_from = self._in_step(rank, late, key, late_s)
        theirs = self._profile(late, late_from, self._issues[key][late])
        ours = self._profile(rank, own_from, self._issues[key][rank])
        more: dict[tuple[str, int], tuple[Any, ...]] = {}
        for (cause, whose), (seconds, detail, _) in theirs.items():
            same = (cause, rank if whose == late and cause != LINK else whose)
            extra = seconds - ours.get(same, (0.0,))[0]
            if extra > 0.05 * late_s:
                more[cause, whose] = (extra, detail)
        if not more:  # it did nothing longer: what it did when this rank waited
            waited_from = self._issues[key][late] - late_s
            more = self._profile(late, waited_from, self._issues[key][late]) or {(REST, late): (1.0, "")}
        total = sum(extra for extra, *_ in more.values())
        return {who: (extra / total, detail) for who, (extra, detail, *_) in more.items()}

    def _in_step(self, rank: int, late: int, key: tuple[str, int], late_s: float) -> tuple[float, float]:
        """When both launched the last collective before this one at which the late rank wasn't late yet."""
        order = self._order[rank]
        place = bisect_left(order, (self._issues[key][rank], key))
        best: tuple[float, float, float] | None = None
        for issue, before in reversed(order[max(place - _FAR_BACK, 0) : place]):
            theirs = self._issues[before].get(late)
            if theirs is None or theirs >= self._issues[key][late]:
                continue
            lag = theirs - issue
            if best is None or lag < best[0]:
                best = (lag, issue, theirs)
            if lag <= _IN_STEP * late_s:
                break
        if best is None:
            return self._starts[rank][0], self._starts[late][0]
        return best[1], best[2]


def _holdups(ring: Ring) -> list[tuple[str, float, float, float]]:
    """What held up a rank with all of its threads, those that send and receive among them, as (cause, start,
    end, seconds of that). Python's collector holds the interpreter's lock."""
    stops = [(QUOTA, each.start, each.end, each.throttled_s) for each in ring.cores]
    collections = [
        (GARBAGE, each.start, each.end, each.end - each.start) for each in ring.records if each.kind == "gc"
    ]
    return [each for each in (*stops, *collections) if each[-1] > _STOPPED_S]


def _where(parts: Mapping[str, float]) -> str:
    """The detail that most seconds have, of those that say anything; "" where that is too little of them."""
    place = max(parts, key=lambda each: (bool(each), parts[each]))
    return place if parts[place] >= _IN_PLACE * sum(parts.values()) else ""


def _axes(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Axes over which a good part of these seconds was waited, the most first."""
    waited = {axis: each for axis, each in seconds.items() if axis}
    order = sorted(waited, key=lambda axis: -waited[axis])
    return tuple(axis for axis in order if waited[axis] >= _IN_PLACE * sum(waited.values()))


def _usual_rates(
    rings: Sequence[Ring], issues: Mapping[tuple[str, int], Mapping[int, float]]
) -> dict[tuple[str, str, int], float]:
    """Seconds of transfers by transport, verb and bytes, all ranks having come: of the fastest tenth."""
    seen: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for ring in rings:
        for each in ring.records:
            if each.kind == "collective" and each.met:
                came = max(issues[each.transport, each.number].values())
                seen[each.transport, each.action, each.nbytes].append(max(each.end - came, 0.0))
    return {key: sorted(times)[len(times) // 10] for key, times in seen.items()}


def table(ledger: Ledger, step: int, ranks: Sequence[int] | None = None) -> str:
    """One step for people: a row for each cause, a column of milliseconds for each of ``ranks`` (default: the
    first eight); then whom the step lost most to."""
    shown = list(ledger.hosts if ranks is None else ranks)[:8]
    rows: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank in shown:
        for line in ledger.of(rank, step):
            rows[_name(line, rank)][rank] += line.seconds
    order = sorted(rows, key=lambda name: (name == REST, -sum(rows[name].values())))
    lines = [["ms of step " + str(step), *(f"rank {rank}" for rank in shown)]]
    lines += [[name, *(_ms(rows[name].get(rank, 0.0)) for rank in shown)] for name in order]
    lines.append(["the step", *(_ms(ledger.seconds[rank, step]) for rank in shown)])
    return "\n".join(in_columns(lines, "<>"))


def _name(line: Line, rank: int) -> str:
    if line.cause == LINK and line.whose != NOBODY:
        return f"link of rank {line.whose} {over(line.axis)}".strip()
    late = line.whose not in (rank, NOBODY)
    cause = f"late: rank {line.whose}, {line.cause}" if late else line.cause
    return f"{cause} {over(line.axis)}".strip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds >= 5e-5 else "-"


def summary(ledger: Ledger) -> str:
    """What the steps of a ledger lost, and to whom: the five largest, and which rank the others wait for."""
    steps, world = len({step for _, step in ledger.seconds}), len(ledger.hosts)
    total = sum(ledger.seconds.values())
    if not total:
        return ""
    lines = [f"of the last {steps} step(s), {1e3 * total / len(ledger.seconds):.1f} ms each, the ranks lost:"]
    for loss in ledger.losses()[:5]:
        whose = "" if loss.whose == NOBODY else ledger.named(loss.whose)
        said = "  ".join(filter(None, (loss.cause, whose, loss.detail, over(*loss.axes))))
        lines.append(f"  {100 * loss.seconds / total:5.1f}%  {said}")
    if (first := ledger.losses()[:1]) and first[0].cause in REMEDIES:
        lines.append(f"against {first[0].cause}: {REMEDIES[first[0].cause]}")
    late = ledger.late()
    if late and world > 1:
        rank = max(late, key=late.__getitem__)
        share = late[rank] * world / total
        lines.append(f"most waited for: {ledger.named(rank)}, {100 * share:.1f}% of the others' time")
    return "\n".join(lines)
