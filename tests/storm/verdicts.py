"""Random faults of a job of up to 10,000 ranks: does the watch name the right ranks, and soon enough?

The watch of one rank that waits is real, with its exchange and its diagnosis, on a simulated clock and store.
What the others say is put into the store for them, at a random moment between two looks after each call.
Ranks wait for each other in the collectives of one transport, eight ranks to a node.
"""

import copy
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from torch.distributed import distributed_c10d as c10d

from shardwright.errors import CommError, Diverged, RankLost, said
from shardwright.observe.watch import flight_recorder, status_exchange, watchdog
from shardwright.observe.watch.diagnosis import spans
from shardwright.observe.watch.findings import Answer, Launched, Waits
from shardwright.observe.watch.status_exchange import answer_of, fields_of
from shardwright.policy import WatchPolicy
from shardwright.transport import jobstore
from shardwright.transport.jobstore import job_store
from shardwright.transport.process import LaunchLog, process_state
from tests.storm.job import SWAPPED, Gloo, Job, simulated
from tests.storm.network import Network
from tests.storm.scale import LINK, RANKS_PER_NODE, SERVE_S, Group, Prefixed, Scale
from tests.storm.sim import MAIN, GreenletTask, Simulation
from tests.storm.store import SimulatedStore

POLICY = WatchPolicy()
KINDS = {
    "is killed": (RankLost, 0.0),
    "is stopped for good": (RankLost, POLICY.lost_s),
    "its node is cut off": (RankLost, POLICY.lost_s),
    "several of its node are killed": (RankLost, 0.0),
    "is in another call": (Diverged, POLICY.suspect_s),
    "is slow": (None, 5 * POLICY.suspect_s),
    "never arrives": (None, 5 * POLICY.suspect_s),
}
"""What goes wrong with ranks: the error that is right (None: a line in the log), and the seconds after which
the watch is to look for it (docs/watch.md)."""
PATIENCE_S = 5.0
"""In which the right ranks are then named."""
PREFIX = "shardwright/watch/token/"
_RANK = '"rank": '
_GROUPS_OF_EVENTS = 20
_NUMBER = 40  # of the collective in which ranks wait
KEYS = [f"all-gather blocks.{number % 7}" for number in range(1, _NUMBER + 1)]


class Verdict(NamedTuple):
    """What a fault came to. ranks: those at fault. after_s: since the fault; inf: nothing was said."""

    kind: str
    ranks: frozenset[int]
    said: str
    after_s: float
    is_right: bool


class Direct:
    """The store as those ask it whose time doesn't count: at once."""

    def __init__(self, keys: dict[str, bytes], prefix: str) -> None:
        self._keys, self._prefix = keys, prefix

    def set(self, key: str, value: Any) -> None:
        self._keys[self._prefix + key] = value.encode() if isinstance(value, str) else value

    def add(self, key: str, amount: int) -> int:
        number = int(self._keys.get(self._prefix + key, b"0")) + amount
        self.set(key, str(number))
        return number


class Keys(dict[str, bytes]):
    """What a store holds. on_call: told of each call for a status."""

    on_call: Callable[[int], None] = staticmethod(lambda call: None)

    def __setitem__(self, key: str, value: bytes) -> None:
        super().__setitem__(key, value)
        if key.endswith("/latest") and int(value.split()[0]) and value.split()[1] == b"0":
            self.on_call(int(value.split()[0]))


class Reader:
    """Stands in for ``said`` and ``answer_of``: what differs by the rank alone is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], tuple[int, Answer]] = {}

    def said(self, data: bytes) -> Any:
        head, is_answer, rest = data.partition(_RANK.encode())
        rank, _, rest = rest.partition(b",")
        if not is_answer:
            return said(data)
        if (head, rest) not in self._known:
            call, fields = said(data)
            self._known[head, rest] = call, answer_of(fields)
        call, answer = self._known[head, rest]
        return call, (answer, int(rank))

    def answer_of(self, read: tuple[Answer, int]) -> Answer:
        answer = copy.copy(read[0])
        object.__setattr__(answer, "rank", read[1])
        return answer


class Case:
    """One fault: ``seed`` draws its kind and its ranks."""

    def __init__(self, world: int, seed: int) -> None:
        chance = self.chance = random.Random(f"verdict {seed}")
        self.world, self.kind = world, chance.choice([*KINDS])
        node = chance.randrange(world // RANKS_PER_NODE)
        local = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
        several = chance.sample(local, chance.randint(2, RANKS_PER_NODE))
        self.at_fault = frozenset(
            {"its node is cut off": local, "several of its node are killed": several}.get(
                self.kind, several[:1]
            )
        )
        self.asker = chance.choice([r for r in (0, 1, world // 2, world - 1) if r not in local])
        if world <= 64:  # all ask, and the first that waits writes the line
            self.asker = min({*range(world)} - self.at_fault)
        elif "killed" in self.kind:  # a neighbour, whose connection closes
            self.asker = (max(self.at_fault) + 2 * RANKS_PER_NODE) % world
        self.ranks = tuple(range(world))
        self.sim = Simulation(seed, [(o, n) for o, n, _ in SWAPPED], limit_s=120.0, kind=GreenletTask)
        self.network = Network(self.sim, *LINK)
        self.job = Job(self.sim, self.network, ["asker's"])
        self.job.agent.host = "store's"
        self.store = self.job.store
        self.store.serve_s, self.store.keys = SERVE_S, Keys()
        self.look_s = jobstore.pause_s(0.25, world)
        self.fault_s, self.line, self.named_s = inf, "", inf

    # ---- what the others do

    def answers(self, call: int, some: range) -> None:
        """Ranks that look now answer a call."""
        store, said = Direct(self.store.keys, PREFIX), dict[Any, str]()
        for rank in some:
            if rank == self.asker or (rank in self.at_fault and self.is_silent):
                continue
            answer = self.answer(rank)
            alike = rank in self.at_fault, answer.gone
            if alike not in said:  # what ranks say that do the same differs by the rank alone
                said[alike] = json.dumps([call, fields_of(replace(answer, rank=-1))])
            store.set(f"answer/{rank}", said[alike].replace(_RANK + "-1", f"{_RANK}{rank}", 1))
            store.add(f"came/{call}", 1)
        # The calls of a look, and of an answer.
        self.store.busy_until = max(self.store.busy_until, self.sim.now) + 3 * len(some) * SERVE_S[0]

    @property
    def is_silent(self) -> bool:
        """Whether the ranks at fault answer no more."""
        return self.kind not in ("is in another call", "is slow")

    def answer(self, rank: int) -> Answer:
        """What a rank says of itself."""
        at_fault = rank in self.at_fault
        keys = KEYS
        if at_fault:
            keys = KEYS[:-1] + (["reduce-scatter blocks.6"] if self.kind == "is in another call" else [])
        log = Launched(self.ranks, len(keys), tuple(keys))
        waits = Waits(self.name, len(keys), keys[-1], self.sim.now - self.fault_s)
        neighbours = {(at + way) % self.world for at in self.at_fault for way in (1, -1)} - self.at_fault
        gone = sorted(self.at_fault) if "killed" in self.kind and rank in neighbours else ()
        place, line = "forward of pass 3", f"train.py:{30 + at_fault} in main"
        is_late = at_fault and self.kind == "is slow"
        return Answer(rank, place, line, None if is_late else waits, logs={self.name: log}, gone=tuple(gone))

    def called(self, call: int) -> None:
        """Ranks see a call at their next look."""
        for part in range(_GROUPS_OF_EVENTS):
            after_s = (part + self.chance.random()) / _GROUPS_OF_EVENTS * self.look_s
            some = range(part, self.world, _GROUPS_OF_EVENTS)
            self.sim.at(self.sim.now + after_s, lambda some=some: self.answers(call, some))

    # ---- the rank that waits

    def live(self) -> None:
        """It waits, and its watch asks the others."""
        sim, own = self.sim, self.sim.here
        for owner, name, fresh in SWAPPED:
            setattr(owner, name, fresh())
        group = Group(self.asker, self.world)
        c10d._world._default_pg, c10d._pg_map = group, {group: ("none", Prefixed("a", self.job_store()))}  # type: ignore
        others = Direct(self.store.keys, PREFIX)
        for rank in self.ranks:  # they have come
            if rank != self.asker and not (self.kind == "never arrives" and rank in self.at_fault):
                others.set(f"at/{rank}", f"node{rank // RANKS_PER_NODE} 1")
                others.set(f"who/{rank}", f"boot-node{rank // RANKS_PER_NODE} ns {rank} 0")
                others.add("come", 1)
        attempt = SimpleNamespace(token="token", meet=lambda: True, began=lambda _: set[int]())
        watch = watchdog.Watch(POLICY, self.asker, attempt, job_store(), lambda: None)  # type: ignore[arg-type]
        watch.start()
        while not watch.reach.has_met:
            sim.sleep(0.1)
        sim.sleep((1 + self.chance.random()) * self.look_s)
        self.fault_s = sim.now
        log = LaunchLog(self.ranks, "cpu")
        self.name = log.name
        for number in range(1, _NUMBER + 1):
            launch = log.launch(KEYS[number - 1])
        broken_s = sim.now + 0.05 if "killed" in self.kind else inf
        try:
            with log.waiting(launch):
                while sim.now < self.fault_s + POLICY.lost_s + 2 * PATIENCE_S:
                    process_state.raise_diagnosis()
                    if sim.now > broken_s:
                        log.ended.add(max(self.at_fault))
                        raise CommError("a connection is closed")
                    if self.line and KINDS[self.kind][0] is None:
                        break
                    sim.sleep(0.02)
        except CommError as error:
            self.error, self.named_s = error, sim.now
        watch.stop()
        job_store().close()
        own.end("done")

    def job_store(self) -> Any:
        return SimulatedStore(self.store, self.network)

    def run(self) -> Verdict:
        """The verdict."""
        self.error: Exception | None = None
        reader = Reader()
        kind, promised_s = KINDS[self.kind]

        def warn(text: str, *values: Any) -> None:
            self.line = text % values
            if kind is None:
                self.named_s = min(self.named_s, self.sim.now)

        self.store.keys.on_call = self.called  # type: ignore[attr-defined]
        logger = SimpleNamespace(warning=warn, exception=logging.getLogger(__name__).exception)
        range_of = lambda *limits: self.ranks if limits == (self.world,) else range(*limits)  # noqa: E731
        with (
            simulated(self.sim, self.network, Gloo(self.sim, self.network)),
            mock.patch.object(watchdog, "logger", logger),
            mock.patch.object(jobstore, "range", range_of, create=True),
            mock.patch.object(jobstore, "PrefixStore", Prefixed),
            mock.patch.object(status_exchange, "PrefixStore", Prefixed),
            mock.patch.object(status_exchange, "said", reader.said),
            mock.patch.object(status_exchange, "answer_of", reader.answer_of),
            mock.patch.object(flight_recorder, "process_groups", list),
            mock.patch.object(watchdog, "is_closed", lambda group, place: False),
        ):
            self.sim.spawn(self.job.ranks[0], MAIN, self.live)
            self.sim.run()
        for process in self.sim.processes:
            for _, error in process.errors:
                raise error
        said = str(self.error or self.line)
        first = said.splitlines()[0] if said else ""
        is_right = type(self.error) is kind if kind else self.error is None
        is_right = is_right and self.named(first) and self.named_s - self.fault_s < promised_s + PATIENCE_S
        return Verdict(self.kind, self.at_fault, first[:300], self.named_s - self.fault_s, is_right)

    def named(self, said: str) -> bool:
        """Whether a sentence names who is at fault, and nobody else."""
        words = spans(sorted(self.at_fault))
        if self.kind == "is in another call":
            return f"{words} launched 'reduce-scatter" in said
        return f"{words} is lost" in said or f"{words} are lost" in said or f"for {words} (" in said


def judge(world: int, seeds: range) -> Iterator[Verdict]:
    """The verdicts of so many faults."""
    for seed in seeds:
        yield Case(world, seed).run()


def report(worlds: Iterable[int], num_faults: int, seed: int) -> Iterator[str]:
    """A table of what jobs of so many ranks take, a line at a time; and which verdicts are wrong."""
    yield (
        "| ranks | start: store calls of a rank | messages | s | later: the store's KB/s "
        "| agreement: messages of a rank | ms | right verdicts |"
    )
    yield "|" + "---:|" * 8
    for world in worlds:
        scale = Scale(world, seed)
        costs = scale.run()
        start, watch, agreed = (costs[name] for name in ("start", "watch", "agreement"))
        found = list(judge(world, range(seed, seed + num_faults)))
        cells = [
            f"{world:,}",
            f"{start.calls / world:.0f}",
            f"{start.messages / world:.0f}",
            f"{start.seconds:.1f}",
            f"{watch.nbytes / watch.seconds / 1e3:.0f}",
            f"{agreed.messages / world:.0f}",
            f"{1e3 * agreed.seconds:.1f}",
            f"{sum(each.is_right for each in found)} of {len(found)}",
        ]
        yield f"| {' | '.join(cells)} |"
        yield from (f"wrong: {each}" for each in found if not each.is_right)
