"""Ranks start, and meet again and again, and none waits for ever (``tests/pure/test_welcome.py``: why)."""

import os
from collections import Counter
from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard, set_transport
from shardwright.transport.attempt import keys_of
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.mesh import resolve
from shardwright.transport.process_group import ProcessGroupComm
from tests.ranks.pool import as_torchrun, free_port, run_ranks

COMMS = {"auto": ShmComm, "sockets": SocketComm, "collectives": ProcessGroupComm}
FEW, MANY = 3, 1000


def meets(rank, world, times, port):
    """With all others, with some, or without them: by whose words each meeting is known."""
    as_torchrun(rank, world, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    found = []
    for number in range(times):
        for ranks in (range(world), (0, 2), range(1, world)):
            if rank in ranks:
                keys = keys_of(ranks, timedelta(seconds=10), "to meet")
                found.append(keys.compare_set("known", "", f"{ranks} {number} {rank}").decode())
    return found


def test_the_same_ranks_meet_many_times_without_a_pause():
    times = 60
    known = Counter(chain.from_iterable(run_ranks(4, meets, times, free_port())))
    assert len(known) == 3 * times
    assert sum(known.values()) == (4 + 2 + 3) * times
    assert {(each.rsplit(" ", 2)[0], count) for each, count in known.items()} == {
        ("range(0, 4)", 4),
        ("(0, 2)", 2),
        ("range(1, 4)", 3),
    }


def starts(rank, world, transport, port):
    """As torchrun starts a rank whose script leaves init_process_group out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    set_transport(transport)
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Linear(8, 8)))
    loss = model(torch.full((1, 8), 1.0)).sum()
    loss.backward()
    assert type(resolve(None).comm) is COMMS[transport]
    assert dist.get_world_size() == world
    return loss.item()


@pytest.mark.each_case
@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("transport", COMMS)
def test_a_job_starts_every_time(transport, times):
    for _ in range(times):
        assert len(set(run_ranks(4, starts, transport, free_port(), grouped=False, limit_s=60.0))) == 1
