"""What this rank has launched, and what it waits for. Kept always, read when a rank waits for long.

Every transport has a :class:`LaunchLog`: a ring of its last launches, numbered the same on all its ranks.
What a thread waits for, since when, stands in ``process_state``, together with the phase that the runtime is
in. Writing it down costs under a microsecond; making sense of it is the watch's work (``observe/``), which
also leaves its diagnosis there: whoever waits or launches next raises it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

from torch.distributed import ProcessGroup

from shardwright import clock
from shardwright.errors import CheckpointError, CommError
from shardwright.transport.process import process_state
from shardwright.transport.recorder import LAUNCH, WAIT

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


class LaunchLog:
    """The launches of one transport.

    name: the same on all its ranks. ranks: of the default process group, in the transport's order.
    operations: of c10d that launches became, where the transport says so (``became``).
    ended: places on the transport of those whose connection to this one is closed. broken: why nothing can
    be launched any more; "" while it can. in_memory: it moves bytes in memory that its ranks share.
    """

    def __init__(self, ranks: Sequence[int], kind: str = "") -> None:
        self.ranks = tuple(ranks)
        self.ended: set[int] = set()
        self.broken = ""
        self.in_memory = False
        self._groups: list[ref[ProcessGroup]] = []
        # Ranks make the transports of one set of ranks in one order, so counting gives each the same name on
        # all.
        process_state.num_logs[self.ranks, kind] += 1
        self.name = f"{kind}{process_state.num_logs[self.ranks, kind]} of {','.join(map(str, self.ranks))}"
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
        """Nothing has begun."""

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
