"""A job of few ranks in one process, of which each does what a test says; by greenlets, in milliseconds."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch.distributed import distributed_c10d as c10d

from shardwright.observe.watch import flight_recorder, status_exchange
from shardwright.transport import attempt, jobstore
from tests.storm.job import SWAPPED, Gloo, Job, simulated
from tests.storm.network import Network
from tests.storm.scale import Group, Prefixed
from tests.storm.sim import GreenletTask, Simulation
from tests.storm.store import SimulatedStore


class Few:
    """The ranks of ``scripts``, each on a host of its own by default. The store is an agent's, on the first
    host. outcomes: of each rank what its script has returned, or raised."""

    def __init__(
        self, *scripts: Callable[[], Any], hosts: Sequence[str] = (), limit_s: float = 1000.0
    ) -> None:
        hosts = [*hosts] or [f"host {rank}" for rank in range(len(scripts))]
        swapped = [(owner, name) for owner, name, _ in SWAPPED]
        self.sim = Simulation(0, swapped, limit_s, GreenletTask)
        self.network = Network(self.sim, 0.0, 0.0, float("inf"))
        self.job = Job(self.sim, self.network, hosts)
        self.store, self.outcomes, self.ranks = self.job.store, self.job.outcomes, self.job.ranks
        self._scripts = scripts

    def run(self, *stand_ins: tuple[Any, str, Any]) -> "Few":
        """Until all have ended. stand_ins: more that is replaced meanwhile."""
        replaced = [(module, "PrefixStore", Prefixed) for module in (attempt, jobstore, status_exchange)]
        with simulated(self.sim, self.network, Gloo(self.sim, self.network)), ExitStack() as stack:
            for owner, name, value in (*replaced, (flight_recorder, "process_groups", list), *stand_ins):
                stack.enter_context(mock.patch.object(owner, name, value))
            self.job.start(self._live)
            self.sim.run()
        for process in self.ranks:
            for _, error in process.errors:
                raise error
        return self

    def _live(self, rank: int, world: int) -> Any:
        store = Prefixed("job", SimulatedStore(self.store, self.network))
        group: Any = Group(rank, world)
        c10d._world._default_pg, c10d._pg_map = group, {group: ("none", store)}  # type: ignore
        return self._scripts[rank]()
