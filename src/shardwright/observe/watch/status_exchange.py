"""Status exchange: how ranks ask each other, through the job's store, what they do.

While all goes well nothing is written.

    latest          the last call: its number, how many steps of its ring each rank is to leave, and the rank
                    that calls ("-": none of them); everyone looks a few times a second
    answer/<rank>   the number it answers, and what the rank says of itself
    came/<call>     how many have answered
    ring/<call>/<r> the steps
    looked/<window> whether a rank has asked who was late then (20 steps)
    looks           what is known of the last time: ``Looks``
    lines, line/<n> what rank 0 is to write into its log
    lates, late/<n> how many times a rank was found late; which one it was, and why
    who/<rank>      the rank's process, to see from the same host whether it has ended
    at/<rank>       where the rank answers who can't ask through the store; it has come
    come            how many have; places: of all of them, once they have, in one key
    note/<n>        what a rank left behind as it ended
    dismissed/<r>   the rank was told to end, by SIGTERM
    diagnosis       what is wrong for good: the first one counts
    heard/<rank>    it has read the diagnosis

A rank that was away (stopped, or held by native code) answers the latest call only. Two callers at once have
two numbers; an answer to the later one serves both.
"""

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch import distributed as dist
from torch.distributed import FileStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright import clock
from shardwright.errors import said
from shardwright.observe.watch.findings import (
    Answer,
    Diagnosis,
    Fault,
    Findings,
    Launched,
    Note,
    Status,
    Waits,
)
from shardwright.torch_private import default_store
from shardwright.transport import liveness
from shardwright.transport.jobstore import bottom_of, of_ranks
from shardwright.transport.process import ranks_of, short

_POLL_S = 0.02


@dataclass(frozen=True)
class SharedDiagnosis:
    """A diagnosis as all ranks read it: whose call it came from, and the whole text."""

    fault: Fault
    ranks: tuple[int, ...]
    text: str


class StatusExchange:
    """The status exchange of one job, over a store connection of its own.

    world: number of ranks. holds_store: whether the store ends with this process.
    """

    def __init__(self, store: Store, world: int, holds_store: bool = False) -> None:
        self.world = world
        self.holds_store = holds_store
        self._store = store
        self._who: dict[int, bytes] = {}
        self._own = "-"

    # ---- calls and answers

    def latest(self) -> tuple[int, int, bool]:
        """The number of the last call, 0 before the first; the steps of its ring that a rank is to leave; and
        whether another rank asks what is wrong."""
        call, steps, caller = self._latest().split()
        return int(call), int(steps), steps == "0" and caller not in ("-", self._own)

    def _latest(self) -> str:
        # One call, where a `get` that may have to wait is two.
        return self._store.compare_set("latest", "", "0 0 -").decode()

    def request(self, steps: int = 0, after: int | None = None) -> int:
        """Ask all ranks for their status, and for so many steps of their rings; returns the call's number.

        steps: -1 asks only to see whether there is a diagnosis. after: only ask where that is the last call;
            0 is returned elsewhere.
        """
        while True:
            before = self._latest()
            call = int(before.split()[0]) + 1
            own = f"{call} {steps} {self._own}"
            if after not in (None, call - 1):
                return 0
            if self._store.compare_set("latest", before, own).decode() == own:
                self._store.delete_key(f"came/{call - 8}")
                return call

    def answer(self, call: int, answer: Answer) -> None:
        """Answer a call."""
        self._store.set(f"answer/{answer.rank}", json.dumps([call, fields_of(answer)]))
        self._store.add(f"came/{call}", 1)

    def call(self, wait_s: float, meanwhile: Callable[[], None] = lambda: None, number: int = 0) -> Findings:
        """Request, and collect what ranks say within ``wait_s``, which have ended, and what they left behind.

        meanwhile: called while waiting; a rank that calls answers itself there. number: of a request that was
        made.
        """
        began = clock.monotonic()
        number, ranks = number or self.request(), range(self.world)
        meanwhile()
        answers = {a.rank: a for a in self.collect(number, wait_s, meanwhile, self.ended(ranks))}
        missing = [rank for rank in ranks if rank not in answers]
        gone = self.ended(missing)
        silent = dict.fromkeys(self.come(missing), wait_s)
        took_s = clock.monotonic() - began
        return Findings(self.world, answers, self.notes(), frozenset(gone), silent, took_s)

    def collect(
        self, call: int, wait_s: float, meanwhile: Callable[[], None], gone: set[int]
    ) -> list[Answer]:
        """The answers that come, until none has for ``wait_s`` (or only ranks in ``gone`` are missing)."""
        num, last_s = 0, clock.monotonic()
        while clock.monotonic() < last_s + wait_s and num < self.world - len(gone):
            meanwhile()
            clock.sleep(_POLL_S)
            if (came := self._store.add(f"came/{call}", 0)) > num:
                num, last_s = came, clock.monotonic()
        told = map(said, self._read("answer", range(self.world)).values())
        return [answer_of(fields) for number, fields in told if number >= call]

    def _read(self, kind: str, ranks: Iterable[int]) -> dict[int, bytes]:
        return of_ranks(self._store, kind, ranks)

    def answered(self, ranks: Iterable[int]) -> dict[int, int]:
        """Of each of ``ranks`` that has answered the last call that it has answered, in time or not."""
        return {rank: said(data)[0] for rank, data in self._read("answer", ranks).items()}

    def rings(self, steps: int, wait_s: float, meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
        """Ask all ranks for what they did in their last ``steps``: the bytes of the rings that come within
        ``wait_s``, by rank. meanwhile: as of ``call``."""
        call = self.request(steps)
        meanwhile()
        self.collect(call, wait_s, meanwhile, self.ended(range(self.world)))
        found = self._read(f"ring/{call}", range(self.world))
        for rank in range(self.world):
            self._store.delete_key(f"ring/{call}/{rank}")
        return [*found.values()]

    def leave_ring(self, call: int, rank: int, data: bytes) -> None:
        """Leave it for who has called."""
        self._store.set(f"ring/{call}/{rank}", data)  # pyright: ignore[reportArgumentType]

    def asks_first(self, window: int) -> bool:
        """Whether nobody has asked before who was late in this window of steps."""
        return self._store.add(f"looked/{window}", 1) == 1

    def looks(self) -> str:
        """What ``note_looks`` last kept; "" before the first time."""
        return self._store.get("looks").decode() if self._store.check(["looks"]) else ""

    def note_looks(self, text: str) -> None:
        """Keep for all ranks what is known of the last time that one asked who was late."""
        self._store.set("looks", text)

    def say(self, line: str) -> None:
        """Have rank 0 write a line into its log."""
        self._store.set(f"line/{self._store.add('lines', 1)}", line)

    def said(self, after: int) -> list[str]:
        """The lines for rank 0 behind so many that it knows."""
        return self._listed("line", after)

    def note_late(self, text: str) -> None:
        """Remember over the run that a rank was found late: a line of text."""
        self._store.set(f"late/{self._store.add('lates', 1)}", text)

    def late(self) -> list[str]:
        """What was noted, in order."""
        return self._listed("late", 0)

    def _listed(self, kind: str, after: int) -> list[str]:
        found: list[str] = []
        while self._store.check([key := f"{kind}/{after + len(found) + 1}"]):
            found.append(self._store.get(key).decode())
        return found

    # ---- who ended, and what they left

    def register(self, rank: int, place: str) -> None:
        """Say which process this rank is, and where it answers without the store."""
        self._own = str(rank)
        identity = liveness.identity()
        if identity is not None:
            self._store.set(f"who/{rank}", identity)
        self._store.set(f"at/{rank}", place)
        # The last one to come tells all where all are, so that each reads one key.
        if self._store.add("come", 1) >= self.world:
            places = [place.decode() for _, place in sorted(self._read("at", range(self.world)).items())]
            self._store.set("places", zlib.compress(json.dumps(places).encode()))  # pyright: ignore[reportArgumentType]

    def come(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that have registered."""
        return {*self._read("at", ranks)}

    def places(self) -> dict[int, str]:
        """Where each rank answers, once all have registered; nothing before."""
        if not self._store.check(["places"]):
            return {}
        return dict(enumerate(said(zlib.decompress(self._store.get("places")))))

    def ended(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` whose processes, of this host, are known to have ended."""
        ranks = set(ranks)
        self._who |= self._read("who", ranks - self._who.keys())
        return liveness.ended({rank: who.decode() for rank, who in self._who.items() if rank in ranks})

    def leave(self, note: Note) -> None:
        """Leave a note; it stays when the process is gone."""
        number = self._store.add("notes", 1)
        self._store.set(f"note/{number}", json.dumps(asdict(note)))

    def dismiss(self, rank: int) -> None:
        """Say that this rank was told to end: nobody's fault, whoever sees it gone."""
        self._store.set(f"dismissed/{rank}", "")

    def dismissed(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that were told to end."""
        return {*self._read("dismissed", ranks)}

    def part(self, wait_s: float) -> None:
        """Return when all other ranks have left, or been told that this one does; or ``wait_s`` later.

        For the process that holds the store, which nobody can ask any more once it has ended.
        """
        call = self.request()

        def done(ranks: set[int]) -> set[int]:
            told = {rank for rank, last in self.answered(ranks).items() if last >= call}
            return told | {note.rank for note in self.notes()}

        self._await(wait_s, done)

    def notes(self) -> list[Note]:
        """All notes, in the order in which they were left."""
        return [Note(**said(text)) for text in self._listed("note", 0)]

    # ---- the diagnosis

    def publish(self, diagnosis: Diagnosis, text: str) -> SharedDiagnosis:
        """Write a diagnosis for all ranks; returns the one that counts, which may be another rank's."""
        mine = json.dumps([diagnosis.fault, diagnosis.ranks, text])
        counts = self._store.compare_set("diagnosis", "", mine)
        self.request(-1)
        return _shared(counts)

    def acknowledge(self, rank: int) -> None:
        """This rank has read the diagnosis."""
        self._store.set(f"heard/{rank}", "")

    def linger(self, wait_s: float) -> None:
        """Return when all living ranks have read the diagnosis, at most ``wait_s`` later."""
        self._await(wait_s, lambda ranks: {*self._read("heard", ranks)})

    def _await(self, wait_s: float, done: Callable[[set[int]], set[int]]) -> None:
        """Return when each rank has ended or is ``done``, at most ``wait_s`` later."""
        deadline, pending = clock.monotonic() + wait_s, set(range(self.world))
        while pending and clock.monotonic() < deadline:
            pending -= done(pending)
            pending -= self.ended(pending)
            clock.sleep(_POLL_S if pending else 0)

    def published(self) -> SharedDiagnosis | None:
        """The job's diagnosis, if there is one."""
        return _shared(self._store.get("diagnosis")) if self._store.check(["diagnosis"]) else None


def _shared(data: bytes) -> SharedDiagnosis:
    fault, ranks, text = said(data)
    return SharedDiagnosis(Fault(fault), tuple(ranks), text)


def fields_of(answer: Answer) -> dict:
    """What ``answer_of`` takes, for JSON: ranks in few words, which would be most of an answer of many."""
    fields = asdict(answer)
    for log in fields["logs"].values():
        log["ranks"] = short(log["ranks"])
    return fields


def answer_of(fields: dict) -> Answer:
    waits, status = fields.pop("waits"), Status(*fields.pop("status"))
    logs = {
        name: Launched(**log | {"ranks": ranks_of(log["ranks"]), "keys": tuple(log["keys"])})
        for name, log in fields.pop("logs").items()
    }
    gone = tuple(fields.pop("gone"))
    return Answer(**fields, gone=gone, waits=waits and Waits(**waits), status=status, logs=logs)


_NAME = "shardwright/watch"


def open_exchange(store: Store, world: int, token: str, own: Store | None = None) -> StatusExchange:
    """The status exchange of the attempt ``token``. Every rank opens it.

    own: by what to ask the store; its own clone by default. What ``find_exchange`` needs is left under
    ``shardwright/job``.
    """
    bottom = bottom_of(store)
    holds_store = isinstance(bottom, TCPStore) and "server=<nullptr>" not in repr(bottom)
    own = own or bottom.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
    assert own is not None
    own.set("shardwright/job", json.dumps([token, world]))
    return StatusExchange(PrefixStore(f"{_NAME}/{token}", own), world, holds_store)


def find_exchange(store: Store) -> StatusExchange | None:
    """The status exchange of the job that last used ``store``, for a process that is no rank; or None."""
    if not store.check(["shardwright/job"]):
        return None
    token, world = said(store.get("shardwright/job"))
    return StatusExchange(PrefixStore(f"{_NAME}/{token}", store), world)


def store_at(address: str, timeout: timedelta) -> Store:
    """A connection to the store at ``HOST:PORT``, or in the file that the path names."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        return TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    store = FileStore(address, -1)
    store.set_timeout(timeout)  # else a file that is taken away meanwhile is waited for, for minutes
    return store


def address_of(store: Store) -> str:
    """What ``store_at`` takes to reach ``store`` from this host; "" where it can't be reached."""
    bottom = bottom_of(store)
    if isinstance(bottom, TCPStore):
        return f"{bottom.host}:{bottom.port}"
    return getattr(bottom, "path", "")  # a FileStore's


def store_address() -> str:
    """Where ``shardwright top`` finds the job's store: ``HOST:PORT`` or a path; "" where it can't."""
    return address_of(default_store()) if dist.is_initialized() else ""
