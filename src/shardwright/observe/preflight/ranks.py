"""How ranks of a preflight tell each other what they found out, through the job's store, in time."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright import clock
from shardwright.errors import CommError, said
from shardwright.observe.preflight.findings import (
    Flow,
    HostReport,
    LinkReport,
    RankCall,
    Readiness,
    Trouble,
    is_loopback,
)
from shardwright.observe.preflight.host import OwnFile, addresses, host_report, within, write_own_file
from shardwright.observe.preflight.judge import can_measure, judge
from shardwright.observe.preflight.links import Responder, call_all, flow_seconds, rounds, send_all
from shardwright.transport.attempt import Attempt
from shardwright.transport.cpu.handshake import Place, listen, listen_at

_POLL_S = 0.01
_COME, _FLOWS, _REPORT = 0.45, 0.2, 0.9
"""Shares of the time: until ranks have come, that flows take, until reports are there."""


class Check:
    """One rank's part. What ranks say goes through the job's store; no process group is made.

    host/<rank>    what the rank found at home, its place and its file    written by each
    ranks          all that came in time                                  written by rank 0
    links/<rank>   what the rank found out about the others               written by each
    verdict        whether anything is wrong                              written by rank 0
    came/<what>    how many have written theirs, or read the verdict
    """

    def __init__(self, rank: int, world: int, folder: Path, seconds: float) -> None:
        self.rank, self.world, self.folder, self.seconds = rank, world, folder, seconds
        self._start = clock.monotonic()
        self._file: OwnFile | None = None
        self._listener: Responder | None = None
        self._keys: Store  # from ``all`` on

    @property
    def passed_s(self) -> float:
        """Seconds since this rank began."""
        return clock.monotonic() - self._start

    def left_s(self, share: float) -> float:
        """Seconds until this share of the time has passed; 0 where it has."""
        return max(share * self.seconds - self.passed_s, 0.0)

    def all(self) -> tuple[Readiness, list[Trouble]]:
        """Find out all; on ranks but the first the others' part is missing.

        Raises: CommError for a rank that can't speak with the first one.
        """
        writing = Thread(target=self._write, daemon=True)
        writing.start()
        master = self._master()
        self._keys = keys = self._store(master)
        writing.join(self.left_s(_COME * 0.8))
        own = host_report(self.rank, master, self._file, self.folder)
        place = self._listen(own)
        path, text = (str(self._file.path), self._file.text) if self._file else ("", "")
        keys.set(f"host/{self.rank}", json.dumps([asdict(own), place, path, text]))
        self._came("host")
        come_s = self._roster(keys)
        ranks = said(keys.get("ranks"))
        told = dict(zip(ranks, _said(keys, "host", ranks), strict=True))
        hosts = {rank: _host(each[0]) for rank, each in told.items()}
        links = self._links(hosts, {rank: Place(*each[1]) for rank, each in told.items()})
        unseen = [rank for rank, each in told.items() if not _shows(each[2], each[3])]
        keys.set(f"links/{self.rank}", json.dumps([links.calls, links.flows, unseen]))
        self._came("links")
        if self.rank:
            return Readiness(self.world, hosts, {}, come_s, str(self.folder)), []
        self._until_came("links", len(ranks), self.left_s(_REPORT))
        there = [rank for rank in ranks if keys.check([f"links/{rank}"])]
        reports = {rank: _link(each) for rank, each in zip(there, _said(keys, "links", there), strict=True)}
        found = Readiness(self.world, hosts, reports, come_s, str(self.folder))
        return found, judge(found)

    def share_verdict(self, troubles: list[Trouble]) -> dict[str, bool]:
        """What rank 0 found, on all ranks; returns on rank 0 when all have read it, or the time is over."""
        keys = self._keys
        if self.rank == 0:
            verdict = {"failed": bool(troubles), "measure": can_measure(troubles)}
            keys.set("verdict", json.dumps(verdict))
            self._until_came("verdict", len(said(keys.get("ranks"))) - 1, max(self.left_s(1.0), 0.5))
            return verdict
        if not self._until(lambda: keys.check(["verdict"]), self.left_s(1.0) + 1.0):
            raise CommError("rank 0 said nothing in time: look at its output")
        verdict = said(keys.get("verdict"))
        self._came("verdict")
        return verdict

    def close(self) -> None:
        """Take away what it left."""
        if self._listener is not None:
            self._listener.close()
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._file = write_own_file(self.folder, self.rank)

    def _master(self) -> str:
        """The address of rank 0's host; "" for a rank that is alone."""
        if self.world == 1:
            return ""
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise CommError(
                f"{' and '.join(missing)} not set: start it with torchrun or srun (docs/launchers.md)"
            )
        name = os.environ["MASTER_ADDR"]
        found = addresses(name)
        if not found:
            raise CommError(
                f"MASTER_ADDR={name} is no name that this host knows: write it into /etc/hosts or the DNS, "
                "or give the address itself"
            )
        return found[0]

    def _store(self, master: str) -> Store:
        """Where ranks leave what they say. Rank 0 serves it where the launcher doesn't."""
        if self.world == 1:
            return HashStore()
        name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=max(self.left_s(_COME if serves else _REPORT), 0.5))
        try:
            store = within(
                limit.total_seconds() + 0.5,
                lambda: TCPStore(name, port, None, serves, limit, wait_for_workers=False, multi_tenant=True),
            )
        except (RuntimeError, TimeoutError) as error:
            where = f"MASTER_ADDR={name}, which is {master} here, port {port}"
            spans = int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) < self.world
            if spans and is_loopback(master):
                why = "that is this host itself: give an address that leads to rank 0's host from here"
            elif serves:
                why = f"can't listen there ({str(error).splitlines()[0]}): take another MASTER_PORT"
            else:
                why = (
                    "rank 0 hasn't started there, or a firewall is between: see its output, and open the port"
                )
            raise CommError(f"no store answers at {where}: {why}") from None
        attempt = Attempt(store, self.rank, self.world)
        attempt.meet_within(self.left_s(_COME if self.rank == 0 else _REPORT))
        if not attempt.token:
            raise CommError("the store answers, and rank 0 never came: look at its output")
        return PrefixStore("preflight", attempt.keys())

    def _listen(self, own: HostReport) -> Place:
        """Where others call: the address that Gloo would tell them, else one that they can reach."""
        usable = own.route[1] if is_loopback(own.address) and own.route[1] else own.address
        try:
            there = listen() if usable == own.address else listen_at(usable)
        except OSError as error:
            there = f"it can't listen at {usable or 'any address'}: {error}"
        if isinstance(there, str):
            raise CommError(f"others can't call this rank: {there}")
        self._listener = Responder(*there)
        return there[1]

    def _roster(self, keys: Store) -> float:
        """Return when it is decided who has come; seconds since this rank began."""
        if self.rank == 0:
            self._until_came("host", self.world, self.left_s(_COME))
            keys.set("ranks", json.dumps([r for r in range(self.world) if keys.check([f"host/{r}"])]))
        elif not self._until(lambda: keys.check(["ranks"]), self.left_s(_REPORT)):
            raise CommError("rank 0 came, and never said who is there: look at its output")
        if self.rank not in said(keys.get("ranks")):
            raise CommError("came too late, the others go on without it: give all more time, --seconds 30")
        return self.passed_s

    def _links(self, hosts: dict[int, HostReport], places: dict[int, Place]) -> LinkReport:
        listener = self._listener
        assert listener is not None
        plan = rounds({rank: report.host for rank, report in hosts.items()})
        listener.flow_s = flow_seconds(len(plan), _FLOWS * self.seconds)
        calls = call_all(self.rank, places, clock.monotonic() + self.left_s(_REPORT) / 2)
        self._came("calls")  # flows begin when nobody measures latencies any more
        self._until_came("calls", len(hosts), self.left_s(_REPORT) / 2)
        send_all(self.rank, places, plan, listener.flow_s)
        return LinkReport(tuple(calls), listener.flows)

    def _came(self, what: str) -> None:
        self._keys.add(f"came/{what}", 1)

    def _until_came(self, what: str, count: int, seconds: float) -> bool:
        return self._until(lambda: self._keys.add(f"came/{what}", 0) >= count, seconds)

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether it is so within ``seconds``."""
        deadline = clock.monotonic() + seconds
        while not done():
            if clock.monotonic() > deadline:
                return False
            clock.sleep(_POLL_S)
        return True


def _said(keys: Store, what: str, ranks: Sequence[int]) -> list[Any]:
    """What ranks have written, all of which have. One message, however many there are."""
    return [said(each) for each in keys.multi_get([f"{what}/{rank}" for rank in ranks])] if ranks else []


def _shows(path: str, text: str) -> bool:
    """Whether this rank sees a file that another has written. (Mounts remember a name looked for before.)"""
    try:
        return not path or within(1.0, Path(path).read_text) == text
    except OSError:
        return False


def _host(said: dict[str, Any]) -> HostReport:
    troubles = tuple(Trouble(what, tuple(ranks), *rest) for what, ranks, *rest in said.pop("troubles"))
    pairs: dict[str, Any] = {name: tuple(said.pop(name)) for name in ("link", "route", "disk")}
    return HostReport(**said, **pairs, troubles=troubles)


def _link(said: list[Any]) -> LinkReport:
    calls, flows, unseen = said
    return LinkReport(
        tuple(RankCall(*each) for each in calls), tuple(Flow(*each) for each in flows), tuple(unseen)
    )
