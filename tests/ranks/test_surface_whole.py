"""Optimizers that need whole matrices get them, and give their updates back to the shards."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwright import fully_shard, gathered, scattered
from shardwright.errors import InputError
from tests.ranks.models import Block, Run, build, shard_decoder, train_beside
from tests.ranks.pool import on_ranks


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix by Newton-Schulz steps (Jordan et al., 2024).

    Momentum is kept sharded; only one matrix at a time is whole.
    """

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.mul_(group["momentum"]).add_(param.grad)
                update = mean
                if param.ndim == 2:
                    [whole] = gathered([mean])
                    update = scattered(param, orthogonal(whole))
                param.add_(update, alpha=-group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix, nearly: five steps of a quintic Newton-Schulz iteration."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.slow
@on_ranks(1, 2, 3, 4)
def test_an_optimizer_that_needs_whole_matrices_equals_one_process(rank, world, dim):
    placement = None if dim == 0 else lambda p: Shard(1) if p.ndim == 2 else None
    model = shard_decoder(build(), fully_shard, shard_placement_fn=placement)
    options = {"lr": 0.02, "momentum": 0.9}
    runs = [Run.of(m, Muon, **options) for m in (model, build())]
    train_beside(*runs, rank, world, tolerance=2e-5)


@pytest.mark.slow
@on_ranks(4)
def test_whole_parameters_go_back_to_the_same_shards_beside_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(3)
    block = Block(16)
    before = [p.detach().clone() for p in block.parameters()]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    fully_shard(parallelize_module(block, mesh["tensor"], plan), mesh=mesh["data"])
    params = list(block.parameters())
    for param, whole, expected in zip(params, gathered(params), before, strict=True):
        assert torch.equal(whole, expected)
        again = scattered(param, whole)
        assert again.placements == param.placements
        assert torch.equal(again.to_local(), param.to_local())
    with pytest.raises(InputError, match=r"shape \[3\] for one of shape \[16\]"):
        scattered(block.norm.weight, torch.ones(3))
