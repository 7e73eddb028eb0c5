"""The watchdog of a rank: a thread that asks the other ranks when this one waits for long.

    every 0.25 s    has a rank asked for the status of all? then answer; is there a diagnosis? then raise it
    a long wait     (the rank has waited suspect_s, or a transport has met an error): ask all ranks, diagnose
    slow            one line in the log; ask again after 1, 2, 4, 5, 5 s
    late            20 steps of which 5% were waits: ask for all rings, seldom if it was as much before; one
                    line, where it was for one rank
    an error        written to the store, where all ranks find it. Each closes its own process groups, and its
                    training thread raises the diagnosis from its wait, or at its next collective

While all goes well a rank reads two small keys of the store per look, and the more ranks there are the less
often it looks.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch.distributed import DistError

from shardwright.observe.ledger.lateness import STEPS, Lateness, Looks, WaitChange, judged
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.rings import Ring
from shardwright.observe.watch.backoff import Backoff
from shardwright.observe.watch.diagnosis import ERRORS, Fault, Findings, Note, diagnose, tell
from shardwright.observe.watch.process_status import ProcessStatus
from shardwright.observe.watch.requests import Requests
from shardwright.observe.watch.status import status
from shardwright.observe.watch.status_exchange import SharedDiagnosis, StatusExchange
from shardwright.policy import WatchPolicy
from shardwright.torch_private import process_groups
from shardwright.transport.abort import close, is_closed
from shardwright.transport.attempt import Attempt
from shardwright.transport.launches import process_state

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LOOKS_PER_S = 4000  # of all ranks together, at most: what a store serves beside its other work
_EXPLAIN_S = 4.5  # a transport's own error is raised after so long without a diagnosis
_GRACE_S = 2.0  # for a diagnosis to reach the training thread, before what that may sit in is closed as well
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

    def __init__(self, policy: WatchPolicy, exchange: StatusExchange, rank: int, attempt: Attempt) -> None:
        self.policy = policy
        self.rank = rank
        self.exchange = exchange
        self._attempt = attempt
        self._status = ProcessStatus(rank)
        self._requests = Requests(policy.signal, self.last_word)
        self._backoff = Backoff(policy.suspect_s)
        self._lateness = Lateness()
        self._known = _Known(exchange.latest())
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.exchange.register(self.rank)
        process_state.explain, process_state.look = self.explain, self.look
        self._thread.start()

    def stop(self) -> None:
        """End the thread, at once; the store is left alone from then on."""
        self._stop.set()
        self._wake.set()
        self._backoff.heard.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        process_state.explain = process_state.look = None
        self._requests.close()

    def follow(self, policy: WatchPolicy) -> None:
        """Judge by another policy from now on."""
        self.policy = policy
        self._backoff.suspect_s = policy.suspect_s

    @property
    def is_deaf(self) -> bool:
        """Whether the store is gone, or about to go with the process that holds it."""
        return bool(self._known.store_error) or any(note.held_store for note in self._known.notes)

    # ---- the thread

    def _run(self) -> None:
        look_s = max(_LOOK_S, self.exchange.world / _LOOKS_PER_S)
        while not self._stop.is_set():
            self._wake.wait(look_s)
            self._wake.clear()
            try:
                if not self._stop.is_set():
                    self._look()
            except DistError as error:  # the store: the process that holds it has ended
                self._known.store_error = str(error).splitlines()[0]
            except Exception:
                logger.exception("rank %d: the watchdog failed in this round and continues", self.rank)

    def _look(self) -> None:
        self._status.sample()
        if self.is_deaf:
            self._diagnose_alone()
            return
        self._answer()
        if self._requests.asked():
            print(status(self.call(), self.policy), file=sys.stderr, flush=True)
        shared = self.exchange.published()
        if shared is not None:
            self._deliver(shared)
        elif self._backoff.is_due(self._status.stands_in):
            self._ask()
        elif (waits := self._lateness.waits()) is not None:
            self._look_for_late(waits)

    def _answer(self) -> None:
        self._attempt.meet()  # a rank that comes later than this one needs the token
        latest = self.exchange.latest()
        if latest > self._known.answered:
            self._known.answered = latest
            self._known.notes = self.exchange.notes()  # kept: who left a note may have held the store as well
            if steps := self.exchange.wanted(latest):
                self.exchange.leave_ring(latest, self.rank, ring(steps + 1).to_bytes())
            self.exchange.answer(latest, self._status.answer())

    def call(self) -> Findings:
        """Ask all ranks: what they say, which have ended and what they left behind."""
        found = self.exchange.call(self.policy.answer_s, self._answer)
        now = time.monotonic()
        self._known.silent_since = {rank: self._known.silent_since.get(rank, now) for rank in found.silent}
        silent = {rank: now - since_s for rank, since_s in self._known.silent_since.items()}
        gone = found.ended | {rank for rank in found.silent if self._is_cut_off(rank)}
        self._known.notes = list(found.notes)
        return replace(found, ended=frozenset(gone), silent=silent)

    def _is_cut_off(self, rank: int) -> bool:
        """Whether a connection to a rank that doesn't answer is closed."""
        for log in process_state.logs:
            if rank in log.ranks:
                place = log.ranks.index(rank)
                if place in log.ended or any(is_closed(group, place) for group in log.groups[:1]):
                    return True
        return False

    def _ask(self) -> None:
        found = self.call()
        diagnosis = diagnose(found, self.policy)
        if diagnosis.is_error:
            self._deliver(self.exchange.publish(diagnosis, tell(diagnosis, found)))
            return
        line = self._backoff.back_off(diagnosis, found)
        if line:
            logger.warning("rank %d: %s: %s", self.rank, diagnosis.fault, line)

    def _look_for_late(self, waits: WaitChange) -> None:
        """Say which rank costs the others much, if one does, and which no longer does; unless others look, or
        there is no reason to."""
        window, looks = self._lateness.window, Looks.from_json(self.exchange.looks())
        if not looks.is_due(window, waits) or not self.exchange.asks_first(window):
            return
        said = self.exchange.rings(STEPS + 1, self.policy.answer_s, self._answer)
        found, shares = judged([Ring.from_bytes(data) for data in said], self.exchange.world)
        after, lines = looks.then(window, waits, found, shares)
        self.exchange.note_looks(after.to_json())
        if found is not None:
            self.exchange.note_late(found._replace(stands=looks.stands(window, found)).to_json())
        for line in lines:
            logger.warning("%s", line)

    def _diagnose_alone(self) -> None:
        """Nobody can be asked any more: an error only once this rank needs others, which then won't come."""
        wait = self._status.wait or self._status.in_flight
        met = self._backoff.error
        if not met and (wait is None or time.monotonic() - wait.since_s < self.policy.suspect_s):
            return
        own = self._status.answer()
        if self._known.notes:
            found = Findings(self.exchange.world, {self.rank: own}, self._known.notes)
            diagnosis = diagnose(found, self.policy)
            self._deliver(SharedDiagnosis(diagnosis.fault, diagnosis.ranks, tell(diagnosis, found)))
            return
        text = (
            f"{Fault.LOST}: the job's store can't be reached, so the process that holds it (rank 0's, or the "
            f"launcher's) has ended: {met or self._known.store_error}\n"
            f"  rank {self.rank} waited in {own.line}\n"
            "Look for what ended that process; its own output says why."
        )
        self._deliver(SharedDiagnosis(Fault.LOST, (0,), text))

    # ---- a diagnosis

    def _deliver(self, shared: SharedDiagnosis) -> None:
        """Have the training thread raise the diagnosis, wherever it waits. Ends the watch."""
        process_state.diagnosis = process_state.diagnosis or ERRORS[shared.fault](shared.text)
        for group in {group for log in process_state.logs for group in log.groups}:
            close(group)
        self._backoff.heard.set()
        if not self.is_deaf:
            with suppress(RuntimeError):
                self.exchange.acknowledge(self.rank)
        # A thread that stands in a call of torch's won't come to hear of it.
        if not self._is_raised_within(_GRACE_S if self._status.in_flight is None else 0.0):
            self._free(shared)
        self._stop.set()

    def _free(self, shared: SharedDiagnosis) -> None:
        """The training thread doesn't wait in a collective of ours. One that computes raises at its next."""
        stalled = shared.fault is Fault.STALLED and self.rank in shared.ranks
        if self._status.answer().foreign or self._status.in_flight is not None:
            for group in process_groups():  # the caller's own, too: what it raises is told by the hook
                close(group)
        elif stalled:
            self._requests.interrupt()
        if (stalled or self._status.wait is not None) and not self._is_raised_within(_LAST_RESORT_S):
            # It sits in native code that nothing can interrupt, and nobody will ever come.
            print(shared.text, file=sys.stderr, flush=True)
            os._exit(1)

    def _is_raised_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not process_state.delivered and time.monotonic() < deadline and not self._stop.is_set():
            time.sleep(0.02)
        return process_state.delivered or self._stop.is_set()

    def look(self) -> None:
        """See now whether there is a diagnosis. The training thread calls it, to save the wait for a look."""
        with suppress(DistError):
            shared = self.exchange.published() if self._thread.is_alive() and not self.is_deaf else None
            if shared is not None and process_state.diagnosis is None:
                process_state.diagnosis = ERRORS[shared.fault](shared.text)

    def last_word(self) -> None:
        """SIGTERM is about to end this process: say which rank failed or is lost by now, if one is.

        A launcher ends what is left of a job as soon as one rank is gone, mostly before the others know why.
        """
        with suppress(RuntimeError):  # the store may have gone first
            self.exchange.dismiss(self.rank)
            shared = self.exchange.published()
            if shared is None:
                ended = self.exchange.ended(range(self.exchange.world))
                notes = self.exchange.notes()  # after that: who leaves one ends then
                lost = ended - {note.rank for note in notes} - self.exchange.dismissed(ended)
                raised = [note for note in notes if note.raised]
                diagnosis = diagnose(Findings(self.exchange.world, {}, raised, frozenset(lost)), self.policy)
                if not diagnosis.is_error:
                    return
                text = f"{diagnosis.fault}: {diagnosis.sentence}\n{diagnosis.remedy}"
                shared = self.exchange.publish(diagnosis, text)
            print(f"rank {self.rank}, ended by SIGTERM: {shared.text}", file=sys.stderr, flush=True)

    def explain(self, error: Exception) -> Exception:
        """The diagnosis, to be raised in place of what a transport met; ``error`` itself where there is none.

        Called by the thread that met it. Returns within 5 s.
        """
        if not self._thread.is_alive():
            return error
        self._backoff.ask_now(str(error))
        self._wake.set()
        self._backoff.heard.wait(_EXPLAIN_S)
        if process_state.diagnosis is None:
            return error
        process_state.delivered = True
        return process_state.diagnosis
