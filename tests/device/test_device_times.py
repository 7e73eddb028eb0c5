"""Times of collectives on a simulated accelerator, by events that are used again; no host waits for them."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from shardwright.engine.costs import exposed_s
from shardwright.schedule.layout import equal_spans
from shardwright.transport import device_times
from shardwright.transport.base import Segment
from shardwright.transport.process import Launch, LaunchLog
from shardwright.transport.process_group import ProcessGroupComm
from shardwright.transport.recorder import DEVICE, STALL
from shardwright.transport.streams import Streams
from tests.device.kernels import Kernels
from tests.device.ranks import Communicator, Job
from tests.device.sim import Event, Stream, World, resizing

STEPS = 12
GROUPS = 3


class Timed(Streams):
    """Streams of a device that takes times."""

    def __init__(self, make, current):
        super().__init__(make, current, make_event=lambda: Event(current()))


def process_that(write):
    return SimpleNamespace(recorder=SimpleNamespace(write=write), device_times=WeakSet())


class Ran:
    """What ranks wrote of some steps, by rank, with the events that each had made after each step."""

    def __init__(self, seed, asks=True):
        self.asks = asks
        self.world = World(2, seed)
        self.written = [[], []]
        self.made = [[], []]
        self.exposed = [0.0, 0.0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_times, "clock", SimpleNamespace(perf_counter=lambda: self.world.now_s))
            patch.setattr(device_times, "process_state", process_that(self.write))
            self.world.run(self.train)

    def write(self, record):
        self.written[self.names.index(record[1])].append(record)

    names = ("rank 0", "rank 1")

    def train(self, rank):
        device = self.world.devices[rank]
        streams = Timed(lambda: Stream(device), lambda: device.current[-1])
        group, log = Communicator(device, [0, 1], "all"), LaunchLog([0, 1])
        log.name = self.names[rank]
        comm, spans = ProcessGroupComm(group, group, log, streams), equal_spans(4, 2)
        with resizing(self.world), Kernels(device):
            for _ in range(STEPS):
                for _ in range(GROUPS):
                    flat = torch.ones(8)
                    comm.all_gather([Segment(flat, spans)], "all-gather").wait()
                    grad = flat * 2 + 1
                    comm.reduce_scatter([Segment(grad, spans)], [grad.dtype], "reduce-scatter").wait()
                device.synchronize()
                if self.asks:
                    streams.times.read()
                self.made[rank].append(streams.times.num_made)
            self.exposed[rank] = exposed_s([comm, comm])
        self.waits = device.waits


def test_torch_is_as_before_when_the_ranks_have_ended_in_any_order():
    before = torch.UntypedStorage.resize_
    for seed in range(3):
        Ran(seed)
        assert torch.UntypedStorage.resize_ is before


@pytest.mark.parametrize("seed", range(6))
def test_each_collective_has_its_times_and_they_are_possible(seed):
    ran = Ran(seed)
    ended = [{r[2]: r[3:] for r in written if r[0] == DEVICE} for written in ran.written]
    for rank, written in enumerate(ran.written):
        assert Counter(record[0] for record in written) == {
            DEVICE: 2 * GROUPS * STEPS,
            STALL: 2 * GROUPS * STEPS,
        }
        numbers = [record[2] for record in written if record[0] == DEVICE]
        assert numbers == sorted(set(numbers))  # they run in the order in which they were launched
        assert all(0 <= start <= end <= ran.world.now_s for start, end in ended[rank].values())
    for number, (_, end) in ended[0].items():
        assert (
            end >= ended[1][number][0] - 0.01
        )  # nobody ends it before the other one has begun: within 10 operations


@pytest.mark.parametrize("seed", range(6))
def test_events_are_used_again(seed):
    most = (
        3 * 2 * GROUPS + 1
    )  # three of each collective of a step, and one that the others' times are told from
    for counts in Ran(seed).made:
        assert counts[-1] <= most and counts[STEPS // 2] == counts[-1]


@pytest.mark.parametrize("seed", range(2))
def test_events_are_used_again_where_nobody_asks_for_times(seed):
    for counts, written in zip((ran := Ran(seed, asks=False)).made, ran.written, strict=True):
        assert counts[-1] == counts[STEPS // 2] and len(written) > 2 * GROUPS * STEPS


def test_times_of_a_device_that_is_always_behind_its_host_are_right_to_what_lies_between_two_launches(
    monkeypatch,
):
    now_s, behind_s, between_s, written = 0.0, 0.3, 0.01, []

    class Behind:
        def record(self):
            self.at = now_s + behind_s

        def query(self):
            return now_s >= self.at

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(device_times, "clock", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(device_times, "process_state", process_that(written.append))
    times = device_times.DeviceTimes(Behind, nullcontext())
    for number in range(200):
        times.end(times.begin(), "all", Launch(number, "", "", 0), [])
        now_s += between_s
    assert len(written) > 100
    for _, _, number, start, _ in written:
        assert start == pytest.approx(number * between_s + behind_s, abs=between_s)


def test_a_thread_asks_a_device_only_after_it_has_made_that_its_own(monkeypatch):
    """Else the runtime of CUDA would open a context on device 0 for it, on each rank of a host."""
    on = threading.local()

    class Asked:
        def record(self):
            pass

        def query(self):
            assert on.device
            return True

        def elapsed_time(self, other):
            assert on.device
            return 0.0

    @contextmanager
    def on_device():
        on.device = True
        yield
        on.device = False

    written = []
    monkeypatch.setattr(device_times, "process_state", process_that(written.append))
    times = device_times.DeviceTimes(Asked, nullcontext(), on_device)
    times.end(times.begin(), "all", Launch(1, "", "", 0), [])
    with ThreadPoolExecutor(1) as watch:
        watch.submit(times.read).result()
    assert len(written) == 1


@pytest.mark.parametrize("seed", range(3))
def test_exposed_seconds_are_those_from_each_stall_to_the_end_of_its_collective(seed):
    ran = Ran(seed)
    for rank, written in enumerate(ran.written):
        ended = {record[2]: record[4] for record in written if record[0] == DEVICE}
        stalled = {record[2]: record[3] for record in written if record[0] == STALL}
        waited = [max(0.0, ended[number] - at) for number, at in stalled.items()]
        assert ran.exposed[rank] == pytest.approx(sum(waited)) and any(waited)


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_the_host_waits_for_no_times_and_trains_to_the_same_bits(kind):
    plain, timed = Job(kind, 0), Job(kind, 0, Timed)
    wanted, found = plain.run(0), timed.run(0)
    for one, other in zip(wanted, found, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    for before, now in zip(plain.world.devices, timed.world.devices, strict=True):
        assert now.waits == before.waits
