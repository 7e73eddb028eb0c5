"""Ranks of one host share memory; what goes wrong there is an error in seconds that names the ranks."""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import SchedulePolicy, WatchPolicy, fully_shard, set_transport, set_watch
from shardwright.checkpoint import save
from shardwright.engine.unit import unit_of
from shardwright.errors import CommError, Diverged, InputError, RankLost
from shardwright.schedule.layout import ParamLayout, align
from shardwright.transport import collect
from shardwright.transport.cpu import arena
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.mesh import TIMEOUT, resolve, timeout_of
from tests.ranks.models import batches, build, full, loss_of, shard_decoder, warned
from tests.ranks.pool import on_ranks, run_ranks, run_ranks_but


def chosen(rank, world, transport):
    set_transport(transport)
    return type(unit_of(fully_shard(nn.Linear(2, 2))).group.axis.comm).__name__


def test_ranks_of_one_host_share_memory_unless_told_otherwise():
    assert set(run_ranks(2, chosen, "auto")) == {ShmComm.__name__}
    assert set(run_ranks(2, chosen, "sockets")) == {SocketComm.__name__}


def one_rank_cannot(rank, world):
    if rank == 1:

        def refuse(name):
            raise OSError("no memory files here")

        os.memfd_create = refuse
    return chosen(rank, world, "auto")


def test_all_ranks_take_sockets_where_one_cannot_share_memory():
    assert set(run_ranks(3, one_rank_cannot)) == {SocketComm.__name__}


def chosen_too_late(rank, world):
    set_transport("auto")
    fully_shard(nn.Linear(4, 4))
    same = warned(lambda: set_transport("auto"))
    with pytest.warns(UserWarning, match="call set_transport before the first fully_shard"):
        set_transport("sockets")
    return len(same)


def test_a_transport_that_is_chosen_after_sharding_warns_that_it_changes_nothing():
    assert run_ranks(2, chosen_too_late) == [0, 0]


def test_an_unknown_transport_is_refused():
    with pytest.raises(InputError, match=r"'auto', 'sockets', 'collectives', got 'pigeon'$"):
        set_transport("pigeon")


def test_gloos_own_messages_are_refused_with_what_to_take_instead():
    with pytest.raises(InputError, match=r"got 'gloo'; .* removed: take 'sockets', or 'collectives'"):
        set_transport("gloo")


def limits(rank, world, folder, transport):
    set_transport(transport)
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **options: (made.append(new_group(*args, **options)), made[-1])[1]
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    made.clear()  # torch's own
    for options in ({}, {"mesh": grid}, {"reshard_after_forward": 2}):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4), **options)), **options)
        model(torch.ones(1, 4)).sum().backward()
    axes = [timeout_of(group).total_seconds() for group in made]
    arena = getattr(unit_of(model[0]).group.axis.comm, "arena", None)
    save(folder, model=model, step=1)
    own = [timeout_of(group).total_seconds() for group in made[len(axes) :]]
    return axes, own, arena and arena._timeout_s


@pytest.mark.parametrize(
    ("transport", "default_s", "expected_s"),
    [("auto", 20.0, 20.0), ("auto", 3600.0, 600.0), ("collectives", 20.0, 20.0)],
)
def test_every_wait_of_an_axis_has_a_time_limit(tmp_path, transport, default_s, expected_s):
    """Its process groups', which only torch's collectives take, or its own."""
    for axes, own, arena_s in run_ranks(4, limits, tmp_path, transport, timeout_s=default_s):
        if transport == "auto":
            assert (axes, arena_s) == ([], expected_s)  # not longer than the caller's group
        else:
            assert len(axes) >= 8  # two for all ranks, copies, shards, neighbours
            assert expected_s in axes
        assert own
        assert max(axes + own) <= TIMEOUT.total_seconds()  # torch's default is half an hour


def other_order(rank, world):
    model = nn.ModuleList(fully_shard(nn.Linear(4, 4)) for _ in range(2))
    root = fully_shard(nn.Sequential(*model))
    root.set_schedule_policy(SchedulePolicy(agreement="off"))  # else they are told before that
    start = time.monotonic()
    with pytest.raises(Diverged, match="different collectives") as error:
        for layer in (0, 1) if rank == 0 else (1, 0):
            root[layer](torch.ones(1, 4))
    assert time.monotonic() - start < 5
    return str(error.value)


def test_ranks_in_different_collectives_are_told_so_at_once():
    for rank, message in enumerate(run_ranks(2, other_order)):
        assert f"rank {rank} launched 'all-gather {rank}'" in message
        assert f"rank {1 - rank} launched 'all-gather {1 - rank}'" in message


def killed(rank, world, watch, error, says):
    set_watch(WatchPolicy(on=watch))
    model = shard_decoder(build(), fully_shard)
    loss_of(model, batches(0, world)[rank]).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(error, match=says):
        loss_of(model, batches(1, world)[rank])


def test_a_killed_rank_is_named_within_seconds():
    run_ranks_but(1, 2, killed, True, RankLost, "rank 1 is lost")


@on_ranks(2, timeout_s=2.0)
def test_a_rank_that_never_comes_is_named_after_the_timeout(rank, world):
    model = shard_decoder(build(), fully_shard)
    if rank == 1:
        time.sleep(4)
        return
    with pytest.raises(CommError, match=r"waited 2 s for rank 1 \(pid \d+\).*it runs but did not come"):
        loss_of(model, batches(0, world)[rank])


def test_without_the_watch_the_transport_itself_names_a_killed_rank_of_its_host():
    says = r"rank 1 \(pid \d+\) has ended while rank 0 waited"
    run_ranks_but(1, 2, killed, False, CommError, says)


@on_ranks(2)
def test_places_in_shared_memory_are_used_again():
    model = fully_shard(nn.Linear(6, 6))
    segment = unit_of(model).group.axis.comm.arena
    for _ in range(300):  # more operations than records: places and numbers are used again
        model(torch.ones(1, 6)).sum().backward()
    assert len(segment._held) <= 4


def late(rank, world):
    slept, sleep_while = [], arena.sleep_while
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4))
    arena.sleep_while = lambda *args: (slept.append(args), sleep_while(*args))
    if rank == 1:
        time.sleep(0.5)
    model(torch.ones(1, 4))
    return len(slept)


def test_who_waits_in_shared_memory_sleeps_until_it_is_woken():
    waited, came_late = run_ranks(2, late)
    assert 1 <= waited <= 40  # in half a second; naps would be hundreds
    assert came_late <= 10


@pytest.mark.parametrize("collect", [True, False], ids=["collected", "garbage"])
@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
@on_ranks(2, timeout_s=20.0)
def test_what_nobody_waits_for_is_in_nobodys_way(rank, world, transport, collect):
    """Models dropped while their weights, or their gradients, are on the way; then one that goes on."""
    set_transport(transport)
    (gc.enable if collect else gc.disable)()
    for _ in range(2):
        gathering = shard_decoder(build(), fully_shard)
        gathering.unshard(async_op=True)
        reducing = shard_decoder(build(), fully_shard)
        reducing.set_is_last_backward(False)
        loss_of(reducing, batches(0, world)[rank]).backward()
        del gathering, reducing
        if collect:
            gc.collect()
    model = fully_shard(nn.Linear(6, 6))
    for _ in range(200):  # more operations than records: each number comes again
        model(torch.ones(1, 6)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((6, 6), 200.0))


@on_ranks(2)
def test_an_unshard_may_be_waited_for_after_any_number_of_others():
    kept = fully_shard(nn.Linear(6, 6))
    expected = full(kept.weight)
    handle = kept.unshard(async_op=True)
    model = fully_shard(nn.Linear(6, 6))
    for _ in range(300):
        with torch.no_grad():
            model(torch.ones(1, 6))
    handle.wait()
    assert torch.equal(kept.weight, expected)


def litter(rank, world):
    fully_shard(nn.Linear(6, 6))
    return sorted(os.listdir("/dev/shm"))


def test_nothing_appears_in_dev_shm():
    before = sorted(os.listdir("/dev/shm"))
    assert [name for name in run_ranks(2, litter)[0] if name not in before and "shardwright" in name] == []


SHAPES = ((7, 3), (1,), (64, 70), (13,), (0, 4), (50, 51))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.float32, torch.float8_e4m3fn)


def collected(rank, world, transport):
    """Uneven shards of several dtypes, whole on the last rank; over torch's collectives in windows that begin
    and end inside of tensors. The launches that it took."""
    set_transport(transport)
    collect.WINDOW_NBYTES = 64 * world * 50
    comm = resolve(None).comm
    layouts = [ParamLayout(shape, world) for shape in SHAPES]
    wholes = [
        torch.randn(layout.numel, generator=torch.Generator().manual_seed(index)).to(dtype)
        for index, (layout, dtype) in enumerate(zip(layouts, DTYPES, strict=True))
    ]
    shards = [whole[slice(*layout.span(rank))] for whole, layout in zip(wholes, layouts, strict=True)]
    before = comm.log.launched
    found = comm.gather_many(shards, [layout.spans for layout in layouts], world - 1)
    assert (found is not None) == (rank == world - 1)
    for ours, whole in zip(found or [], wholes, strict=rank == world - 1):
        assert ours.dtype == whole.dtype
        assert ours.view(torch.uint8).equal(whole.view(torch.uint8))
    row_nbytes = sum(
        align(max(b - a for a, b in s.spans) * d.itemsize) for s, d in zip(layouts, DTYPES, strict=True)
    )
    return comm.log.launched - before, -(-row_nbytes // (64 * 50))


@pytest.mark.parametrize("transport", ["auto", "collectives", "sockets"])
def test_shards_of_several_tensors_are_whole_on_one_rank_and_come_in_windows_over_torchs_collectives(
    transport,
):
    for launched, windows in run_ranks(3, collected, transport):
        assert windows > 3
        assert launched == (windows if transport == "collectives" else len(SHAPES))
