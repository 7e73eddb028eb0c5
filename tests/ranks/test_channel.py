"""Every rank of a channel learns the same: combined words, and what differs, each kind once."""

import os
import signal
from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardwright import set_transport
from shardwright.errors import CommError, Diverged, RankFailed
from shardwright.transport.channel import NOTHING, AxisChannel, JointChannel, broadcast
from shardwright.transport.cpu import shm
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.mesh import resolve
from shardwright.transport.process_group import ProcessGroupComm
from tests.ranks.models import fresh_mesh
from tests.ranks.pool import on_ranks, run_ranks, run_ranks_but


def combined(rank, world):
    kinds = {"auto": ShmComm, "sockets": SocketComm, "collectives": ProcessGroupComm}
    for transport, kind in kinds.items():
        set_transport(transport)
        axis = resolve(fresh_mesh(world))
        assert isinstance(axis.comm, kind)
        channel = AxisChannel(axis.comm)
        assert channel.exchange([1 << rank, ~0, 0]) == [2**world - 1, -1, 0]
        assert channel.exchange([rank + 3, -(2**62) + rank, NOTHING], "min") == [3, -(2**62), NOTHING]
        assert axis.comm.sent_nbytes == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_words_are_combined_alike_on_every_rank_and_transport(world):
    run_ranks(world, combined)


@pytest.mark.parametrize(("world", "hops"), [(4, 1), (5, 3), (8, 3)])
@on_ranks()
def test_words_of_many_ranks_travel_as_many_hops_as_doubling_takes(rank, world, hops):
    combined(rank, world)
    set_transport("sockets")
    axis = resolve(fresh_mesh(world))
    channel = AxisChannel(axis.comm)
    before, said, say = axis.comm.log.launched, [], Connection.say
    Connection.say = lambda to, message: said.append(to.peer) or say(to, message)
    assert channel.exchange([1 << rank] * 40) == [2**world - 1] * 40
    to = [[1, 2, 3]] if hops == 1 else [[1], [2], [4]]
    assert said == [(rank + way) % world for hop in to for way in hop] and len(to) == hops
    assert axis.comm.log.launched - before == 1


@on_ranks(4)
def test_the_ranks_of_two_axes_learn_what_every_one_of_them_said(rank):
    axis = resolve(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    channel = JointChannel([AxisChannel(comm) for comm in (axis.comm, axis.replicate)])
    assert channel.exchange([1 << rank]) == [0b1111]
    assert channel.exchange([5 - rank], "min") == [2]


@on_ranks(4)
def test_each_kind_of_answer_is_told_once(rank):
    axis = resolve(None)
    channel = AxisChannel(axis.comm)
    assert broadcast(channel, 7, b"the same words") == {7: b"the same words"}
    assert broadcast(channel, 0, None) == {}
    texts = [b"", b"\0in another call\0", b"nobody hears this", None]
    kinds = [10, 20, 21, 0]
    got = broadcast(channel, kinds[rank], texts[rank], lambda key: key // 10)
    assert got == {10: b"", 20: b"\0in another call\0"}


def on_hosts_of(size, rank, world):
    """As if so many ranks in turn were on each host: a transport of all ranks, and to whom each hop went."""
    this_host = shm.this_host
    shm.this_host = lambda fd: replace(this_host(fd), network=rank // size)
    comm, said, say = resolve(fresh_mesh(world)).comm, [], Connection.say
    assert isinstance(comm, SocketComm)
    Connection.say = lambda to, message: said.append(to.peer) or say(to, message)
    return comm, said


@pytest.mark.parametrize(
    ("world", "size", "hops"), [(4, 2, [2]), (5, 2, [2, 4]), (8, 1, None), (8, 2, [2, 4, 6])]
)
@on_ranks()
def test_words_go_between_hosts_by_one_rank_of_each(rank, world, size, hops):
    comm, said = on_hosts_of(size, rank, world)
    before, channel = comm.log.launched, AxisChannel(comm)
    assert channel.exchange([1 << rank, 0]) == [2**world - 1, 0]
    assert channel.exchange([rank + 3], "min") == [3]
    if hops is not None:
        assert said == ([] if rank % size else [(rank + way) % (world + world % size) for way in hops] * 2)
    assert comm.exchange([rank], "rows") == [[each] for each in range(world)]
    assert comm.log.launched - before == 3


@on_ranks(4)
def test_a_rank_that_exchanges_other_words_than_its_host_is_told_to_all_hosts(rank):
    comm, _ = on_hosts_of(2, rank, 4)
    channel = AxisChannel(comm)
    assert channel.exchange([rank]) == [3]
    with pytest.raises((CommError, RankFailed, Diverged), match="2 integers") as told:
        channel.exchange([0] * (2 if rank == 3 else 1))
        channel.exchange([0])
    assert "rank 3" in str(told.value)


def ends(rank, world):
    comm, _ = on_hosts_of(2, rank, world)
    channel = AxisChannel(comm)
    channel.exchange([rank])
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((CommError, RankFailed), match="rank 3"):
        channel.exchange([rank])


def test_a_rank_that_ended_is_named_on_its_host_and_on_others():
    run_ranks_but(3, 4, ends)
