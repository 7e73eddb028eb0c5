"""The watchdog of a rank: a thread that asks the other ranks when this one waits for long.

    every 0.25 s    has a rank asked for the status of all? then answer; is there a diagnosis? then raise it
    a long wait     (the rank has waited suspect_s, or a transport has met an error): ask all ranks, diagnose
    slow            one line in the log; ask again after 1, 2, 4, 5, 5 s
    late            20 steps of which 5% were waits: ask for all rings, seldom if it was as much before; one
                    line, where it was for one rank
    an error        written to the store, where all ranks find it. Each closes its own process groups, and its
                    training thread raises the diagnosis from its wait, or at its next collective

While all goes well a rank reads one small key of the store per look, and the more ranks there are the less
often it looks.
"""

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch.distributed import DistError

from shardwright import clock
from shardwright.errors import printable
from shardwright.observe.watch.findings import ERRORS, Diagnosis, Fault, Findings, Note
from shardwright.observe.watch.flight_recorder import InFlight
from shardwright.observe.watch.process_status import ProcessStatus
from shardwright.observe.watch.reach import STORE_S, Reach
from shardwright.observe.watch.requests import Requests
from shardwright.observe.watch.status_exchange import SharedDiagnosis, StatusExchange, store_address
from shardwright.observe.watch.waits import STEPS, OwnWaits, WaitChange
from shardwright.policy import WatchPolicy
from shardwright.transport.attempt import Attempt
from shardwright.transport.jobstore import JobStore, StoreSilent, hasty, pause_s
from shardwright.transport.process import Wait, is_closed, process_state

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_MEETING_S = 0.05  # between looks whether the others have come
_ALL_ASK = 64  # ranks at most: of more only one asks, which hears of closed connections from the others
_EXPLAIN_S = 4.5  # a transport's own error is raised after so long without a diagnosis
_AWAY_S = 5.0  # without a look, at least, to count as away
_BACK_S = 60.0  # for which what others have found meanwhile is that


_LONGEST_PAUSE_S = 5.0
_QUIET_S = 60.0  # between two lines of the log, unless the waits get much longer
_SAID = 5  # times suspect_s, which a wait lasts before the log has it: on a busy host many last one
_URGENT_PAUSE_S = 0.3
_URGENT_CALLS = 3  # what ended a connection is known before the connection ends, so more would not help


class Backoff:
    """When a rank asks the others what they do, and what it writes into the log.

    heard: a diagnosis is there, or none will explain what a transport met (``error``).
    """

    def __init__(self, suspect_s: float) -> None:
        self.heard = threading.Event()
        self.error = ""
        self.suspect_s = suspect_s
        self.not_before_s = 0.0  # for another of many ranks asks
        self._urgent_calls = 0
        self._wait: Wait | InFlight | None = None
        self._next_s = self._pause_s = 0.0
        self._logged = (-_QUIET_S, 0.0)  # when, and how long a wait that was

    def ask_now(self, error: str) -> None:
        """A transport has met an error: ask now."""
        self.heard.clear()
        self._urgent_calls, self._next_s, self.not_before_s = _URGENT_CALLS, 0.0, 0.0
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
        return now >= max(self._next_s, self.not_before_s)

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
            left_s = lost_s - max(found.silent.values()) - found.took_s  # which it takes to ask
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


@dataclass
class _Known:
    """What the watch knows of the job: the last call it answered, what was left behind, since when a rank is
    silent, with the last call that it has answered, what the store last said ("": it is there), how many
    lines rank 0 has written, and when this process last looked, or came back from a time without looks; since
    then it ``listens``."""

    answered: int = 0
    seen: int = 0
    notes: list[Note] = field(default_factory=list)
    silent_since: dict[tuple[int, int], float] = field(default_factory=dict)
    store_error: str = ""
    lines: int = 0
    looked_s: float = field(default_factory=lambda: clock.monotonic())
    listens_s: float = field(default_factory=lambda: clock.monotonic())
    back_s: float = -_BACK_S
    away_s: float = 0.0


class Watch:
    """The watch of this process over the ranks of one default process group.

    joined: called once this rank has met the first one, in the watch's thread.
    """

    def __init__(
        self, policy: WatchPolicy, rank: int, attempt: Attempt, store: JobStore, joined: Callable[[], None]
    ) -> None:
        self.policy = policy
        self.rank = rank
        self._status = ProcessStatus(rank)
        self.reach = Reach(rank, attempt, store, self._status.answer)
        self._requests = Requests(policy.signal, self.last_word)
        self._look_s = self._pause_s = pause_s(_LOOK_S, self.reach.world)
        self._backoff = Backoff(policy.suspect_s)
        self._own_waits = OwnWaits()
        self._known = _Known()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(joined,), name="shardwright-watch", daemon=True
        )

    @property
    def exchange(self) -> StatusExchange:
        """As ``Reach`` has it."""
        return self.reach.exchange

    def start(self) -> None:
        """Begin to watch."""
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
        self.reach.close()

    def follow(self, policy: WatchPolicy) -> None:
        """Judge by another policy from now on."""
        self.policy = policy
        self._backoff.suspect_s = policy.suspect_s
        if not policy.signal:
            self._requests.close()

    @property
    def is_deaf(self) -> bool:
        """Whether the store is gone, or about to go with the process that holds it."""
        return bool(self._known.store_error) or any(note.held_store for note in self._known.notes)

    # ---- the thread

    def _run(self, joined: Callable[[], None]) -> None:
        meeting_s = pause_s(_MEETING_S, 8 * self.reach.world if self.rank else 1)
        with hasty(STORE_S):
            while not self._stop.is_set():
                self._wake.wait(self._pause_s if self.reach.has_met else meeting_s)
                self._wake.clear()
                try:
                    met = self.reach.has_met
                    if not self._stop.is_set():
                        self._look()
                    if self.reach.has_met and not met:
                        joined()
                except StoreSilent:
                    pass  # the next look is without it
                except DistError as error:  # the store: the process that holds it has ended
                    self._known.store_error = str(error).splitlines()[0]
                except Exception:
                    logger.exception("rank %d: the watchdog failed in this round and continues", self.rank)

    def _look(self) -> None:
        self._note_absence()
        self._status.sample()
        if self.is_deaf:
            self._diagnose_alone()
            return
        if self.reach.is_silent:
            self._look_without_store()
            return
        if not self.reach.meet():
            return
        self._answer()
        if self._requests.asked():
            from shardwright.observe.watch.status import status  # noqa: PLC0415 asked words

            print(status(self.call(), self.policy), file=sys.stderr, flush=True)
        shared = None
        if self._known.answered > self._known.seen:  # who publishes a diagnosis calls
            shared, self._known.seen = self.exchange.published(), self._known.answered
        if shared is not None:
            self._deliver(shared)
        elif self._backoff.is_due(self._status.stands_in):
            if number := self._turn():
                self._judge(self.call(number))
        elif (waits := self._own_waits.change()) is not None:
            self._look_for_late(waits)
        for line in self.exchange.said(self._known.lines) if self.rank == 0 else ():
            self._known.lines += 1
            logger.warning("%s", printable(line))

    def _note_absence(self) -> None:
        known, now = self._known, clock.monotonic()
        away_s, known.looked_s = now - known.looked_s, now
        if away_s > max(
            self.policy.lost_s / 2, _AWAY_S
        ):  # nobody could be heard meanwhile: nobody was silent
            known.listens_s = now
            known.silent_since.clear()
        if away_s > max(self.policy.lost_s, _AWAY_S):
            known.back_s, known.away_s = now, away_s

    def _look_without_store(self) -> None:
        """The store is silent: its host is dark, or its process stopped, or this host is cut off."""
        told = self.reach.told()
        if told is not None:
            self._deliver(told)
        elif self._backoff.is_due(self._status.stands_in):
            found = self.reach.ask(self.policy.answer_s, self._known.notes)
            limit_s, listened_s = self.policy.lost_s, clock.monotonic() - self._known.listens_s
            if len(found.hosts) == self.reach.world or min(self.reach.silent_s, listened_s) < limit_s:
                self._judge(self._heard(found))
                return
            at = f" at {place}" if (place := store_address()) else ""
            text = (
                f"{Fault.LOST}: the job's store{at} has not answered for {limit_s:g} s, since before the "
                "ranks had met: its host is dark, its process is stopped, or this host is cut off\n"
                f"  rank {self.rank} waited in {found.answers[self.rank].line}"
            )
            self._deliver(SharedDiagnosis(Fault.LOST, (self.rank,), text))

    def _answer(self) -> None:
        latest, steps, another_asks = self.exchange.latest()
        if latest > self._known.answered:
            if another_asks:
                self._leave_it()
            self._known.answered = latest
            if steps < 0:
                return
            self._known.notes = self.exchange.notes()  # kept: who left a note may have held the store as well
            if steps > 0:
                from shardwright.observe.steps.recording import ring  # noqa: PLC0415 rings asked

                self.exchange.leave_ring(latest, self.rank, ring(steps + 1).to_bytes())
            self.exchange.answer(latest, self._status.answer())

    def _turn(self) -> int:
        """Ask all ranks; returns the call's number, 0 where another one of many has just asked."""
        if self.reach.world <= _ALL_ASK:
            return self.exchange.request()
        if not (number := self.exchange.request(after=self._known.answered)):
            self._answer()
        self._pause_s = _LOOK_S if number else self._look_s  # who asks on looks when it's due
        return number

    def _leave_it(self) -> None:
        """Another rank asks what is wrong, and goes on to: of many only one does, unless that one ends."""
        if self.reach.world > _ALL_ASK:
            pause_s = _URGENT_PAUSE_S if self._backoff.error else _LONGEST_PAUSE_S
            self._pause_s = self._look_s
            self._backoff.not_before_s = clock.monotonic() + pause_s + self.policy.answer_s + self._look_s

    def call(self, number: int = 0) -> Findings:
        """Ask all ranks: what they say, which have ended and what they left behind. number: as of
        ``StatusExchange.call``."""
        return self._heard(self.exchange.call(self.policy.answer_s, self._answer, number))

    def _heard(self, found: Findings) -> Findings:
        """Add since when ranks are silent, which connections are closed, and who is where."""
        now = clock.monotonic()
        # Who has made a transport with this rank was there, and has begun to watch: it may be gone since.
        met = {rank for log in tuple(process_state.logs) if log.ring for rank in log.ranks}
        if (unheard := met - {*found.answers, *found.silent}) and not self.reach.is_silent:
            silent = dict.fromkeys(self.reach.began(unheard), found.took_s)
            found = replace(found, silent={**found.silent, **silent})
        # Who has answered another call since, though too late for it, is slow, and not silent.
        answered = self.reach.answered(found.silent)
        silent_since = [(rank, answered.get(rank, 0)) for rank in found.silent]
        before, asked_s = self._known.silent_since, now - found.took_s
        self._known.silent_since = {each: before.get(each, asked_s) for each in silent_since}
        silent = {rank: now - since_s for (rank, _), since_s in self._known.silent_since.items()}
        missing = {*range(found.world)} - {*found.answers}
        told = missing.intersection(rank for answer in found.answers.values() for rank in answer.gone)
        gone = found.ended | told | {rank for rank in missing - told if self._is_cut_off(rank)}
        self._known.notes = list(found.notes)
        hosts = self.reach.hosts()
        return replace(found, ended=frozenset(gone), silent=silent, asker=self.rank, hosts=hosts)

    def _is_cut_off(self, rank: int) -> bool:
        """Whether a connection to a rank that doesn't answer is closed."""
        for log in process_state.logs:
            if rank in log.ranks:
                place = log.ranks.index(rank)
                if place in log.ended or any(is_closed(group, place) for group in log.groups[:1]):
                    return True
        return False

    def _diagnosed(self, found: Findings) -> tuple[Diagnosis, str]:
        """What is wrong, and all that is said of it."""
        from shardwright.observe.watch.diagnosis import diagnose  # noqa: PLC0415 judged ranks
        from shardwright.observe.watch.table import tell  # noqa: PLC0415 judged ranks

        diagnosis = diagnose(found, self.policy)
        return diagnosis, tell(diagnosis, found)

    def _judge(self, found: Findings) -> None:
        diagnosis, text = self._diagnosed(found)
        if diagnosis.is_error:
            shared = SharedDiagnosis(diagnosis.fault, diagnosis.ranks, text)
            if self.reach.is_silent:
                self.reach.tell(shared)
            else:
                shared = self.exchange.publish(diagnosis, shared.text)
            self._deliver(shared)
            return
        line = self._backoff.back_off(diagnosis, found, self.policy.lost_s)
        # Where all that wait have heard the same the first of them says it.
        waiting = [rank for rank, said in found.answers.items() if said.waits or said.foreign]
        if line and (self.reach.world > _ALL_ASK or self.rank == min(waiting, default=-1)):
            logger.warning("rank %d: %s: %s", self.rank, diagnosis.fault, line)

    def _look_for_late(self, waits: WaitChange) -> None:
        """Say which rank costs the others much, if one does, and which no longer does; unless others look, or
        there is no reason to."""
        known = self.exchange.looks()
        if not known and not waits.much:
            return
        # The ledger and what it reads are 1,500 lines, which a job whose ranks don't wait never loads.
        from shardwright.observe.ledger.lateness import Looks, judged  # noqa: PLC0415 waits lasted
        from shardwright.observe.steps.rings import Ring  # noqa: PLC0415 waits lasted

        window, looks = self._own_waits.window, Looks.from_json(known)
        if not looks.is_due(window, waits) or not self.exchange.asks_first(window):
            return
        said = self.exchange.rings(STEPS + 1, self.policy.answer_s, self._answer)
        found, shares = judged([Ring.from_bytes(data) for data in said], self.exchange.world)
        after, lines = looks.then(window, waits, found, shares)
        self.exchange.note_looks(after.to_json())
        if found is not None:
            self.exchange.note_late(found._replace(stands=looks.stands(window, found)).to_json())
        for line in lines:
            self.exchange.say(line)

    def _diagnose_alone(self) -> None:
        """Nobody can be asked any more: an error only once this rank needs others, which then won't come."""
        wait = self._status.stands_in
        met = self._backoff.error
        if not met and (wait is None or clock.monotonic() - wait.since_s < self.policy.suspect_s):
            return
        own = self._status.answer()
        if self._known.notes:
            found = Findings(self.reach.world, {self.rank: own}, self._known.notes)
            diagnosis, told = self._diagnosed(found)
            self._deliver(SharedDiagnosis(diagnosis.fault, diagnosis.ranks, told))
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
        text, known = shared.text, self._known
        if shared.fault in (Fault.LOST, Fault.FAILED) and clock.monotonic() - known.back_s < _BACK_S:
            text = (
                f"{Fault.LOST}: rank {self.rank} was itself away for {known.away_s:.0f} s (stopped, "
                f"suspended, or held by native code), and the others did not wait for it\n{text}"
            )
        process_state.diagnosis = process_state.diagnosis or ERRORS[shared.fault](text)
        self._backoff.heard.set()
        from shardwright.observe.watch.delivery import Delivery  # noqa: PLC0415 found faults

        delivery = Delivery(self.rank, self._status, self._requests, self._stop)
        delivery.close_ours()
        if not self.is_deaf:
            with suppress(RuntimeError):
                self.exchange.acknowledge(self.rank)
        delivery.see_it_raised(shared.fault is Fault.STALLED and self.rank in shared.ranks, text)
        self._stop.set()

    def look(self) -> None:
        """See now whether there is a diagnosis. The training thread calls it, to save the wait for a look."""
        with suppress(DistError), hasty(STORE_S):
            shared = self.exchange.published() if self._thread.is_alive() and not self.is_deaf else None
            if shared is not None and process_state.diagnosis is None:
                process_state.diagnosis = ERRORS[shared.fault](shared.text)

    def last_word(self) -> None:
        """SIGTERM is about to end this process: say which rank failed or is lost by now, if one is.

        A launcher ends what is left of a job as soon as one rank is gone, mostly before the others know why.
        """
        with suppress(RuntimeError), hasty(STORE_S / 4):  # the store may have gone first
            self.exchange.dismiss(self.rank)
            shared = self.exchange.published()
            if shared is None:
                ended = self.exchange.ended(range(self.exchange.world))
                notes = self.exchange.notes()  # after that: who leaves one ends then
                lost = ended - {note.rank for note in notes} - self.exchange.dismissed(ended)
                raised = [note for note in notes if note.raised]
                found = Findings(self.exchange.world, {}, raised, frozenset(lost))
                diagnosis, _ = self._diagnosed(found)
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
        if self.reach.world <= _ALL_ASK or any(log.ended for log in process_state.logs):
            self._wake.set()  # of many those look at once that have seen it themselves
        self._backoff.heard.wait(_EXPLAIN_S + 2 * (self._look_s - _LOOK_S))
        if process_state.diagnosis is None:
            return error
        process_state.delivered = True
        return process_state.diagnosis
