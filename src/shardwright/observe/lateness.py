"""When one rank costs the others much for many steps: noticed by who waits, told in one line of the log.

Nothing is sent while all goes well. A rank whose own waits were more than 5% of its last 20 steps asks all
ranks for their rings, through the status exchange; of several that would, the first one. The pause until the
next look doubles, whatever was found: a job whose link is slow is not asked about all day.
"""

from collections.abc import Sequence

from shardwright.observe.clocks import on_one_clock
from shardwright.observe.ledger import Ledger, booked
from shardwright.observe.recording import Ring
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


def late_rank(rings: Sequence[Ring]) -> tuple[int, str] | None:
    """The rank that cost the others more than 5% of their last steps, and in at least half of these; with a
    line that says so, and what it did. None where no rank does. rings: of all ranks."""
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
    first = next(loss for loss in ledger.losses() if loss.whose == rank)
    detail = f" ({first.detail})" if first.detail else ""
    return rank, (
        f"rank {rank} on {ledger.hosts[rank]} costs the others {100 * share:.0f}% of the last {len(steps)} "
        f"steps: {first.cause}{detail}"
    )


def _share(ledger: Ledger, rank: int, steps: set[int]) -> float:
    """Of the others' time in these steps, what they waited for a rank."""
    waited_s = sum(
        line.seconds for line in ledger.lines if line.whose == rank != line.rank and line.step in steps
    )
    total_s = sum(s for (other, step), s in ledger.seconds.items() if other != rank and step in steps)
    return waited_s / total_s if total_s else 0.0
