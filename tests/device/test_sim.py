"""The simulated accelerator does what a real one does to programs that don't wait."""

import pytest
import torch

from tests.device.kernels import Kernels, put_on_host
from tests.device.ranks import Communicator
from tests.device.sim import Stream, Stuck, World, resizing

SEEDS = range(40)


def results(program, size=1):
    """What ``program(device)`` returns on rank 0, by each seed, as a set of texts."""
    found = set()
    for seed in SEEDS:
        world = World(size, seed)

        def run(rank, world=world):
            device = world.devices[rank]
            with resizing(world), Kernels(device):
                out = program(device)
                device.synchronize()
                return device.read(out).tolist()

        found.add(str(world.run(run)[0]))
    return found


def test_operations_of_one_stream_run_in_their_order():
    def program(device):
        x = torch.arange(4.0)
        y = x * 2
        x.add_(1)
        return y + x

    assert results(program) == {"[1.0, 4.0, 7.0, 10.0]"}


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_reads_what_is_there_unless_it_waits(waits):
    def program(device):
        side = Stream(device)
        x = torch.zeros(2) + 1
        x.add_(1)
        if waits:
            side.wait_event(device.compute.record_event())
        with side:
            return x * 1

    found = results(program)
    assert (found == {"[2.0, 2.0]"}) is waits
    assert waits or "[nan, nan]" in found


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_is_freed_is_written_again_on_its_own_stream(keeps):
    def program(device):
        side = Stream(device)
        x = torch.zeros(2) + 1
        side.wait_event(device.compute.record_event())
        with side:
            y = x * 1
        kept = x if keeps else None
        del x
        z = torch.full((2,), 5.0)  # takes the memory of x, where nobody has that
        device.wait("test")
        del kept, z
        return y

    found = results(program)
    assert (found == {"[1.0, 1.0]"}) is keeps
    assert keeps or "[5.0, 5.0]" in found


def test_a_storage_that_is_resized_to_nothing_gives_its_memory_back():
    def program(device):
        x = torch.zeros(2) + 1
        storage = x.untyped_storage()
        storage.resize_(0)
        storage.resize_(8)
        return x

    assert results(program) == {"[nan, nan]"}


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_is_asynchronous_only_from_pinned_memory(pinned):
    def program(device):
        host = torch.ones(2)
        put_on_host(device, host, pinned)
        x = torch.empty(2)
        x.copy_(host, non_blocking=True)
        host.fill_(3.0)
        return x

    assert (results(program) == {"[1.0, 1.0]"}) is not pinned


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_copied_to_pinned_memory_is_there_once_the_host_has_waited(waits):
    def program(device):
        host = torch.empty(2, pin_memory=True)
        host.copy_(torch.zeros(2) + 1, non_blocking=True)
        if waits:
            device.compute.record_event().synchronize()
        return host * 2

    assert (results(program) == {"[2.0, 2.0]"}) is waits


def test_the_host_waits_for_numbers_that_it_asks_for():
    def program(device):
        x = torch.zeros(3) + 2
        host = torch.empty(3, pin_memory=True)
        host.copy_(x)
        return x * x.sum().item() + len(x.nonzero()) + host

    assert results(program) == {"[17.0, 17.0, 17.0]"}


def gathering(waits):
    def program(device):
        group = Communicator(device, [0, 1], "all")
        whole = torch.empty(2)
        whole[device.rank : device.rank + 1].fill_(device.rank + 1)
        work = group.all_gather_single_coalesced([whole], [whole[device.rank : device.rank + 1]])
        if waits:
            work.wait()
        return whole * 1

    return program


def test_a_collective_ends_late_and_is_waited_for():
    assert results(gathering(True), size=2) == {"[1.0, 2.0]"}
    assert "[1.0, nan]" in results(gathering(False), size=2)


def test_ranks_that_wait_for_a_collective_which_one_never_launches_are_stuck():
    def program(device):
        return gathering(True)(device) if device.rank else torch.zeros(1)

    with pytest.raises(Stuck):
        results(program, size=2)


@pytest.mark.parametrize("depth", [4, 64])
def test_hosts_whose_queues_are_full_wait_so_that_collectives_in_two_orders_never_end(depth):
    def run(rank):
        device = world.devices[rank]
        with resizing(world), Kernels(device):
            for name in ("a", "b") if rank else ("b", "a"):
                with Stream(device):  # none of the two waits for the other
                    y = torch.ones(2)
                    group = Communicator(device, [0, 1], name)
                    group.all_gather_single_coalesced([y], [y[rank : rank + 1]]).wait()
                    for _ in range(10):
                        y.add_(1)
            queued_ms = device.host_ms
            device.synchronize()
        return queued_ms

    world = World(2, 0)
    world.depth, world.pace = depth, 0.0
    if depth < 10:
        with pytest.raises(Stuck):
            world.run(run)
    else:
        assert world.run(run) == [0.0, 0.0]  # all is queued before anything has ended


def on_host(device, pinned):
    tensor = torch.zeros(2) + 1
    put_on_host(device, tensor, pinned)
    device.waits.clear()
    return tensor


@pytest.mark.parametrize(
    ("use", "waited"),
    [
        (lambda x, device: x + torch.tensor([1.0, 2.0], device=x.device), ["aten::add"]),
        (lambda x, device: x + on_host(device, False).to(x.device), ["aten::add"]),
        (lambda x, device: x.copy_(on_host(device, False), non_blocking=True), ["aten::copy_"]),
        (lambda x, device: x.copy_(on_host(device, True)), ["aten::copy_"]),
        (lambda x, device: x.copy_(on_host(device, True), non_blocking=True), []),
        (lambda x, device: x * x.sum().item(), ["aten::_local_scalar_dense"]),
        (lambda x, device: x * x.sum(), []),
    ],
)
def test_the_host_waits_for_numbers_that_it_reads_or_sends_from_memory_that_is_not_pinned(use, waited):
    """Also for those of which a tensor is made on the device of another one."""
    seen = []

    def program(device):
        x = torch.zeros(2) + 1
        device.waits.clear()
        result = use(x, device)
        seen.append(device.waits[:])
        return result

    assert "nan" not in str(results(program))
    assert seen == [waited] * len(SEEDS)
