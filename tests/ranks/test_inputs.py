"""Bad input gives one clear error with the remedy, and leaves nothing half done."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwright import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    communication_s,
    full_state_dict,
    fully_shard,
    set_transport,
    stats,
)
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError, ShardwrightError, StageError
from tests.ranks.models import Run, batches, build, loss_of, shard_decoder
from tests.ranks.pool import on_ranks, run_ranks


@on_ranks(2)
def test_each_bad_argument_is_refused_with_the_remedy(world):
    sharded = fully_shard(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (world,))
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    cases = [
        (lambda: fully_shard(sharded), "has already been applied to the following module"),
        (lambda: fully_shard([]), "empty list"),
        (lambda: fully_shard("model"), "nn.Module or a list of them, got str"),
        (lambda: fully_shard([nested, nested[0]]), "inside another"),
        (lambda: fully_shard(nn.Linear(2, 2), mesh="all"), "DeviceMesh or None, got str"),
        (
            lambda: fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world, 1, 1))),
            "expects a 1D or 2D DeviceMesh",
        ),
        (lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3), "factor of 2, not 3"),
        (lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward="no"), "should be a bool or an int"),
        (lambda: fully_shard(nn.Linear(2, 2), offload_policy="cpu"), "OffloadPolicy, got str"),
        (lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: 1), "Invalid shard_placement_fn"),
        (
            lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(2)),
            "Shard dim 2 is invalid",
        ),
        (
            lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp")),
            "mesh_dim_names",
        ),
        (lambda: DataParallelMeshDims(), "shard or replicate must be set"),
        (lambda: fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16), "MixedPrecisionPolicy"),
        (lambda: MixedPrecisionPolicy(param_dtype=torch.int8), "floating-point"),
        (lambda: stats(nn.Linear(2, 2)), "not sharded; call shardwright.fully_shard"),
        (lambda: full_state_dict(nn.Linear(2, 2)), "no sharded module"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()
    for call in (cases[0][0], lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(1))):
        with pytest.raises(AssertionError):  # what torch raises there
            call()
    assert not isinstance(nested[0][0].weight, DTensor)


@on_ranks(2)
def test_a_mesh_without_this_rank_is_refused(rank):
    if rank == 1:
        mesh = dist.device_mesh.DeviceMesh("cpu", [0])
        model = nn.Linear(2, 2)
        with pytest.raises(InputError, match=r"rank 1 is not in the mesh \[0\]"):
            fully_shard(model, mesh=mesh)
        assert not isinstance(model.weight, DTensor)
    else:
        dist.device_mesh.DeviceMesh("cpu", [0])


@on_ranks(2)
def test_an_optimizer_built_before_sharding_is_refused_at_its_first_step(rank, world):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_decoder(model, fully_shard)
    loss_of(model, batches(0, world)[rank]).backward()
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(
        StageError, match=r"SGD holds \d+ parameters that fully_shard has replaced.*Build the opt"
    ):
        optimizer.step()
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    Run.of(model).step()


@on_ranks(2)
def test_a_forward_on_meta_is_refused_and_works_after_init():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(StageError, match=r"still on meta device: \['weight'.*to_empty"):
        model(torch.ones(1, 4))
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 4.0))


@on_ranks(2)
def test_a_parameter_replaced_by_a_plain_one_is_named():
    model = fully_shard(nn.Linear(4, 4))
    model._parameters["weight"] = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(
        StageError, match=r"'weight' was replaced by Parameter of shape \[4, 4\].*stay a DTensor"
    ):
        model(torch.ones(1, 4))


@on_ranks(2)
def test_measuring_communication_inside_a_forward_is_refused():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            communication_s(self)
            return self.linear(x)

    with pytest.raises(StageError, match="between steps"):
        fully_shard(Asks())(torch.ones(1, 4))


def one_rank_raises(rank, world):
    model = shard_decoder(build(), fully_shard)
    if rank == 1:
        model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    loss_of(model, batches(0, world)[rank]).backward()


def test_a_rank_that_raises_ends_all_ranks_with_its_traceback_first():
    start = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(2, one_rank_raises, timeout_s=5.0)
    assert time.monotonic() - start < 20
    assert "ZeroDivisionError" in str(error.value).partition("rank 0 of 2")[0]


@on_ranks(2)
def test_measuring_communication_launches_the_steps_collectives_and_changes_nothing(rank, world):
    model = shard_decoder(build(), fully_shard)
    before = [p.to_local().clone() for p in model.parameters()]
    assert communication_s(model) > 0
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    log = unit_of(model).group.gatherer.comm.log
    for step in range(3):
        before_it = log.launched
        loss_of(model, batches(step, world)[rank]).backward()
        of_step = [launch.key for launch in log.ring if launch.number > before_it]
        of_step = [key for key in of_step if key.startswith(("all-gather", "reduce"))]
    last = log.launched
    grads = [p.grad.to_local().clone() for p in model.parameters()]
    assert communication_s(model) > 0
    assert [launch.key for launch in log.ring if launch.number > last] == 3 * of_step
    assert any("more" in key for key in of_step)  # of small groups together
    assert all(torch.equal(p.grad.to_local(), old) for p, old in zip(model.parameters(), grads, strict=True))


@on_ranks(2)
def test_measuring_communication_over_a_network_sends_all_bytes_of_a_step():
    set_transport("sockets")
    model = fully_shard(nn.Linear(512, 512, bias=False))
    sent = [stats(model).sent_nbytes]
    for what in (lambda: model(torch.ones(1, 512)).sum().backward(), lambda: communication_s(model)):
        what()
        sent.append(stats(model).sent_nbytes)
    assert sent[2] - sent[1] == 3 * (sent[1] - sent[0]) == 3 * 512 * 512 * 4


def test_without_a_launcher_a_world_of_one_is_made():
    model = fully_shard(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    assert stats(model).sent_nbytes == 0
    dist.destroy_process_group()


def test_every_error_is_of_one_tree():
    assert issubclass(InputError, (ShardwrightError, ValueError))
    assert issubclass(StageError, (ShardwrightError, RuntimeError))
