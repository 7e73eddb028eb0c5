"""When one rank costs the others much for many steps: noticed by who waits, told in one line of the log.

Nothing is sent while all goes well. A rank whose own waits were more than 5% of its last 20 steps asks all
ranks for their rings, through the status exchange; of several that would, the first one. The pause until the
next look doubles, whatever was found: a job whose link is slow is not asked about all day.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

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


class Lateness:
    """Of this rank: after which step it looks next."""

    def __init__(self) -> None:
        self._next = STEPS + 1
        self._pause = STEPS

    def is_due(self) -> bool:
        """Whether this rank has waited for so long in its last steps that all are to be asked."""
        if recorder.number <= self._next:
            return False
        kept = recorder.steps()[-STEPS - 1 :]
        waited_s = sum(
            each[5] - each[4]
            for *_, written in kept[:-1]
            for each in written
            if each[0] == WAIT and each[3] == process_state.thread
        )
        self._next = recorder.number + self._pause
        if waited_s < SHARE * (kept[-1][1] - kept[0][1]):
            return False
        self._pause = min(2 * self._pause, _MOST_STEPS)
        return True


class Late(NamedTuple):
    """At ``time`` (seconds since 1970) a rank was found to have cost the others ``share`` of their last
    ``steps``, by what it did: cause, and where that was."""

    time: float
    rank: int
    host: str
    share: float
    steps: int
    cause: str
    detail: str

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
    """Which host was late over a run, the one that was named most often first; "" where none ever was."""
    places: dict[tuple[str, int], list[Late]] = {}
    for each in found:
        places.setdefault((each.host, each.rank), []).append(each)
    lines = []
    for (host, rank), of in sorted(places.items(), key=lambda item: -len(item[1])):
        cause, times = Counter(each.cause for each in of).most_common(1)[0]
        share = sum(each.share for each in of) / len(of)
        lines.append(
            f"  {host} (rank {rank}): {len(of)} time(s), {100 * share:.0f}% of the others' steps; "
            f"{cause} {times} time(s)"
        )
    return "\n".join(["late over the run:", *lines]) if lines else ""


def _share(ledger: Ledger, rank: int, steps: set[int]) -> float:
    """Of the others' time in these steps, what they waited for a rank."""
    waited_s = sum(
        line.seconds for line in ledger.lines if line.whose == rank != line.rank and line.step in steps
    )
    total_s = sum(s for (other, step), s in ledger.seconds.items() if other != rank and step in steps)
    return waited_s / total_s if total_s else 0.0
