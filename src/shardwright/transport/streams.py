"""Which stream of a device moves what, and when memory may be used again: every rule in one place.

    compute   the caller's: forwards, backwards, optimizer
    gather    takes a group's buffer, copies the own shard in, launches its all-gather
    reduce    casts and pads gradients, launches their reduce-scatter into memory of its own
    second    launches what follows a reduce-scatter: an all-reduce over copies, the hop between nodes
    offload   copies sums and activations to pinned memory of the host, and back; made when the first one is

Device memory belongs to the stream that it was taken on: given back, it is handed out there again at once, in
the order of that stream. ``record_stream`` would make that safe for other streams by holding freed memory
until the host looks again, so that peaks depend on timing. It isn't used; instead:

1. Shards that may have changed (a first gather, an optimizer step, a load) are read by gather after all that
   compute had queued. Unchanged ones (the gather for a backward) wait for nothing but rule 2, so that the
   copy and the all-gather run beside computations that were queued long before.
2. A buffer that compute gives back (at a reshard, or once what it held was decoded) is written again by
   gather only after what compute had queued by then.
   So the buffers of a step form a ring: as many as the schedule has live at once, handed on when released.
3. Before compute reads a buffer it waits for gather once; before it reads a sum, for reduce once.
4. Gradients are read by reduce after what compute had queued, and are held until compute has waited for that:
   from then on compute may have their memory again. The sums are memory of reduce; it takes memory only after
   what compute had queued by then, so after every reader of a sum that was dropped.
5. An all-reduce over copies is launched from second, which waits for the reduce-scatter's sums; what that
   has read is held until compute has waited for them, too.
6. Sums that go to the host are read by offload after what compute had queued (their division), and are held
   until compute has waited for that, which it does when the next sums follow.
7. The host reads what offload has copied, and writes shards that lie in its memory, only after it has waited
   for offload, and for what compute and gather had queued: at the end of a backward, and before the step of
   an optimizer. Nowhere else does it wait.
8. What comes back from the host is copied by offload, so after it was copied there, into memory that offload
   takes only after what compute had queued by then. Compute waits for it once before it reads it.

An event is recorded where one of these begins and waited for at most once. tests/pure/test_streams.py lets
streams run as far apart as events allow and finds every race, also that each rule is needed.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from shardwright.errors import StageError
from shardwright.transport.process import process_state

HIGH_PRIORITY = -1
"""Of streams: what collectives wait for goes before computations that could as well run later."""


def wait_for_device() -> None:
    """The host waits until nothing that it has queued runs any more, where there is an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def wait_for_stream() -> None:
    """The host waits for all that the current stream of the accelerator has queued."""
    torch.accelerator.current_stream().synchronize()


class Due:
    """What another stream has queued so far, for a stream to wait for: once, and not again."""

    def __init__(self, stream: Any) -> None:
        # Making an event takes a microsecond of the driver's, and a group has twelve a step. Who was made to
        # wait for one before keeps to what it stood for then.
        self._free = process_state.events[stream.device, threading.get_ident()]
        self._event: Any = stream.record_event(self._free.pop() if self._free else None)

    def wait(self, stream: Any) -> None:
        """Make ``stream`` wait, where that hasn't been done."""
        if self._event is not None:
            stream.wait_event(self._event)
            self._give_back()

    def wait_on_host(self) -> None:
        """Make the host wait, where no stream has been made to."""
        if self._event is not None:
            self._event.synchronize()
            self._give_back()

    def _give_back(self) -> None:
        self._free.append(self._event)
        self._event = None


class Streams:
    """The side streams of all transports of a device that one thread has made.

    make: makes a stream. current: gives the one that is current now; outside of this class' blocks, compute.
    captures: whether what is queued on the current stream now is recorded in a graph instead of run.
    make_event: makes an event that takes times; None: no times are taken. on_device: see ``DeviceTimes``.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        current: Callable[[], Any],
        captures: Callable[[], bool] = bool,
        make_event: Callable[[], Any] | None = None,
        on_device: Any = nullcontext,
    ) -> None:
        self._gather = make()
        self._reduce = make()
        self._second = make()
        self._make = make
        self._current = current
        self._offload: Any = None
        self._offloaded: tuple[Due, list[torch.Tensor]] | None = None
        self._captures = captures
        self._released: Due | None = None
        self._filled: set[int] = set()
        self.times = None
        if make_event is not None:
            from shardwright.transport.device_times import DeviceTimes  # noqa: PLC0415 events timed

            self.times = DeviceTimes(make_event, make(), on_device)

    @classmethod
    def of(cls, device: torch.device) -> "Streams | None":
        """Those for tensors on ``device``; None on the host.

        One set for all transports: torch has 32 streams of a priority, which it gives out in turn, so of many
        sets one's gather stream would be another's reduce stream, and no rule held. Of each thread its own,
        since what a set remembers is of one order of calls.
        """
        if device.type == "cpu":
            return None
        made, key = process_state.streams, (device, threading.get_ident())
        if key not in made:
            made[key] = cls._made_for(device)
        return made[key]

    @classmethod
    def _made_for(cls, device: torch.device) -> "Streams":
        return cls(
            partial(torch.Stream, device, priority=HIGH_PRIORITY),
            partial(torch.accelerator.current_stream, device),
            getattr(torch.get_device_module(device), "is_current_stream_capturing", bool),
            partial(torch.Event, device, enable_timing=True),
            partial(torch.accelerator.device_index, device.index),
        )

    @contextmanager
    def filling(self, changed: bool) -> Iterator[None]:
        """Take a buffer and copy the own shard in inside (rules 1 and 2); then say ``filled``.

        changed: whether the shards may have been written since they were last gathered.
        Raises: StageError inside of a capture.
        """
        if self._captures():
            raise StageError(
                "parameters are to be gathered while a device graph captures the current stream: a replay "
                "would read them at addresses that this step gives back, without the other ranks. Run a "
                "sharded model outside of captures (torch.cuda.graph, make_graphed_callables). torch.compile "
                "of each block saves launches; for inference, capture a plain model that was loaded with "
                "full_state_dict(model)"
            )
        if changed or self._released is None:
            self._released = Due(self._current())  # rule 1: after all that compute had queued, and so rule 2
        self._released.wait(self._gather)  # rule 2, and nothing else where shards are unchanged
        with self._gather:
            yield

    def filled(self, flats: Iterable[torch.Tensor]) -> None:
        """What was filled so, and needn't wait for compute when it is gathered."""
        self._filled.update([flat.data_ptr() for flat in flats])

    def forget_filled(self) -> None:
        """No gather of what was filled was launched: its memory goes back, and compute may fill it next."""
        self._filled.clear()

    def release(self) -> None:
        """Compute has given a buffer back, or will read it no more (rule 2)."""
        self._released = Due(self._current())

    @contextmanager
    def gathering(self, flats: Iterable[torch.Tensor]) -> Iterator[None]:
        """Launch an all-gather inside. What isn't ``filled`` may come from compute, and waits for it."""
        places = {flat.data_ptr() for flat in flats}
        if not places <= self._filled:  # what is filled lies on gather's own stream, behind the copies in
            Due(self._current()).wait(self._gather)
        self._filled -= places
        with self._gather:
            yield

    def gathered(self) -> Due:
        """What gather has queued: for compute to wait for (rule 3)."""
        return Due(self._gather)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Take memory for sums, cast, pad and launch a reduce-scatter inside (rule 4)."""
        Due(self._current()).wait(self._reduce)  # rule 4, for gradients and for the memory of the sums
        with self._reduce:
            yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """Wait for a reduce-scatter and launch what follows it inside (rule 5): the next reduce-scatter isn't
        queued behind that."""
        reduce, self._reduce = self._reduce, self._second
        try:
            with self.reducing():
                yield
        finally:
            self._reduce = reduce

    def reduced(self) -> Due:
        """What reduce has queued: for compute to wait for (rules 3 and 4)."""
        return Due(self._reduce)

    @contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """Run the caller's code on a stream of the caller's inside: after what compute had queued, and what
        compute queues from then on comes after it."""
        Due(self._current()).wait(stream)
        with stream:
            yield
            # Recorded on torch.Stream's side of it, that ``current`` gives: a torch.cuda.Stream records a
            # torch.cuda.Event, whose field torch.Stream.wait_event doesn't read, so it waits for nothing.
            ran = Due(self._current())
        ran.wait(self._current())

    def land(self, due: Due) -> None:
        """Make compute wait."""
        due.wait(self._current())

    @contextmanager
    def offloading(self, sums: Iterable[torch.Tensor]) -> Iterator[None]:
        """Copy ``sums`` to the host inside (rule 6). They are held until the next ones are copied."""
        if self._offload is None:
            self._offload = self._make()
        if self._offloaded is not None:  # rule 6: the sums before these may go
            self.land(self._offloaded[0])
        Due(self._current()).wait(self._offload)
        with self._offload:
            yield
        self._offloaded = Due(self._offload), [*sums]

    def fetch(self, there: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Due]:
        """What was offloaded, on the device again, and what compute is to wait for (rule 8)."""
        Due(self._current()).wait(self._offload)
        with self._offload:
            back = there.to(device, copy=True, non_blocking=True)
        return back, Due(self._offload)

    def arrive(self) -> None:
        """The host waits until all that was copied to it is there (rule 7)."""
        if self._offloaded is not None:
            self._offloaded[0].wait_on_host()
            self._offloaded = None

    def settle(self) -> None:
        """The host waits until nothing that was queued reads or writes its memory (rule 7)."""
        if self._offload is None:
            self._offload = self._make()
        # Through offload, so that the host waits once for all three.
        for stream in (self._gather, self._current()):
            Due(stream).wait(self._offload)
        self._offloaded = None
        Due(self._offload).wait_on_host()
