"""torch's own harness for its wrapper class, claim by claim: P1 to P47 and X1 to X4 of docs/from-fsdp1.md.

Every case trains beside DDP with each backward prefetch, with and without offload, and with the model moved
before it is wrapped, after, or never. Moving is ``_apply`` with a copy: new memory for every tensor, as from
one device to another.
"""

import copy
import gc
import itertools
import time
import weakref
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.engine.groups.group import ParamGroup, Stage
from shardwright.engine.unit import unit_of, units_in
from shardwright.observe.steps.trace import last_trace
from shardwright.schedule.schedule import ActionKind, EventKind, Phase
from shardwright.wrapper import (
    FSDP,
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    ShardingStrategy,
    TrainingState,
)
from tests.ranks.models import Decoder, Run, assert_same_grads, batches, build, loss_of, train_beside
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.wrapped import (
    OwnExpert,
    Transformer,
    WithoutExperts,
    beside_ddp,
    everything,
    nested,
    root_only,
)

PREFETCHES = [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None]
MATRIX = list(itertools.product(PREFETCHES, (None, CPUOffload(True)), ("before", "after", "never")))
NEVER_MOVED = [case for case in MATRIX if case[2] == "never"]


def moved(model):
    """The model with all its tensors in new memory."""
    return model._apply(torch.clone)


def each_case(make, shape, cases):
    """``(model, options)`` for each case of the matrix, wrapped and on the host."""
    for prefetch, offload, when in cases:
        model = moved(make()) if when == "before" else make()
        sharded = shape(model, cpu_offload=offload, backward_prefetch=prefetch)
        if when == "after":
            assert moved(sharded) is sharded
        wrappers = FSDP.fsdp_modules(sharded)
        assert all(w.cpu_offload == (offload or CPUOffload()) for w in wrappers)
        assert all(w.backward_prefetch is prefetch for w in wrappers)
        assert all(p.device.type == "cpu" for p in sharded.parameters())
        # On a CPU all memory is the host's: what an accelerator's shards would lie on is said by this.
        shards = [param for unit in units_in(sharded) for param in unit.params]
        assert {param.split.on_host for param in shards} == {bool(offload)}
        yield sharded


def trains(rank, world, shape, make, steps, cases):
    for sharded in each_case(make, shape, cases):
        beside_ddp(make, sharded, rank, world, steps)
        assert all(p.device.type == "cpu" for p in sharded.parameters())


@pytest.mark.parametrize(
    ("shape", "make"),
    [(nested, build), (everything, build), (root_only, Transformer)],
    ids=["nested", "everything wrapped", "transformer"],
)
def test_a_model_trains_as_ddp_in_every_case(shape, make):  # P1 P12-P14 P16-P19 P22-P26 P28 P33-P36
    run_ranks(2, trains, shape, make, 2, MATRIX)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.slow
def test_more_ranks_than_two_train_as_ddp(world):
    cases = [(BackwardPrefetch.BACKWARD_PRE, None, "never"), (None, CPUOffload(True), "after")]
    run_ranks(world, trains, nested, build, 2, cases)


# P13 P14 P24
@pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["on the device", "offloaded"])
@on_ranks(2)
def test_an_optimizer_built_after_wrapping_and_before_the_move_steps_what_was_moved(rank, world, offload):
    model = nested(build(), cpu_offload=offload)
    ours, theirs = Run.of(model), Run.of(build())
    for _ in range(2):  # before the first step, and with momentum
        assert moved(model) is model
        # Two steps: in the first the memory from before the move still holds equal weights.
        train_beside(ours, theirs, rank, world, steps=2)


@on_ranks(2)
def test_a_model_that_is_moved_to_another_dtype_or_from_meta_after_wrapping_trains_on(rank, world):  # P13 P14
    """To another dtype and back, and from the meta device, between wrapping and training."""
    model = nested(build()).double()
    ours, theirs = Run.of(model), Run.of(build().double())
    train_beside(ours, theirs, rank, world, steps=2, tolerance=1e-12)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.float() is model
    train_beside(Run.of(model), Run.of(theirs.model.float()), rank, world, steps=2)
    with torch.device("meta"):
        plain = Decoder()
    empty = nested(plain, param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False))
    empty.load_state_dict(model.state_dict())
    for buffer, full in zip(empty.buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, full)
    train_beside(Run.of(empty), Run.of(theirs.model), rank, world, steps=2)


@on_ranks(2)
def test_the_state_of_training_is_idle_outside_of_forward_and_backward_and_only_there(rank, world):  # P27
    model, seen = nested(build()), []

    def look(*_):
        seen.append({each.training_state for each in FSDP.fsdp_modules(model)})

    def look_in_backward(_, __, out):
        out.register_hook(look)

    model.norm.register_forward_hook(look)
    model.norm.register_forward_hook(look_in_backward)
    loss = loss_of(model, batches(0, world)[rank])
    look()
    loss.backward()
    look()
    running, idle = {TrainingState.FORWARD_BACKWARD}, {TrainingState.IDLE}
    assert seen == [running, idle, running, idle]
    with FSDP.summon_full_params(model):
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
    assert model.training_state is TrainingState.IDLE


@on_ranks(2)
def test_a_root_without_parameters_of_its_own_trains_as_ddp(rank, world):  # P31 P37
    model = everything(build())
    inner = {id(p) for m in model.module.modules() if isinstance(m, FSDP) for p in m.parameters()}
    own = [name for name, p in model.named_parameters() if id(p) not in inner]
    assert own == []  # P37: what is wrapped inside has taken all
    assert unit_of(model.module).group is None
    beside_ddp(build, model, rank, world, steps=1)


@on_ranks(2)
def test_group_offload_and_prefetch_may_be_given_for_each_wrapper(rank, world):  # P38 P45
    alone = [dist.new_group([each]) for each in range(world)][rank]
    of_norm = {"process_group": alone, "cpu_offload": CPUOffload(True), "backward_prefetch": None}
    policy = CustomPolicy(lambda m: of_norm if isinstance(m, nn.LayerNorm) else isinstance(m, nn.Linear))
    model = FSDP(build(), auto_wrap_policy=policy)
    norm, linear = model.norm, model.head
    assert (norm.cpu_offload.offload_params, norm.backward_prefetch) == (True, None)
    assert (linear.cpu_offload.offload_params, linear.backward_prefetch) == (False, PREFETCHES[0])
    assert norm.weight.to_local().shape == norm.weight.shape
    assert linear.weight.to_local().shape[0] < linear.weight.shape[0]
    # Offloaded or not by each wrapper's own word, also where one group holds both kinds of ranks' parts.
    offload = {"cpu_offload": CPUOffload(True)}
    norms = CustomPolicy(lambda m: offload if isinstance(m, nn.LayerNorm) else False)
    mixed = FSDP(build(), auto_wrap_policy=norms)
    offloaded = {p.fqn: p.split.on_host for unit in units_in(mixed) for p in unit.params}
    assert any(offloaded.values()) and not all(offloaded.values())
    offloading = [each for each in FSDP.fsdp_modules(mixed) if each.cpu_offload.offload_params]
    wrapped = {id(param) for each in offloading for param in each.parameters()}
    shards = [p for unit in units_in(mixed) for p in unit.params]
    own = {id(p) for p in mixed.parameters()} - wrapped
    assert all(p.split.on_host == (id(p.sharded) not in own) for p in shards)
    beside_ddp(build, mixed, rank, world, steps=2)


@pytest.mark.slow
@on_ranks(2)
def test_delays_after_the_loss_and_before_every_reduction_change_nothing(rank, world):  # P39 P40 P46
    for sharded in each_case(build, nested, MATRIX):
        comms = {id(unit.group.gatherer.comm): unit.group.gatherer.comm for unit in units_in(sharded)}
        calls = []
        for comm in comms.values():

            def late(*args, real=comm.reduce_scatter, calls=calls):
                calls.append(args)
                time.sleep(0.002)
                return real(*args)

            comm.reduce_scatter = late
        beside_ddp(build, sharded, rank, world, steps=2, after_loss_s=0.01)
        # One point that all reductions go through: P40. Small groups share a collective.
        groups = [unit.group for unit in units_in(sharded) if unit.group]
        reduced = sum(len(segments) for segments, *_ in calls)
        assert reduced == 2 * sum(group.trainable.bit_count() for group in groups)
        for comm in comms.values():
            del comm.reduce_scatter


def experts(rank, world, late_s):
    alone = [dist.new_group([each]) for each in range(world)][rank]
    freed = []
    real = ParamGroup.reshard

    def late(group, *args, **kwargs):
        time.sleep(late_s)
        real(group, *args, **kwargs)
        freed.append(group)
        assert group.buffer.allocated_nbytes == 0

    with mock.patch.object(ParamGroup, "reshard", late):
        for prefetch, offload, when in MATRIX:
            options = {"cpu_offload": offload, "backward_prefetch": prefetch}
            model = OwnExpert(alone, **options)
            model = FSDP(moved(model) if when == "before" else model, **options)
            model = moved(model) if when == "after" else model
            freed.clear()
            beside_ddp(OwnExpert, model, rank, world, steps=2, ddp=WithoutExperts)
            # One point that all freeing goes through: P44. Each group at least once in each step.
            groups = [unit.group for unit in units_in(model)]
            assert all(freed.count(group) >= 2 for group in groups)
            assert model.expert.module.weight.to_local().shape == (7, 7)  # P41
            assert model.expert.module.weight.device_mesh.size() == 1
            assert model.before.weight.device_mesh.size() == world  # P42


@pytest.mark.parametrize("late_s", [0.0, 0.002], ids=["at once", "freed late"])
@pytest.mark.slow
def test_an_expert_on_a_group_of_one_is_not_sharded_reduced_or_divided(late_s):  # P30 P41-P45
    run_ranks(3 if late_s else 2, experts, late_s)


@on_ranks(2)
def test_parts_that_are_wrapped_and_dropped_before_the_root_leave_nothing(rank, world):  # P41
    alone = [dist.new_group([each]) for each in range(world)][rank]
    model = OwnExpert(alone)
    wrappers = [weakref.ref(part) for part in (model.expert, model.after)]
    torch.manual_seed(60)
    model.expert, model.after = nn.Linear(7, 7), nn.Linear(7, 17)
    gc.collect()
    assert [ref() for ref in wrappers] == [None, None], "what was dropped is still held"
    plain = copy.deepcopy(model)
    beside_ddp(lambda: plain, FSDP(model), rank, world)


# P47
@pytest.mark.each_case
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_one_hook_on_an_output_that_stays_and_changes_after_wrapping_are_seen(rank, world, use_orig_params):
    model = nested(build(), use_orig_params=use_orig_params)
    tokens = batches(0, world)[rank]
    for _ in range(2):
        out = model(tokens)
        assert len(out._backward_hooks) == 1
        [hook] = out._backward_hooks.values()
        out.sum().backward()
        assert list(out._backward_hooks.values()) == [hook]  # it stays, for a second backward through a graph
        model.load_state_dict(model.state_dict())  # hooks survive it
    with torch.no_grad():
        assert torch.equal(model(tokens), out)
    before = out.detach()
    model.apply(lambda m: m.bias.data.add_(1) if isinstance(m, nn.LayerNorm) else None)
    after = model(tokens)
    assert not torch.equal(after, before)
    plain = build()
    plain.apply(lambda m: m.bias.data.add_(1) if isinstance(m, nn.LayerNorm) else None)
    torch.testing.assert_close(after, plain(tokens))


class AnyOrder(Decoder):
    """Blocks that run in another order than they are listed, and wrapped, in."""

    order = (2, 0, 1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for place in self.order:
            x = self.blocks[place](x)
        return self.head(self.norm(x))


def gathered_in_backward(runtime):
    """``(moment, group at that moment, group gathered first)`` of each all-gather of the last backward."""
    backward = last_trace(runtime.table.labels).schedule().phases[Phase.BACKWARD]
    planned = [(event, action) for event, actions in backward for action in actions]
    unshards = [(event, action) for event, action in planned if action.kind is ActionKind.UNSHARD]
    return [(event.kind, event.group, action.group) for event, action in unshards]


def expected_in_backward(prefetch, ran, bucket_cap_mb):
    """The same by what was recorded: blocks ran in the order ``ran``, the last stays for the backward."""
    last, middle, first = reversed(ran)
    if prefetch is None:
        return [(EventKind.BACKWARD_BEGIN, group, group) for group in (middle, first)]
    at = EventKind.BACKWARD_BEGIN if prefetch is BackwardPrefetch.BACKWARD_PRE else EventKind.BACKWARD_END
    # With a cap what follows goes with it.
    return [(at, last, middle), (at, middle, first)][: 1 if bucket_cap_mb else 2]


# P1 P4 P5 P9. Of the caps the last alone runs in make test: each collective has one group.
@pytest.mark.parametrize("bucket_cap_mb", [25, 0])
@on_ranks(2)
def test_groups_that_run_in_another_order_than_wrapped_are_gathered_once_and_exact(
    rank, world, bucket_cap_mb
):
    gathered = Counter()
    real = ParamGroup.fill

    def counted(group, *args):
        gathered[group] += 1
        return real(group, *args)

    for prefetch in PREFETCHES:
        model, theirs = AnyOrder(), AnyOrder()
        theirs.load_state_dict(model.state_dict())
        model.blocks = nn.ModuleList(FSDP(block, backward_prefetch=prefetch) for block in model.blocks)
        ours = FSDP(model, backward_prefetch=prefetch)
        runtime = unit_of(ours.module).runtime
        runtime.set_policy(replace(runtime.policy, bucket_cap_mb=bucket_cap_mb))
        for step, order in enumerate(((2, 0, 1), (2, 0, 1), (2, 0, 1), (1, 2, 0))):
            ours.module.order = theirs.order = order
            tokens = batches(step, world)
            gathered.clear()
            with mock.patch.object(ParamGroup, "fill", counted):
                loss = loss_of(ours, tokens[rank])
                forward, kept = gathered.copy(), {g for g in runtime.groups if g.stage is not Stage.SHARDED}
                gathered.clear()
                loss.backward()
            if step < 3:  # none twice, none lost
                assert forward == dict.fromkeys(runtime.groups, 1)
                assert gathered == dict.fromkeys(set(runtime.groups) - kept, 1)
                assert len(kept) < len(runtime.groups) == 4
            if step in (1, 2):  # ahead is what was recorded, not what was wrapped: P1 P5 P9
                assert gathered_in_backward(runtime) == expected_in_backward(prefetch, order, bucket_cap_mb)
            (sum(loss_of(theirs, rows) for rows in tokens) / world).backward()
        assert_same_grads(ours, theirs)


@on_ranks(2)
def test_every_sharding_strategy_trains_as_ddp(rank, world):
    for strategy in ShardingStrategy:
        model = nested(build(), sharding_strategy=strategy)
        sizes = {p.to_local().numel() == p.numel() for p in model.parameters() if p.ndim}
        assert sizes == ({True} if strategy is ShardingStrategy.NO_SHARD else {False})
        beside_ddp(build, model, rank, world, steps=2)


@pytest.mark.parametrize("way", ["plain", "checkpointed", "replaced"])
@pytest.mark.parametrize("bias", [False, True])
@on_ranks(2)
def test_a_linears_backward_keeps_no_gathered_weight_alive(bias, way):  # X1 X3
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
