"""Where the host waits for the simulated device with offloaded shards: at the documented points alone."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.unit import units_in
from shardwright.transport.streams import Streams
from tests.device import cases
from tests.device.cases import KINDS
from tests.device.ranks import Job
from tests.device.test_runtime import MODELS
from tests.ranks.pool import run_ranks

OFFLOADED = [kind for kind in KINDS if kind.startswith("offloaded")]


class Counted(Streams):
    """num_offloads: groups of gradients that went to the host."""

    num_offloads = 0

    @contextmanager
    def offloading(self, sums):
        Counted.num_offloads += 1
        with super().offloading(sums):
            yield


class CountedJob(Job):
    num_trained = 0

    def _offload(self, model):
        super()._offload(model)
        groups = [group for unit in units_in(model) for group in unit.groups]
        self.num_trained = sum(any(param.trainable for param in group.params) for group in groups)


def counted(rank, world, kind, seed):
    """Of one run: what the hosts waited for, groups copied to the host, groups, backwards and steps."""
    if dist.is_initialized():
        dist.destroy_process_group()
    Counted.num_offloads = 0
    job, backward, step = CountedJob(kind, seed, Counted), torch.Tensor.backward, torch.optim.SGD.step
    with (
        patch.object(cases, "HAPPENS", ("step", "evaluation", "accumulation")),
        patch.object(cases, "BETWEEN", ("nothing",)),
        patch.object(torch.Tensor, "backward", autospec=True, side_effect=backward) as backwards,
        patch.object(torch.optim.SGD, "step", autospec=True, side_effect=step) as steps,
    ):
        job.run(seed % MODELS)
    waits = [each for device in job.world.devices for each in device.waits if each != "put on host"]
    return waits, Counted.num_offloads, job.num_trained, backwards.call_count, steps.call_count


@pytest.mark.parametrize("kind", OFFLOADED)
def test_the_host_waits_once_a_backward_and_once_before_a_step_and_one_event_brings_a_group(kind):
    for seed in range(3):
        [(waits, num_offloads, num_trained, backwards, steps)] = run_ranks(1, counted, kind, seed)
        assert waits == ["event"] * (backwards + steps)
        assert num_offloads == num_trained * backwards
