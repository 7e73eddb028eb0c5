"""What this process has made and knows of itself, in one object; and the switch for what is done to it."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from shardwright import clock
from shardwright.errors import InputError
from shardwright.transport.recorder import SPAN, Recorder

VARIABLE = "SHARDWRIGHT_PROCESS"
"""``off`` leaves the process alone, in programs that don't call ``set_process``; ``on`` and "" do not."""


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
    recorder: what ran in the last steps. loops, device_times: of all transports that are alive.
    num_logs: launch logs that were made, by ranks and kind. probes: see ``abort.is_closed``.
    is_ours, transport: what was chosen by ``set_process`` and ``set_transport``. told: warnings given once.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.step = 0
        self.progress = ""
        self.waits: dict[int, Any] = {}
        self._logs: list[ref[Any]] = []
        self.moved_s = clock.monotonic()
        self.caught = ("", 0)
        self.diagnosis: Exception | None = None
        self.delivered = False
        self.explain: Callable[[Exception], Exception] | None = None
        self.look: Callable[[], None] | None = None
        self.thread = threading.get_ident()
        self.recorder = Recorder()
        self.num_logs: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.loops: WeakSet[Any] = WeakSet()
        self.device_times: WeakSet[Any] = WeakSet()
        self.probes: WeakKeyDictionary[ProcessGroup, dict[int, Work]] = WeakKeyDictionary()
        self.is_ours: bool | None = None
        self.transport = "auto"
        self.told: set[str] = set()
        self.haste = threading.local()  # how long each thread waits for the job's store
        self.made = Made(lambda: None)
        self.making = threading.RLock()  # the watch's thread asks for the job's store, too
        self.swapping = threading.Lock()  # of the store that torch takes for the default group's

    @property
    def logs(self) -> list[Any]:
        """Of all transports that are alive; any thread may ask."""
        return [log for made in tuple(self._logs) if (log := made()) is not None]

    def add(self, log: Any) -> None:
        """Remember a transport's log for as long as the transport lives."""
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


process_state = ProcessState()
# All that a rank knows hangs here, so that a simulation can have one for each of its ranks, and put the
# attributes of whichever runs in place. Elsewhere is only what belongs to the real process: its memory
# (`cpu/pages.py`) and the kernel's counters of its threads (`thread_use.py`).


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
