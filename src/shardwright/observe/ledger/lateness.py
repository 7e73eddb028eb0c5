"""When one rank costs the others much for many steps: noticed by who waits, told in one line of the log.

Nothing is sent while all goes well. What makes a rank look is cheap and of its own: every 20 steps, how much
of half of them it has waited. To look is to ask all ranks for their rings, through the status exchange, which
costs each rank the reading of 20 steps. So there are two reasons to look (``Looks``):

    the waits have risen    by more than 5% of the time since the last look: within 40 steps of the change
    the pause has ended     where they are as they were. It doubles after each look that brings nothing new
                            (whom the log has named already, or nobody, as where a link is slow)
"""

import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_high
from typing import Any, NamedTuple

from shardwright.observe.ledger.causes import REMEDIES
from shardwright.observe.ledger.ledger import Ledger, booked
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.rings import Ring
from shardwright.transport.launches import process_state
from shardwright.transport.recorder import WAIT, recorder

STEPS = 20
"""Of which is judged."""
SHARE = 0.05
"""Of their time: what a rank may cost the others."""
_MOST_STEPS = 1280  # between two looks
_FALLEN = 4  # windows with fewer waits, until a rise to what they were is one


class Lateness:
    """Of this rank: whether it waits, and more than it did."""

    def __init__(self) -> None:
        self._window = 0
        self._known_s = 0.0  # waited in a step when its waits last rose, or less since
        self._last = deque[float](maxlen=_FALLEN)

    def rise(self) -> bool | None:
        """Once for each 20 steps, the same ones on all ranks: whether this rank waits for more of its time
        than when it last said so. None where it hardly waits, or has been asked already."""
        if self.window <= self._window:
            return None
        self._window = self.window
        kept = recorder.steps()[-STEPS - 1 :]
        if len(kept) < 2:  # steps of so many records that no other one is remembered
            return None
        # Of a step in the middle: one checkpoint among them isn't a rank that is late in half of them.
        step_s = median_high(after[1] - before[1] for before, after in pairwise(kept))
        waited_s = median_high(_waited_s(written) for *_, written in kept[:-1])
        self._last.append(waited_s)
        self._known_s = min(self._known_s, max(self._last))
        if waited_s < SHARE * step_s:
            return None
        risen = waited_s - self._known_s > SHARE * step_s
        if risen:
            self._known_s = waited_s
        return risen

    @property
    def window(self) -> int:
        """How many times 20 steps have ended; the first step, in which a process warms up, is in none."""
        return (recorder.number - 2) // STEPS


def _waited_s(written: Sequence[tuple[Any, ...]]) -> float:
    return sum(each[5] - each[4] for each in written if each[0] == WAIT and each[3] == process_state.thread)


class Looks(NamedTuple):
    """What the ranks of a job know of their last look: the first 20 steps are window 1.

    pause: windows until the next one, if no rank's waits rise. said: (rank, cause) of all that were named.
    latest: what that look found; None where nobody was late.
    """

    window: int = 0
    pause: int = 1
    said: tuple[tuple[int, str], ...] = ()
    latest: tuple[int, str] | None = None

    def is_due(self, window: int, risen: bool) -> bool:
        """Whether a rank that waits is to look."""
        return risen or window >= self.window + self.pause

    def then(self, window: int, risen: bool, found: "Late | None") -> "Looks":
        """After another look, because of a rise or not, and what it found."""
        latest = None if found is None else (found.rank, found.cause)
        said = self.said if latest is None or latest in self.said else (*self.said, latest)
        again = said != self.said or (risen and latest is None)  # a ring may have come too late to tell
        pause = 1 if again else min(2 * self.pause, _MOST_STEPS // STEPS)
        return Looks(window, pause, said, latest)

    def stands(self, window: int, found: "Late") -> int:
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
        window, pause, said, latest = json.loads(text)
        return Looks(window, pause, tuple((rank, cause) for rank, cause in said), latest and tuple(latest))


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
        return Late(**json.loads(text))

    def text(self) -> str:
        """A line for the log, with the remedy."""
        detail = f" ({self.detail})" if self.detail else ""
        remedy = f". {REMEDIES[self.cause]}" if self.cause in REMEDIES else ""
        return (
            f"rank {self.rank} on {self.host} costs the others {100 * self.share:.0f}% of the last "
            f"{self.steps} steps: {self.cause}{detail}{remedy}"
        )


def late_rank(rings: Sequence[Ring]) -> Late | None:
    """The rank that cost the others more than 5% of their last steps, and in at least half of these. None
    where no rank does. rings: of all ranks."""
    if len(rings) < 2:
        return None
    numbers = set.intersection(*({step.number for step in ring.steps[:-1]} for ring in rings))
    ledger = booked(on_one_clock(rings), sorted(numbers)[-STEPS:])
    late = ledger.late()
    if not late or not ledger.seconds:
        return None
    rank = max(late, key=late.__getitem__)
    steps = {step for _, step in ledger.seconds}
    slow = [step for step in steps if _share(ledger, rank, {step}) > SHARE]
    share = _share(ledger, rank, steps)
    if share <= SHARE or len(slow) < len(steps) / 2:
        return None
    waits = ledger._replace(lines=[line for line in ledger.lines if line.rank != rank])
    first = next(loss for loss in waits.losses() if loss.whose == rank)
    return Late(time.time(), rank, ledger.hosts[rank], share, len(steps), first.cause, first.detail)


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


def _share(ledger: Ledger, rank: int, steps: set[int]) -> float:
    """Of the others' time in these steps, what they waited for a rank."""
    waited_s = sum(
        line.seconds for line in ledger.lines if line.whose == rank != line.rank and line.step in steps
    )
    total_s = sum(s for (other, step), s in ledger.seconds.items() if other != rank and step in steps)
    return waited_s / total_s if total_s else 0.0
