"""Tests see each comparison, constant and return of the pure rooms that is turned (mutants.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure import mutants

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/design/follower.md"
_AGAIN = "what stands is written again, in as many calls as it would be read"
_BELOW = "what is below the least is refused, however far below"
_BAR = "of numbers that are measured none is just the bar"
_CHECKER = "for the type checker: it isn't so there"
_EMPTY = "what takes no time is kept, or not: nothing is booked to it"
_MEMORY = "a bound of what is remembered or looked at, which may be any"
_NUMBERED = "collectives have numbers of their own, of which only equal ones count"
_ORDER = "of two that begin and end together either may be first"
_REPLACED = "a place is taken that is written before it is read"
_UNREAD = "a bit that nobody reads at that point"
_SCALED = "all that is compared grows alike"
_FOREIGN = "waited_s < FOREIGN_S < max((answer.foreign_s for answer  ... .values()))"
_LAST = "max((log.count for log, _ in alike.values())) + 1"
_EXCHANGE, _WATCH = "observe/watch/status_exchange.py", "observe/watch/watchdog.py"
_AS_OFTEN = "two ranks look as often as one"
_FLUSHED = "stderr writes each line at once"
_EXACTLY = "measured seconds are never exactly that many"
REASONED: dict[str, str] = {
    "schedule/follower.py Follower.__init__: self._launched = 0: 0 is 1": _REPLACED,
    "schedule/follower.py Follower.__init__: self._given = 0: 0 is 1": _REPLACED,
    "schedule/following.py Following.__init__: self._place = 0: 0 is 1": _REPLACED,
    "schedule/follower.py Follower.abandon: ((), (), (), 0): 0 is 1": _REPLACED,
    "schedule/following.py Following._leave_exact: ((), 0): 0 is 1": _REPLACED,
    "schedule/layout.py ParamLayout.strides: [0]: 0 is 1": _REPLACED,
    "schedule/layout.py contiguous_strides: ParamLayout(shape, 1, None): 1 is 2": (
        "what is kept whole is the same in any world"
    ),
    "schedule/scheduler.py Scheduler.__init__: self._issued = 0: 0 is 1": _NUMBERED,
    "schedule/scheduler.py Scheduler._begin: self._issued += 1: 1 is 2": _NUMBERED,
    "schedule/scheduler.py Scheduler._gather_ahead: self._issued += 1: 1 is 2": _NUMBERED,
    "schedule/recorded.py (module): _MAX_CELLS = 4000000: 4000000 is 4000001": _MEMORY,
    "schedule/recorded.py RecordedSchedules.__init__: self.digest = 0: 0 is 1": _REPLACED,
    "schedule/recorded.py RecordedSchedules.note_used: default=0: 0 is 1": "without groups none is gone",
    "schedule/recorded.py _shared_lengths: len(second) + 1: 1 is 2": _MEMORY,
    "schedule/recorded.py _shared_lengths: len(second) + 1: 1 is 2 (2)": _MEMORY,
    "schedule/recorded.py _shared_lengths: below[j + 1] + 1: 1 is 2": _SCALED,
    "observe/ledger/late.py _most: each.end <= start: <": _EMPTY,
    "observe/ledger/lateness.py (module): _MOST_STEPS = 1280: 1280 is 1281": "as many whole windows",
    "observe/ledger/lateness.py Looks.then: shares.get(each.rank, 1.0): 1.0 is 2.0": "far above the bar",
    "observe/ledger/lateness.py history: causes.most_common(1): 1 is 2": "the first of them is read",
    "observe/ledger/ledger.py (module): _FAR_BACK = 400: 400 is 401": _MEMORY,
    "observe/ledger/ledger.py _axes: waited[axis] >= _IN_PLACE * sum(waited.values()): >": _EXACTLY,
    "observe/ledger/ledger.py _Books._profile: bisect_right(starts, start) - 1: 1 is 2": _EMPTY,
    "observe/ledger/ledger.py _Books._profile: seconds <= 0: <": _EMPTY,
    "observe/ledger/ledger.py _Books._profile: sum((line.seconds for line in lines)) or 1.0: 1.0 is 2.0": (
        _EMPTY
    ),
    "observe/ledger/ledger.py _Books._apart: total_s - left_s < _NOTED_S: <=": _BAR,
    **{
        f"observe/ledger/ledger.py _Books._wait: Line(rank, 0, {rest}): 0 is 1": _REPLACED
        for rest in (
            "*who, part.late_s * share, detail",
            "SCHEDULE, rank, part.usual_s, f'{wait.action} on demand'",
            "LINK, NOBODY, part.usual_s, wait.transport",
            "*part.held, part.held_s",
            "LINK, whose, seconds, where or wait.transport",
        )
    },
    "observe/ledger/ledger.py _Books._held: each_start < end: <=": _EMPTY,
    "observe/ledger/ledger.py _Books._held: each_end > start: >=": _EMPTY,
    "observe/ledger/ledger.py _Books._more: (1.0, ''): 1.0 is 2.0": _SCALED,
    "observe/ledger/ledger.py summary: :1: 1 is 2": "the first of them is read",
    "observe/ledger/ledger.py summary: world > 1: >=": "of one rank nobody waits for another",
    "observe/ledger/slices.py _tiles: :2: 2 is 3": _ORDER,
    "observe/ledger/slices.py _tiles: each.start < clear[-1].end: <=": _EMPTY,
    "observe/ledger/slices.py _tiles: each.end > each.start: >=": _EMPTY,
    "observe/ledger/slices.py _tiles: clear[at].end <= start: <": _EMPTY,
    "observe/ledger/slices.py _tiles: cut.start > start: >=": _EMPTY,
    "observe/ledger/slices.py _tiles: cut.start < start: <=": _EMPTY,
    "observe/ledger/slices.py _tiles: tile.end > start: >=": _EMPTY,
    "observe/ledger/slices.py _without_core: use.end - use.start - use.ran_s < _NOTED_S: <=": _BAR,
    "observe/ledger/slices.py _without_core: end > each.start: >=": _EMPTY,
    "observe/ledger/slices.py _without_core: :2: 2 is 3": _ORDER,
    "observe/ledger/slices.py _parts: queued_s > _NOTED_S: >=": _BAR,
    "observe/ledger/slices.py _parts: seconds > 0: >=": _EMPTY,
    "observe/ledger/slices.py _parts: blocked_s < _BLOCKED_S: <=": _BAR,
    "observe/ledger/slices.py _parts: idle_s > _BLOCKED_S: >=": _BAR,
    f"observe/watch/diagnosis.py _different_launches: {_LAST}: 1 is 2": "nobody launched that",
    "plan/simulate.py _Step.compute: -4: 4 is 5": "the fifth one ago has ended before what is computed",
    "observe/watch/diagnosis.py _slow: answer.waits.since_s if answer.waits else 0.0: 0.0 is 1.0": _CHECKER,
    "observe/watch/diagnosis.py _slow: default=0.0: 0.0 is 1.0": "where nobody waits it is not asked for",
    f"observe/watch/diagnosis.py _slow: {_FOREIGN}: <=": _EXACTLY,
    f"observe/watch/diagnosis.py _slow: {_FOREIGN}: <= (2)": _EXACTLY,
    **{
        f"engine/step/consensus.py Consensus._masks: {zeros}: 0 is 1{number}": _UNREAD
        for zeros, most in (
            ("(0, 0, 0, 0, 0)", 5),
            ("(0, 0, 0, 0, self._joined([group.reducer.gradient_mask f ... n groups]))", 4),
            ("(missing, every, 0, 0, 0)", 3),
            ("(missing, not_smaller, 0, 0, 0)", 3),
        )
        for number in ("", *(f" ({n})" for n in range(2, most + 1)))
    },
    "transport/attempt.py answer: f'welcome/{rank}': without rank": _AGAIN,
    "transport/attempt.py ask: f'hello/{rank}': without rank": _AGAIN,
    "transport/attempt.py Attempt.meet: {0}: 0 is 1": "only whether there is one counts",
    "transport/attempt.py Attempt.meet_within: 8 * self._world if self._rank else 1: 1 is 2": _AS_OFTEN,
    "transport/jobstore.py JobStore.close: self.silent_s > _LOOK_S: >=": _EXACTLY,
    "transport/jobstore.py JobStore._result: clock.monotonic() < began + self._line.patience_s: <=": _EXACTLY,
    f"{_EXCHANGE} StatusExchange.collect: clock.monotonic() < last_s + wait_s: <=": _EXACTLY,
    f"{_EXCHANGE} StatusExchange._await: clock.monotonic() < deadline: <=": _EXACTLY,
    f"{_EXCHANGE} store_at: wait_for_workers=False: True": (
        "of ranks whose number isn't told none is waited for"
    ),
    f"{_EXCHANGE} store_at: -1: 1 is 2": "any number below 0 is one that isn't told",
    f"{_WATCH} Backoff.__init__: self._urgent_calls = 0: left out": _REPLACED,
    f"{_WATCH} Backoff.__init__: self._urgent_calls = 0: 0 is 1": _REPLACED,
    f"{_WATCH} Backoff.__init__: self._next_s = self._pause_s = 0.0: 0.0 is 1.0": _REPLACED,
    f"{_WATCH} Backoff.__init__: (-_QUIET_S, 0.0): 0.0 is 1.0": "it is read within a minute of a line only",
    f"{_WATCH} Backoff.back_off: now - self._wait.since_s if self._wait else 0.0: 0.0 is 1.0": _CHECKER,
    f"{_WATCH} Watch._run: 8 * self.reach.world if self.rank else 1: 1 is 2": _AS_OFTEN,
    f"{_WATCH} Watch._look: flush=True: False": _FLUSHED,
    f"{_WATCH} Watch._note_absence: away_s > max(self.policy.lost_s / 2, _AWAY_S): >=": _EXACTLY,
    f"{_WATCH} Watch._note_absence: away_s > max(self.policy.lost_s, _AWAY_S): >=": _EXACTLY,
    f"{_WATCH} Watch._look_without_store: min(self.reach.silent_s, listened_s) < limit_s: <=": _EXACTLY,
    f"{_WATCH} Watch._judge: -1: 1 is 2": "no rank has a number below 0",
    f"{_WATCH} Watch._diagnose_alone: clock.monotonic() - wait.since_s < self.policy.suspect_s: <=": _EXACTLY,
    f"{_WATCH} Watch._diagnose_alone: (0,): 0 is 1": "it isn't sent, and nobody asks whom it accuses",
    f"{_WATCH} Watch._deliver: clock.monotonic() - known.back_s < _BACK_S: <=": _EXACTLY,
    f"{_WATCH} Watch.last_word: flush=True: False": _FLUSHED,
    "engine/step/consensus.py (module): _WORD_BITS = 62: 62 is 63": "a word has 64, of which one is the sign",
    "engine/step/consensus.py Consensus.__init__: self.settles = True: False": _REPLACED,
    "engine/step/consensus.py Consensus._synchronize: self._compared = True: False": (
        "who compares knows what was compared"
    ),
    "engine/step/consensus.py Consensus._synchronize: 1:9: 9 is 10": "what is behind them isn't read",
    "engine/step/consensus.py Consensus._masks: 1 << len(groups): 1 is 2": "a bit of no group",
    "engine/step/consensus.py Consensus._joined: joined = 0: 0 is 1": "a bit of no parameter",
    "engine/step/consensus.py Consensus._diverge: key >> 31: 31 is 32": (
        "two hashes would have to differ in the lowest bit alone"
    ),
    "checkpoint/writer.py whole_number: least - 1: 1 is 2": _BELOW,
    "checkpoint/writer.py whole_number: least - 1: 1 is 2 (2)": _BELOW,
    "checkpoint/writer.py Writer._continued: f.step < step: <=": "a whole one of that step is refused before",
    "checkpoint/writer.py Writer.prune: (f.number or oldest[0], f.step) < oldest: <=": (
        "a save has one folder, which is either whole or broken"
    ),
}
"""Those that no test sees, with the reason."""


def seen_by(*arguments):
    """By mutant the name of the test that has seen it, or ""."""
    command = [sys.executable, "-m", "tests.pure.mutants", "--json", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(map(json.loads, run.stdout.splitlines()))


def test_what_no_test_sees_is_in_the_source():
    assert REASONED.keys() <= {str(mutant) for mutant in mutants.mutants()}


def test_the_document_says_how_many_are_turned_and_how_many_are_seen():
    num = len(mutants.mutants())
    told = f"{num} such changes", f"{num - len(REASONED)} of them are seen", f"{len(REASONED)} more"
    document = " ".join(DOCUMENT.read_text().split())
    assert [each for each in told if each not in document] == []


def test_tests_see_some_that_are_turned():
    seen = seen_by("schedule/grouping.py", "observe/watch/diagnosis.py", "--each", "8")
    assert len(seen) >= 8
    assert {mutant for mutant, test in seen.items() if not test} <= REASONED.keys()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("file", [file for held in mutants.HELD for file in held.files])
def test_tests_see_all_that_are_turned(file):
    unseen = {mutant for mutant, test in seen_by(file).items() if not test}
    assert unseen == {mutant for mutant in REASONED if mutant.startswith(f"{file} ")}
