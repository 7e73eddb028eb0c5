"""When a rank asks the others what they do, and what it writes into the log."""

import threading

from shardwright import clock
from shardwright.observe.watch.findings import Diagnosis, Findings
from shardwright.observe.watch.flight_recorder import InFlight
from shardwright.transport.process import Wait

_LONGEST_PAUSE_S = 5.0
_QUIET_S = 60.0  # between two lines of the log, unless the waits get much longer
_SAID = 5  # times suspect_s, which a wait lasts before the log has it: on a busy host many last one
_URGENT_PAUSE_S = 0.3
_URGENT_CALLS = 3  # what ended a connection is known before the connection ends, so more would not help


class Backoff:
    """``heard``: a diagnosis is there, or none will explain what a transport met (``error``)."""

    def __init__(self, suspect_s: float) -> None:
        self.heard = threading.Event()
        self.error = ""
        self.suspect_s = suspect_s
        self._urgent_calls = 0
        self._wait: Wait | InFlight | None = None
        self._next_s = self._pause_s = 0.0
        self._logged = (-_QUIET_S, 0.0)  # when, and how long a wait that was

    def ask_now(self, error: str) -> None:
        """A transport has met an error: ask now."""
        self.heard.clear()
        self._urgent_calls, self._next_s = _URGENT_CALLS, 0.0
        self.error = error

    def is_due(self, wait: Wait | InFlight | None) -> bool:
        """Whether to ask now, seen what the rank waits for."""
        now = clock.monotonic()
        if not self.error:
            if wait is None:
                return False
            if wait is not self._wait:
                self._wait, self._pause_s = wait, self.suspect_s
                self._next_s = wait.since_s + self.suspect_s
        return now >= self._next_s

    def back_off(self, diagnosis: Diagnosis, found: Findings, lost_s: float = _LONGEST_PAUSE_S) -> str:
        """The ranks were asked and nothing is wrong: ask later, and as soon as one that is silent has been so
        for lost_s. Returns the line to log, if any; none where what this rank waited for has come while they
        were asked, or no rank has waited for long."""
        now = clock.monotonic()
        if self.error:
            self._next_s = now + _URGENT_PAUSE_S
            self._urgent_calls -= 1
            if self._urgent_calls == 0:
                self.error = ""
                self.heard.set()
            return ""
        self._next_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if found.silent:
            left_s = lost_s - max(found.silent.values())
            self._next_s = min(self._next_s, now + max(left_s, 0.0) + _URGENT_PAUSE_S)
        waited_s = now - self._wait.since_s if self._wait else 0.0
        at_s, longest_s = self._logged
        if _longest_s(found) < _SAID * self.suspect_s or (now - at_s < _QUIET_S and waited_s < 2 * longest_s):
            return ""
        self._logged = (now, waited_s)
        return f"{diagnosis.sentence}. {diagnosis.remedy}"


def _longest_s(found: Findings) -> float:
    """Seconds that some rank has waited, in a collective of ours or of torch's, or has not answered."""
    waits = [max(a.foreign_s, a.waits.since_s if a.waits else 0.0) for a in found.answers.values()]
    return max(0.0, *waits, *found.silent.values())
