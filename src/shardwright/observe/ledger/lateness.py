"""When one rank costs the others much for many steps: noticed by who waits, told in one line of the log.

Nothing is sent while all goes well. What makes a rank look is cheap and of its own: every 20 steps, how much
of half of them it has waited. To look is to ask all ranks for their rings, through the status exchange, which
costs each rank the reading of 20 steps. So there are three reasons to look (``Looks``):

    the waits have risen    by more than 5% of the time since the last look: within 40 steps of the change
    the waits have ended    while the log says of a rank that it costs the others much
    the pause has ended     where they are as they were. It doubles after each look that brings nothing new
                            (whom the log has named already, or nobody, as where a link is slow)

A line is written when it says something new: a rank, or a cause of it, that was not named since it became
late; the same with much more cost; and that a rank which was named is late no more.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from shardwright import clock
from shardwright.errors import said
from shardwright.observe.ledger.causes import NOBODY, REMEDIES, REST
from shardwright.observe.ledger.ledger import Ledger, booked
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.rings import Ring
from shardwright.observe.watch.waits import OVER, SHARE, STEPS, WaitChange

_CLEARLY = 3.0
"""Times what any other rank costs by the same cause: less is no rank's own. On busy cores, or with batches of
any length, ranks take turns at being last, and over 20 steps one of them often leads by twice:
of 100 such windows of simulated ranks one was named in 83 without this bar, in 13 with 2, in 3 with 3."""
_GROWN = 1.5
"""Times the cost that was said, and 5% of the time more, is worth another line: where nothing has changed the
costs of 20 steps and of the next 20 differ by less."""
_MOST_STEPS = 1280  # between two looks


class Late(NamedTuple):
    """At ``time`` (seconds since 1970) a rank was found to have cost the others ``share`` of their last
    ``steps``, by what it did: cause, and where that was. stands: for how many steps that was so, as far as
    looks have shown: those since the last look, if that found the same and no rank's waits rose since."""

    time: float
    rank: int
    host: str
    share: float
    steps: int
    cause: str
    detail: str
    stands: int = STEPS

    def to_json(self) -> str:
        """An object, without line breaks."""
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> "Late":
        """Of what ``to_json`` returned."""
        return Late(**said(text))

    def text(self) -> str:
        """A line for the log, with the remedy."""
        detail = f" ({self.detail})" if self.detail else ""
        remedy = f". {REMEDIES[self.cause]}" if self.cause in REMEDIES else ""
        return (
            f"rank {self.rank} on {self.host} costs the others {100 * self.share:.0f}% of the last "
            f"{self.steps} steps: {self.cause}{detail}{remedy}"
        )


class NamedLate(NamedTuple):
    """That the log has named a rank, with a cause and the share of the others' time that it cost then."""

    rank: int
    host: str
    cause: str
    share: float


class Looks(NamedTuple):
    """What the ranks of a job know of their last look: the first 20 steps are window 1.

    pause: windows until the next one, if no rank's waits rise. told: what the log has said of ranks that are
    late still. latest: (rank, cause) that the look found; None where nobody was late.
    """

    window: int = 0
    pause: int = 1
    told: tuple[NamedLate, ...] = ()
    latest: tuple[int, str] | None = None

    def is_due(self, window: int, waits: WaitChange) -> bool:
        """Whether a rank is to look."""
        if waits.risen or (waits.ended and self.told):
            return True
        return (waits.much or bool(self.told)) and window >= self.window + self.pause

    def then(
        self, window: int, waits: WaitChange, found: Late | None, shares: Mapping[int, float]
    ) -> tuple["Looks", list[str]]:
        """After another look, for which these ``waits`` were the reason, and the new lines for the log.

        found: who is late, if anybody is. shares: of the others' time what each rank costs, by any cause;
        empty where not all have answered.
        """
        over = {each.rank for each in self.told if shares.get(each.rank, 1.0) < OVER}
        told = [each for each in self.told if each.rank not in over]
        last = {each.rank: each for each in self.told}  # the cause that was named last
        lines = [
            f"rank {rank} on {last[rank].host} no longer costs the others much: {last[rank].cause} has ended"
            for rank in sorted(over)
        ]
        again = waits.risen and found is None  # a ring may have come too late to tell
        if found is not None:
            known = next(
                (each for each in told if (each.rank, each.cause) == (found.rank, found.cause)), None
            )
            again = known is None
            if known is None or found.share > max(_GROWN * known.share, known.share + SHARE):
                told = [each for each in told if each is not known]
                told.append(NamedLate(found.rank, found.host, found.cause, found.share))
                lines.append(found.text())
        latest = None if found is None else (found.rank, found.cause)
        pause = 1 if again else min(2 * self.pause, _MOST_STEPS // STEPS)
        return Looks(window, pause, tuple(told), latest), lines

    def stands(self, window: int, found: Late) -> int:
        """Steps that ``found`` stands for: since the last look, if that found the same; else its own."""
        same = self.latest == (found.rank, found.cause)
        return STEPS * (window - self.window) if same else found.steps

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(self)

    @staticmethod
    def from_json(text: str) -> "Looks":
        """Of what ``to_json`` returned; of "", before the first look."""
        if not text:
            return Looks()
        window, pause, told, latest = said(text)
        return Looks(window, pause, tuple(NamedLate(*each) for each in told), latest and tuple(latest))


def judged(rings: Sequence[Ring], world: int) -> tuple[Late | None, dict[int, float]]:
    """Of their last 20 steps: who is late, and what each rank costs the others (see ``Looks.then``)."""
    if len(rings) < 2:
        return None, {}
    numbers = set.intersection(*({step.number for step in ring.steps[:-1]} for ring in rings))
    ledger = booked(on_one_clock(rings), sorted(numbers)[-STEPS:])
    if not ledger.seconds:
        return None, {}
    steps = {step for _, step in ledger.seconds}
    all_said = len(rings) == world
    return _late_rank(ledger), {rank: _share(ledger, rank, steps) for rank in ledger.hosts if all_said}


def _late_rank(ledger: Ledger) -> Late | None:
    """The rank that cost the others more than 5% of these steps, and in at least half of them, by causes that
    are clearly its own. None where no rank does."""
    steps = {step for _, step in ledger.seconds}
    causes = {rank: _own_causes(ledger, rank) for rank in ledger.hosts}
    shares = {rank: _share(ledger, rank, steps, own) for rank, own in causes.items()}
    rank = max(shares, key=shares.__getitem__)
    own = causes[rank]
    slow = [step for step in steps if _share(ledger, rank, {step}, own) > SHARE]
    if shares[rank] <= SHARE or len(slow) < len(steps) / 2:
        return None
    waits = ledger._replace(lines=[line for line in ledger.lines if line.rank != rank])
    first = next(loss for loss in waits.losses() if loss.whose == rank and loss.cause in own)
    return Late(clock.time(), rank, ledger.hosts[rank], shares[rank], len(steps), first.cause, first.detail)


def _own_causes(ledger: Ledger, rank: int) -> set[str]:
    """The causes by which the others wait clearly more for this rank than for any other one."""
    cost: dict[str, Counter[int]] = defaultdict(Counter)
    for line in ledger.lines:
        if line.whose not in (line.rank, NOBODY) and line.cause != REST:
            cost[line.cause][line.whose] += line.seconds  # pyright: ignore[reportArgumentType]
    return {
        cause
        for cause, by_rank in cost.items()
        if by_rank[rank] > _CLEARLY * max((s for other, s in by_rank.items() if other != rank), default=0.0)
    }


def history(found: Sequence[Late]) -> str:
    """Which host was late over a run, the one that was late for most steps first; "" where none ever was."""
    places: dict[tuple[str, int], list[Late]] = {}
    for each in found:
        places.setdefault((each.host, each.rank), []).append(each)
    lines = []
    for (host, rank), of in sorted(places.items(), key=lambda item: -_steps(item[1])):
        causes = Counter[str]()
        for each in of:
            causes[each.cause] += each.stands
        (cause, most), *_ = causes.most_common(1)
        share = sum(each.share * each.stands for each in of) / _steps(of)
        lines.append(
            f"  {host} (rank {rank}): {_steps(of)} steps, {100 * share:.0f}% of the others' time in them; "
            f"{cause} in {most}"
        )
    return "\n".join(["late over the run:", *lines]) if lines else ""


def _steps(of: Sequence[Late]) -> int:
    return sum(each.stands for each in of)


def _share(ledger: Ledger, rank: int, steps: set[int], causes: Container[str] | None = None) -> float:
    """Return the share of the others' time in which they waited for a rank, by these causes alone."""
    waited_s = sum(
        line.seconds
        for line in ledger.lines
        if line.whose == rank != line.rank and line.step in steps and (causes is None or line.cause in causes)
    )
    total_s = sum(s for (other, step), s in ledger.seconds.items() if other != rank and step in steps)
    return waited_s / total_s if total_s else 0.0
