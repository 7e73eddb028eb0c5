"""``shardwright preflight``: in ten seconds, whether a job can train on the ranks that its launcher starts.

torchrun ... -m shardwright preflight [--folder /shared/runs] [--out cluster.toml] [--json]
srun shardwright preflight
"""

import argparse
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.cli.bench import DTYPES, measured_cluster, told
from shardwright.errors import CommError, ConfigError
from shardwright.observe.preflight import (
    Flow,
    HostReport,
    LinkReport,
    RankCall,
    Readiness,
    Trouble,
    can_measure,
    is_loopback,
    judge,
)
from shardwright.observe.preflight_host import OwnFile, addresses, host_report, within, write_own_file
from shardwright.observe.preflight_links import Responder, call_all, flow_seconds, rounds, send_all
from shardwright.observe.preflight_table import page
from shardwright.train.tasks import is_rank, take_part
from shardwright.transport.attempt import Attempt, join_job
from shardwright.transport.cpu.handshake import Place, listen
from shardwright.transport.mesh import default_backend

_POLL_S = 0.01
_COME, _FLOWS, _REPORT = 0.45, 0.2, 0.9
"""Shares of the time: until ranks have come, that flows take, until reports are there."""


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    preflight = commands.add_parser(
        "preflight",
        description="Find out whether a job can train on these hosts: names, interfaces, links, clocks, "
        "versions, memory, disks, devices. Start it on every rank, as a training job is. Exit code 1: "
        "something is wrong, and the page says what to do.",
        allow_abbrev=False,
    )
    preflight.add_argument("--folder", default=".", help="what all hosts share, where runs are to be kept")
    preflight.add_argument("--seconds", type=float, default=10.0, help="it takes at most (default 10)")
    preflight.add_argument(
        "--out", metavar="FILE", help="measure the cluster as well, into this file for plans"
    )
    preflight.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of what is measured")
    preflight.add_argument("--json", action="store_true", help="print all that was found out as one object")
    preflight.set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Find out, and print it on rank 0. Every rank returns 1 where something is wrong anywhere.

    Raises: ConfigError.
    """
    if not known.seconds >= 2:
        raise ConfigError(f"--seconds {known.seconds:g}, expected 2 or more: links alone take that long")
    take_part()
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if is_rank() else (0, 1)
    check = _Check(rank, world, Path(known.folder).absolute(), known.seconds)
    try:
        found, troubles = check.all()
        if rank == 0:
            print(
                _as_json(found, troubles) if known.json else page(found, troubles, check.passed_s), flush=True
            )
        verdict = check.share_verdict(troubles)
    except (CommError, RuntimeError) as error:  # the second one: the store's own
        print(
            f"shardwright preflight: rank {rank} on {socket.gethostname()}: {error}",
            file=sys.stderr,
            flush=True,
        )
        # Who leaves now takes the other ranks of its launcher along, before they have said anything.
        time.sleep(max(known.seconds - check.passed_s, 0.0) if "TORCHELASTIC_RUN_ID" in os.environ else 0.0)
        return 1
    finally:
        check.close()
    if known.out and verdict["measure"]:
        _measure(Path(known.out), known.dtype, world, known.seconds, quiet=known.json)
    elif known.out and rank == 0:
        print(f"not written: {known.out}. Links are measured once ranks can meet", file=sys.stderr)
    return 1 if verdict["failed"] else 0


def _measure(path: Path, dtype: str, world: int, seconds: float, *, quiet: bool) -> None:
    if world > 1:
        join_job(default_backend(), timedelta(seconds=3 * seconds))
    found = measured_cluster(path, DTYPES[dtype])
    if int(os.environ.get("RANK", "0")) == 0:
        found.save(path)
        print(
            "" if quiet else told(found) + "\n",
            f"written: {path}",
            sep="",
            file=sys.stderr if quiet else None,
        )


class _Check:
    """One rank's part. What ranks say goes through the job's store; no process group is made.

    host/<rank>    what the rank found at home, its place and its file    written by each
    ranks          all that came in time                                  written by rank 0
    links/<rank>   what the rank found out about the others               written by each
    verdict        whether anything is wrong                              written by rank 0
    came/<what>    how many have written theirs, or read the verdict
    """

    def __init__(self, rank: int, world: int, folder: Path, seconds: float) -> None:
        self.rank, self.world, self.folder, self.seconds = rank, world, folder, seconds
        self._start = time.monotonic()
        self._file: OwnFile | None = None
        self._listener: Responder | None = None
        self._keys: Store | None = None

    @property
    def passed_s(self) -> float:
        """Seconds since this rank began."""
        return time.monotonic() - self._start

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
        ranks = json.loads(keys.get("ranks"))
        said = dict(zip(ranks, _said(keys, "host", ranks), strict=True))
        hosts = {rank: _host(each[0]) for rank, each in said.items()}
        links = self._links(hosts, {rank: Place(*each[1]) for rank, each in said.items()})
        unseen = [rank for rank, each in said.items() if not _shows(each[2], each[3])]
        keys.set(f"links/{self.rank}", json.dumps([links.calls, links.flows, unseen]))
        self._came("links")
        if self.rank:
            return Readiness(self.world, hosts, {}, come_s, str(self.folder)), []
        self._until_came("links", len(ranks), self.left_s(_REPORT))
        there = [rank for rank in ranks if keys.check([f"links/{rank}"])]
        reports = {rank: _link(said) for rank, said in zip(there, _said(keys, "links", there), strict=True)}
        found = Readiness(self.world, hosts, reports, come_s, str(self.folder))
        return found, judge(found)

    def share_verdict(self, troubles: list[Trouble]) -> dict[str, bool]:
        """What rank 0 found, on all ranks; returns on rank 0 when all have read it, or the time is over."""
        keys = self._keys
        assert keys is not None
        if self.rank == 0:
            verdict = {"failed": bool(troubles), "measure": can_measure(troubles)}
            keys.set("verdict", json.dumps(verdict))
            self._until_came("verdict", len(json.loads(keys.get("ranks"))) - 1, max(self.left_s(1.0), 0.5))
            return verdict
        if not self._until(lambda: keys.check(["verdict"]), self.left_s(1.0) + 1.0):
            raise CommError("rank 0 said nothing in time: look at its output")
        verdict = json.loads(keys.get("verdict"))
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
        there = listen(self.world) if usable == own.address else _listening_at(usable)
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
        if self.rank not in json.loads(keys.get("ranks")):
            raise CommError("came too late, the others go on without it: give all more time, --seconds 30")
        return self.passed_s

    def _links(self, hosts: dict[int, HostReport], places: dict[int, Place]) -> LinkReport:
        listener = self._listener
        assert listener is not None
        plan = rounds({rank: report.host for rank, report in hosts.items()})
        listener.flow_s = flow_seconds(len(plan), _FLOWS * self.seconds)
        calls = call_all(self.rank, places, time.monotonic() + self.left_s(_REPORT) / 2)
        self._came("calls")  # flows begin when nobody measures latencies any more
        self._until_came("calls", len(hosts), self.left_s(_REPORT) / 2)
        send_all(self.rank, places, plan, listener.flow_s)
        return LinkReport(tuple(calls), listener.flows)

    def _came(self, what: str) -> None:
        assert self._keys is not None
        self._keys.add(f"came/{what}", 1)

    def _until_came(self, what: str, count: int, seconds: float) -> bool:
        keys = self._keys
        assert keys is not None
        return self._until(lambda: keys.add(f"came/{what}", 0) >= count, seconds)

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether it is so within ``seconds``."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _said(keys: Store, what: str, ranks: Sequence[int]) -> list[Any]:
    """What ranks have written, all of which have. One message, however many there are."""
    return (
        [json.loads(each) for each in keys.multi_get([f"{what}/{rank}" for rank in ranks])] if ranks else []
    )


def _shows(path: str, text: str) -> bool:
    """Whether this rank sees a file that another has written. (Mounts remember a name looked for before.)"""
    try:
        return not path or within(1.0, Path(path).read_text) == text
    except OSError:
        return False


def _listening_at(address: str) -> tuple[socket.socket, Place] | str:
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, 0), family=family)
    except OSError as error:
        return f"it can't listen at {address or 'any address'}: {error}"
    return sock, Place(address, sock.getsockname()[1], secrets.token_hex(16))


def _host(said: dict[str, Any]) -> HostReport:
    troubles = tuple(Trouble(what, tuple(ranks), *rest) for what, ranks, *rest in said.pop("troubles"))
    pairs: dict[str, Any] = {name: tuple(said.pop(name)) for name in ("link", "route", "disk")}
    return HostReport(**said, **pairs, troubles=troubles)


def _link(said: list[Any]) -> LinkReport:
    calls, flows, unseen = said
    return LinkReport(
        tuple(RankCall(*each) for each in calls), tuple(Flow(*each) for each in flows), tuple(unseen)
    )


def _as_json(found: Readiness, troubles: Sequence[Trouble]) -> str:
    return json.dumps({**asdict(found), "failed": [trouble._asdict() for trouble in troubles]})
