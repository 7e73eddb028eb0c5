"""How the training thread comes to raise a diagnosis, wherever it stands; or this process ends without it."""

import os
import sys
import threading
from collections.abc import Iterable

from torch.distributed import ProcessGroup

from shardwright import clock
from shardwright.observe.watch.process_status import ProcessStatus
from shardwright.observe.watch.requests import Requests
from shardwright.torch_private import process_groups
from shardwright.transport.process import close, process_state

HELD = 74
"""The exit code of a rank whose training thread is held in native code, by ranks that will never come."""

_GRACE_S = 2.0  # for a diagnosis to reach the training thread, before what that may sit in is closed as well
_LAST_RESORT_S = 10.0


class Delivery:
    """Used by the watch's thread, once ``process_state`` has the diagnosis. stop: the watch is to end."""

    def __init__(self, rank: int, status: ProcessStatus, requests: Requests, stop: threading.Event) -> None:
        self._rank, self._status, self._requests, self._stop = rank, status, requests, stop

    def close_ours(self) -> None:
        """End what waits in the process groups of our transports."""
        _close({group for log in process_state.logs for group in log.groups})

    def see_it_raised(self, stalled: bool, text: str) -> None:
        """Return once the training thread has raised it, or will at its next collective. stalled: it does
        nothing. text: printed where it can't raise it."""
        # A thread that stands in a call of torch's won't come to hear of it.
        if self._is_raised_within(_GRACE_S if self._status.wait is not None else 0.0):
            return
        if self._status.answer().foreign or self._status.in_flight is not None:
            _close(process_groups())  # the caller's own, too: what it raises is told by the hook
        elif stalled:
            self._requests.interrupt()
        stands = self._status.stands_in
        if (stands is None and not stalled) or self._is_raised_within(_GRACE_S, stands):
            return
        # It sits in native code that nothing may be able to interrupt, and nobody will ever come.
        process_state.delivered = not stalled
        print(text, file=sys.stderr, flush=True)
        if not self._is_raised_within(_LAST_RESORT_S, stands):
            os._exit(HELD)

    def _is_raised_within(self, seconds: float, stands: object = None) -> bool:
        """Whether the training thread has heard of it by then, or stands no longer where it stood."""
        deadline = clock.monotonic() + seconds
        while clock.monotonic() < deadline and not self._stop.is_set():
            self._status.sample()
            if self._status.stands_in is not stands if stands else process_state.delivered:
                return True
            clock.sleep(0.02)
        return self._stop.is_set() or (stands is None and process_state.delivered)


def _close(groups: Iterable[ProcessGroup]) -> None:
    """End what waits there. Each by a thread: a connection to a host that is dark is not closed soon."""
    for group in groups:
        threading.Thread(target=close, args=(group,), daemon=True).start()
