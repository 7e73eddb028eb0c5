"""Two models, trained in two threads of each rank at once, do not disturb each other."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright import fully_shard, set_transport
from tests.ranks.models import Run, assert_same, batches, build, loss_of, shard_decoder
from tests.ranks.pool import on_ranks

STEPS = 4


@pytest.mark.parametrize("transport", ["auto", "sockets"])
@on_ranks(2)
def test_two_models_trained_in_two_threads_equal_one_process_each(rank, world, transport):
    set_transport(transport)
    # Collectives of one group need one order on all ranks, which threads don't keep: so a mesh for each.
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    runs = [Run.of(shard_decoder(build(seed), fully_shard, mesh=mesh)) for seed, mesh in enumerate(meshes)]
    together = threading.Barrier(2, timeout=20)
    failures = []

    def train(seed: int) -> None:
        try:
            for step in range(STEPS):
                together.wait()
                loss_of(runs[seed].model, batches(10 * seed + step, world)[rank]).backward()
                runs[seed].step()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for seed, run in enumerate(runs):
        reference = Run.of(build(seed))
        for step in range(STEPS):
            rows = batches(10 * seed + step, world)
            torch.stack([loss_of(reference.model, each) for each in rows]).mean().backward()
            reference.step()
        assert_same(run.model, reference.model)
