"""This process as its transports and its watch see it: what it has made and launched, and what it waits for.

Every transport has a :class:`LaunchLog`: a ring of its last launches, numbered the same on all its ranks.
What a thread waits for, since when, stands in ``process_state``, together with the phase that the runtime is
in. Writing it down costs under a microsecond; making sense of it is the watch's work (``observe/``), which
also leaves its diagnosis there: whoever waits or launches next raises it.
"""

import contextlib
import datetime
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from shardwright import clock
from shardwright.errors import CheckpointError, CommError, InputError
from shardwright.torch_private import backend_names
from shardwright.transport.recorder import LAUNCH, SPAN, WAIT, Recorder

RING = 64
"""Launches of a transport that are remembered: more than any schedule has between two waits."""


class Launch(NamedTuple):
    """One collective: its number on the transport (from 1), operation and group, phase and pass."""

    number: int
    key: str
    phase: str
    step: int


class Wait(NamedTuple):
    """What a thread waits for, since when (``clock.monotonic``)."""

    log: "LaunchLog"
    launch: Launch
    since_s: float


class Made:
    """What was made for one default process group, and goes with it: descriptors, threads, address space.

    group: gives it, for as long as it lives.
    comms: one transport per axis and device type, however many modules are sharded over it. Keyed by the
        axis' own group (a DeviceMesh compares equal to that of an earlier, destroyed world).
    """

    def __init__(self, group: Callable[[], ProcessGroup | None]) -> None:
        self.group = group
        # Of classes whose modules import this one.
        self.store: Any = None
        self.attempt: Any = None
        self.mesh: DeviceMesh | None = None
        self.comms: dict[tuple[ProcessGroup, str], Any] = {}
        self.smaller: dict[tuple[ProcessGroup, int], Any] = {}
        self.joined: dict[tuple[ProcessGroup, ProcessGroup], Any] = {}


class ProcessState:
    """This process as its transports and its watch see it.

    phase, step: what the runtime runs now ("" between phases), and the number of its forward.
    thread: the one that trains. waits: by thread id.
    progress: what the training loop says of how far it is, for people; "" where none says anything.
    moved_s: when a phase last began or ended. caught: the last exception that went through a forward, and
        that forward's number.
    diagnosis: what the watch found to be wrong for good; every wait and launch raises it from then on.
    explain, look: set by the watch. The error to raise in place of one that a transport met; and a look,
        now, whether there is a diagnosis.
    recorder: what ran in the last steps. loops, device_times: of all transports that are alive. streams,
        events: by device and thread, see ``Streams.of`` and ``Due``.
    num_pages: pages of steps that ranks have written together. num_logs: launch logs that were made, by ranks
        and kind. num_called: waits in collectives of torch's, by name. probes: see ``is_closed``.
    destroyed_ns: when the last default process group was, in nanoseconds since 1970; 0: none was.
    is_ours, transport: what was chosen by ``set_process`` and ``set_transport``. told: warnings given once.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.step = 0
        self.progress = ""
        self.waits: dict[int, Wait] = {}
        self._logs: list[ref[LaunchLog]] = []
        self.moved_s = clock.monotonic()
        self.caught = ("", 0)
        self.destroyed_ns = 0.0
        self.diagnosis: Exception | None = None
        self.delivered = False
        self.explain: Callable[[Exception], Exception] | None = None
        self.look: Callable[[], None] | None = None
        self.thread = threading.get_ident()
        self.recorder = Recorder()
        self.num_pages = 0
        self.num_logs: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.num_called: Counter[str] = Counter()
        self.loops: WeakSet[Any] = WeakSet()
        self.device_times: WeakSet[Any] = WeakSet()
        self.streams: dict[tuple[torch.device, int], Any] = {}
        self.events: dict[tuple[torch.device, int], list[Any]] = defaultdict(list)
        self.probes: WeakKeyDictionary[ProcessGroup, dict[int, Work]] = WeakKeyDictionary()
        self.is_ours: bool | None = None
        self.transport = "auto"
        self.told: set[str] = set()
        self.haste = threading.local()  # how long each thread waits for the job's store
        self.made = Made(lambda: None)
        self.making = threading.RLock()  # the watch's thread asks for the job's store, too
        self.swapping = threading.Lock()  # of the store that torch takes for the default group's

    @property
    def logs(self) -> list["LaunchLog"]:
        """The logs of all transports that are alive; any thread may ask."""
        return [log for made in tuple(self._logs) if (log := made()) is not None]

    def add(self, log: "LaunchLog") -> None:
        """Remember a transport's log for as long as the transport lives."""
        # Replaced, not edited: other threads may go through the list meanwhile.
        self._logs = [made for made in self._logs if made() is not None] + [ref(log)]

    def made_here(self) -> Made:
        """What was made for the default process group that is there now; of another one all is let go."""
        group = dist.group.WORLD
        assert group is not None
        with self.making:
            before = self.made  # what it holds may take long to end, and does so after the lock is free
            if before.group() is not group:
                self.end_store()
                self.made = Made(ref(group))
            return self.made

    def end_store(self) -> None:
        """The process group is destroyed: end the thread that asks its store. What holds the store still, of
        C++, finds it closed."""
        if self.made.store is not None:
            self.made.store.close()

    def enter(self, phase: str, step: int) -> None:
        """The runtime begins a phase, or goes back to the one around it ("": none)."""
        self.phase, self.step, self.moved_s = phase, step, clock.monotonic()
        if phase != "backward":  # its hooks may run in threads of autograd's
            self.thread = threading.get_ident()

    def failed(self, error: BaseException | None) -> None:
        """An exception went through a whole forward; the caller may go on without it."""
        self.caught = f"{type(error).__name__}: {error}"[:200], self.step

    def raise_diagnosis(self) -> None:
        """Raise what the watch has found, if it has found anything."""
        if self.diagnosis is not None:
            self.delivered = True
            raise self.diagnosis


def short(ranks: Sequence[int]) -> str:
    """Ranks in few words, for machines: "0-9999:1", "3,5"."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if step > 0 and [*ranks] == [*range(ranks[0], ranks[-1] + 1, step)]:
        return f"{ranks[0]}-{ranks[-1]}:{step}"
    return ",".join(map(str, ranks))


@lru_cache(1024)
def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks in such words."""
    first, dash, rest = text.partition("-")
    if not dash:
        return tuple(map(int, text.split(",")))
    last, _, step = rest.partition(":")
    return (*range(int(first), int(last) + 1, int(step)),)


process_state = ProcessState()
# All that a rank knows hangs here, so that a simulation can have one for each of its ranks, and put the
# attributes of whichever runs in place. Elsewhere is only what belongs to the real process: its memory
# (`cpu/pages.py`) and the kernel's counters of its threads (`recorder.py`).


class LaunchLog:
    """The launches of one transport.

    name: the same on all its ranks. ranks: of the default process group, in the transport's order.
    operations: of c10d that launches became, where the transport says so (``became``).
    ended: places on the transport of those whose connection to this one is closed. broken: why nothing can
    be launched any more; "" while it can. in_memory: it moves bytes in memory that its ranks share. axis: of
    the mesh, "" where that has no names.
    """

    def __init__(self, ranks: Sequence[int], kind: str = "") -> None:
        self.ranks = tuple(ranks)
        self.ended: set[int] = set()
        self.broken = self.axis = ""
        self.in_memory = False
        self._groups: list[ref[ProcessGroup]] = []
        # Ranks make the transports of one set of ranks in one order, so counting gives each the same name on
        # all.
        process_state.num_logs[self.ranks, kind] += 1
        self.name = f"{kind}{process_state.num_logs[self.ranks, kind]} of {short(self.ranks)}"
        self.ring: deque[Launch] = deque(maxlen=RING)
        self.operations = 0
        self._of_caller: LaunchLog | None = None
        self._of_operations: deque[Launch] = deque(maxlen=2 * RING)
        process_state.add(self)

    @property
    def of_caller(self) -> "LaunchLog":
        """Of the caller's own collectives among the same ranks: transports count on the numbers of theirs."""
        if self._of_caller is None:
            self._of_caller = LaunchLog(self.ranks, "custom ")
        return self._of_caller

    @property
    def launched(self) -> int:
        """How many there were: one number, since an interrupt may come between two."""
        return self.ring[-1].number if self.ring else 0

    def travels_on(self, group: ProcessGroup) -> None:
        """From now on its messages go over ``group``, too."""
        self._groups.append(ref(group))

    @property
    def groups(self) -> list[ProcessGroup]:
        """The process groups that its messages travel on, to be closed when something is wrong for good.

        Not held: threads of transports know the log, and a group whose last owner is a thread that Python
        stops as it ends takes the process down ("terminate called without an active exception").
        """
        return [group for made in self._groups if (group := made()) is not None]

    def launch(self, key: str) -> Launch:
        """Write down one more collective. Raises: the watch's diagnosis, where there is one; CommError where
        one before it was left half done."""
        if process_state.diagnosis is not None:
            process_state.raise_diagnosis()
        if self.broken:
            raise CommError(self.broken)
        launch = Launch(self.launched + 1, key, process_state.phase, process_state.step)
        self.ring.append(launch)
        process_state.recorder.write((LAUNCH, self.name, launch, clock.perf_counter()))
        return launch

    def beginning(self, rank: int, on_break: Callable[[str], None] | None = None) -> "_Beginning":
        """A block in which this rank, whose place is ``rank``, launches and begins a collective. An exception
        that leaves it half done (Ctrl-C) breaks the transport, since this rank's collectives don't match the
        others' from there on; ``on_break`` is told why, for the others to hear."""
        return _Beginning(self, rank, on_break)

    def became(self, launch: Launch) -> None:
        """``launch`` has become one more operation of c10d, on the transport's one process group. That has no
        others, so torch's flight recorder has given it the number ``operations``."""
        self.operations += 1
        self._of_operations.append(launch)

    def launch_of(self, operation: int) -> Launch | None:
        """What became the operation of that number, from 1; None where that isn't known any more, or yet."""
        of = tuple(self._of_operations)
        index = operation - 1 - (self.operations - len(of))
        return of[index] if 0 <= index < len(of) else None

    def waiting(self, launch: Launch) -> "_Waiting":
        """A block in which this thread waits for the others in ``launch``.

        A RuntimeError that leaves it (a closed connection, a peer that is elsewhere) is replaced by the
        watch's diagnosis, where the watch is on and finds one.
        """
        return _Waiting(Wait(self, launch, clock.monotonic()))


class _Beginning:
    """See ``LaunchLog.beginning``."""

    __slots__ = ("_before", "_log", "_on_break", "_rank")

    def __init__(self, log: LaunchLog, rank: int, on_break: Callable[[str], None] | None) -> None:
        self._log, self._rank, self._on_break, self._before = log, rank, on_break, log.launched

    def __enter__(self) -> None:
        """Enter the block; what was launched before it is known already."""

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        log = self._log
        if kind is not None and log.launched != self._before and len(log.ranks) > 1:
            log.broken = (
                f"rank {log.ranks[self._rank]} was interrupted ({kind.__name__}) as it began "
                f"{log.ring[-1].key!r} (number {log.launched} of this mesh), so that its collectives don't "
                "match the other ranks' any more: end the job, and continue from its last checkpoint"
            )
            if self._on_break is not None:
                self._on_break(log.broken)


class _Waiting:
    """See ``LaunchLog.waiting``. Waits don't nest within a thread."""

    __slots__ = ("_link", "_since", "_start", "_thread", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._thread = threading.get_ident()
        self._link: tuple[int, ...] = ()

    def only(self, source: int, to: int) -> None:
        """From now on only one message is waited for, from ``source`` to ``to``: places on the transport."""
        ranks = self._wait.log.ranks
        self._link, self._since = (ranks[source], ranks[to]), clock.perf_counter()

    def __enter__(self) -> "_Waiting":
        process_state.waits[self._thread] = self._wait
        self._start, recorder = clock.perf_counter(), process_state.recorder
        if self._start > recorder.look_s and self._thread == process_state.thread:
            recorder.look(self._start)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        wait, recorder = self._wait, process_state.recorder
        if (end := clock.perf_counter()) > recorder.look_s and self._thread == process_state.thread:
            recorder.look(end)
        link_s = end - self._since if self._link else 0.0
        recorder.write((WAIT, wait.log.name, wait.launch, self._thread, self._start, end, self._link, link_s))
        try:
            explained = isinstance(error, CheckpointError) or error is process_state.diagnosis
            if isinstance(error, RuntimeError) and not explained:
                process_state.raise_diagnosis()
                better = error if process_state.explain is None else process_state.explain(error)
                if better is not error:
                    raise better from None  # it says more than what this transport saw
        finally:
            process_state.waits.pop(self._thread, None)


def came(ready: Callable[[], bool], seconds: float, pause_s: float, most_s: float) -> bool:
    """Look whether it is ``ready``, again and again; False where it isn't after ``seconds``.

    pause_s, most_s: between the first two looks, twice as long each time, and at most.
    Raises: the watch's diagnosis, where there is one.
    """
    deadline_s = clock.monotonic() + seconds
    while not ready():
        process_state.raise_diagnosis()
        if clock.monotonic() > deadline_s:
            return False
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)
    return True


def start_thread(name: str, run: Callable[..., None], *arguments: Any) -> threading.Thread:
    """A thread beside the rank's own has begun; it doesn't keep the process from ending."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


# ---- ends waits of this process, and sees that of a peer

_TAG = 1 << 30  # above those of our transports (30 bits): nobody ever sends or receives with it
_MESSAGE = torch.zeros(1, device="cpu")  # there for as long as it may be sent: as long as the process


# A thread that waits in Gloo can't be interrupted, and Gloo's ``abort`` frees nobody (torch 2.13). What does:
# a receive whose time limit passes closes all connections of its group, on this rank and so at its
# neighbours; every wait in that group ends with an error at once, and other groups live on.
def close(group: ProcessGroup) -> None:
    """End every wait of this rank in a group, now and later, with an error. Not a collective; any thread."""
    if group.size() == 1:
        return
    names = {*backend_names(group).values()}
    if names != {"gloo"}:  # NCCL, or what another accelerator has
        with contextlib.suppress(RuntimeError):
            group.abort()
    for shift in range(1, group.size() if "gloo" in names else 1):
        # A peer that has closed its end tells at once, and closes only that.
        with contextlib.suppress(RuntimeError):  # the time limit, or a connection that is closed already
            peer = (group.rank() + shift) % group.size()
            group.recv([torch.empty(1, device="cpu")], peer, _TAG).wait(datetime.timedelta(milliseconds=1))


def is_closed(group: ProcessGroup, peer: int) -> bool:
    """Whether the connection to a peer (its rank in the group) is known to be closed.

    A message of one element that nobody receives: it can only be queued where the connection stands. Never
    with a time limit, which would close the group.
    """
    if "gloo" not in backend_names(group).values():
        return False
    try:
        # The last one is held. Gloo lets go of the one before it.
        process_state.probes.setdefault(group, {})[peer] = group.send([_MESSAGE], peer, _TAG + 1)
    except RuntimeError:
        return True
    return False


# ---- the one switch for what is done to this process, and blocks of its training thread

VARIABLE = "SHARDWRIGHT_PROCESS"
"""``off`` leaves the process alone, in programs that don't call ``set_process``; ``on`` and "" do not."""


def set_process(on: bool) -> None:
    """Choose whether the package may change this process beyond its models; the same on all ranks.

    Call it before the first ``fully_shard``. Local. Without a call the environment variable
    ``SHARDWRIGHT_PROCESS`` decides. docs/process.md lists what is changed.

    Args:
        on: False means no watchdog thread, no signal handlers, no ``excepthook``, nothing at exit, and
            unchanged malloc settings. Then no rank is ended by another one's failure, and a missing rank is
            only detected by the time limit of the process groups.

    Raises:
        InputError: ``on`` isn't a bool.
    """
    if not isinstance(on, bool):
        raise InputError(f"set_process expects True or False, got {on!r}")
    process_state.is_ours = on


def process_is_ours() -> bool:
    """Whether the package may change anything of this process. Raises: InputError for another variable."""
    if process_state.is_ours is not None:
        return process_state.is_ours
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "on", "off"):
        raise InputError(f'{VARIABLE} must be "on" or "off", got {value!r}')
    return value != "off"


@contextmanager
def span(what: str, note: str = "") -> Iterator[None]:
    """The training thread does ``what`` in this block: "data", "save", ... note: more of it, for people."""
    recorder = process_state.recorder
    if (start := clock.perf_counter()) > recorder.look_s:
        recorder.look(start)
    try:
        yield
    finally:
        if (end := clock.perf_counter()) > recorder.look_s:
            recorder.look(end)
        recorder.write((SPAN, what, note, start, end))


def record_function(name: str) -> AbstractContextManager[None]:
    """Name a block of the training loop in traces and in the ledger of lost time, as torch's profiler does.

    Use it on this rank's training thread, outside of forward and backward. It costs a microsecond, and no
    rank needs to call it. The ledger of lost time knows "data" as one of its causes.

    Args:
        name: the name of the block.

    Returns:
        A context manager around the block.

    Examples:
        >>> with shardwright.record_function("data"):
        ...     batch = torch.ones(2, 8)
    """
    return span(name)
