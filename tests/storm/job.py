"""A job of ranks in one process, with all of the package's code: start-up, steps, saves, the watch.

Only what stands behind the package's doors is simulated (docs/design/transport.md, "What a simulation
replaces"), and what is torch's: the launcher's store and Gloo.
"""

import contextlib
import gc
import os
import secrets
import sys
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed import distributed_c10d as c10d

from shardwright import clock
from shardwright.checkpoint import background
from shardwright.engine.groups import table
from shardwright.engine.step import hooks, runtime
from shardwright.observe.watch import (
    delivery,
    lifecycle,
    process_status,
    reach,
    requests,
    status_exchange,
    watchdog,
)
from shardwright.torch_private import new_group_of
from shardwright.transport import attempt, jobstore, liveness, mesh, recorder
from shardwright.transport.cpu import event_loop, handshake
from shardwright.transport.process import ProcessState, process_state
from tests.storm.network import Network
from tests.storm.sim import MAIN, Condition, Future, Killed, Process, Queue, Simulation, Threading
from tests.storm.store import Held, SimulatedStore

saving = import_module("shardwright.checkpoint.save")  # the package shows the function of that name
for _name in ("transport.cpu.peers", "transport.cpu.sockets", "checkpoint.load"):  # as they are needed
    import_module(f"shardwright.{_name}")

# What a process has once (the mutable objects of modules, and torch's own of its process groups), and what a
# process begins with there.
SWAPPED: list[tuple[Any, str, Callable[[], Any]]] = [
    (process_state, "__dict__", lambda: vars(ProcessState())),
    (lifecycle, "_lifecycle", lifecycle._Lifecycle),
    (hooks, "_root_left_out", hooks._RootLeftOut),
    (saving, "_staging", dict),
    (background, "_running", list),
    (table, "tables", lambda: type(table.tables)()),
    (runtime, "unsettled", lambda: type(runtime.unsettled)()),
    (requests, "_open", lambda: type(requests._open)()),
    (requests, "_masks", dict),
    *[(c10d, name, dict) for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config")],
    (c10d, "_group_count", int),
    (c10d, "_tags_to_pg", dict),
    (c10d, "_pg_to_tag", dict),
    (c10d._world, "_default_pg", lambda: None),
]


class Gloo:
    """torch's own collectives among ranks, as far as the package calls them: a call ends when all ranks have
    come to it, and fails where one of them has ended or has closed the group."""

    def __init__(self, sim: Simulation, network: Network) -> None:
        self.sim, self.network = sim, network
        self._said: dict[Any, dict[int, Any]] = {}
        self._numbers: Counter[Any] = Counter()
        self._made: Counter[Any] = Counter()
        self._of: dict[tuple[int, str], tuple[Any, int, float]] = {}
        self._groups: dict[Any, tuple[Any, dict[int, Process]]] = {}
        self.closed: set[Any] = set()

    def new_group(self, ranks: Any, timeout: timedelta, backend: str) -> Any:
        group = new_group_of(ranks, timeout, "fake")
        own = dist.get_rank()
        self._made[self.sim.here.number, tuple(ranks)] += 1
        name = tuple(ranks), self._made[self.sim.here.number, tuple(ranks)], process_state.made.attempt.token
        members = self._groups.setdefault(name, (name, {}))[1]
        members[own] = self.sim.here
        limit_s = timeout.total_seconds() if timeout else 300.0
        self._of[self.sim.here.number, group.group_name] = name, own, limit_s
        return group

    def _found(self, group: Any) -> Any:
        """What this rank's group is called among all ranks, its own number there, and its time limit."""
        return self._of.get((self.sim.here.number, group.group_name))

    def exchange(self, group: Any, value: Any) -> list[Any]:
        """What each rank gave, in their order. Raises: RuntimeError."""
        sim = self.sim
        name, own, limit_s = self._found(group)
        ranks, members = name[0], self._groups[name][1]
        sim.pass_on()
        self._numbers[name, own] += 1
        said = self._said.setdefault((name, self._numbers[name, own]), {})
        said[own] = value
        sim.look_at_all()
        began = sim.now

        def gone() -> bool:
            return (name, own) in self.closed or any(
                rank not in said and (not members[rank].alive or (name, rank) in self.closed)
                for rank in ranks
                if rank in members
            )

        sim.wait(lambda: len(said) == len(ranks) or gone(), began + limit_s)
        sim.sleep(self.network.delay_s())
        if len(said) == len(ranks):
            return [said[rank] for rank in ranks]
        if gone():
            raise RuntimeError("[../third_party/gloo/transport/tcp/pair.cc] Connection closed by peer")
        raise RuntimeError(f"Timed out waiting {limit_s * 1e3:.0f}ms for recv operation to complete")

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        given = torch.stack(self.exchange(group, tensor.clone()))
        tensor.copy_(given.amin(0) if op == dist.ReduceOp.MIN else given.sum(0))

    def all_gather(self, places: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        for place, given in zip(places, self.exchange(group, tensor.clone()), strict=True):
            place.copy_(given)

    def close(self, group: Any) -> None:
        if (found := self._found(group)) is not None:
            self.closed.add(found[:2])
            self.sim.look_at_all()

    def is_closed(self, group: Any, place: int) -> bool:
        if (found := self._found(group)) is None:
            return False
        name = found[0]
        member = self._groups[name][1].get(name[0][place])
        return member is not None and (not member.alive or (name, name[0][place]) in self.closed)


class Exited(Killed):
    """``os._exit``."""


class Job:
    """The ranks of one job in a simulation. hosts: of each rank its host's name."""

    def __init__(
        self, sim: Simulation, network: Network, hosts: list[str], store: Held | None = None
    ) -> None:
        self.sim, self.network, self.hosts = sim, network, hosts
        self.agent = store.process if store else self._process("agent", hosts[0])
        self.store = store or Held(self.agent)
        self.ranks = [self._process(f"rank {rank}", host) for rank, host in enumerate(hosts)]
        self.outcomes: dict[int, Any] = {}

    def _process(self, name: str, host: str) -> Process:
        return Process(self.sim, name, host, [getattr(owner, name) for owner, name, _ in SWAPPED])

    def start(self, script: Callable[[int, int], Any]) -> None:
        """Each rank runs ``script(rank, world)``."""
        for rank, made in enumerate(self.ranks):
            self.sim.spawn(made, MAIN, lambda rank=rank: self._live(rank, script))

    def _live(self, rank: int, script: Callable[[int, int], Any]) -> None:
        own = self.sim.here
        own.rank, own.job = rank, self
        for owner, name, fresh in SWAPPED:
            setattr(owner, name, fresh())
        try:
            self.outcomes[rank] = script(rank, len(self.ranks))
            lifecycle.leave(None)
        except (Exception, KeyboardInterrupt) as error:
            self.outcomes[rank] = error
            self.sim.note(f"{type(error).__name__}: {error}")
            lifecycle.leave(error)
        event_loop._join_all()
        own.end("its script has ended")


def _exit(sim: Simulation, code: int) -> None:
    sim.here.end(f"os._exit({code})")
    raise Exited


@contextlib.contextmanager
def simulated(sim: Simulation, network: Network, gloo: Gloo) -> Iterator[None]:
    """In this block all doors of the package lead into the simulation."""
    random, shim = sim.random, Threading(sim)

    def identity(pid: int | None = None) -> str | None:
        of = sim.here if pid is None else sim.processes[pid]
        return f"boot-{of.host} ns {of.number} 0" if of.alive else None

    def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        own = sim.here
        yield SimulatedStore(own.job.store, network), own.rank, len(own.job.ranks)

    stand_ins: list[tuple[Any, str, Any]] = [
        *[(clock, name, lambda: sim.now) for name in ("monotonic", "perf_counter", "time")],
        *[(clock, name, lambda: 0.0) for name in ("thread_time", "process_time")],
        (clock, "sleep", sim.sleep),
        (clock, "wait", Condition.wait),
        (handshake, "addresses_of", network.addresses_of),
        (handshake, "serve", network.serve),
        (handshake, "connect", network.connect),
        (handshake, "pair", network.pair),
        (handshake, "Selector", network.selector),
        (handshake, "sleep_until_read", network.sleep_until_read),
        (reach, "_bound", network.datagram),
        (jobstore, "queue", SimpleNamespace(SimpleQueue=lambda: Queue(sim))),
        (jobstore, "Future", lambda: Future(sim)),
        (status_exchange, "TCPStore", SimulatedStore),
        (attempt, "rendezvous", rendezvous),
        (attempt, "new_group_of", gloo.new_group),
        (mesh, "default_backend", lambda: "fake"),
        (dist, "all_reduce", gloo.all_reduce),
        (dist, "all_gather", gloo.all_gather),
        (delivery, "close", gloo.close),
        (watchdog, "is_closed", gloo.is_closed),
        (delivery, "os", SimpleNamespace(_exit=lambda code: _exit(sim, code))),
        (liveness, "identity", identity),
        (process_status, "sys", SimpleNamespace(version_info=sys.version_info, _current_frames=sim.frames)),
        (process_status, "_others_cpu_s", lambda: 0.0),
        (process_status, "_runnable", lambda: False),
        (process_status, "resident_nbytes", lambda: 0),
        (recorder, "waited_for_core", lambda: None),
        (requests.Requests, "interrupt", lambda _: None),
        (secrets, "token_hex", lambda n=16: random.randbytes(n).hex()),
        (secrets, "token_bytes", random.randbytes),
        (secrets, "randbits", random.getrandbits),
        (uuid, "uuid4", lambda: uuid.UUID(int=random.getrandbits(128))),
        (os, "environ", {**os.environ, "RANK": "0", "SHARDWRIGHT_SECRET": "0123456789abcdef"}),
        *[
            (module, "threading", shim)
            for name, module in sorted(sys.modules.items())
            if name.startswith("shardwright.") and getattr(module, "threading", None) is threading
        ],
    ]
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    cores = os.sched_getaffinity(0)
    # On one core threads hand over to each other twice as fast.
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    collects = gc.isenabled()
    gc.disable()  # a finalizer runs where the seed says, or not at all
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # names of groups are each thread's own
    for owner, name, value in stand_ins:
        setattr(owner, name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for (owner, name, _), value in zip(stand_ins, before, strict=True):
            setattr(owner, name, value)
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        os.sched_setaffinity(0, cores)
        if collects:
            gc.enable()
