"""A simulated accelerator: streams that run later, memory that is reused, collectives that finish late.

Operations are put on the queue of the current stream as a CUDA kernel is: with the addresses of what they
read and write, not with the tensors, so that nothing but the caller keeps memory. Which stream runs next is
drawn by a seed, among those whose head isn't waiting for an event. Ranks are threads, of which one runs at a
time; it goes on until the host has to wait for a device, and some seeds let others go on before.

    Stream     a queue; an event is a place in it
    Meeting    one collective: it runs when all ranks have come to it, and ends on each of them by itself
    Memory     blocks of one arena. Freed, a block may at once be taken again on the stream that it was taken
               on. It is filled with 0xFF (NaN as a float, -1 as an integer) when it is taken, in the order
               of that stream, and when all has run that was queued before it was freed
    World      the ranks, their devices, and who runs next

Torch ships nothing that would do: its reference backend (OpenReg) is in the sources of its tests, not in the
package, is C++ that is to be compiled, and runs each operation at once; ``torch.utils.backend_registration``
gives a device type in Python, whose tensors are wrapper subclasses without storages, which buffers need.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

POISON = 0xFF
ARENA_NBYTES = 1 << 22
ALIGNMENT = 64


class Durations(NamedTuple):
    """Milliseconds, of which the times of streams are told: of a kernel of compute, an operation of another
    stream, a collective once all have come to it, the host's for each operation, and words of hosts once the
    last has come to them."""

    kernel_ms: float = 1.0
    copy_ms: float = 0.1
    collective_ms: float = 1.0
    host_ms: float = 0.0
    words_ms: float = 0.0


class Event:
    """What a stream had queued when it was recorded."""

    def __init__(self, stream: "Stream") -> None:
        self.stream, self.number = stream, stream.queued
        self.at = 0.0

    def again(self) -> "Event":
        """The same place of the stream, as an event of torch.Stream's kind."""
        found = Event(self.stream)
        found.number = self.number
        return found

    def record(self) -> None:
        """As torch.Event, of one that takes times: record it (again) on the current stream, with the time at
        which it is passed."""
        stream = self.stream.device.current[-1]
        stream.put(lambda: setattr(self, "at", stream.device.world.now_s))
        self.stream, self.number = stream, stream.queued

    def query(self) -> bool:
        """As torch.Event."""
        return self.done

    def elapsed_time(self, other: "Event") -> float:
        """As torch.Event: milliseconds, of two that are passed."""
        assert self.done and other.done, "torch raises here"
        return 1e3 * (other.at - self.at)

    @property
    def done(self) -> bool:
        """Whether all of that has run."""
        return self.stream.done >= self.number

    @property
    def ended_ms(self) -> float:
        """When all of that had run, of one that is done."""
        return self.stream.ended_ms[self.number - 1] if self.number else 0.0

    def synchronize(self) -> None:
        """The host waits for it."""
        self.stream.device.waits.append("event")
        self.stream.device.world.wait_for(self)

    def wait(self) -> None:
        """The current stream waits for it."""
        self.stream.device.current[-1].wait_event(self)


class Stream:
    """A queue of operations, run in order. weight: how likely it runs next, among those that can.

    behind: streams that wait for it, and until how much of it is done. ended_ms: when each operation ended,
    by ``Durations``, whatever the order in which they are run here. exposed_ms: in which it had nothing to do
    but to wait for other streams.
    """

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.weight = device.world.random.choice((0.01, 1.0, 100.0))
        self.items: deque[Any] = deque()
        self.queued = self.done = 0
        self.ended_ms: list[float] = []
        self.launched_ms: deque[float] = deque()
        self.at_ms = self.exposed_ms = 0.0
        self.behind: list[tuple[int, Stream]] = []
        device.streams.append(self)

    def put(self, item: Any) -> None:
        """Queue a call without arguments, events to wait for, or a part of a meeting. The host waits while
        the queue is full, as that of a card is at some 1,000."""
        if len(self.items) >= self.device.world.depth and self is not self.device.janitor:
            place = Event(self)
            place.number -= self.device.world.depth - 1
            self.device.world.wait_for(place)
        self.items.append(item)
        self.launched_ms.append(self.device.launch_ms())
        self.queued += 1
        if len(self.items) == 1:
            self.device.world.candidates[self] = None

    def record_event(self, event: Event | None = None) -> Event:
        """As torch.Stream: of an event that was recorded before, again."""
        if event is not None:
            event.stream, event.number = self, self.queued
        return event or Event(self)

    def wait_event(self, event: Event) -> None:
        """As torch.Stream, which waits for nothing where the event is one of torch.cuda's: those have a field
        that it doesn't read."""
        if not self.device.waits_for_nothing and not isinstance(event, BackendEvent):
            self.put([event.again()])  # who was made to wait keeps to it, whatever is recorded again

    def synchronize(self) -> None:
        """The host waits for all that it has queued."""
        self.record_event().synchronize()

    def __enter__(self) -> None:
        self.device.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.current.pop()

    def ready(self) -> bool:
        """Whether its head can run now. Where not it is looked at again once what it waits for is done."""
        while self.items and isinstance(self.items[0], list):
            events = self.items[0]
            while events and events[-1].done:
                self._wait_until(events.pop().ended_ms)
            if events:
                events[-1].stream.behind.append((events[-1].number, self))
                break
            self._pop()
        head = self.items[0] if self.items else None
        if callable(head) and not (isinstance(head, Part) and not head.meeting.come(self)):
            return True
        del self.device.world.candidates[self]
        return False

    def _wait_until(self, ended_ms: float) -> None:
        begin_ms = self.begin_ms()
        self.exposed_ms += max(0.0, ended_ms - begin_ms)
        self.at_ms = max(begin_ms, ended_ms)

    def begin_ms(self) -> float:
        """When its head can begin."""
        return max(self.at_ms, self.launched_ms[0])

    def run(self) -> None:
        """Run the head."""
        durations, head = self.device.world.durations, self.items[0]
        if isinstance(head, Part):
            self.at_ms = head.meeting.begin_ms() + durations.collective_ms
        else:
            is_compute = self is self.device.compute
            self.at_ms = self.begin_ms() + (durations.kernel_ms if is_compute else durations.copy_ms)
        head()
        self._pop()

    def _pop(self) -> None:
        self.items.popleft()
        self.launched_ms.popleft()
        self.ended_ms.append(self.at_ms)
        self.done += 1
        if self.behind:
            freed = [stream for number, stream in self.behind if number <= self.done]
            self.behind = [each for each in self.behind if each[0] > self.done]
            self.device.world.candidates |= dict.fromkeys(freed)


class BackendEvent(Event):
    """As torch.cuda.Event: what a stream of that kind records."""


class BackendStream:
    """As torch.cuda.Stream, the kind of stream that users make. ``generic``: torch.Stream's side of it, which
    is what ``torch.accelerator.current_stream()`` gives where it is current."""

    def __init__(self, device: "Device") -> None:
        self.generic = Stream(device)

    def record_event(self) -> Event:
        """As torch.cuda.Stream."""
        return BackendEvent(self.generic)

    def wait_event(self, event: Event) -> None:
        """As torch.cuda.Stream, which asks the event to make it wait: each kind can."""
        self.generic.wait_event(event.again())

    def __enter__(self) -> None:
        self.generic.__enter__()

    def __exit__(self, *_: object) -> None:
        self.generic.__exit__()


class Part:
    """A rank's part in a collective: ``read`` gives its input, ``write`` takes what all ranks had."""

    def __init__(self, meeting: "Meeting", read: Callable[[], Any], write: Callable[[list[Any]], None]):
        self.meeting, self.read, self.write = meeting, read, write

    def __call__(self) -> None:
        self.write(self.meeting.inputs())


class Meeting:
    """One collective of ``size`` ranks, whose parts come in rank order."""

    def __init__(self, size: int) -> None:
        self.parts: list[Part | None] = [None] * size
        self._come: dict[Stream, None] = {}
        self._inputs: list[Any] | None = None
        self._begin_ms: float | None = None

    def come(self, stream: Stream) -> bool:
        """The part of this stream is at its head; whether all are."""
        self._come[stream] = None
        if len(self._come) < len(self.parts):
            return False
        if self._inputs is None:
            stream.device.world.candidates |= self._come
        return True

    def begin_ms(self) -> float:
        """When the last of its parts can begin."""
        if self._begin_ms is None:
            self._begin_ms = max(stream.begin_ms() for stream in self._come)
        return self._begin_ms

    def inputs(self) -> list[Any]:
        """Of all ranks, read when the first of them runs."""
        if self._inputs is None:
            self._inputs = [part.read() for part in self.parts if part is not None]
        return self._inputs


class Place:
    """Where a storage lies. stream: that it was taken on; None on the host."""

    def __init__(self, ref: StorageWeakRef, at: int, nbytes: int, stream: Stream | None, pinned: bool):
        self.ref, self.at, self.nbytes, self.stream, self.pinned = ref, at, nbytes, stream, pinned


class Address:
    """A tensor as a kernel gets it."""

    def __init__(self, memory: "Memory", tensor: torch.Tensor, place: Place) -> None:
        self.view = memory.typed(tensor.dtype)
        start = place.at // tensor.dtype.itemsize + tensor.storage_offset()
        self.where = tuple(tensor.shape), tensor.stride(), start if tensor.numel() else 0

    def tensor(self) -> torch.Tensor:
        """The memory that it says, whatever that holds by now."""
        return self.view.as_strided(*self.where)


class Memory:
    """The memory of a rank's host and device. The tensors that the host sees are only names for it."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self._arena = torch.full((ARENA_NBYTES,), POISON, dtype=torch.uint8)
        self._typed = {torch.uint8: self._arena}
        self._top = 0
        self._free: dict[Stream | None, list[Place]] = {}
        self._places: dict[int, Place] = {}
        self._refs: dict[int, int] = {}
        self.num_reused = 0

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, in a dtype."""
        if dtype not in self._typed:
            with _disable_current_modes():
                self._typed[dtype] = self._arena.view(dtype)
        return self._typed[dtype]

    def find(self, tensor: torch.Tensor) -> Place:
        """Where a tensor lies. One that was made before the simulation is brought to the device first."""
        storage = tensor.untyped_storage()
        place = self._places.get(storage._cdata)
        if place is None:
            place = self.take(storage)
            held = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
            self.device.launch(lambda: self._bytes(place)[: len(held)].copy_(held))
        return place

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of the host."""
        return self.find(tensor).stream is None

    def take(self, storage: torch.UntypedStorage, host: bool = False, pinned: bool = False) -> Place:
        """Memory for a storage, on the current stream or on the host. It isn't written."""
        expired = torch.UntypedStorage._expired
        if any(map(expired, self._refs.values())):
            for key in [key for key, ref in self._refs.items() if expired(ref)]:
                self.drop(key)
        stream, nbytes = None if host else self.device.current[-1], storage.nbytes()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(stream, [])
        fitting = [index for index, each in enumerate(free) if each.nbytes >= size > 0]
        if fitting:  # what was freed last: what is most likely still read
            block = free.pop(fitting[-1])
            at, size = block.at, block.nbytes
            self.num_reused += 1
        else:
            at, self._top = self._top, self._top + size
            assert self._top <= ARENA_NBYTES, f"the arena is too small: {nbytes} bytes more"
        place = Place(StorageWeakRef(storage), at, size, stream, pinned)
        self._places[storage._cdata] = place
        self._refs[storage._cdata] = place.ref.cdata
        if fitting and stream is not None:
            stream.put(lambda: self._bytes(place).fill_(POISON))
        return place

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether it has memory already."""
        return storage._cdata in self._places

    def drop(self, key: int) -> None:
        """Free what a storage has: that of this ``_cdata``, though it may stay."""
        place = self._places.pop(key, None)
        if place is not None:
            del self._refs[key]
            self._give_back(place)

    def _give_back(self, place: Place) -> None:
        """Whoever takes it next on its stream may write it in the order of that. Until then it is written
        over as soon as all is done that was queued before: what reads it later has no right to. Pinned memory
        is free only then: torch keeps it until the streams that have used it are done."""
        if not place.nbytes:
            return
        free = self._free.setdefault(place.stream, [])
        if place.stream is None and not place.pinned:
            free.append(place)
            self._bytes(place).fill_(POISON)
            return
        janitor = self.device.janitor
        janitor.put(
            [Event(stream) for stream in self.device.streams if stream.items and stream is not janitor]
        )
        if place.stream is None:
            janitor.put(lambda: (self._bytes(place).fill_(POISON), free.append(place)))
            return
        free.append(place)
        janitor.put(lambda: self._bytes(place).fill_(POISON) if place in free else None)

    def _bytes(self, place: Place) -> torch.Tensor:
        return self._arena[place.at : place.at + place.nbytes]

    def pointer_of(self, tensor: torch.Tensor) -> int:
        """As ``tensor.data_ptr()`` of a device."""
        with _disable_current_modes():
            return self.find(tensor).at + tensor.storage_offset() * tensor.itemsize if tensor.numel() else 0

    def address(self, tensor: torch.Tensor) -> Address:
        """For an operation to find the tensor later."""
        return Address(self, tensor, self.find(tensor))


class Device:
    """The simulated device of one rank. waits: what its host has waited for: events, and by its name each
    operation that had to end first."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.streams: list[Stream] = []
        self.compute = Stream(self)
        self.janitor = Stream(self)
        self.current = [self.compute]
        self.memory = Memory(self)
        self.num_launched = 0
        self.waits: list[str] = []
        self.waits_for_nothing = False
        self.host_ms = 0.0

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Queue a kernel on the current stream."""
        self.current[-1].put(kernel)
        self.num_launched += 1
        self.world.go_on()

    def launch_ms(self) -> float:
        """When the host queues the next operation."""
        self.host_ms += self.world.durations.host_ms
        return self.host_ms

    def synchronize(self) -> None:
        """The host waits for all that it has queued, on every stream."""
        for stream in self.streams:
            self.world.wait_for(Event(stream))

    def wait(self, what: str) -> None:
        """The host waits for what the current stream has; for ``waits``, what for."""
        self.waits.append(what)
        self.world.wait_for(Event(self.current[-1]))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor, for a test to look at; after ``synchronize``."""
        with _disable_current_modes():
            return self.memory.address(tensor.detach()).tensor().clone()


_threads: list[ThreadPoolExecutor] = []
"""One thread for each rank, kept: what torch has cached of DTensors it has cached for a thread."""


_running: list["World"] = []


class Stuck(AssertionError):
    """No rank can go on."""


class Ended(BaseException):
    """Another rank has failed."""


class World:
    """Ranks that are threads, one at a time, and their devices.

    swapped: ``(owner, attribute)`` of what a process has once, so that each rank gets its own.
    """

    def __init__(self, size: int, seed: int, swapped: list[tuple[Any, str]] | None = None) -> None:
        self.random = random.Random(seed)
        self.durations = Durations()
        self.now_s = 0.0
        """Simulated time: each operation takes a millisecond, whatever runs beside it."""
        self.pace = self.random.choice((0.0, 0.2, 1.0, 3.0))  # kernels run for each that is launched
        self.depth = random.Random(f"depth {seed}").choice((10**6, 10**6, 64, 4))  # of a stream's queue
        self.candidates: dict[Stream, None] = {}
        """Streams that may be ready."""
        self.devices = [Device(self, rank) for rank in range(size)]
        self.meetings: dict[Any, Meeting] = {}
        self._batons = [threading.Semaphore(0) for _ in range(size)]
        self._alive = list(range(size))
        self._failure: BaseException | None = None
        self._swapped = swapped or []
        self._in_vain = 0
        self._here = 0
        self._running = False

    # ---- devices

    def go_on(self) -> None:
        """Let devices run beside the host, as fast as the seed says."""
        self._in_vain = 0
        for _ in range(int(self.pace + self.random.random())):
            if not self.run_one():
                break

    def run_one(self) -> bool:
        """Run the head of some stream; False where none can run. Not in a mode of torch's dispatch."""
        if self._running:
            return False
        ready = [stream for stream in list(self.candidates) if stream.ready()]
        if not ready:
            return False
        stream = self.random.choices(ready, [stream.weight for stream in ready])[0]
        self._running = True
        self.now_s += 1e-3
        try:
            with torch._C._AutoDispatchBelowAutograd():
                stream.run()
        finally:
            self._running = False
        self._in_vain = 0
        return True

    def wait_for(self, event: Event) -> None:
        """The host of this rank waits; devices and, if need be, other ranks go on."""
        with nullcontext() if event.done else _disable_current_modes():
            while not event.done:
                if not self.run_one():
                    self.yield_turn()
        self.device.host_ms = max(self.device.host_ms, event.ended_ms)

    def meeting(self, key: Any, size: int) -> Meeting:
        """The meeting of that name; parts are put into it by all its ranks."""
        return self.meetings.setdefault(key, Meeting(size))

    # ---- ranks

    @property
    def device(self) -> Device:
        """Of the rank that runs."""
        return self.devices[self._here]

    def yield_turn(self) -> None:
        """Let another rank run. Raises: Stuck where none has done anything since long."""
        self._in_vain += 1
        if self._in_vain > 20 * len(self.devices):
            raise Stuck(f"ranks {self._alive} wait for each other")
        mine, others = self._here, [rank for rank in self._alive if rank != self._here]
        if not others:
            return
        kept = [getattr(owner, name) for owner, name in self._swapped]
        self._hand_to(self.random.choice(others))
        self._batons[mine].acquire()
        for (owner, name), value in zip(self._swapped, kept, strict=True):
            setattr(owner, name, value)
        self._here = mine
        if self._failure is not None:
            raise Ended

    def _hand_to(self, rank: int) -> None:
        self._here = rank
        self._batons[rank].release()

    def run(self, function: Callable[[int], Any], fresh: Callable[[], list[Any]] = list) -> list[Any]:
        """``function(rank)`` of each rank; their results. fresh: what a rank's ``swapped`` begin with."""
        results: list[Any] = [None] * len(self.devices)

        def life(rank: int) -> None:
            self._batons[rank].acquire()
            self._here = rank
            try:
                if self._failure is None:
                    for (owner, name), value in zip(self._swapped, fresh(), strict=True):
                        setattr(owner, name, value)
                    results[rank] = function(rank)
            except Ended:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            self._alive.remove(rank)
            if self._alive:
                self._hand_to(self._alive[0])

        before = [getattr(owner, name) for owner, name in self._swapped]
        while len(_threads) < len(self.devices):
            _threads.append(ThreadPoolExecutor(1))
        lives = [_threads[rank].submit(life, rank) for rank in range(len(self.devices))]
        _running.append(self)
        self._hand_to(0)
        for each in lives:
            each.result()
        _running.pop()
        for (owner, name), value in zip(self._swapped, before, strict=True):
            setattr(owner, name, value)
        if self._failure is not None:
            raise self._failure
        return results


def without_waiting(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call``, in which no stream of its rank waits for another."""

    def without() -> Any:
        device = _running[-1].device
        before, device.waits_for_nothing = device.waits_for_nothing, True
        try:
            return call()
        finally:
            device.waits_for_nothing = before

    return without


_resize, _resizing = torch.UntypedStorage.resize_, []


@contextmanager
def resizing(world: World):
    """Inside of it a storage that is resized gives its memory back, or takes it, on the current stream.

    Each rank enters it, and the last one that leaves it puts torch's own function back.
    """

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        memory = world.device.memory
        with _disable_current_modes():
            memory.drop(storage._cdata)
            _resize(storage, nbytes)
            if nbytes:
                memory.take(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_
    _resizing.append(resize_)
    try:
        yield
    finally:
        _resizing.pop()
        if not _resizing:
            torch.UntypedStorage.resize_ = _resize
