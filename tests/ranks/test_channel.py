"""Every rank of a channel learns the same: combined words, and what differs, each kind once."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardwright import set_transport
from shardwright.transport.channel import NOTHING, AxisChannel, JointChannel, broadcast
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.mesh import resolve
from shardwright.transport.process_group import ProcessGroupComm
from tests.ranks.models import fresh_mesh
from tests.ranks.pool import on_ranks, run_ranks


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
