"""Simulated processes: each of their threads runs only in its turn, and a seed draws whose turn it is.

    Simulation   time, and who runs next. Time goes on only when everybody waits
    Process      a rank: its host, its threads, and a copy of all that a process of ours has once
    Task         a thread of a process, which runs until it waits for something

Everything that waits does so by ``Simulation.wait``: locks, conditions and queues (``Threading`` stands in
for the module), sleeps, the store, sockets, other ranks. A process that is killed goes no further than its
next wait, where ``Killed`` is raised; what its ``finally`` blocks do then reaches nobody.
"""

import heapq
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

import greenlet

MAIN = "main"
"""The name of a process' first thread, which Ctrl-C interrupts."""
_MANY = 256  # tasks that may go on, of which none is drawn any more


class Killed(BaseException):
    """This process has ended; nothing that it still does is seen by others."""


class Stuck(AssertionError):
    """Everybody waits, and nothing that would end a wait is still to come."""


class Process:
    """A rank, or what else has a host and threads. state: of each ``(owner, attribute)`` of the simulation's
    ``swapped`` what this process has there."""

    def __init__(self, sim: "Simulation", name: str, host: str, state: list[Any]) -> None:
        self.sim, self.name, self.host, self.state = sim, name, host, state
        self.alive, self.stopped_until, self.ended_s = True, 0.0, inf
        self.number = len(sim.processes)
        self.owned: list[Any] = []  # sockets, locks of files: what the kernel closes
        self.errors: list[tuple[str, BaseException]] = []
        self.interrupt = False
        """Whether Ctrl-C was pressed."""
        self.events = 0
        self.on_end: Callable[[], None] = lambda: None
        self.on_event: tuple[float, Callable[[], None]] = (inf, lambda: None)
        """What happens as it comes to the event of that number."""
        sim.processes.append(self)

    def check(self) -> None:
        """Raises: Killed, where this process has ended."""
        if not self.sim.is_inside:  # a finalizer, after the end
            return
        self.events += 1
        if self.events >= self.on_event[0]:
            call = self.on_event[1]
            self.on_event = inf, call
            call()
        if not self.alive:
            raise Killed
        if self.interrupt and self.sim.is_in_main:
            self.interrupt = False
            raise KeyboardInterrupt

    def end(self, what: str, is_dark: bool = False) -> None:
        """As by SIGKILL. The kernel closes what it had open, but where its host has lost its power."""
        if self.alive:
            self.sim.note(what, self)
            self.alive, self.ended_s = False, self.sim.now
            self.on_end()
            for each in () if is_dark else self.owned:
                each.torn()
            self.sim.look_at_all()

    def stop(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT so much later."""
        self.sim.note(f"stopped for {seconds:.3g} s", self)
        self.stopped_until = self.sim.now + seconds
        self.sim.at(self.stopped_until, self.sim.look_at_all)


class Task:
    """A thread of ``process``, made as ``ThreadTask`` or ``GreenletTask`` makes it. ready, until: what it
    waits for; it goes on at ``until`` at the latest."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process, self.name = process, name
        self.ready: Callable[[], bool] | None = None
        self.until = -inf
        self.done = False
        self.joiners: dict[Task, None] = {}
        self.begun_by: Thread | None = None
        self.number = next(process.sim.numbers)
        self._run = run

    def live(self) -> None:
        """All that it does. What it raises is kept for ``Process.errors``."""
        try:
            self.process.check()
            self._run()
        except Killed:
            pass
        except BaseException as error:
            self.process.errors.append((self.name, error))
        self.done = True
        sim = self.process.sim
        del sim.tasks[self]
        sim.look_at(self.joiners)

    is_current: bool
    """Whether the caller is run by it."""

    def go_to(self, task: "Task") -> None:
        """It pauses, and ``task`` goes on."""
        raise NotImplementedError

    @property
    def can_go(self) -> bool:
        """Whether what it waits for is there."""
        process = self.process
        if not process.alive:
            return True
        if process.stopped_until > process.sim.now:
            return False
        return self.until <= process.sim.now or (self.ready is not None and self.ready())


class ThreadTask(Task):
    """By a thread, for what PyTorch keeps by thread: autograd, modes, names of process groups."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        super().__init__(process, name, run)
        self._baton = threading.Lock()
        self._baton.acquire()
        self.thread = threading.Thread(target=self._begin, name=name, daemon=True)
        self.thread.start()

    def _begin(self) -> None:
        self._baton.acquire()
        self.live()
        self.process.sim.hand_over(lambda task: task.resume())

    def resume(self) -> None:
        """It goes on."""
        self._baton.release()

    @property
    def is_current(self) -> bool:  # type: ignore[override]
        return threading.current_thread() is self.thread

    @property
    def frame(self) -> Any:
        """Where it is."""
        return sys._current_frames().get(self.thread.ident or 0)

    def go_to(self, task: "ThreadTask") -> None:  # type: ignore[override]
        task.resume()
        self._baton.acquire()


class GreenletTask(Task):
    """By a greenlet: for many thousands, which touch no tensors."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        super().__init__(process, name, run)
        self._greenlet = greenlet.greenlet(self._begin, process.sim.outermost)

    def _begin(self, _: object = None) -> None:  # what another one returns as it ends
        self.live()
        self.process.sim.hand_over(self._end_with)

    def _end_with(self, task: "GreenletTask") -> None:
        self._greenlet.parent = task._greenlet  # where it goes as it ends

    def resume(self) -> None:
        """It goes on, and the caller once all have ended."""
        self._greenlet.switch()

    @property
    def is_current(self) -> bool:  # type: ignore[override]
        return greenlet.getcurrent() is self._greenlet

    @property
    def frame(self) -> Any:
        """Where it is."""
        return self._greenlet.gr_frame

    def go_to(self, task: "GreenletTask") -> None:  # type: ignore[override]
        task._greenlet.switch()


class Simulation:
    """See the module. swapped: ``(owner, attribute)`` of what a process has once. limit_s: of simulated time,
    after which whoever still waits waits for ever. kind: of tasks."""

    def __init__(
        self,
        seed: int,
        swapped: list[tuple[Any, str]],
        limit_s: float = 3600.0,
        kind: "type[ThreadTask] | type[GreenletTask]" = ThreadTask,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 1.0  # zero is what some take for "never"
        self.swapped, self.limit_s, self._kind = swapped, limit_s, kind
        self.processes: list[Process] = []
        self.tasks: dict[Task, None] = {}
        self.history: list[tuple[float, str, str]] = []
        self.failure: BaseException | None = None
        self.switches = 0
        self._here: Task | None = None
        self._within: Process | None = None
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._ends: list[tuple[float, int, Task]] = []
        self._changed: dict[Task, None] = {}
        """Tasks whose wait may have ended; nobody else is looked at."""
        self.numbers = iter(range(1, 1 << 62))
        self._main = threading.Lock()
        self.outermost = greenlet.getcurrent()

    # ---- who runs

    @property
    def here(self) -> Process:
        """The process that runs."""
        assert self._here is not None, "nothing of the simulation runs now"
        return self._here.process

    @property
    def is_inside(self) -> bool:
        """Whether a task calls."""
        return self._here is not None and self._here.is_current

    @property
    def is_in_main(self) -> bool:
        """Whether the running task is its process' main thread."""
        return self._here is not None and self._here.name == MAIN

    @property
    def ident(self) -> int:
        """Of the running task, as of a thread."""
        return self._here.number if self._here is not None else 0

    @property
    def thread(self) -> Any:
        """The ``Thread`` that the running task was begun by."""
        return self._here and self._here.begun_by

    def frames(self) -> dict[int, Any]:
        """As sys._current_frames()."""
        return {task.number: task.frame for task in self.tasks}

    def note(self, what: str, process: Process | None = None) -> None:
        """For the history: who, when, what."""
        who = process or (self._here.process if self._here else None)
        self.history.append((self.now, who.name if who else "", what))

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have it called at that time. It must not wait."""
        heapq.heappush(self._later, (when, next(self.numbers), call))

    def spawn(self, process: Process, name: str, run: Callable[[], None]) -> Task:
        """A thread of ``process`` begins."""
        task = self._kind(process, name, run)
        self.tasks[task] = self._changed[task] = None
        return task

    def look_at(self, tasks: Iterable[Task]) -> None:
        """What these wait for may be there."""
        for task in tasks:
            self._changed[task] = None

    def look_at_all(self) -> None:
        """As ``look_at``, of all: a process has ended, or something else that many may wait for."""
        self.look_at(self.tasks)

    def wait(
        self, ready: Callable[[], bool] | None, until: float = inf, by: "dict[Task, None] | None" = None
    ) -> bool:
        """The running task waits until ``ready()``, or that time. Returns whether it is ready.

        by: who changes what ``ready`` looks at calls ``look_at`` for the tasks in there. Raises: Killed.
        """
        task = self._here
        if task is None or not task.is_current:  # after the end: a finalizer
            return ready is None or ready()
        task.process.check()
        task.ready, task.until = ready, until
        if by is not None:
            by[task] = None
        if until < inf:
            heapq.heappush(self._ends, (until, next(self.numbers), task))
        self._changed[task] = None
        if (following := self._next()) is not task:
            self.switches += 1
            self._enter(following)
            task.go_to(following)
        if by is not None:
            del by[task]
        task.process.check()
        return ready is None or ready()

    def sleep(self, seconds: float) -> None:
        """The running task sleeps."""
        self.wait(None, self.now + seconds)

    def pass_on(self) -> None:
        """Somebody else may run first."""
        if self.random.random() < 0.3:
            self.wait(None, self.now)
        else:
            self.here.check()

    def hand_over(self, to: Callable[[Any], None]) -> None:
        """The running task has ended."""
        following = self._next()
        if following is None:
            self._here = None
            self._main.release()
        else:
            self._enter(following)
            to(following)

    def _enter(self, task: Task) -> None:
        if task.process is not self._within:
            self._swap(task.process)
        self._here = task

    def _swap(self, process: Process | None) -> None:
        if self._within is not None:
            self._within.state = [getattr(owner, name) for owner, name in self.swapped]
        self._within = process
        if process is not None:
            for (owner, name), value in zip(self.swapped, process.state, strict=True):
                setattr(owner, name, value)

    def _next(self) -> Task | None:
        """Who goes on: one of those that can, else whoever can first, once time has gone on."""
        while self.tasks:
            while self._ends and self._ends[0][0] <= self.now:
                self._changed[heapq.heappop(self._ends)[2]] = None
            if len(self._changed) > _MANY:  # whoever it is: to look at all each time would take for ever
                task, _ = self._changed.popitem()
                if not task.done and task.can_go:
                    return task
                continue
            able = [task for task in self._changed if not task.done and task.can_go]
            self._changed = dict.fromkeys(able)
            if able:
                chosen = able[0] if len(able) == 1 else self.random.choice(able)
                del self._changed[chosen]
                return chosen
            if self.failure is not None:  # all were told to end
                raise AssertionError(f"can't be ended: {[task.name for task in self.tasks]}")
            ends, later = (heap[0][0] if heap else inf for heap in (self._ends, self._later))
            if min(ends, later) >= self.limit_s:
                self._fail(Stuck(f"at {self.now:.3f} s: " + "; ".join(self._waiting())))
            elif later <= ends:
                when, _, call = heapq.heappop(self._later)
                self.now = max(self.now, when)
                call()
            else:
                self.now = ends
        return None

    def _waiting(self) -> Iterator[str]:
        for task in self.tasks:
            yield f"{task.process.name} {task.name} until {task.until:.6g}"

    def _fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        for process in self.processes:
            process.alive = False
        self.look_at_all()

    def run(self) -> None:
        """Until all tasks have ended. Raises: Stuck."""
        before = [getattr(owner, name) for owner, name in self.swapped]
        self._main.acquire()
        if (first := self._next()) is not None:
            self._enter(first)
            first.resume()
            self._main.acquire()
        self._swap(None)
        for (owner, name), value in zip(self.swapped, before, strict=True):
            setattr(owner, name, value)
        if self.failure is not None:
            raise self.failure


# ---- what stands in for threads and what they wait by


class Lock:
    """As threading.Lock; with ``again`` as RLock."""

    def __init__(self, sim: Simulation, again: bool = False) -> None:
        self.sim, self._again = sim, again
        self.owner: Any = None
        self.times = 0
        self.waiters: dict[Task, None] = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self.sim.ident
        if self.owner is not None and not (self._again and self.owner == me):
            if not blocking:
                return False
            until = inf if timeout < 0 else self.sim.now + timeout
            while self.owner is not None:
                if (
                    not self.sim.wait(lambda: self.owner is None, until, self.waiters)
                    and until <= self.sim.now
                ):
                    return False
        self.owner, self.times = me, self.times + 1
        return True

    def release(self) -> None:
        if self.owner is None or (self._again and self.owner != self.sim.ident):
            raise RuntimeError("cannot release un-acquired lock")
        self.times -= 1
        if not self.times:
            self.owner = None
            self.sim.look_at(self.waiters)

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """As threading.Condition."""

    def __init__(self, sim: Simulation, lock: Lock | None = None) -> None:
        self.sim, self._lock = sim, lock or Lock(sim, again=True)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: deque[tuple[list[bool], dict[Task, None]]] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        told, lock = ([False], {}), self._lock
        self._waiters.append(told)
        times, lock.times, lock.owner = lock.times, 0, None
        self.sim.look_at(lock.waiters)
        try:
            self.sim.wait(lambda: told[0][0], inf if timeout is None else self.sim.now + timeout, told[1])
        finally:
            if told in self._waiters:
                self._waiters.remove(told)
            lock.acquire()
            lock.times = times
        return told[0][0]

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            said, waiter = self._waiters.popleft()
            said[0] = True
            self.sim.look_at(waiter)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """As threading.Event."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self._set = sim, False
        self._waiters: dict[Task, None] = {}

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self.sim.look_at(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self.sim.wait(self.is_set, inf if timeout is None else self.sim.now + timeout, self._waiters)


class Thread:
    """As threading.Thread, of the process that makes it."""

    def __init__(self, sim: Simulation, target: Any, args: Any = (), name: str = "", daemon: bool = False):
        self.sim, self.name, self.daemon = sim, name, daemon
        self._target, self._args = target, args
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self.sim.spawn(self.sim.here, self.name, lambda: self._target(*self._args))
        self._task.begun_by = self

    @property
    def ident(self) -> int | None:
        return self._task and self._task.number

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        if self.sim.is_inside:
            until = inf if timeout is None else self.sim.now + timeout
            self.sim.wait(lambda: task.done, until, task.joiners)


class Local:
    """As threading.local."""

    def __init__(self, sim: Simulation) -> None:
        vars(self)["_of"] = sim, {}

    def __getattr__(self, name: str) -> Any:
        sim, values = vars(self)["_of"]
        try:
            return values[sim.ident, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        sim, values = vars(self)["_of"]
        values[sim.ident, name] = value


class Threading:
    """Stands in for the module ``threading``."""

    def __init__(self, sim: Simulation) -> None:
        self.Lock = lambda: Lock(sim)
        self.RLock = lambda: Lock(sim, again=True)
        self.Condition = lambda lock=None: Condition(sim, lock)
        self.Event = lambda: Event(sim)
        self.Thread = lambda target=None, **options: Thread(sim, target, **options)
        self.local = lambda: Local(sim)
        self.get_ident = self.get_native_id = lambda: sim.ident
        self.current_thread = lambda: sim.thread
        self.main_thread = lambda: self  # nobody: signals are left alone
        self.enumerate = list


class Queue:
    """As queue.SimpleQueue."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self._items = sim, deque[Any]()
        self._waiters: dict[Task, None] = {}

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.sim.look_at(self._waiters)

    def get(self) -> Any:
        self.sim.wait(lambda: bool(self._items), by=self._waiters)
        return self._items.popleft()


class Future:
    """As concurrent.futures.Future, as far as the job's store needs it."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self._state = sim, ""
        self._value: Any = None
        self._waiters: dict[Task, None] = {}

    def set_running_or_notify_cancel(self) -> bool:
        if self._state == "cancelled":
            return False
        self._state = "running"
        return True

    def cancel(self) -> None:
        self._state = self._state or "cancelled"

    def set_result(self, value: Any) -> None:
        self._state, self._value = "done", value
        self.sim.look_at(self._waiters)

    def set_exception(self, error: BaseException) -> None:
        self._state, self._value = "failed", error
        self.sim.look_at(self._waiters)

    def result(self, timeout: float | None = None) -> Any:
        until = inf if timeout is None else self.sim.now + timeout
        if not self.sim.wait(lambda: self._state in ("done", "failed"), until, self._waiters):
            raise TimeoutError
        if self._state == "failed":
            raise self._value
        return self._value
