"""Hybrid meshes without copies at rest: shards over all ranks, gathered between nodes once per forward."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardwright import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    explain,
    full_state_dict,
    fully_shard,
    set_transport,
    stats,
)
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError
from tests.ranks.models import NEEDS_ORDER, Run, batches, build, full, loss_of, shard_decoder, sharded
from tests.ranks.pool import on_ranks

pytestmark = NEEDS_ORDER

OPTIONS = {
    "plain": {},
    "half": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "on the last dim": {"shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.ndim else None},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "kept whole": {"reshard_after_forward": False},
}


def mesh_of(world):
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("nodes", "ranks"))


def trained(rank, world, options):
    """The weights after three steps, with evaluations in between, and the norm that gradients then have."""
    model = shard_decoder(build(tied=True), fully_shard, mesh=mesh_of(world), **options)
    run = Run.of(model)
    for step in range(3):
        tokens = batches(step, world)[rank]
        with torch.no_grad():
            loss_of(model, tokens)
        loss = loss_of(model, tokens)
        if step == 1:
            with torch.no_grad():
                loss_of(model, tokens)
        loss.backward()
        if step == 0:
            loss_of(model, tokens.flip(0)).backward()
        run.step()
    weights = full_state_dict(model)
    loss_of(model, batches(3, world)[rank]).backward()
    return weights, clip_grad_norm_(model.parameters(), 1e-2)


@pytest.mark.parametrize("kind", OPTIONS)
@on_ranks(4)
def test_weights_are_bit_for_bit_those_of_a_mesh_with_copies(rank, world, kind):
    whole, norm = trained(rank, world, OPTIONS[kind] | {"shard_over_all": True})
    copies, same_norm = trained(rank, world, OPTIONS[kind])
    assert whole.keys() == copies.keys()
    assert [name for name in whole if not torch.equal(whole[name], copies[name])] == []
    assert norm.isclose(same_norm)


def accumulated(rank, world, options):
    """The weights after steps of three microbatches, an evaluation and an edit between them."""
    model = shard_decoder(build(tied=True), fully_shard, **options)
    run = Run.of(model)
    for step in range(3):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            loss_of(model, batches(3 * step + micro, world)[rank]).backward()
            if micro == 0 and step == 1:
                with torch.no_grad():
                    loss_of(model, batches(0, world)[rank])
            if micro == 1 and step == 1:
                with torch.no_grad():
                    next(iter(model.parameters())).to_local().mul_(0.5)
        run.step()
    return full_state_dict(model)


@on_ranks(4)
def test_microbatches_that_do_not_reduce_are_gathered_from_the_shares_of_the_first_bit_for_bit(rank, world):
    mesh = {"mesh": mesh_of(world)}
    for options, plain in ((mesh | {"shard_over_all": True}, mesh), ({"reshard_after_forward": 2}, {})):
        ours, theirs = accumulated(rank, world, options), accumulated(rank, world, plain)
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@on_ranks(4)
def test_a_step_gathers_between_nodes_once_and_each_rank_holds_its_share_of_everything(world):
    set_transport("sockets")  # shared memory sends nothing
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    sharded(model, mesh=mesh_of(world), shard_over_all=True, reshard_after_forward=True)
    nbytes = 2 * 64 * 64 * 4
    assert sum(param.to_local().nbytes for param in model.parameters()) == nbytes // 4
    node, *between = (unit_of(model[0]).group.axis.hops[hop] for hop in (0, 1, 3))  # 3: for sums
    run = Run.of(model, torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        before = node.sent_nbytes, sum(each.sent_nbytes for each in between), stats(model).sent_nbytes
        model(torch.ones(2, 64)).sum().backward()
        run.step()
        state = [each for held in run.optimizer.state.values() for each in held.values() if each.ndim]
        assert sum(each.to_local().nbytes for each in state) == 2 * nbytes // 4
        inside = node.sent_nbytes - before[0]
        across = sum(each.sent_nbytes for each in between) - before[1]
        # Between nodes a quarter of the bytes for the forward's all-gather, and another for gradients.
        assert across == nbytes // 4 + nbytes // 4
        # Inside of them a half for each all-gather, forward and backward, and for gradients.
        assert inside == 3 * nbytes // 2
        assert stats(model).sent_nbytes - before[2] == inside + across
    for step in range(3):
        before = node.sent_nbytes, sum(each.sent_nbytes for each in between)
        for micro in range(3):  # each of its own inputs; shares of the node serve all of them
            model.set_requires_gradient_sync(micro == 2)
            model(torch.ones(2, 64)).sum().backward()
        run.step()
        assert sum(each.sent_nbytes for each in between) - before[1] == nbytes // 4 + nbytes // 4, step
        assert node.sent_nbytes - before[0] == 7 * nbytes // 2, step


@on_ranks(4)
def test_checkpoints_and_state_dicts_know_the_shards_and_what_is_kept_is_never_stale(rank, world, tmp_path):
    folder = str(tmp_path / "saved")
    model, reference = (
        shard_decoder(build(), fully_shard, mesh=mesh_of(world), **options)
        for options in ({"shard_over_all": True}, {})
    )
    tokens = batches(0, world)[rank]
    checkpoint.save(folder, model=model, step=1)
    for each in (model, reference):
        loss_of(each, tokens).backward()
        run = Run.of(each)
        run.step()
        loss_of(each, tokens)  # shards of the node are kept, and what they are of changes
        checkpoint.load(folder, model=each)
    assert loss_of(model, tokens).equal(loss_of(reference, tokens))
    for name, value in model.state_dict().items():
        assert full(value).equal(full(reference.state_dict()[name]))
    for each in (model, reference):
        full_state_dict(each)  # at rest
        with torch.no_grad():
            for param in each.parameters():
                param.to_local().mul_(0.5)
    assert loss_of(model, tokens).equal(loss_of(reference, tokens))
    ours, theirs = full_state_dict(model), full_state_dict(reference)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@on_ranks(4)
def test_it_is_explained_and_what_does_not_go_with_it_is_refused(world):
    with pytest.raises(InputError, match="takes a 2-D mesh"):
        fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world,)), shard_over_all=True)
    with pytest.raises(InputError, match="reshard_after_forward=2 doesn't go with shard_over_all"):
        fully_shard(nn.Linear(4, 4), mesh=mesh_of(world), shard_over_all=True, reshard_after_forward=2)
    model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh_of(world)
    fully_shard(model[0], mesh=mesh, shard_over_all=True)
    fully_shard(model, mesh=mesh, shard_over_all=True)
    assert unit_of(model[0]).group.axis is unit_of(model).group.axis
    text = str(explain(model))
    assert "gathered between nodes, then inside of each, by fully_shard's shard_over_all" in text
    assert "after forward to 2 ranks of the node" in text
    model[0].set_reshard_after_forward(False)
    assert unit_of(model[0]).group.gatherer.smaller_world is None
    model[0].set_reshard_after_forward(True)
    assert unit_of(model[0]).group.gatherer.smaller_world is not None
