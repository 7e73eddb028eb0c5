"""However ``torch.distributed`` was started, ``fully_shard`` shards over its ranks, on the devices it has."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn

from shardwright import full_state_dict, fully_shard, lockstep, loss_weights, set_transport
from shardwright.transport import mesh, process, streams
from shardwright.transport.channel import AxisChannel, compare
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.process_group import ProcessGroupComm
from tests.ranks.models import fresh_mesh, sharded
from tests.ranks.pool import as_torchrun, free_port, on_ranks, run_ranks

LEFT_OUT = "left out"
# The last one stands for NCCL alone: nothing in the default group moves tensors of the host.
FORMS = [LEFT_OUT, None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "cuda:fake"]


def started(rank: int, world: int, form: str | None, port: int) -> tuple[str, dict[str, torch.Tensor]]:
    """A step in a process whose environment is torchrun's, and whose default group was made in this way."""
    as_torchrun(rank, world, port)
    if form != LEFT_OUT:
        dist.init_process_group(form, timeout=timedelta(seconds=30))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sharded(model)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert dist.get_world_size() == world
    moved = {name: weight.cpu() - before[name] for name, weight in full_state_dict(model).items()}
    return str(next(model.parameters()).device), moved


@pytest.mark.each_case
@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_however_the_process_group_was_made(form):
    (device, moved), _ = run_ranks(2, started, form, free_port())
    assert device == "cpu"
    assert moved.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.allclose(moved["1.bias"], torch.full((2,), -0.5))  # its gradient is 1 on both ranks
    assert moved["0.weight"].any()


def makes_a_group_apart(rank, world):
    """In a world that is bound to a device, as by ``init_process_group(device_id=...)``: torch splits its
    communicator for a new group, which is a collective of all ranks."""
    device = dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    c10d = dist.distributed_c10d
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_get_split_source", lambda _: pytest.fail("the world is split"))
        ranks = [0] if rank == 0 else [1, 2]
        group = mesh.new_group(ranks, "gloo", timedelta(seconds=20))
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        assert dist.group.WORLD.bound_device_id == device
        with pytest.raises(pytest.fail.Exception, match="is split"):
            dist.new_group([0, 1, 2], backend="gloo")  # so torch does
    return total.item()


def test_a_group_of_some_ranks_is_made_by_these_alone_where_the_world_is_bound_to_a_device():
    assert run_ranks(3, makes_a_group_apart) == [0, 3, 3]


class Devices:
    """A process group with these backends, that notes what is asked of it."""

    def __init__(self, **names):
        self.names, self.calls = names, []

    def size(self):
        return 2

    def rank(self):
        return 0

    def abort(self):
        self.calls.append("abort")

    def recv(self, *_):
        self.calls.append("recv")
        raise RuntimeError("the time limit")

    def send(self, *_):
        self.calls.append("send")


@pytest.mark.parametrize(
    ("names", "ends", "asks"),
    [
        ({"cpu": "gloo"}, ["recv"], ["send"]),
        ({"cuda": "nccl"}, ["abort"], []),
        ({"xpu": "xccl"}, ["abort"], []),
        ({"cpu": "gloo", "cuda": "nccl"}, ["abort", "recv"], ["send"]),
    ],
    ids=str,
)
def test_waits_in_a_group_are_ended_as_each_of_its_backends_can(monkeypatch, names, ends, asks):
    monkeypatch.setattr(process, "backend_names", lambda group: group.names)
    group = Devices(**names)
    process.close(group)
    assert group.calls == ends
    group.calls.clear()
    process.is_closed(group, 1)
    assert group.calls == asks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.gpu
@pytest.mark.parametrize("form", [LEFT_OUT, None, "cpu:gloo,cuda:nccl", "nccl"])
def test_a_machine_with_devices_uses_them(form):
    [(device, moved)] = run_ranks(1, started, form, free_port())
    assert device == "cuda:0"
    assert torch.allclose(moved["1.bias"], torch.full((2,), -0.5))


ACCELERATORS = [
    # accelerator, how the group was made, what is sharded on by default
    ("cuda", "gloo", "cpu"),
    ("cuda", "cpu:gloo", "cpu"),
    ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
    ("cuda", "cpu:gloo,cuda:fake", "cuda"),
    ("cuda", "cuda:fake", "cuda"),
    ("xpu", "cpu:gloo,xpu:fake", "xpu"),
    ("xpu", "cpu:gloo,cuda:fake", "cpu"),
    ("hpu", "cpu:gloo,hpu:fake", "hpu"),
    ("mps", "cpu:gloo,mps:gloo", "cpu"),
    ("mps", "cpu:gloo", "cpu"),
    (None, "cpu:gloo,cuda:fake", "cpu"),
]


@on_ranks(1)
def test_the_accelerator_is_taken_where_the_process_group_has_a_backend_of_its_own_for_it():
    found = []
    for accelerator, form, _ in ACCELERATORS:
        dist.destroy_process_group()
        dist.init_process_group(form, store=dist.HashStore(), rank=0, world_size=1)
        device = None if accelerator is None else torch.device(accelerator)
        torch.accelerator.current_accelerator = lambda check_available=False, device=device: device
        found.append(mesh._default_device_type())
    assert found == [expected for _, _, expected in ACCELERATORS]


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("accelerator", "is_there", "backend"),
    [
        (None, False, "gloo"),
        ("cuda", True, "cpu:gloo,cuda:nccl"),
        ("cuda", False, "gloo"),  # torch is built for it, and the machine has none
        ("xpu", True, "cpu:gloo,xpu:xccl"),
        ("mps", True, "gloo"),
    ],
)
def test_a_group_that_is_made_for_the_caller_has_the_hosts_backend_and_the_accelerators(
    accelerator, is_there, backend, monkeypatch
):
    found = None if accelerator is None else type("Device", (), {"type": accelerator})()
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: found if is_there or not check_available else None,
    )
    assert mesh.default_backend() == backend


@on_ranks(1)
def test_the_time_limit_of_a_group_is_that_of_its_own_backends():
    found = []
    for form in ("gloo", "cpu:gloo", "cpu:gloo,cuda:fake", "cuda:fake"):
        dist.destroy_process_group()
        store = dist.HashStore()
        dist.init_process_group(form, store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
        found.append(mesh.timeout_of(dist.group.WORLD).total_seconds())
    assert found == [77, 77, 77, mesh.TIMEOUT.total_seconds()]  # "fake" has none of its own


def communicators(rank: int, world: int) -> list[str]:
    """The backends of the process groups that a step over two axes makes, beside the caller's own."""
    dist.Backend.default_device_backend_map["cuda"] = "fake"  # in NCCL's place
    streams.Streams.of = classmethod(lambda cls, device: None)
    mesh._device = torch.device
    made, new_group = [], dist.new_group
    grid = dist.init_device_mesh("cuda", (2, 2), backend_override={0: "fake", 1: "fake"})
    dist.new_group = lambda ranks, timeout, backend, **options: (
        made.append(backend),
        new_group(ranks, timeout, backend, **options),
    )[1]
    for _ in range(2):
        axis = mesh.resolve(grid)
    assert axis.comm._gather_group is axis.comm._reduce_group
    return made


def test_an_axis_of_an_accelerator_has_one_communicator():
    """Each holds buffers on the device, the more the more ranks there are."""
    for made in run_ranks(4, communicators):
        assert made.count("fake") == 2


@on_ranks(2)
def test_words_that_ranks_agree_on_travel_from_host_to_host(rank, world):
    """Gloo is in the place of an accelerator's transport."""
    dist.Backend.default_device_backend_map["cuda"] = "gloo"
    comm = mesh.comm_of(None, "cuda")
    assert isinstance(comm, ProcessGroupComm)
    assert isinstance(comm.host, ShmComm)
    assert AxisChannel(comm).exchange([1 << rank]) == [0b11]
    assert compare(comm, f"rank {rank}", "models") == ["rank 0", "rank 1"]

    set_transport(
        "collectives"
    )  # ProcessGroupComm, but of host tensors; with a host's transport beside it all the same
    axis = mesh.resolve(fresh_mesh(world))
    assert isinstance(axis.comm, ProcessGroupComm)
    axis.comm._host = comm.host
    model = fully_shard(nn.Linear(4, 2), mesh=axis.mesh)
    assert len(list(lockstep([1] * (2 + rank), mesh=axis.mesh))) == 2
    shares = loss_weights(model, [1 + 2 * rank])
    assert shares == [(1 + 2 * rank) / 4]
    (model(torch.ones(1, 4)).sum() * shares[0]).backward()
    assert comm.log.launched == 0
    on_device = [launch.key for launch in axis.comm.log.ring]
    on_host = [launch.key for launch in comm.host.log.ring]
    assert on_device == ["all-gather Linear", "reduce-scatter Linear"]
    assert {"lockstep", "compare models", "the weights of a step's losses"} <= set(on_host)
    assert any(key.startswith("agreement") for key in on_host)
