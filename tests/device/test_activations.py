"""Inputs of recomputed blocks on the host: they leave the simulated device, and nothing else changes."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from shardwright import fully_shard
from shardwright.ops.activations import _OnHost, inputs_on_host
from shardwright.transport.streams import Streams
from tests.device import cases
from tests.device.ranks import Job
from tests.ranks.pool import run_ranks

LAYERS, WIDTH, ROWS, STEPS = 5, 12, 16, 3


class Recomputed(torch.nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks = torch.nn.ModuleList(cases.Layer(WIDTH, 9) for _ in range(LAYERS))
        self.head, self.recompute = torch.nn.Linear(WIDTH, 3), recompute

    def forward(self, x):
        for block in self.blocks:
            x = self.recompute(block, x, use_reentrant=False)
        return self.head(x)


class ActivationsJob(Job):
    """Trains three steps of layers that are recomputed. Returns shards, and of the last step
    what each tensor that was moved lay on after the forward, and how many the backward took."""

    def trains(self, kind, number, rank, place):
        device = self.world.devices[rank]
        with _disable_current_modes():
            torch.manual_seed(number)
            recompute = inputs_on_host(checkpoint) if self.on_host else checkpoint  # one for each rank
            model = Recomputed(recompute).double()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        place.sharded(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(STEPS):
            self.moved[rank] = []
            x = torch.full((ROWS, WIDTH), 0.1 * (step + 1 + rank), dtype=torch.float64)
            loss = model(x).square().mean()
            on_host = [device.memory.is_on_host(each) for each in self.moved[rank]]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return place.read([param.to_local().detach() for param in model.parameters()]), on_host

    def run(self, number):
        self.moved = {}
        moving = _OnHost.__init__

        def move(kept, tensor, *rest):
            moving(kept, tensor, *rest)
            self.moved[self.world.device.rank].append(kept._there)

        streams = patch.object(Streams, "of", lambda _: self._streams[self.world.device])
        with streams, patch.object(_OnHost, "__init__", move):
            return super().run(number)


def run(rank, world, seed, on_host):
    if dist.is_initialized():
        dist.destroy_process_group()
    job = ActivationsJob("plain", seed)
    job.function = job.trains
    job.on_host = on_host
    return job.run(0)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 30))]
)
def test_inputs_of_recomputed_blocks_lie_on_the_host_and_training_has_the_same_bits(seed):
    [plain], [moved] = (run_ranks(1, run, seed, on_host) for on_host in (False, True))
    for (expected, _), (found, on_host) in zip(plain, moved, strict=True):
        assert on_host == [True] * (LAYERS - 1)  # the first one's input needs no gradient
        assert all(map(torch.equal, found, expected))
