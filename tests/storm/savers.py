"""Ranks that save and load, in one process: the real code, with threads of which one runs at a time.

In place of the ranks' agreement each rank runs until it has to wait for the others; after every operation of
the disk another one may go on. Who does is of the seed, and so is all that would be drawn.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shardwright import clock
from shardwright.checkpoint import agree, background, live, sink, storage, target, writer
from shardwright.checkpoint.format import Box, chunk
from shardwright.errors import CheckpointError
from tests.storm.disk import Disk, Killed

saving, loading = (import_module(f"shardwright.checkpoint.{name}") for name in ("save", "load"))


class Process:
    """One rank of a job: its model, and what the package keeps for a process."""

    def __init__(self, name: str, rank: int, world: int) -> None:
        self.name, self.rank, self.world = name, rank, world
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=1.0)
        self.ranks = _Ranks(self)
        self.peers: list[Process] = [self]
        self.said: list[str] = []
        self.state: dict[str, Any] = {"_running": [], "_staging": {}}
        self.warned: list[str] = []
        self.is_dead = False
        self.saved: dict[int, str] = {}  # what came of each save: its error, or nothing

    def __repr__(self) -> str:
        return self.name


class Net(nn.Module):
    """Integers, all -1 until they are trained or loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), -1.0))
        self.bias = nn.Parameter(torch.full((4,), -1.0))
        self.count = nn.Buffer(torch.tensor(-1))


class _Ranks(agree.Ranks):
    """The ranks of a job, which tell each other what they say as soon as all have."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.rank, process.world)
        self._process = process

    def arrive(self, call: str) -> None:
        if len(set(self._meet(call))) > 1:
            raise CheckpointError("the ranks made different calls")

    def together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        try:
            return super().together(what, work)
        finally:
            if self._process.is_dead:
                raise Killed

    def _wait_for_all(self, thread: Any, outcome: list[Any], what: str) -> list[Any]:
        if self._process.is_dead:
            raise Killed
        return [json.loads(said) for said in self._meet(json.dumps(outcome[0]))]

    def _meet(self, said: str) -> list[str]:
        process = self._process
        process.said.append(said)
        number, peers = len(process.said), process.peers

        def is_met() -> bool:
            return all(len(p.said) >= number or p.is_dead for p in peers)

        turns.wait(is_met)
        if lost := [p.rank for p in peers if len(p.said) < number]:
            raise RuntimeError(f"ranks {lost} are gone") if process.world > 1 else AssertionError
        return [p.said[number - 1] for p in peers]


class _Inline:
    """A thread of ``together``, whose work is done at once."""

    def __init__(self, *, target: Any, args: Any, **_: Any) -> None:
        self.start, self.join = lambda: target(*args), lambda *_: None


@dataclass(eq=False)
class _Task:
    process: Process
    is_ready: Callable[[], bool]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Turns:
    """Threads of which one runs at a time."""

    def __init__(self) -> None:
        self.random = Random()
        self.current: _Task | None = None
        self._tasks: list[_Task] = []
        self._end = threading.Semaphore(0)
        self._failed: list[BaseException] = []

    def run(self, works: Sequence[tuple[Process, Callable[[], None]]]) -> None:
        """Until all have ended."""
        self._failed = []
        for process, work in works:
            self.start(process, work)
        if self._tasks:
            self._next()
            self._end.acquire()
        self.current = None
        if self._failed:
            raise self._failed[0]

    def start(self, process: Process, work: Callable[[], None]) -> None:
        task = _Task(process, lambda: True)
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task, work), daemon=True).start()

    def _run(self, task: _Task, work: Callable[[], None]) -> None:
        task.turn.acquire()
        try:
            work()
        except Killed:
            pass
        except BaseException as failed:
            self._failed.append(failed)
        self._tasks.remove(task)
        self._next()

    def _next(self) -> None:
        ready = [task for task in self._tasks if task.process.is_dead or task.is_ready()]
        if not ready:
            if self._tasks:
                self._failed.append(AssertionError("all wait for each other"))
            self._end.release()
            return
        self.current = self.random.choice(ready)
        for module, name in ((background, "_running"), (saving, "_staging")):
            setattr(module, name, self.current.process.state[name])
        self.current.turn.release()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Others run until ``is_ready``."""
        task = self.current
        if task is None or (len(self._tasks) == 1 and is_ready()):
            return
        task.is_ready = is_ready
        self._next()
        task.turn.acquire()
        task.is_ready = lambda: True
        if task.process.is_dead:
            raise Killed

    def processes(self) -> list[Process]:
        """All that run."""
        return [task.process for task in self._tasks]

    def process(self) -> Process | None:
        """Whose turn it is."""
        return self.current.process if self.current else None


turns = Turns()


def _start(*, target: Callable[..., None], args: Any, **_: Any) -> SimpleNamespace:
    process = turns.process()
    assert process is not None
    return SimpleNamespace(start=lambda: turns.start(process, lambda: target(*args)))


def _cut(key: str, tensor: torch.Tensor) -> Box:
    """What this rank holds of a tensor of the model or its optimizer: rows."""
    whole, process = Box.whole(tuple(tensor.shape)), turns.process()
    if process is None or not tensor.ndim or not key.startswith(("model/", "optimizer/")):
        return whole
    start, size = chunk(len(tensor), process.world, process.rank)
    return Box((start, *whole.offset[1:]), (size, *whole.shape[1:]))


def _local(key: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[_cut(key, tensor).slices_in(Box.whole(tuple(tensor.shape)))]


def _part(key: str, tensor: torch.Tensor, rank: int) -> live.Part:
    box, process = _cut(key, tensor), turns.process()
    cut = box != Box.whole(tuple(tensor.shape))
    owner = cut or process is None or process.rank == 0 or key.startswith("rng/")
    boxes = (box,) if box.numel else ()
    return live.Part(_local(key, tensor), tuple(tensor.shape), boxes, owner and box.numel > 0, cut)


def _warned(text: str) -> None:
    process = turns.process()
    assert process is not None
    process.warned.append(text)


@contextmanager
def simulated(disk: Disk, random: Random) -> Iterator[None]:
    """Inside of it ranks are processes of ``turns``, and what would be drawn is of the seed."""

    def current_ranks() -> agree.Ranks:
        process = turns.process()
        return process.ranks if process else agree.Ranks(0, 1)

    def rng_state() -> dict[str, Any]:
        return {"torch": torch.tensor([random.randrange(100)])}

    futures = SimpleNamespace(
        Future=background.futures.Future, wait=lambda each: turns.wait(lambda: each[0].done())
    )
    local = SimpleNamespace(Thread=_start, Event=threading.Event, get_native_id=threading.get_native_id)
    turns.random = random
    with ExitStack() as stack:
        for owner, name, value in (
            (saving, "ranks", current_ranks),
            (loading, "ranks", current_ranks),
            (saving, "rng_state", rng_state),
            (saving, "part_of", _part),
            (live, "box_of", _cut),
            (live, "local_part", _local),
            (target, "local_part", _local),
            (saving, "warn", _warned),
            (writer, "warn", _warned),
            (storage, "warn", _warned),
            (agree, "threading", SimpleNamespace(Thread=_Inline, get_ident=threading.get_ident)),
            (background, "threading", local),
            (background, "futures", futures),
            (background, "yield_to_training", lambda: None),
            (background, "_running", []),
            (saving, "_staging", {}),
            (sink, "_BLOCK_NBYTES", 512),
            (sink, "_ALIGN", 512),
            (sink, "take_bytes", lambda n: torch.empty(n, dtype=torch.uint8)),
            (clock, "sleep", lambda _: turns.wait(lambda: True)),
            (uuid, "uuid4", lambda: uuid.UUID(int=random.getrandbits(128))),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(disk)
        yield
