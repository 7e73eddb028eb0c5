"""The watch of a rank: a thread that becomes suspicious when the rank waits for long, and asks the others.

    every 0.25 s    has somebody called the roll? then answer. Is there a verdict? then deliver it
    suspicious      (the rank has waited suspect_s, or a transport has met an error): call the roll, judge
    slow            one line in the log; ask again after 1, 2, 4, 5, 5 s
    an error        written to the store, where all ranks find it. Each closes its own process groups, and its
                    training thread raises the verdict from its wait, or at its next collective

In peace a rank costs two small reads of the store per look, and looks less often where there are many ranks.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch.distributed import DistError

from shardwright.observe.backoff import Suspicion
from shardwright.observe.diagnosis import ERRORS, Fault, Findings, Note, judge, tell
from shardwright.observe.process_status import Doing
from shardwright.observe.requests import Requests
from shardwright.observe.status import status
from shardwright.observe.status_exchange import Roll, Ruling
from shardwright.policy import WatchPolicy
from shardwright.torch_private import process_groups
from shardwright.transport.abort import close, is_closed
from shardwright.transport.attempt import Attempt
from shardwright.transport.launches import here

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LOOKS_PER_S = 4000  # of all ranks together, at most: what a store serves beside its other work
_EXPLAIN_S = 4.5  # a transport's own error is raised after so long without a verdict
_GRACE_S = 2.0  # for a verdict to reach the training thread, before what that may sit in is closed as well
_LAST_RESORT_S = 10.0


@dataclass
class _Known:
    """What the watch knows of the job: the last call it answered, what was left behind, since when a rank is
    silent, and what the store last said ("": it is there)."""

    answered: int
    notes: list[Note] = field(default_factory=list)
    silent_since: dict[int, float] = field(default_factory=dict)
    store_error: str = ""


class Watch:
    """The watch of this process over the ranks of one default process group."""

    def __init__(self, policy: WatchPolicy, roll: Roll, rank: int, attempt: Attempt) -> None:
        self.policy = policy
        self.rank = rank
        self.roll = roll
        self._attempt = attempt
        self._doing = Doing(rank)
        self._requests = Requests(policy.signal)
        self._suspicion = Suspicion(policy.suspect_s)
        self._known = _Known(roll.latest())
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.roll.enrol(self.rank)
        here.explain, here.look = self.explain, self.look
        self._thread.start()

    def stop(self) -> None:
        """End the thread, at once; the store is left alone from then on."""
        self._stop.set()
        self._wake.set()
        self._suspicion.heard.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        here.explain = here.look = None
        self._requests.close()

    def follow(self, policy: WatchPolicy) -> None:
        """Judge by another policy from now on."""
        self.policy = policy
        self._suspicion.suspect_s = policy.suspect_s

    @property
    def is_deaf(self) -> bool:
        """Whether the store is gone, or about to go with the process that holds it."""
        return bool(self._known.store_error) or any(note.held_store for note in self._known.notes)

    # ---- the thread

    def _run(self) -> None:
        look_s = max(_LOOK_S, self.roll.world / _LOOKS_PER_S)
        while not self._stop.is_set():
            self._wake.wait(look_s)
            self._wake.clear()
            try:
                if not self._stop.is_set():
                    self._look()
            except DistError as error:  # the store: the process that holds it has ended
                self._known.store_error = str(error).splitlines()[0]
            except Exception:
                logger.exception("rank %d: the watch met an error of its own, and goes on", self.rank)

    def _look(self) -> None:
        self._doing.sample()
        if self.is_deaf:
            self._judge_alone()
            return
        self._answer()
        if self._requests.asked():
            print(status(self.call(), self.policy), file=sys.stderr, flush=True)
        ruling = self.roll.decided()
        if ruling is not None:
            self._convict(ruling)
        elif self._suspicion.is_due(self._doing.wait):
            self._ask()

    def _answer(self) -> None:
        self._attempt.meet()  # a rank that comes later than this one needs the token
        latest = self.roll.latest()
        if latest > self._known.answered:
            self._known.answered = latest
            self._known.notes = self.roll.notes()  # kept: who left a note may have held the store as well
            self.roll.answer(latest, self._doing.answer())

    def call(self) -> Findings:
        """Call the roll: what the ranks say, which have ended and what they left behind."""
        found = self.roll.call(self.policy.answer_s, self._answer)
        now = time.monotonic()
        self._known.silent_since = {rank: self._known.silent_since.get(rank, now) for rank in found.silent}
        silent = {rank: now - since_s for rank, since_s in self._known.silent_since.items()}
        gone = found.ended | {rank for rank in found.silent if self._is_cut_off(rank)}
        self._known.notes = list(found.notes)
        return replace(found, ended=frozenset(gone), silent=silent)

    def _is_cut_off(self, rank: int) -> bool:
        """Whether a connection to a rank that doesn't answer is closed."""
        shared = [log for log in here.logs if rank in log.ranks]
        return any(is_closed(group, log.ranks.index(rank)) for log in shared for group in log.groups[:1])

    def _ask(self) -> None:
        found = self.call()
        verdict = judge(found, self.policy)
        if verdict.is_error:
            self._convict(self.roll.decide(verdict, tell(verdict, found)))
            return
        line = self._suspicion.calm(verdict)
        if line:
            logger.warning("rank %d: %s: %s", self.rank, verdict.fault, line)

    def _judge_alone(self) -> None:
        """Nobody can be asked any more: an error only once this rank needs others, which then won't come."""
        wait = self._doing.wait
        met = self._suspicion.error
        if not met and (wait is None or time.monotonic() - wait.since_s < self.policy.suspect_s):
            return
        own = self._doing.answer()
        if self._known.notes:
            found = Findings(self.roll.world, {self.rank: own}, self._known.notes)
            verdict = judge(found, self.policy)
            self._convict(Ruling(verdict.fault, verdict.ranks, tell(verdict, found)))
            return
        text = (
            f"{Fault.LOST}: the job's store can't be reached, so the process that holds it (rank 0's, or the "
            f"launcher's) has ended: {met or self._known.store_error}\n"
            f"  rank {self.rank} waited in {own.line}\n"
            "Look for what ended that process; its own output says why."
        )
        self._convict(Ruling(Fault.LOST, (0,), text))

    # ---- a verdict

    def _convict(self, ruling: Ruling) -> None:
        """Have the training thread raise the verdict, wherever it waits. Ends the watch."""
        here.verdict = here.verdict or ERRORS[ruling.fault](ruling.text)
        for group in {group for log in here.logs for group in log.groups}:
            close(group)
        self._suspicion.heard.set()
        if not self.is_deaf:
            with suppress(RuntimeError):
                self.roll.hear(self.rank)
        if not self._is_raised_within(_GRACE_S):
            self._free(ruling)
        self._stop.set()

    def _free(self, ruling: Ruling) -> None:
        """The training thread doesn't wait in a collective of ours. One that computes raises at its next."""
        stalled = ruling.fault is Fault.STALLED and self.rank in ruling.ranks
        if self._doing.answer().foreign:
            for group in process_groups():  # the caller's own, too: what it raises is told by the hook
                close(group)
        elif stalled:
            self._requests.interrupt()
        if (stalled or self._doing.wait is not None) and not self._is_raised_within(_LAST_RESORT_S):
            # It sits in native code that nothing can interrupt, and nobody will ever come.
            print(ruling.text, file=sys.stderr, flush=True)
            os._exit(1)

    def _is_raised_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not here.delivered and time.monotonic() < deadline and not self._stop.is_set():
            time.sleep(0.02)
        return here.delivered or self._stop.is_set()

    def look(self) -> None:
        """See now whether there is a verdict: by the training thread, which won't wait for the next look."""
        with suppress(DistError):
            ruling = self.roll.decided() if self._thread.is_alive() and not self.is_deaf else None
            if ruling is not None and here.verdict is None:
                here.verdict = ERRORS[ruling.fault](ruling.text)

    def explain(self, error: Exception) -> Exception:
        """The verdict, to be raised in place of what a transport met; ``error`` itself where there is none.

        Called by the thread that met it. Returns within 5 s.
        """
        if not self._thread.is_alive():
            return error
        self._suspicion.alarm(str(error))
        self._wake.set()
        self._suspicion.heard.wait(_EXPLAIN_S)
        if here.verdict is None:
            return error
        here.delivered = True
        return here.verdict
