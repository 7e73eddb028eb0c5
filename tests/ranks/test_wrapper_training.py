"""What the wrapper does beside training as DDP does (test_wrapper_harness.py): its arguments and methods."""

import copy
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.engine.unit import unit_of, units_in
from shardwright.errors import InputError, StageError
from shardwright.params.param import ShardedParam
from shardwright.wrapper import (
    FSDP,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.ranks.models import Block, assert_same_grads, batches, build, full, loss_of, waits
from tests.ranks.pool import on_ranks
from tests.ranks.wrapped import beside_ddp, nested


@on_ranks(4)
def test_a_hybrid_over_two_process_groups_trains_as_ddp(rank, world):
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = nested(build(), process_group=(shard, copies), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert unit_of(model.module).group.axis.num_copies == 2
    beside_ddp(build, model, rank, world, steps=2)


@pytest.mark.parametrize("way", ["None", "zero_grad"])
@on_ranks(2)
def test_what_waits_is_cleared_over_parameters_after_a_backward_that_raised(way, rank, world):
    model, reference = nested(build()), build()
    tokens = batches(0, world)[rank]
    with model.no_sync():
        loss_of(model, tokens).backward()
        handle = model.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, tokens).backward()
        handle.remove()
    if way == "zero_grad":
        model.zero_grad()
    for param in model.parameters() if way == "None" else ():
        param.grad = None
    loss_of(model, tokens).backward()
    for each in batches(0, world):
        (loss_of(reference, each) / world).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine.grad, other.grad, atol=1e-6)


class Moved(SimpleNamespace):
    """What is looked at of a shard on another device. A class of its own has weak references."""


@on_ranks(2)
def test_offloaded_parameters_moved_after_wrapping_are_refused_by_name(rank, world):
    model = nested(build(), cpu_offload=CPUOffload(True))
    # No accelerator here: what a group looks at is replaced by what it would see there.
    moved = Moved(device=torch.device("cuda"), _version=0, element_size=lambda: 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedParam, "local", property(lambda _: moved))
        with pytest.raises(StageError, match=r"Expected param to be on CPU: '.*(weight|bias|scale)'"):
            loss_of(model, batches(0, world)[rank])
    beside_ddp(build, model, rank, world, steps=1)  # nothing was lost
    plain = nested(build())
    beside_ddp(build, plain.to("cpu"), rank, world, steps=1)


@on_ranks(2)
def test_no_sync_accumulates_and_clipping_gives_the_norm_of_one_process(rank, world):
    model, reference = nested(build()), build()
    with model.no_sync():
        loss_of(model, batches(0, world)[rank]).backward()
        assert all(waits(p) for p in model.parameters())
    loss_of(model, batches(1, world)[rank]).backward()
    for step in range(2):
        (sum(loss_of(reference, rows) for rows in batches(step, world)) / world).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.testing.assert_close(model.clip_grad_norm_(0.5), expected)
    assert_same_grads(model, reference)


@on_ranks(2)
def test_a_comm_hook_takes_the_place_of_every_reduce_scatter(rank, world):
    seen = []

    def bf16(state, whole, shard):
        seen.append((state, whole.numel(), shard.numel()))
        half = whole.bfloat16()
        dist.all_reduce(half)
        shard.copy_(half.chunk(world)[rank] / world)

    model, exact = nested(build()), nested(build())
    model.register_comm_hook("mine", bf16)
    for each in (model, exact):
        loss_of(each, batches(0, world)[rank]).backward()
    assert len(seen) == len([unit for unit in units_in(model) if unit.group])
    assert all(state == "mine" and whole == shard * world for state, whole, shard in seen)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), full(theirs.grad), atol=2e-3, rtol=2e-2)
    copies = FSDP(nn.Linear(3, 3), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(InputError, match="all-reduces over copies"):
        copies.register_comm_hook(None, bf16)


@on_ranks(2)
def test_policies_wrap_what_torchs_do():
    def wrapped(policy, **options):
        model = FSDP(build(), auto_wrap_policy=policy, **options)
        return {name for name, m in model.module.named_modules() if isinstance(m, FSDP)}

    blocks = {f"blocks.{i}" for i in range(3)}
    assert wrapped(ModuleWrapPolicy({Block})) == blocks
    assert wrapped(partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})) == blocks
    assert wrapped(partial(size_based_auto_wrap_policy, min_num_params=700)) == blocks
    keeps = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    linear = CustomPolicy(lambda m: keeps if isinstance(m, nn.Linear) else False)
    chosen = FSDP(build(), auto_wrap_policy=linear)
    found = FSDP.fsdp_modules(chosen)
    assert [w.sharding_strategy.name for w in found] == ["FULL_SHARD"] + ["SHARD_GRAD_OP"] * 7
    assert [w.check_is_root() for w in found] == [True] + [False] * 7
    assert FSDP.fsdp_modules(chosen, root_only=True) == [chosen]
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        assert wrap(nn.Linear(2, 2)).sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert type(wrap(nn.Linear(2, 2))) is nn.Linear
    with pytest.raises(InputError, match="keep_low_precision_grads"):
        MixedPrecision(keep_low_precision_grads=True)


def train_alone(seed, results):
    def make():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5))

    with _building:
        sharded, plain = FSDP(make(), auto_wrap_policy=always_wrap_policy), make()
    for model in (sharded, plain):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(10):
            x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    results[seed] = all(torch.allclose(full(a), b) for a, b in pairs)


_building = threading.Lock()  # the random numbers of a process are one stream


@on_ranks(1)
def test_two_models_in_two_threads_do_not_disturb_each_other():
    results = {}
    threads = [threading.Thread(target=train_alone, args=(seed, results)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {1: True, 2: True}


@on_ranks(2)
def test_mixed_precision_casts_compute_and_float_buffers_and_saves_full_precision(rank, world):  # P34
    model = build()
    model.register_buffer("extra", torch.ones(3))
    whole = {"long_buffer": torch.arange(3) + 2**24 + 1, "bool_buffer": torch.tensor([True, False])}
    for name, buffer in whole.items():
        model.register_buffer(name, buffer.clone())
    sharded = nested(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))
    out = sharded(batches(0, world)[rank])
    assert out.dtype == torch.bfloat16
    assert sharded.extra.dtype == torch.bfloat16
    state = sharded.state_dict()
    for name, buffer in whole.items():  # P34: what counts or chooses isn't rounded
        assert getattr(sharded, name).dtype == buffer.dtype == state[name].dtype
        assert torch.equal(getattr(sharded, name), buffer) and torch.equal(state.pop(name), buffer)
    assert {v.dtype for v in state.values()} == {torch.float32}
    out.float().sum().backward()
    assert {p.grad.dtype for p in sharded.parameters()} == {torch.float32}


@on_ranks(2)
def test_a_copy_of_a_wrapped_model_trains_on_its_own(rank, world):
    model = nested(build())
    twin = copy.deepcopy(model)
    loss_of(model, batches(0, world)[rank]).backward()
    assert all(p.grad is None for p in twin.parameters())
    beside_ddp(build, twin, rank, world, steps=1)
