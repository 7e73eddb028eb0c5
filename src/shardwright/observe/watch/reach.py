"""How a rank reaches the others: through the job's store, and directly while that is silent.

Directly, by a few datagrams of JSON:

    ask, <number>               the others answer at once
    answer, <number>, <Answer>  what the rank says of itself
    diagnosis, <what is wrong>  for ranks that no store tells

Each has the token of the attempt and the rank that sends it; what has another token is a stranger's.
"""

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError

from shardwright import clock
from shardwright.errors import said
from shardwright.observe.watch.findings import Answer, Fault, Findings, Note
from shardwright.observe.watch.status_exchange import (
    SharedDiagnosis,
    StatusExchange,
    answer_of,
    fields_of,
    open_exchange,
)
from shardwright.torch_private import default_store
from shardwright.transport.attempt import Attempt
from shardwright.transport.cpu.handshake import own_hosts
from shardwright.transport.jobstore import JobStore, StoreSilent

STORE_S = 1.0
"""For each answer of the store: then it counts as silent."""

_NBYTES = 60_000  # of a datagram, at most
_POLL_S = 0.02


class Reach:
    """The other ranks, as this one reaches them. own: what this rank says of itself."""

    def __init__(self, rank: int, attempt: Attempt, store: JobStore, own: Callable[[], Answer]) -> None:
        self.world = dist.get_world_size()
        self._rank, self._attempt, self._store, self._own = rank, attempt, store, own
        self._exchange: StatusExchange | None = None
        self._default = default_store()  # a script may destroy the process group before the ranks have met
        self._peers = Datagrams(rank, "", own)

    @property
    def has_met(self) -> bool:
        """Whether this rank has met the first one."""
        return self._exchange is not None

    @property
    def silent_s(self) -> float:
        """For how long the store has owed an answer."""
        return self._store.silent_s

    @property
    def is_silent(self) -> bool:
        """Whether the store owes one for too long."""
        return self.silent_s > STORE_S

    @property
    def exchange(self) -> StatusExchange:
        """Raises: DistStoreError before this rank has met the first one; StoreSilent."""
        if self._exchange is None:
            raise DistStoreError("the ranks have not met yet")
        if self.is_silent:
            raise StoreSilent(f"the job's store has not answered for {self.silent_s:.1f} s")
        return self._exchange

    def meet(self) -> bool:
        """Answer those that come later; whether this rank has met the first one. Asks where all others are,
        until that is known."""
        self._attempt.meet()
        if self._exchange is None:
            if not (token := self._attempt.token):
                return False
            exchange = open_exchange(self._default, self.world, token, self._store.bottom())
            self._peers.close()
            self._peers = Datagrams(self._rank, token, self._own)
            exchange.register(self._rank, self._peers.place)
            self._exchange = exchange
        if not self._peers.places:
            self._peers.places = self._exchange.places()
        return True

    def began(self, ranks: set[int]) -> set[int]:
        """Those of ``ranks`` that have begun to watch, in this attempt or in one before."""
        return self._attempt.began(ranks)

    def hosts(self) -> dict[int, str]:
        """The address of each rank's host, once all are known."""
        return {rank: place.rpartition(" ")[0] for rank, place in self._peers.places.items()}

    def ask(self, seconds: float, notes: Sequence[Note]) -> Findings:
        """Ask all ranks without the store: what they say within so many seconds."""
        answers = self._peers.ask(seconds)
        silent = dict.fromkeys(self._peers.places.keys() - answers.keys(), seconds)
        return Findings(self.world, answers, notes, silent=silent, took_s=seconds, hosts=self.hosts())

    def answered(self, ranks: Iterable[int]) -> Mapping[int, int]:
        """Of ranks that have answered a call the last one, in time or not."""
        return self._peers.answered if self.is_silent else self.exchange.answered(ranks)

    def tell(self, shared: SharedDiagnosis) -> None:
        """Send all ranks a diagnosis, without the store."""
        self._peers.tell(json.dumps([shared.fault, shared.ranks, shared.text]))

    def told(self) -> SharedDiagnosis | None:
        """The diagnosis that another rank has sent, if one has. Answers who asks."""
        self._peers.serve()
        if not self._peers.told:
            return None
        fault, ranks, text = said(self._peers.told)
        return SharedDiagnosis(Fault(fault), tuple(ranks), text)

    def close(self) -> None:
        """Answer nobody any more."""
        self._peers.close()


class Datagrams:
    """The other ranks' places, as they are known (``places``), and a socket of this one (``place``; "" where
    it has none). own: what this rank says of itself. told: a diagnosis that another one has sent.
    answered: the last call that each has answered."""

    def __init__(self, rank: int, token: str, own: Callable[[], Answer]) -> None:
        self.places: dict[int, str] = {}
        self.told = ""
        self._rank, self._token, self._own = rank, token, own
        self._number = 0
        self.answered: dict[int, int] = {}
        self._answers: dict[int, Answer] = {}
        self._socket, self.place = _bound()

    def close(self) -> None:
        """Answer nobody any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, seconds: float) -> dict[int, Answer]:
        """What ranks say of themselves within so many seconds."""
        self._number += 1
        self._answers = {self._rank: self._own()}
        self._send(range(len(self.places)), "ask", self._number)
        deadline = clock.monotonic() + seconds
        while len(self._answers) < len(self.places) and clock.monotonic() < deadline:
            self.serve()
            clock.sleep(_POLL_S)
        return self._answers

    def tell(self, text: str) -> None:
        """Send all ranks a diagnosis; they find it as ``told``."""
        self._send(self.places, "diagnosis", text)

    def serve(self) -> None:
        """Answer who has asked, and take what has come."""
        with suppress(OSError):  # none left, or a rank that isn't there
            while self._socket is not None:
                self._take(self._socket.recv(_NBYTES))

    def _take(self, data: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError):  # a stranger's
            token, rank, kind, number, fields = said(data)
            if token != self._token or rank == self._rank:
                return
            if kind == "ask":
                answer = self._own()
                self._send([rank], "answer", number, fields_of(answer))
            elif kind == "answer":
                self.answered[rank] = number
                if number == self._number:
                    self._answers[rank] = answer_of(fields)
            elif kind == "diagnosis":
                self.told = self.told or str(number)

    def _send(self, ranks: Any, kind: str, number: Any, fields: Any = None) -> None:
        data = json.dumps([self._token, self._rank, kind, number, fields]).encode()
        if len(data) > _NBYTES:
            data = json.dumps([self._token, self._rank, kind, number, fields | {"logs": {}}]).encode()
        for rank in ranks:
            host, _, port = self.places.get(rank, "").rpartition(" ")
            if self._socket is not None and host and rank != self._rank:
                with suppress(OSError):
                    self._socket.sendto(data, (host, int(port)))


def _bound() -> tuple[socket.socket | None, str]:
    for host in own_hosts():
        with suppress(OSError):
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
            made = socket.socket(family, socket.SOCK_DGRAM)
            made.setblocking(False)
            made.bind(address)
            name, port = made.getsockname()[:2]
            return made, f"{name} {port}"
    return None, ""
