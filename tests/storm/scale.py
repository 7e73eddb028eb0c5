"""A job of up to 10,000 ranks: what its start, its watch and its agreement ask of the store and the network.

The real code runs, on the simulated clock, network and store of ``nights.py``: the meetings and hand-shakes
of the start-up, a watch of every rank, and ``Consensus`` over sockets. Only torch's process group is a
stand-in (``Group``). The store has the speed of torch's TCPStore, as measured on one core.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwright.engine.groups.group import Stage
from shardwright.engine.step.consensus import Consensus
from shardwright.observe.watch import flight_recorder, lifecycle, status_exchange
from shardwright.observe.watch.status_exchange import StatusExchange
from shardwright.schedule.sync import Synchronize, SyncPoint
from shardwright.transport import attempt, jobstore
from shardwright.transport.attempt import Meeting, join_job, keys_of
from shardwright.transport.channel import AxisChannel
from shardwright.transport.cpu.peers import open_connections
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.process import LaunchLog
from tests.storm.job import SWAPPED, Gloo, Job, simulated
from tests.storm.network import Network
from tests.storm.sim import GreenletTask, Simulation

SERVE_S = 33e-6, 5e-6
"""A TCPStore's one thread: seconds for a call, and for each of its keys (8 clients, 128 keys)."""
LINK = 1e-4, 1.0, 1e9
"""Seconds of latency, how many times as much it may be besides, bytes a second."""
RANKS_PER_NODE = 8
NUM_GROUPS = 100
"""Parameter groups of the model about which ranks agree."""
PHASES = "start", "settling", "watch", "first agreements", "agreement"
SETTLED_S = 10.0
"""In which the watches have met each other; counted by itself."""
_LIMIT = timedelta(minutes=10)


class Prefixed:
    """As PrefixStore, which is of C++: no task of these may wait inside of that."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.underlying_store, self.timeout = f"{prefix}/", store, store.timeout

    def clone(self) -> "Prefixed":
        return Prefixed(self.prefix[:-1], self.underlying_store.clone())

    def __getattr__(self, name: str) -> Any:
        ask, prefix = getattr(self.underlying_store, name), self.prefix

        def call(key: Any, *more: Any) -> Any:
            return ask(f"{prefix}{key}" if isinstance(key, str) else [f"{prefix}{k}" for k in key], *more)

        return call


class Group:
    """torch's default process group, of which only who it has is asked."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.size = lambda: rank, lambda: world


@dataclass
class Cost:
    """What a phase took. calls, nbytes: of the store, of all ranks. messages: between ranks, besides."""

    seconds: float
    calls: int
    nbytes: int
    messages: int


class Scale:
    """A job of ``world`` ranks that starts, waits, and agrees. costs: of each phase, by name."""

    def __init__(self, world: int, seed: int = 0, watched_s: float = 20.0) -> None:
        self.world, self.watched_s = world, watched_s
        self.ranks = tuple(range(world))
        self.sim = Simulation(seed, [(owner, name) for owner, name, _ in SWAPPED], kind=GreenletTask)
        self.network = Network(self.sim, *LINK)
        hosts = [f"node{rank // RANKS_PER_NODE}" for rank in self.ranks]
        self.job = Job(self.sim, self.network, hosts)
        self.job.store.serve_s = SERVE_S
        self.costs: dict[str, Cost] = {}
        self._begins = self._spent()
        self._came = dict.fromkeys(PHASES, 0)
        self._waiters: dict[Any, None] = {}

    def _spent(self) -> Cost:
        store = self.job.store
        return Cost(self.sim.now, store.calls, store.nbytes, self.network.messages)

    def _ends(self, phase: str) -> None:
        """This rank is at the end of a phase; returns when all are."""
        self._came[phase] += 1
        if self._came[phase] == self.world:
            spent, before = self._spent(), self._begins
            self.costs[phase] = Cost(
                *(after - was for after, was in zip(vars(spent).values(), vars(before).values(), strict=True))
            )
            self._begins = spent
            self.sim.look_at(self._waiters)
        self.sim.wait(lambda: self._came[phase] == self.world, by=self._waiters)

    def run(self) -> dict[str, Cost]:
        """Returns the costs of each of ``PHASES``."""
        with simulated(self.sim, self.network, Gloo(self.sim, self.network)), self._stand_ins():
            self.job.start(self._live)
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(1 << 30)  # a greenlet counts on from the depth of who has begun it
            try:
                self.sim.run()
            finally:
                sys.setrecursionlimit(limit)
        failed = [each for each in self.job.outcomes.values() if each is not None]
        errors = [error for process in self.sim.processes for _, error in process.errors]
        for error in (*failed, *errors):
            raise AssertionError(f"a rank of a healthy job fails: {error!r}") from error
        return self.costs

    def _live(self, rank: int, world: int) -> None:
        join_job("none", _LIMIT)
        lifecycle.keep_watch()
        meeting = Meeting(
            keys_of(self.ranks, _LIMIT, "to make a transport"), LaunchLog(self.ranks, "cpu"), rank, _LIMIT
        )
        peers = open_connections(meeting)
        assert not isinstance(peers, str), peers
        comm = SocketComm(peers)
        self._ends("start")
        self.sim.sleep(SETTLED_S)
        self._ends("settling")
        self.sim.sleep(self.watched_s)
        self._ends("watch")
        group = SimpleNamespace(
            gatherer=SimpleNamespace(smaller_world=None),
            params=[0] * 4,
            stage=Stage.SHARDED,
            keeps_smaller=False,
        )
        table = SimpleNamespace(groups=[group] * NUM_GROUPS, comms=list, num_steps=0)
        executor = SimpleNamespace(table=table, compare=lambda: None)
        consensus = Consensus(executor, AxisChannel(comm))  # type: ignore[arg-type]
        for _ in range(2):  # connections to those far away are opened by the first
            consensus.exchange(Synchronize(SyncPoint.FORWARD, 0, 0, 0))
        self._ends("first agreements")
        consensus.exchange(Synchronize(SyncPoint.FORWARD, 0, 0, 0))
        self._ends("agreement")

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        def begin(backend: str, *, store: Any, rank: int, world_size: int, timeout: Any) -> None:
            group = Group(rank, world_size)
            c10d._world._default_pg, c10d._pg_map = group, {group: (backend, store)}  # type: ignore

        # What each rank has of all others is the same: one for all, for want of memory.
        places, shared = StatusExchange.places, {0: dict[int, str]()}

        def few(*limits: int) -> Any:
            return self.ranks if limits == (self.world,) else range(*limits)

        with ExitStack() as stack:
            for owner, name, value in (
                *((module, "PrefixStore", Prefixed) for module in (attempt, jobstore, status_exchange)),
                (dist, "init_process_group", begin),
                (flight_recorder, "process_groups", list),
                (lifecycle, "timeout_of", lambda group: _LIMIT),
                (StatusExchange, "places", lambda own: shared.setdefault(len(found := places(own)), found)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(mock.patch.object(jobstore, "range", few, create=True))
            yield
