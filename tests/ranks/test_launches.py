"""Each rank writes down what it launches and what it waits for; all ranks of a transport write the same."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from shardwright import fully_shard, set_transport
from shardwright.comm.launches import RING, LaunchLog, here
from shardwright.motion.unit import unit_of
from tests.ranks.models import batches, build, loss_of, shard_decoder
from tests.ranks.pool import run_ranks

TRANSPORTS = ("auto", "sockets", "collectives")


def trained(rank, world, transport):
    set_transport(transport)
    model = shard_decoder(build(), fully_shard)
    comm = unit_of(model).group.axis.comm
    for step in range(16):
        loss_of(model, batches(step, world)[rank]).backward()
        model.zero_grad()
    assert here.phase == ""
    assert not here.waits
    return comm.log.name, comm.log.launched, list(comm.log.ring)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_write_down_the_same_launches_and_keep_the_last(transport):
    first, second = run_ranks(2, trained, transport)
    assert first == second
    name, launched, ring = first
    assert "0,1" in name
    assert launched > RING
    assert [launch.number for launch in ring] == list(range(launched - RING + 1, launched + 1))
    assert {launch.phase for launch in ring} >= {"forward", "backward"}
    assert ring[-1].key.startswith("reduce-scatter")
    assert ring[-1].step == 16


def late(rank, world, transport):
    set_transport(transport)
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    seen = []

    def look():
        while not seen:
            seen.extend(here.waits.values())
            time.sleep(0.01)

    if rank == 1:
        time.sleep(0.3)
        model(torch.ones(1, 4))
        return None
    watch = threading.Thread(target=look)
    watch.start()
    model(torch.ones(1, 4))
    watch.join()
    assert not here.waits
    return seen[0].launch, seen[0].log.ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_waits_says_for_what(transport):
    launch, ranks = run_ranks(2, late, transport)[0]
    assert launch.key == "compare models"
    assert launch.phase == "forward"
    assert ranks == (0, 1)


class Verdict(RuntimeError):
    pass


def convicted(rank, world):
    model = fully_shard(nn.Linear(4, 4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # ended by the pool
    threading.Timer(0.2, lambda: setattr(here, "verdict", Verdict("it is lost"))).start()
    for _ in range(2):  # in the wait, then at the next launch
        with pytest.raises(Verdict, match="it is lost"):
            model(torch.ones(1, 4))
    assert here.delivered


def test_a_verdict_ends_a_wait_in_shared_memory_and_every_later_launch():
    with pytest.raises(AssertionError) as error:
        run_ranks(2, convicted, limit_s=4.0)
    assert "rank 1 of 2" in str(error.value)
    assert "rank 0 of 2" not in str(error.value)


def test_a_log_of_other_ranks_or_made_later_has_another_name():
    names = [LaunchLog(ranks, "test").name for ranks in ((0, 1), (0, 1), (0, 2))]
    assert len(set(names)) == 3
