"""When a device ran collectives and waited for them: events on its streams, read once they have passed.

The host never waits for them.

    begin   on the stream that launches, after all that the collective reads was made
    end     on a stream of its own, which waits for nothing but the collective
    stall   on the compute stream, before that is made to wait for the collective

"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from math import inf
from typing import Any

from shardwright import clock
from shardwright.transport.process import Launch, process_state
from shardwright.transport.recorder import DEVICE, STALL

MOST = 4096
"""Marks that wait to be read. Where more come (a device hangs) they are left out."""
_TOGETHER = 64  # marks that are read at once: looking costs as much as a mark
_REBASED_S = 1.0  # a time in milliseconds as a float of 32 bits is exact to 0.1 us within a second


class DeviceTimes:
    """The events of the streams of one transport. Its methods are called where collectives are.

    make_event: makes an event that takes times, and is recorded on the stream that is current. on_device:
    makes the device of the streams the thread's own, for a block.
    exposed_s: seconds in which compute streams waited for collectives, of those that have been read.
    """

    def __init__(self, make_event: Callable[[], Any], stream: Any, on_device: Any = nullcontext) -> None:
        self.num_made, self.exposed_s = 0, 0.0
        self._ends_s: dict[tuple[str, int], float] = {}  # of collectives that no stream has waited for yet
        self._make_event, self._stream, self._on_device = make_event, stream, on_device
        self._free: list[Any] = []
        self._pending: deque[tuple[int, str, int, float, Any, Any]] = deque()
        self._origin: tuple[Any, float] | None = None  # an event that others are told from, and its time
        self._unpassed_s, self._known = -inf, False
        self._reading = threading.Lock()
        process_state.device_times.add(self)

    def begin(self) -> tuple[Any, float] | None:
        """A collective is launched next, on the stream that is current; for ``end``."""
        if self._origin is None:
            self._origin = self._made(), clock.perf_counter()
            self._origin[0].record()
        if len(self._pending) >= _TOGETHER or not self._known:
            self.read()
        if len(self._pending) >= MOST:
            return None
        event = self._free.pop() if self._free else self._made()
        event.record()
        return event, clock.perf_counter()

    def end(self, begun: tuple[Any, float] | None, name: str, launch: Launch, works: Iterable[Any]) -> None:
        """The collective was launched, by the log of that name. works: what it is to be waited for by."""
        if begun is not None:
            event = self._free.pop() if self._free else self._made()
            with self._stream:
                for work in works:
                    work.wait()
                event.record()
            self._pending.append((DEVICE, name, launch.number, begun[1], begun[0], event))

    def stall(self, name: str, launch: Launch) -> None:
        """The current stream is about to wait for the collective."""
        if len(self._pending) < MOST:
            event = self._free.pop() if self._free else self._made()
            event.record()
            self._pending.append((STALL, name, launch.number, clock.perf_counter(), None, event))

    def _made(self) -> Any:
        self.num_made += 1
        return self._make_event()

    def read(self) -> None:
        """Write the marks that have passed, the oldest first, into the recorder. Any thread may call it."""
        # A thread that has no device yet (the watch's) would open a context on device 0 as it first asks.
        with self._reading, self._on_device():
            while self._pending and self._origin is not None:
                kind, name, number, queued_s, begun, ended = self._pending[0]
                looked_s = clock.perf_counter()
                if not ended.query():
                    self._unpassed_s = looked_s
                    return
                self._pending.popleft()
                base, base_s = self._origin
                end_s = start_s = base_s + base.elapsed_time(ended) / 1e3
                if begun is not None:
                    start_s = base_s + base.elapsed_time(begun) / 1e3
                    # Used again, so that there are only as many as were ever in flight at once.
                    self._free.append(begun)
                # An event is passed after the host has queued it, after the host has last seen that it isn't,
                # and before the host sees that it is. So each one says how far the device's clock may be from
                # the host's, and what was taken for the difference is corrected by no more than that: this
                # also follows a clock that drifts.
                early_s = max(queued_s - start_s, self._unpassed_s - end_s)
                shift_s = early_s if early_s > 0 else min(clock.perf_counter() - end_s, 0.0)
                start_s, end_s = start_s + shift_s, end_s + shift_s
                self._unpassed_s, self._known = -inf, True
                if end_s - base_s > _REBASED_S:
                    self._origin, ended = (ended, end_s), base
                elif shift_s:
                    self._origin = base, base_s + shift_s
                self._free.append(ended)
                times = (end_s,) if begun is None else (start_s, end_s)
                process_state.recorder.write((kind, name, number, *times))
                if kind == STALL:  # until the collective that it waited for had ended
                    self.exposed_s += max(0.0, self._ends_s.pop((name, number), end_s) - end_s)
                    continue
                self._ends_s[name, number] = end_s
                if len(self._ends_s) > MOST:  # the oldest one: it was never waited for
                    del self._ends_s[next(iter(self._ends_s))]


def read_device_times() -> None:
    """Write down all that has passed by now on any device of this process."""
    for times in tuple(process_state.device_times):
        times.read()
