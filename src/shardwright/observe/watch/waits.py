"""How much of its time a rank waits for the others, of every 20 steps: who waits much looks for a late rank.

It sends nothing and reads nothing but what the recorder has: ``observe/ledger/lateness.py`` says what is done
with it, and is loaded once a rank waits much.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_high
from typing import Any, NamedTuple

from shardwright.transport.process import process_state
from shardwright.transport.recorder import WAIT

STEPS = 20
"""Of which is judged."""
SHARE = 0.05
"""Of their time: what a rank may cost the others."""
OVER = SHARE / 2
"""Of the others' time: a rank that was named costs them less when it is late no more. Were that the same bar,
one that costs about 5% would be named and take it back every 20 steps."""
_FALLEN = 4  # windows with fewer waits, until a rise to what they were is one
_LOOKS_AFTER = 2  # waits have ended: the first of the 20 steps then may still be slow


class WaitChange(NamedTuple):
    """Of a rank in 20 steps. much: it waits for more than 5% of its time. risen: by more than that since it
    last rose. ended: it waited much, and does hardly now."""

    much: bool
    risen: bool
    ended: bool


class OwnWaits:
    """Of this rank: whether it waits, and more than it did."""

    def __init__(self) -> None:
        self._window = 0
        self._known_s = 0.0  # waited in a step when its waits last rose, or less since
        self._last = deque[float](maxlen=_FALLEN)
        self._looks_after = 0

    def change(self) -> WaitChange | None:
        """Once for each 20 steps, the same ones on all ranks. None where it has been asked already."""
        if self.window <= self._window:
            return None
        self._window = self.window
        kept = process_state.recorder.steps()[-STEPS - 1 :]
        if len(kept) < 2:  # steps of so many records that no other one is remembered
            return None
        # Of a step in the middle: one checkpoint among them isn't a rank that is late in half of them.
        step_s = median_high(after[1] - before[1] for before, after in pairwise(kept))
        waited_s = median_high(_waited_s(written) for *_, written in kept[:-1])
        self._last.append(waited_s)
        self._known_s = min(self._known_s, max(self._last))
        much = waited_s >= SHARE * step_s
        risen = much and waited_s - self._known_s > SHARE * step_s
        if risen:
            self._known_s = waited_s
        ended = self._looks_after > 0 and waited_s < OVER * step_s
        self._looks_after = _LOOKS_AFTER if much else self._looks_after - ended
        return WaitChange(much, risen, ended)

    @property
    def window(self) -> int:
        """How many times 20 steps have ended; the first step, in which a process warms up, is in none."""
        return (process_state.recorder.number - 2) // STEPS


def _waited_s(written: Sequence[tuple[Any, ...]]) -> float:
    return sum(each[5] - each[4] for each in written if each[0] == WAIT and each[3] == process_state.thread)
