"""Ranks that only agree, as the hosts of an accelerator's mesh do: connections to few, words from all."""

import functools
import operator
import os
import re
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from shardwright.errors import CommError
from shardwright.transport.attempt import Meeting, join_job
from shardwright.transport.channel import AxisChannel, broadcast, compare
from shardwright.transport.cpu.peers import open_connections
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.process import LaunchLog
from tests.ranks.pool import free_port, run_ranks

LIMIT_S = 60.0
LOST = 5
"""The rank that ends."""


def opened(rank, world, store, name):
    log = LaunchLog(range(world), name)
    peers = open_connections(Meeting(PrefixStore(name, store), log, rank, timedelta(seconds=LIMIT_S)))
    assert not isinstance(peers, str), peers
    return SocketComm(peers)


def sockets_here():
    """Descriptors of this process that are sockets."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # of the listing itself
            continue
    return sum(link.startswith("socket:") for link in links)


def agree(rank, world, port, rounds):
    """``rounds`` agreements, every rank's words on all, a divergence, ranks in different collectives, and at
    last the end of a rank. What each rank has seen of it."""
    store = TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=LIMIT_S), wait_for_workers=False)
    before = sockets_here()
    comm = opened(rank, world, store, "agree")
    channel = AxisChannel(comm)
    mine = [1 << rank % 62, rank, ~rank, 0]
    assert channel.exchange(mine) == [
        2 ** min(world, 62) - 1,
        functools.reduce(operator.or_, range(world)),
        -1,
        0,
    ]
    began = time.monotonic()
    for number in range(rounds):
        assert channel.exchange([number, ~number, 1 << rank % 62]) == [
            number,
            ~number,
            2 ** min(world, 62) - 1,
        ]
    each_s = (time.monotonic() - began) / max(1, rounds)
    assert comm.exchange([3 * rank, -rank], "rows") == [[3 * r, -r] for r in range(world)]
    assert compare(comm, "the same", "models") == []
    sockets = comm.connections.num_open, sockets_here() - before
    assert comm.sent_nbytes == 0

    # a rank of another mind: all learn both sides, in as many rounds as there are sides
    said = 7 if rank != world - 2 else 8
    equal = channel.exchange([said, ~said])
    assert equal[0] & equal[1]
    told = broadcast(channel, said << 31 | rank, f"rank {rank} is in {said}".encode(), lambda key: key >> 31)
    assert sorted(told.values()) == [b"rank 0 is in 7", f"rank {world - 2} is in 8".encode()]

    other = opened(rank, world, store, "other")
    began = time.monotonic()
    with pytest.raises(CommError) as elsewhere:
        for _ in range(2):
            AxisChannel(other).exchange([0] * (2 if rank == LOST else 3))
    differing_s = time.monotonic() - began

    comm.exchange([0], "all are here")
    began = time.monotonic()
    if rank == LOST:
        comm.connections.loop.join()  # closes them, as the kernel does for a process that ends
    with pytest.raises(CommError) as lost:
        channel.exchange([1])
    lost_s = time.monotonic() - began
    return sockets, each_s, (str(elsewhere.value), differing_s), (str(lost.value), lost_s)


def check(world, rounds):
    """That, whatever the number of ranks. Returns the seconds of an agreement."""
    hops = (world - 1).bit_length()
    found = run_ranks(world, agree, free_port(), rounds, grouped=False, limit_s=LIMIT_S)
    for rank, (sockets, _, (elsewhere, differing_s), (lost, lost_s)) in enumerate(found):
        assert sockets[0] <= 2 * hops
        of_store = world if rank == 0 else 0  # which is in its process
        assert sockets[1] <= sockets[0] + 3 + of_store  # what it is called at, and what wakes its event loop
        assert "ranks are in different collectives" in elsewhere
        assert f"rank {LOST} is in 'agreement on 2 integers" in elsewhere
        assert differing_s < 10
        if rank != LOST:
            assert re.match(rf"rank {LOST} has ended|the connection to rank {LOST} broke", lost)
            assert f"(rank {rank} was in 'agreement on 1 integers" in lost
            assert lost_s < 10
    return max(each_s for _, each_s, _, _ in found)


@pytest.mark.parametrize("world", [7, 8, 12])
def test_ranks_that_agree_have_connections_to_few_and_all_learn_who_is_elsewhere_or_has_ended(world):
    check(world, rounds=3)


def joined(rank, world, port, mode):
    """The sockets that a rank has once the package has joined its job."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "SHARDWRIGHT_PROCESS": mode}
    before = sockets_here()
    join_job("gloo", timedelta(seconds=LIMIT_S))
    return sockets_here() - before


def test_a_job_that_the_package_joins_has_no_connection_of_gloo_to_a_rank_before_it_is_used():
    # To the store, torch's and the watch's; where torch is called at, and where the watch is.
    world, own = 8, 4
    found = run_ranks(world, joined, free_port(), "on", grouped=False, limit_s=LIMIT_S)
    assert max(found[1:]) <= own and found[0] <= own + 2 * world + 1, found  # rank 0's process has the store
    left_alone = run_ranks(world, joined, free_port(), "off", grouped=False, limit_s=LIMIT_S)
    assert min(left_alone) >= 2 + world - 1, left_alone  # no watch there


@pytest.mark.slow
def test_so_it_is_with_64_ranks():
    print(f"an agreement of 64 ranks: {1000 * check(64, rounds=50):.1f} ms")
