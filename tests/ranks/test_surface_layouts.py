"""Where parameters may lie: any dim, any memory format, several meshes, copies, neighbours, the host."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwright import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    SchedulePolicy,
    ShardPlacementResult,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    set_transport,
    stats,
)
from shardwright.engine.unit import unit_of
from tests.ranks.models import (
    Run,
    assert_same,
    batches,
    both_step,
    build,
    equal_steps,
    full,
    loss_of,
    shard_decoder,
    sharded,
    train_beside,
    twins,
)
from tests.ranks.pool import on_ranks

WORLDS = [1, 2, 3, 4]


class Looks(nn.Module):
    """Code that counts on contiguous weights, as modules written for torch's fully_shard may."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Parameter(torch.randn(6, 5, 8) * 0.3)
        self.plain = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.cut.is_contiguous()
        assert self.cut.stride() == (40, 8, 1)
        return self.plain(x) @ self.cut.view(-1, 8)[:8]


@pytest.mark.parametrize(("world", "size"), [(1, None), (2, None), (2, True), (4, 2)])
@on_ranks()
def test_a_weight_that_is_cut_on_another_dim_is_contiguous_while_unsharded(size):
    torch.manual_seed(0)
    reference = Looks()
    for dim in (1, 2, -1):
        torch.manual_seed(0)
        model = fully_shard(
            Looks(),
            shard_placement_fn=lambda p, dim=dim: Shard(dim) if p.ndim == 3 else None,
            reshard_after_forward=size,
        )
        for x in torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)):
            for each in (model, reference):
                each.zero_grad()
                each(x).sum().backward()
            assert torch.allclose(full(model.cut.grad), reference.cut.grad)
            assert stats(model).unsharded_nbytes == 0
        with model.unsharded(), torch.no_grad():
            model.cut.copy_(torch.arange(240.0).view(6, 5, 8))
        assert torch.equal(full(model.cut), torch.arange(240.0).view(6, 5, 8))
        with model.unsharded():
            assert torch.equal(model.cut, torch.arange(240.0).view(6, 5, 8))


@on_ranks(4)
def test_hybrid_sharding_sends_the_optimal_bytes_and_each_reduction_can_be_left_out():
    set_transport("sockets")  # shared memory sends nothing
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh, reshard_after_forward=True)
    nbytes, sent = 64 * 64 * 4, []
    for sync, reduce_over_copies in ((True, True), (True, False), (False, False), (True, True)):
        before = stats(model).sent_nbytes
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(reduce_over_copies)
        model(torch.ones(2, 64)).sum().backward()
        sent.append(stats(model).sent_nbytes - before)
    gather, scatter, spread = nbytes // 2, nbytes // 2, nbytes // 2
    # Two all-gathers each time; the all-reduce of a half moves 2 x (1/2) of it.
    reduced = (scatter + spread, scatter, 0, scatter + spread)
    assert sent == [2 * gather + each for each in reduced]


@on_ranks(4)
def test_the_gather_half_of_an_all_reduce_goes_out_with_the_next_groups_reduction():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    sharded(model, mesh=mesh).set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    for _ in range(3):
        before = unit_of(model[0]).group.axis.replicate.log.launched
        model(torch.ones(2, 8)).sum().backward()
    log = unit_of(model[0]).group.axis.replicate.log
    keys = [launch.key for launch in log.ring if launch.number > before]
    halves = [(key.split()[0], int(key.rpartition(" ")[2])) for key in keys if "all-reduce" in key]
    # Each gather half goes out before the next reduce half, not after the backward.
    assert halves == [
        *[("reduce", 4), ("spread", 4), ("reduce", 3), ("spread", 3), ("reduce", 2), ("spread", 2)],
        *[("reduce", 1), ("spread", 1), ("reduce", 0), ("spread", 0)],
    ]


@on_ranks(4)
def test_resharding_to_a_smaller_world_gathers_among_neighbours_in_backward():
    set_transport("sockets")  # shared memory sends nothing
    model = fully_shard(nn.Linear(64, 64, bias=False), reshard_after_forward=2)
    group = unit_of(model).group
    nbytes = 64 * 64 * 4
    out = model(torch.ones(2, 64))
    assert group.buffer.allocated_nbytes == 0  # freed, but for a half of it
    assert stats(model).unsharded_nbytes == nbytes // 2
    sent = [c.sent_nbytes for c in (group.axis.comm, group.gatherer.smaller_world.comm)]
    assert sent == [3 * nbytes // 4, 0]
    out.sum().backward()
    assert stats(model).unsharded_nbytes == 0
    # The backward's gather moves a half to one neighbour; only the reduce-scatter goes to all.
    assert group.gatherer.smaller_world.comm.sent_nbytes == nbytes // 2
    assert group.axis.comm.sent_nbytes == 2 * 3 * nbytes // 4


@on_ranks(4)
def test_an_edit_between_forward_and_backward_is_an_error_though_neighbours_kept_the_old_weights():
    model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=2)
    x = torch.ones(1, 4, requires_grad=True)
    out = model(x)
    with torch.no_grad():
        model.weight.to_local().fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 4), 4.0))


@pytest.mark.parametrize("pin", [True, False])
@on_ranks(2)
def test_offload_keeps_shards_and_gradients_on_the_host(rank, world, pin):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if pin else MixedPrecisionPolicy()
    model = shard_decoder(
        build(), fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=pin), mp_policy=policy
    )
    if not pin:
        train_beside(Run.of(model), Run.of(build()), rank, world)
    loss_of(model, batches(0, world)[rank]).backward()
    for param in model.parameters():
        assert param.to_local().device.type == param.grad.to_local().device.type == "cpu"
        assert param.grad.dtype == torch.float32


class Experts(nn.Module):
    """Weights that are used by all ranks, beside experts that a mesh of their own shares."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.expert = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.dense(x)))


@on_ranks(4)
def test_one_module_on_several_meshes_trains_exactly_and_clips_by_the_norm_of_one_process(rank, world):
    whole, small = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    model, reference = twins(lambda: nn.Sequential(Experts(), Experts()))
    for block in model:
        experts = set(block.expert.parameters())

        def place(param, experts=experts):
            return ShardPlacementResult(None, small) if param in experts else None

        fully_shard(block, mesh=whole, shard_placement_fn=place)
    fully_shard(model, mesh=whole)
    assert model[0].expert.weight.device_mesh == small
    assert stats(model).num_groups == 4
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        x = torch.randn(world, 5, 6, generator=torch.Generator().manual_seed(step))
        model(x[rank]).square().mean().backward()
        torch.stack([reference(rows).square().mean() for rows in x]).mean().backward()
        kind = (2.0, 1.0, float("inf"))[step]
        norm = clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type=kind)
        assert abs(norm - expected) <= 1e-6 * max(1, expected)
        both_step(ours, theirs)


def feed():
    return nn.Sequential(OrderedDict(up=nn.Linear(6, 8), relu=nn.ReLU(), down=nn.Linear(8, 6)))


def build_feed(seed):
    torch.manual_seed(seed)
    return nn.Sequential(feed(), feed())


@on_ranks(4)
def test_sharding_composes_with_tensor_parallelism(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = build_feed(0), build_feed(0)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert model[0].up.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    equal_steps(model, reference, rank // 2, 2, shape=(5, 6))
    state = full_state_dict(model)
    assert not rank or not state
    model.load_state_dict({name: p.detach() for name, p in build_feed(3).named_parameters()})
    assert_same(model, build_feed(3), 0.0)


@pytest.mark.parametrize(
    "dims",
    [
        DataParallelMeshDims(shard=("a", "b")),
        DataParallelMeshDims(shard="b", replicate="a"),
        DataParallelMeshDims(replicate=("a", "b")),
    ],
)
@on_ranks(4)
def test_named_axes_of_a_larger_mesh_are_data_parallel(rank, world, dims):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model, reference = twins(lambda: nn.Linear(6, 5))
    for name, param in list(model.named_parameters()):
        spread = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
        setattr(model, name, nn.Parameter(spread))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        x = torch.randn(world, 3, 6, generator=torch.Generator().manual_seed(step))
        local = DTensor.from_local(x[rank], mesh, [Replicate(), Replicate()], run_check=False)
        model(local).to_local().square().mean().backward()
        torch.stack([reference(rows).square().mean() for rows in x]).mean().backward()
        both_step(ours, theirs)
