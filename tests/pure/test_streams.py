"""The rules for streams, on streams that are only lists: no device, every race found.

A fake stream remembers what was queued on it. Each operation knows which operations come before it for
certain: those queued earlier on its stream, and those behind the events that its stream has waited for. Two
operations on the same memory, one of them writing, race where neither comes before the other.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import rankzero
from shardwright import fully_shard
from shardwright.errors import StageError
from shardwright.transport.process import process_state
from shardwright.transport.streams import Due, Streams


class FakeStream:
    """before: operations that everything queued from now on comes after."""

    def __init__(self, device):
        self.device, self.before = device, frozenset()

    def record_event(self, event=None):
        self.device.num_events += 1
        self.device.num_made += event is None
        event = event or SimpleNamespace(waited=True)
        assert event.waited, "somebody is still to wait for it"
        event.before, event.waited = self.before, False
        event.synchronize = partial(self.device.wait_on_host, event)
        return event

    def wait_event(self, event):
        assert not event.waited, "an event is waited for once"
        event.waited = True
        self.before |= event.before

    def __enter__(self):
        self.device.current.append(self)

    def __exit__(self, *_):
        self.device.current.pop()


class Device:
    """Streams, and an allocator that hands memory out again at once, to the stream that it was taken on.

    host: what the host does, in program order. What is queued comes after what it has done by then.
    """

    def __init__(self):
        self.num_events = self.num_made = self.num_ops = self.num_places = 0
        self.touched, self.free, self.owner = {}, {}, {}
        self.races = []
        self.compute, self.host = FakeStream(self), FakeStream(self)
        self.current = [self.compute]
        self.num_waits = 0

    def wait_on_host(self, event):
        event.waited = True
        self.host.before |= event.before
        self.num_waits += 1

    def take(self):
        stream = self.current[-1]
        place = self.free[stream].pop() if self.free.get(stream) else self.num_places
        self.num_places = max(self.num_places, place + 1)
        self.owner[place] = stream
        return place

    def give_back(self, place):
        self.free.setdefault(self.owner[place], []).append(place)

    def run(self, name, reads=(), writes=()):
        stream, op = self.current[-1], self.num_ops
        stream.before |= self.host.before
        self.num_ops += 1
        for place in (*reads, *writes):
            for other, wrote, what in self.touched.get(place, ()):
                if (wrote or place in writes) and other not in stream.before:
                    self.races.append((what, name))
            self.touched.setdefault(place, []).append((op, place in writes, name))
        stream.before |= {op}


def flat(place):
    return SimpleNamespace(data_ptr=lambda: place)


class Model:
    """Trains a few groups as the runtime does, one gathered ahead. offloads: its shards lie on the host."""

    def __init__(self, rules=Streams, num_groups=4, offloads=False):
        self.device, self.offloads, self.offloaded = Device(), offloads, None
        self.streams = rules(lambda: FakeStream(self.device), lambda: self.device.current[-1])
        self.shards = [self.device.take() for _ in range(num_groups)]
        self.sums = {}
        for shard in self.shards:
            self.device.run("initialise", writes=[shard])

    def unshard(self, group, changed):
        with self.streams.filling(changed):
            place = self.device.take()
            self.device.run("copy in", [self.shards[group]], [place])
        self.streams.filled([flat(place)])
        with self.streams.gathering([flat(place)]):
            self.device.run("all-gather", writes=[place])
            return place, self.streams.gathered()

    def use(self, gathering, name):
        place, due = gathering
        self.streams.land(due)
        self.device.run(name, reads=[place])
        self.device.give_back(place)
        self.streams.release()

    def reduce(self, group):
        gradient = self.device.take()
        self.device.run("gradient", writes=[gradient])
        with self.streams.reducing():
            total = self.device.take()
            self.device.run("reduce-scatter", [gradient], [total])
        return group, gradient, total, self.streams.reduced()

    def land(self, reduction):
        group, gradient, total, due = reduction
        self.streams.land(due)
        self.device.give_back(gradient)
        self.device.run("divide", writes=[total])
        if self.offloads:
            with self.streams.offloading([total]):
                self.sums[group] = self.take_on_host()
                self.device.run("offload", [total], [self.sums[group]])
            if self.offloaded is not None:
                self.device.give_back(self.offloaded)
            self.offloaded = total
        else:
            self.sums[group] = total

    def take_on_host(self):
        with self.device.host:
            return self.device.take()

    def step(self):
        for total in self.sums.values():  # zero_grad
            self.device.give_back(total)
        self.sums = {}
        order = range(len(self.shards))
        for name, groups, changed in (("forward", order, True), ("backward", order[::-1], False)):
            ahead, reductions = self.unshard(groups[0], changed), []
            for group, following in zip(groups, [*groups[1:], None], strict=True):
                gathering, ahead = ahead, None if following is None else self.unshard(following, changed)
                self.use(gathering, name)
                if name == "backward":
                    reductions.append(self.reduce(group))
                    if len(reductions) > 1:
                        self.land(reductions.pop(0))
            for reduction in reductions:
                self.land(reduction)
        if self.offloads:
            self.streams.settle()
            self.device.give_back(self.offloaded)
            self.offloaded = None
        with self.device.host if self.offloads else nullcontext():
            for shard, total in zip(self.shards, self.sums.values(), strict=True):
                self.device.run("optimizer", [total], [shard])


@pytest.mark.parametrize("offloads", [False, True])
def test_steps_have_no_race_and_a_fixed_number_of_buffers(offloads):
    model = Model(offloads=offloads)
    model.step()
    places = model.device.num_places
    for _ in range(3):
        model.step()
    assert model.device.races == []
    assert model.device.num_places == places
    assert model.device.num_waits == 4 * offloads  # of the host: one a step


class NoRule1(Streams):
    def filling(self, changed):
        return super().filling(False)


class NoRule2(Streams):
    def release(self):
        pass


class NoRule3(Streams):
    def gathered(self):
        return Due(FakeStream(Device()))


class NoRule4(Streams):
    def reducing(self):
        return self._reduce or nullcontext()


class NoRule6(Streams):
    """Copies follow compute, and nothing waits for them."""

    @contextmanager
    def offloading(self, sums):
        self._offloaded = None
        with super().offloading([]):
            yield


class NoRule6Either(Streams):
    """Copies don't wait for the division."""

    def offloading(self, sums):
        self._offload = self._offload or self._make()
        return self._offload


class NoRule7(Streams):
    def settle(self):
        pass

    arrive = settle


@pytest.mark.parametrize(
    ("rules", "race"),
    [
        (NoRule1, ("optimizer", "copy in")),
        (NoRule2, ("backward", "copy in")),
        (NoRule3, ("all-gather", "forward")),
        (NoRule4, ("gradient", "reduce-scatter")),
        (NoRule6, ("offload", "reduce-scatter")),
        (NoRule6Either, ("divide", "offload")),
        (NoRule7, ("offload", "optimizer")),
    ],
)
def test_each_rule_is_needed(rules, race):
    model = Model(rules, offloads="6" in rules.__name__ or "7" in rules.__name__)
    for _ in range(3):
        model.step()
    assert race in model.device.races


@pytest.mark.parametrize("rules", [Streams, NoRule7])
def test_an_optimizer_waits_for_gathers_of_an_evaluation_before_it_writes_shards_on_the_host(rules):
    model = Model(rules, offloads=True)
    model.unshard(0, changed=False)
    model.streams.settle()
    with model.device.host:
        model.device.run("optimizer", writes=[model.shards[0]])
    assert (("copy in", "optimizer") in model.device.races) is (rules is NoRule7)


def test_a_gather_for_the_backward_does_not_wait_for_computations_queued_after_the_last_release():
    model = Model()
    model.step()
    model.streams.release()
    model.device.run("long computation")
    model.unshard(0, changed=False)
    long = model.device.num_ops - 3
    assert long not in model.streams._gather.before
    model.unshard(1, changed=True)
    assert long in model.streams._gather.before


def test_what_was_not_filled_on_the_gather_stream_waits_for_compute():
    model = Model()
    place = model.device.take()
    model.device.run("fill", writes=[place])
    with model.streams.gathering([flat(place)]):
        model.device.run("all-gather", writes=[place])
    assert model.device.races == []


def test_a_due_is_waited_for_once_and_then_its_event_is_recorded_again():
    device = Device()
    due, other = Due(device.compute), FakeStream(device)
    due.wait(other)
    due.wait(other)
    assert device.num_events == 1
    Due(device.compute).wait(other)
    Due(device.compute).wait_on_host()
    assert (device.num_events, device.num_made) == (3, 1)


def test_side_streams_go_before_compute(monkeypatch):
    priorities = []
    monkeypatch.setattr(torch, "Stream", lambda device, priority: priorities.append(priority))
    monkeypatch.setattr(process_state, "streams", {})
    Streams.of(torch.device("xpu", 0))
    assert priorities and set(priorities) == {-1}


def test_all_transports_that_a_thread_makes_on_a_device_share_few_streams(monkeypatch):
    """Torch gives out 32 of a priority in turn: of many sets one's gather would be another's reduce."""
    made = []
    monkeypatch.setattr(torch, "Stream", lambda device, priority: made.append(device))
    monkeypatch.setattr(process_state, "streams", {})
    here = {Streams.of(torch.device("xpu", 0)) for _ in range(40)}
    with ThreadPoolExecutor(1) as other:
        there = other.submit(Streams.of, torch.device("xpu", 0)).result()
    assert len(here) == 1 and len(made) <= 2 * 4
    assert there not in here
    assert Streams.of(torch.device("xpu", 1)) not in here


def test_a_forward_inside_of_a_captured_graph_is_refused_and_the_next_one_works(monkeypatch):
    captures = [True]
    monkeypatch.setattr(rankzero, "Streams", partial(Streams, captures=lambda: captures[0]))
    with rankzero.rank_zero_of(2):
        model = fully_shard(torch.nn.Linear(4, 4))
        with pytest.raises(StageError, match=r"captures the current stream.*Run a sharded model outside"):
            model(torch.ones(1, 4))
        captures[0] = False
        model(torch.ones(1, 4)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
