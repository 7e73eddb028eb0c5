"""When a device ran collectives and waited for them: events on its streams, read once they have passed.

The host never waits for them, but once, as the first one is made: from then on the device's clock is known
by the host's. It would drift, so it is corrected by what must be: nothing happens on a device before the host
has queued it, or after the host has seen that it had happened.

    begin   on the stream that launches, after all that the collective reads was made
    end     on a stream of its own, which waits for nothing but the collective
    stall   on the compute stream, before that is made to wait for the collective

An event that has been read is used again, so that there are as many as were ever in flight at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from shardwright.transport.launches import Launch
from shardwright.transport.recorder import DEVICE, STALL, clock, recorder

MOST = 4096
"""Marks that wait to be read. Where more come (a device hangs) they are left out."""
_AT_ONCE = 3  # marks read for each that is made, so that none stay behind
_REBASED_S = 1.0  # a time in milliseconds as a float of 32 bits is exact to 0.1 us within a second


class DeviceTimes:
    """The events of the streams of one transport. Its methods are called where collectives are.

    make_event: makes an event that takes times. current: gives the stream that is current.
    """

    def __init__(self, make_event: Callable[[], Any], stream: Any, current: Callable[[], Any]) -> None:
        self.num_made = 0
        self._make_event, self._stream, self._current = make_event, stream, current
        self._free: list[Any] = []
        self._pending: deque[tuple[str, int, float, tuple[Any, ...]]] = deque()
        self._origin: tuple[Any, float] | None = None
        self._reading = threading.Lock()
        _all.add(self)

    def begin(self) -> Any:
        """A collective is launched next, on the stream that is current; for ``end``."""
        if self._origin is None:
            event = self._recorded()
            event.synchronize()
            self._origin = event, clock()
        self.read(_AT_ONCE)
        return (self._recorded(), clock()) if len(self._pending) < MOST else None

    def end(self, begun: Any, name: str, launch: Launch, works: Iterable[Any]) -> None:
        """It was launched, by the log of that name. works: what it is to be waited for by."""
        if begun is not None:
            event, at = begun
            with self._stream:
                for work in works:
                    work.wait()
                self._pending.append((name, launch.number, at, (event, self._recorded())))

    def stall(self, name: str, launch: Launch) -> None:
        """The current stream waits for it next."""
        if self._origin is not None and len(self._pending) < MOST:
            self._pending.append((name, launch.number, clock(), (self._recorded(),)))

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._made()
        event.record(self._current())
        return event

    def _made(self) -> Any:
        self.num_made += 1
        return self._make_event()

    def read(self, most: int = MOST) -> None:
        """Write the oldest marks, as far as they have passed, into the recorder. Any thread may call it."""
        with self._reading:
            while most and self._pending and self._pending[0][3][-1].query():
                name, number, queued_s, events = self._pending.popleft()
                times = self._times(queued_s, events)
                recorder.write((DEVICE if len(times) == 2 else STALL, name, number, *times))
                most -= 1

    def _times(self, queued_s: float, events: tuple[Any, ...]) -> list[float]:
        """By the host's clock."""
        assert self._origin is not None
        base, base_s = self._origin
        times = [base_s + base.elapsed_time(event) / 1e3 for event in events]
        early_s, late_s = queued_s - times[0], times[-1] - clock()
        shift_s = early_s if early_s > 0 else -max(late_s, 0.0)
        times = [at + shift_s for at in times]
        if times[-1] - base_s > _REBASED_S:
            self._free.append(base)
            self._origin = events[-1], times[-1]
            events = events[:-1]
        elif shift_s:
            self._origin = base, base_s + shift_s
        self._free.extend(events)
        return times


_all: "WeakSet[DeviceTimes]" = WeakSet()


def read_device_times() -> None:
    """Write down all that has passed by now on any device of this process."""
    for times in tuple(_all):
        times.read()
