"""The wrapper trains as DDP does: the promises of torch's own harness for FSDP1 (docs/from-fsdp1.md)."""

import copy
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardwright.errors import InputError, StageError
from shardwright.motion.unit import unit_of, units_in
from shardwright.state.param import ShardedParam
from shardwright.wrapper import (
    FSDP,
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    TrainingState,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.ranks.models import Block, batches, build, full, loss_of
from tests.ranks.pool import run_ranks

PREFETCHES = [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]


class Transformer(nn.Module):
    """torch's encoder-decoder with tied ends, a float and a long buffer, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.1, batch_first=True)
        self.output = nn.Linear(8, 11)
        self.output.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("long_buffer", torch.zeros_like(self.scale, dtype=torch.long))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        source = self.embed(tokens) + self.scale + self.long_buffer.type_as(self.scale)
        out = self.transformer(source, source)
        return self.output(self.norm(out.transpose(1, 2)).transpose(1, 2))


def nested(model, **options):
    """Mixed: a block wrapped whole, one wrapped inside of it, leftovers in the root."""
    model.blocks[0] = FSDP(model.blocks[0], **options)
    model.blocks[1].up = FSDP(model.blocks[1].up, **options)
    model.blocks[1] = FSDP(model.blocks[1], **options)
    return FSDP(model, **options)


def everything(model, **options):
    return FSDP(model, auto_wrap_policy=always_wrap_policy, **options)


def root_only(model, **options):
    return FSDP(model, **options)


def beside_ddp(make, sharded, rank, world, steps=3, after_loss_s=0.0):
    """Losses and full parameters equal DDP's, SGD with momentum; IDLE afterwards."""
    reference = DistributedDataParallel(make())
    ours = torch.optim.SGD(sharded.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        tokens = batches(step, world)[rank] % 11
        losses = []
        for model, optimizer in ((sharded, ours), (reference, theirs)):
            torch.manual_seed(100 + step + rank)  # the same dropout in both
            loss = loss_of(model, tokens)
            time.sleep(after_loss_s)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert losses[0].dtype == torch.float32
        torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-5)
    assert sharded.training_state is TrainingState.IDLE
    expected = dict(reference.module.named_parameters())
    assert [name for name, _ in sharded.named_parameters()] == list(expected)
    for name, param in sharded.named_parameters():
        torch.testing.assert_close(full(param).detach(), expected[name].detach(), atol=2e-6, rtol=1e-5)


def trains(rank, world, shape, make):
    for offload in (None, CPUOffload(True)):
        for prefetch in PREFETCHES:
            sharded = shape(make(), cpu_offload=offload, backward_prefetch=prefetch)
            assert all(w.cpu_offload == (offload or CPUOffload()) for w in FSDP.fsdp_modules(sharded))
            beside_ddp(make, sharded, rank, world)
            assert all(p.device.type == "cpu" for p in sharded.parameters())


@pytest.mark.parametrize("shape", [nested, everything], ids=["nested", "everything wrapped"])
@pytest.mark.parametrize("world", [2, 3])
def test_wrapped_models_train_as_ddp_with_every_prefetch_with_and_without_offload(world, shape):
    run_ranks(world, trains, shape, build)


def test_a_transformer_with_tied_ends_buffers_batchnorm_and_dropout_trains_as_ddp():
    run_ranks(2, trains, root_only, Transformer)


def strategies(rank, world):
    for strategy in ShardingStrategy:
        model = nested(build(), sharding_strategy=strategy)
        sizes = {p.to_local().numel() == p.numel() for p in model.parameters() if p.ndim}
        assert sizes == ({True} if strategy is ShardingStrategy.NO_SHARD else {False})
        beside_ddp(build, model, rank, world, steps=2)


def test_every_sharding_strategy_trains_as_ddp():
    run_ranks(2, strategies)


def hybrid(rank, world):
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = nested(build(), process_group=(shard, copies), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert unit_of(model.module).group.axis.num_copies == 2
    beside_ddp(build, model, rank, world, steps=2)


def test_a_hybrid_over_two_process_groups_trains_as_ddp():
    run_ranks(4, hybrid)


class Expert(nn.Module):
    """A layer that every rank has its own of."""

    def __init__(self, rank: int, own: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(5, 7)
        torch.manual_seed(50 + rank)
        self.expert = nn.Linear(7, 5)
        if own:
            self.expert = FSDP(self.expert, process_group=own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.relu(self.before(x)))


def experts(rank, world):
    alone = [dist.new_group([each]) for each in range(world)][rank]
    model, reference = FSDP(Expert(rank, alone)), Expert(rank, False)
    freed = unit_of(model.module).group.reshard

    def late(*args, **kwargs):
        time.sleep(0.02)
        freed(*args, **kwargs)

    unit_of(model.module).group.reshard = late
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference))
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + rank))
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        for name, param in reference.named_parameters():
            if "expert" not in name:
                dist.all_reduce(param.grad.div_(world))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param).detach(), expected.detach(), msg=name)
    assert model.expert.module.weight.to_local().shape == (5, 7)


def test_an_expert_on_a_group_of_one_is_not_sharded_reduced_or_divided_and_late_frees_do_no_harm():
    run_ranks(3, experts)


def delayed(rank, world):
    model = nested(build())
    for unit in units_in(model):
        comm = unit.group.reducer.comm
        if not hasattr(comm, "late"):
            comm.late, real = True, comm.reduce_scatter

            def slow(*args, real=real):
                time.sleep(0.02)
                return real(*args)

            comm.reduce_scatter = slow
    beside_ddp(build, model, rank, world, after_loss_s=0.02)


def test_delays_after_the_loss_and_before_every_reduction_change_nothing():
    run_ranks(2, delayed)


def moved_with_offload(rank, world):
    model = nested(build(), cpu_offload=CPUOffload(True))
    # No accelerator here: what a group looks at is replaced by what it would see there.
    moved = SimpleNamespace(device=torch.device("cuda"), _version=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedParam, "local", property(lambda _: moved))
        with pytest.raises(StageError, match=r"Expected param to be on CPU: '.*(weight|bias|scale)'"):
            loss_of(model, batches(0, world)[rank])
    beside_ddp(build, model, rank, world, steps=1)  # nothing was lost
    plain = nested(build())
    beside_ddp(build, plain.to("cpu"), rank, world, steps=1)


def test_offloaded_parameters_moved_after_wrapping_are_refused_by_name():
    run_ranks(2, moved_with_offload)


def accumulates(rank, world):
    model, reference = nested(build()), build()
    with model.no_sync():
        loss_of(model, batches(0, world)[rank]).backward()
        assert all(p.grad is None for p in model.parameters())
    loss_of(model, batches(1, world)[rank]).backward()
    for step in range(2):
        (sum(loss_of(reference, rows) for rows in batches(step, world)) / world).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.testing.assert_close(model.clip_grad_norm_(0.5), expected)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, atol=1e-6, rtol=1e-5)


def test_no_sync_accumulates_and_clipping_gives_the_norm_of_one_process():
    run_ranks(2, accumulates)


def hooked(rank, world):
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


def test_a_comm_hook_takes_the_place_of_every_reduce_scatter():
    run_ranks(2, hooked)


def policies(rank, world):
    def wrapped(policy, **options):
        model = FSDP(build(), auto_wrap_policy=policy, **options)
        return {name for name, m in model.module.named_modules() if isinstance(m, FSDP)}

    blocks = {f"blocks.{i}" for i in range(3)}
    assert wrapped(ModuleWrapPolicy({Block})) == blocks
    assert wrapped(partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})) == blocks
    assert wrapped(partial(size_based_auto_wrap_policy, min_num_params=700)) == blocks
    chosen = FSDP(
        build(),
        auto_wrap_policy=CustomPolicy(
            lambda m: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(m, nn.Linear) else False
            )
        ),
    )
    found = FSDP.fsdp_modules(chosen)
    assert [w.sharding_strategy.name for w in found] == ["FULL_SHARD"] + ["SHARD_GRAD_OP"] * 7
    assert [w.check_is_root() for w in found] == [True] + [False] * 7
    assert FSDP.fsdp_modules(chosen, root_only=True) == [chosen]
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        assert wrap(nn.Linear(2, 2)).sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert type(wrap(nn.Linear(2, 2))) is nn.Linear
    with pytest.raises(InputError, match="use_orig_params=False"):
        FSDP(build(), use_orig_params=False)
    with pytest.raises(InputError, match="keep_low_precision_grads"):
        MixedPrecision(keep_low_precision_grads=True)


def test_policies_wrap_what_torchs_do():
    run_ranks(2, policies)


def linear_memory(rank, world, bias, way):
    linear = FSDP(nn.Linear(6, 4, bias=bias))
    outer = FSDP(nn.Sequential(linear, nn.ReLU(), nn.Linear(4, 4)))
    if way == "replaced":
        inner = linear.module
        inner.forward = lambda x: nn.functional.linear(x, inner.weight, inner.bias)
    x = torch.randn(2, 3, 6, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = checkpoint(outer, x, use_reentrant=False) if way == "checkpointed" else outer(x)
    buffer = unit_of(linear.module).group.buffer
    storage = buffer._storage
    weights = [t for t in saved if t.untyped_storage()._cdata == storage._cdata]
    assert bool(weights) == (way != "checkpointed")
    assert all(t.untyped_storage().nbytes() == 0 for t in weights), "a resharded weight is still held"
    assert buffer.allocated_nbytes == 0
    out.sum().backward()
    assert buffer.allocated_nbytes == 0
    assert linear.module.weight.grad is not None


@pytest.mark.parametrize("way", ["plain", "checkpointed", "replaced"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linears_backward_keeps_no_gathered_weight_alive(way, bias):
    run_ranks(2, linear_memory, bias, way)


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


def two_threads(rank, world):
    results = {}
    threads = [threading.Thread(target=train_alone, args=(seed, results)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {1: True, 2: True}


def test_two_models_in_two_threads_do_not_disturb_each_other():
    run_ranks(1, two_threads)


def precision(rank, world):
    model = build()
    model.register_buffer("extra", torch.ones(3))
    sharded = nested(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))
    out = sharded(batches(0, world)[rank])
    assert out.dtype == torch.bfloat16
    assert sharded.extra.dtype == torch.bfloat16
    assert {v.dtype for v in sharded.state_dict().values()} == {torch.float32}
    out.float().sum().backward()
    assert {p.grad.dtype for p in sharded.parameters()} == {torch.float32}


def test_mixed_precision_casts_compute_and_buffers_and_saves_full_precision():
    run_ranks(2, precision)


def copied(rank, world):
    model = nested(build())
    twin = copy.deepcopy(model)
    loss_of(model, batches(0, world)[rank]).backward()
    assert all(p.grad is None for p in twin.parameters())
    beside_ddp(build, twin, rank, world, steps=1)


def test_a_copy_of_a_wrapped_model_trains_on_its_own():
    run_ranks(2, copied)
