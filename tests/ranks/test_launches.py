"""Each rank writes down what it launches and what it waits for; all ranks of a transport write the same."""

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard, set_transport
from shardwright.engine.unit import unit_of
from shardwright.transport.process import RING, LaunchLog, is_closed, process_state
from shardwright.transport.streams import Streams
from tests.pure.test_streams import Device, FakeStream, flat
from tests.ranks.models import batches, build, fresh_mesh, loss_of, shard_decoder
from tests.ranks.pool import on_ranks, run_ranks

TRANSPORTS = ("auto", "sockets", "collectives")


def trained(rank, world, transport):
    set_transport(transport)
    model = shard_decoder(build(), fully_shard)
    comm = unit_of(model).group.axis.comm
    for step in range(16):
        loss_of(model, batches(step, world)[rank]).backward()
        model.zero_grad()
    assert process_state.phase == ""
    assert not process_state.waits
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
            seen.extend(process_state.waits.values())
            time.sleep(0.01)

    if rank == 1:
        time.sleep(0.3)
        model(torch.ones(1, 4))
        return None
    watch = threading.Thread(target=look)
    watch.start()
    model(torch.ones(1, 4))
    watch.join()
    assert not process_state.waits
    return seen[0].launch, seen[0].log.ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_waits_says_for_what(transport):
    launch, ranks = run_ranks(2, late, transport)[0]
    assert launch.key == "compare models"
    assert launch.phase == "forward"
    assert ranks == (0, 1)


class Diagnosis(RuntimeError):
    pass


def convicted(rank, world):
    model = fully_shard(nn.Linear(4, 4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # ended by the pool
    threading.Timer(0.2, lambda: setattr(process_state, "diagnosis", Diagnosis("it is lost"))).start()
    for _ in range(2):  # in the wait, then at the next launch
        with pytest.raises(Diagnosis, match="it is lost"):
            model(torch.ones(1, 4))
    assert process_state.delivered


def test_a_verdict_ends_a_wait_in_shared_memory_and_every_later_launch():
    with pytest.raises(AssertionError) as error:
        run_ranks(2, convicted, limit_s=4.0)
    assert "rank 1 of 2" in str(error.value)
    assert "rank 0 of 2" not in str(error.value)


def test_a_log_of_other_ranks_or_made_later_has_another_name():
    names = [LaunchLog(ranks, "test").name for ranks in ((0, 1), (0, 1), (0, 2))]
    assert len(set(names)) == 3


@on_ranks(2)
def test_looking_whether_a_peer_is_gone_keeps_one_message_and_none_of_a_group_that_is_gone(rank, world):
    group = dist.new_group(range(world), timeout=timedelta(seconds=20))
    known = len(process_state.probes)
    if rank == 0:
        assert not any(is_closed(group, 1) for _ in range(300))
        assert len(process_state.probes) == known + 1
        assert list(process_state.probes[group]) == [1]
    words = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(words, torch.full((1,), float(rank)), group)  # the group is as good as before
    assert torch.cat(words).tolist() == [0.0, 1.0]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(process_state.probes) == known


@on_ranks(1)
def test_memory_of_a_gather_that_failed_does_not_count_as_filled(world):
    set_transport("collectives")
    model = fully_shard(nn.Linear(4, 4), mesh=fresh_mesh(world))
    comm, device, places = unit_of(model).group.gatherer.comm, Device(), []
    comm.streams = Streams(lambda: FakeStream(device), lambda: device.current[-1])

    def refuse(segments, key):
        places.extend(flat(segment.flat.data_ptr()) for segment in segments)
        raise RuntimeError("not now")

    comm.all_gather = refuse
    with pytest.raises(RuntimeError, match="not now"):
        model.unshard()
    assert places
    for place in places:  # handed out again, and filled by compute this time
        device.run("fill", writes=[place.data_ptr()])
    with comm.streams.gathering(places):
        for place in places:
            device.run("all-gather", writes=[place.data_ptr()])
    assert device.races == []
