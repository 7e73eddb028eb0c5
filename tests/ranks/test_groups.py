"""What a group may hold, and what a step leaves behind."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import MixedPrecisionPolicy, SchedulePolicy, fully_shard, set_transport, stats
from shardwright.engine.groups.group import Stage
from shardwright.engine.unit import is_sharded, unit_of, units_in
from shardwright.errors import StageError
from shardwright.schedule.check import check
from shardwright.schedule.schedule import Action, ActionKind, Event, EventKind, Phase, Schedule
from tests.ranks.models import (
    Run,
    assert_same,
    assert_same_grads,
    batches,
    both_backward,
    both_step,
    build,
    full,
    loss_of,
    shard_decoder,
    sharded,
)
from tests.ranks.pool import on_ranks, run_ranks


def held_nbytes(model):
    return sum(g.buffer.allocated_nbytes for g in unit_of(model).runtime.groups if g.buffer is not None)


@on_ranks(1, 2, 3)
def test_after_every_step_all_unsharded_storage_is_freed(rank, world):
    model = shard_decoder(build(), fully_shard)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    run = Run.of(model)
    root, last = unit_of(model).group, unit_of(model.blocks[-1]).group
    for step in range(3):
        loss = loss_of(model, batches(step, world)[rank])
        # The root stays unsharded for its backward, which comes first; so does the last block once a
        # backward was recorded; the others don't.
        kept = root.buffer.nbytes + (last.buffer.nbytes if step else 0)
        assert held_nbytes(model) == kept == stats(model).unsharded_nbytes
        loss.backward()
        # The loss is still here, and with it nothing of a weight: its storage is freed, in bytes.
        assert held_nbytes(model) == stats(model).unsharded_nbytes == 0
        assert all(isinstance(p, DTensor) for p in model.parameters())
        run.step()
    blocks = [g.buffer.nbytes for g in unit_of(model).runtime.groups[:-1]]
    # One in use, one ahead, and the root: never the whole model.
    assert stats(model).peak_unsharded_nbytes == root.buffer.nbytes + 2 * max(blocks)
    with torch.no_grad():
        loss_of(model, batches(0, world)[rank])
    assert held_nbytes(model) == root.buffer.nbytes  # as torch; the blocks are freed
    model.reshard()
    assert held_nbytes(model) == 0


@on_ranks(2)
def test_the_root_owns_what_nested_calls_have_left_and_is_resharded_at_the_end_of_backward(rank, world):
    """Each call owns what nested calls have left; the root's stays from forward to the end of backward."""
    model = build()
    fully_shard(model.blocks[0].up)
    sharded(model, model.blocks[:2])
    owned = {name: {p.fqn for p in unit_of(m).params} for name, m in model.named_modules() if is_sharded(m)}
    of_block = {"norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias", "scale"}
    assert owned.pop("blocks.0.up") == {"weight", "bias"}
    assert owned.pop("blocks.0") == of_block - {"up.weight", "up.bias"}
    assert owned.pop("blocks.1") == of_block
    ends = {"embedding.weight", "norm.weight", "norm.bias", "head.weight"}
    assert owned.pop("") == ends | {f"blocks.2.{each}" for each in of_block}
    assert not owned
    root = unit_of(model).group
    held = []
    model.blocks[0].register_full_backward_hook(lambda *_: held.append(root.buffer.allocated_nbytes))
    for _ in range(3):
        loss = loss_of(model, batches(0, world)[rank])
        assert root.buffer.allocated_nbytes == root.buffer.nbytes
        loss.backward()
        assert held.pop() == root.buffer.nbytes, "freed before the end of backward"
        assert root.buffer.allocated_nbytes == 0


@on_ranks(2)
def test_the_autograd_graph_keeps_no_resharded_weight_alive():
    """Every tensor that autograd saved from a resharded group lies in a storage of zero bytes, and can't be
    read: its version isn't the one that was saved."""
    block = fully_shard(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), reshard_after_forward=True
    )
    x = torch.ones(2, 8, requires_grad=True)
    out = block(x)
    storage = unit_of(block).group.buffer._storage
    saved, refused, nodes = [], [], [out.grad_fn]
    while nodes:
        node = nodes.pop()
        for name in (name for name in dir(node) if name.startswith("_saved_")):
            try:
                saved.append(getattr(node, name))
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                refused.append(name)
        nodes += [following for following, _ in node.next_functions if following is not None]
    tensors = [t for t in saved if isinstance(t, torch.Tensor)]
    assert all(t.untyped_storage()._cdata != storage._cdata for t in tensors)
    assert len(refused) == 2 and storage.nbytes() == 0
    out.sum().backward()


@on_ranks(2)
def test_the_original_parameter_is_freed():
    layer = nn.Linear(64, 64)
    original = weakref.ref(layer.weight)
    fully_shard(layer)
    gc.collect()
    assert original() is None
    assert layer.weight.to_local().untyped_storage().nbytes() == 64 * 32 * 4


@on_ranks(1, 2, 3, 4)
def test_a_step_sends_the_optimal_number_of_bytes(world):
    set_transport("sockets")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(48, 96, bias=False)) for _ in range(2)])
    model[1] = nn.Sequential(nn.Linear(96, 48, bias=False))
    sharded(model, reshard_after_forward=True)
    sent = []
    for _ in range(3):
        before = stats(model).sent_nbytes
        model(torch.ones(2, 48, requires_grad=True)).sum().backward()
        sent.append(stats(model).sent_nbytes - before)
    weights = 2 * 48 * 96 * 4
    # Two all-gathers and one reduce-scatter of each group, each at (W - 1) / W of its bytes.
    assert sent == [3 * weights * (world - 1) // world] * 3


def schedule_is_followed(rank, world):
    model = shard_decoder(build(), fully_shard)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    assert model.schedule() == Schedule()
    for step in range(3):
        loss_of(model, batches(step, world)[rank]).backward()
    schedule = model.schedule()
    check(schedule)
    assert Schedule.parse(str(schedule), schedule.names) == schedule
    assert model.trace().schedule() == schedule
    # One ahead in both directions: block 1 is being gathered when block 0 (or 2) begins.
    stops = {(phase, stop.event): stop.actions for phase in Phase for stop in schedule.phases.get(phase, ())}
    forward = stops[Phase.FORWARD, Event(EventKind.FORWARD_BEGIN, 0)]
    backward = stops[Phase.BACKWARD, Event(EventKind.BACKWARD_BEGIN, 2)]
    assert Action(ActionKind.UNSHARD, (1,)) in forward
    assert Action(ActionKind.UNSHARD, (1,)) in backward
    assert forward.index(Action(ActionKind.UNSHARD, (1,))) < forward.index(Action(ActionKind.WAIT, (0,)))
    return str(schedule)


def test_the_schedule_is_planned_followed_and_the_same_on_all_ranks():
    assert len(set(run_ranks(3, schedule_is_followed))) == 1


@on_ranks(2)
def test_a_list_of_modules_is_one_group_and_the_root_may_own_nothing(rank, world):
    model, reference = build(), build()
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    sharded(model, [*model.blocks, model.embedding])
    assert unit_of(model).group is None  # nested calls have taken every parameter
    assert unit_of(model.norm) is unit_of(model.head)
    assert stats(model).num_groups == 5
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        tokens = batches(step, world)
        both_backward(model, reference, tokens, rank)
        both_step(ours, theirs)
        assert held_nbytes(model) == 0
    both = unit_of(model).runtime.groups.index(unit_of(model.norm).group)
    events = [stop.event for stop in model.schedule().phases[Phase.BACKWARD] if stop.event.group == both]
    # Once each, although two modules run: else the group is gathered and reduced twice.
    kinds = [EventKind.BACKWARD_BEGIN, EventKind.GRADS_READY, EventKind.BACKWARD_END]
    assert events == [Event(kind, both) for kind in kinds]


@on_ranks(2)
def test_a_parameter_shared_inside_a_group_is_sharded_once_and_stays_shared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    fully_shard(model)
    assert model[2].weight is model[0].weight
    assert len(list(model.parameters())) == 3
    assert stats(model).param_numel == 36 + 12
    model(torch.ones(2, 6)).sum().backward()
    assert model[2].weight is model[0].weight
    assert model[0].weight.grad is not None


@on_ranks(2)
def test_a_weight_changed_between_two_forwards_is_seen():
    """A forward without a backward leaves the root unsharded; what changes then must still be seen."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    x = torch.ones(1, 4)
    before = model(x)
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    assert torch.allclose(model(x), 2 * before)
    with torch.no_grad():
        unit_of(model).group.params[0].local.mul_(2)
    assert torch.allclose(model(x), 4 * before)


@on_ranks(1, 2)
def test_after_an_exception_on_all_ranks_the_next_step_is_clean(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    tokens = batches(0, world)
    norm = model.blocks[1].norm
    for register in (norm.register_forward_hook, norm.register_full_backward_hook):
        handle = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, tokens[rank]).backward()
        handle.remove()
        model.zero_grad()
    both_backward(model, reference, tokens, rank)
    assert_same_grads(model, reference)
    assert held_nbytes(model) == 0


def by_hand(run):
    """A step as who writes a loop by hand: it leaves no mark on the shards."""
    for param in run.optimizer.param_groups[0]["params"]:
        param.detach().to_local().sub_(param.grad.to_local(), alpha=0.1)


@pytest.mark.each_case
@pytest.mark.parametrize("step", [Run.step, by_hand])
@on_ranks(2)
def test_what_was_gathered_for_a_forward_that_failed_is_not_used_after_a_step(step):
    """Of two microbatches the second fails, with gathers in flight, and the first is stepped with."""
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(4)))
    run, x = Run.of(fully_shard(model)), torch.ones(1, 4)
    model(x).sum().backward()  # recorded: from now on gathers are launched ahead
    model(x).sum().backward()
    fails = model[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    fails.remove()
    assert [group.stage for unit in units_in(model) for group in unit.groups].count(Stage.GATHERING) > 0
    step(run)
    seen = model(x)
    for layer in model:
        x = nn.functional.linear(x, full(layer.weight), full(layer.bias))
    assert seen.equal(x)


@on_ranks(2)
def test_a_model_may_be_cast_between_steps(rank, world):
    model = shard_decoder(build(), fully_shard)
    parameters = list(model.parameters())
    loss_of(model, batches(0, world)[rank]).backward()
    model.zero_grad()
    model.double()
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    loss_of(model, batches(0, world)[rank]).backward()
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())
    reference = build().double()
    torch.stack([loss_of(reference, rows) for rows in batches(0, world)]).mean().backward()
    assert_same_grads(model, reference)


@on_ranks(1, 2, 3)
def test_a_group_may_hold_any_mix_of_dtypes_and_sizes():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5).double()})

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model
            self.packed = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            assert torch.equal(self.packed, torch.arange(7, dtype=torch.uint8))
            return self.parts["b"](self.parts["a"](x).double()) + self.empty.sum()

    mixed = fully_shard(Mixed())
    mixed(torch.ones(2, 5)).sum().backward()
    assert mixed.parts["a"].weight.grad.dtype == torch.float32
    assert mixed.parts["b"].weight.grad.dtype == torch.float64
    assert tuple(mixed.empty.grad.shape) == (0, 3)


@on_ranks(2)
def test_parameters_assigned_by_load_state_dict_are_taken_over(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build(seed=9)
    other = shard_decoder(build(seed=9), fully_shard)
    model.load_state_dict(other.state_dict(), assign=True)
    assert_same(model, reference, 0.0)
    loss = loss_of(model, batches(0, world)[rank])
    assert torch.equal(loss, loss_of(other, batches(0, world)[rank]))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_a_bf16_gradient_travels_as_bf16_and_is_summed_as_fp32():
    set_transport("sockets")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(64, 64, bias=False), mp_policy=policy, reshard_after_forward=False)
    before = stats(model).sent_nbytes
    model(torch.ones(2, 64)).sum().backward()
    # bf16 gather and bf16 gradient, summed in fp32 on arrival: widening before sending adds bytes only.
    assert stats(model).sent_nbytes - before == 2 * 64 * 64 * 2 // 2


@on_ranks(2)
def test_a_model_that_is_dropped_is_freed(rank, world):
    model = shard_decoder(build(), fully_shard)
    run = Run.of(model)
    for step in range(2):
        loss_of(model, batches(step, world)[rank]).backward()
        run.step()
    seen = weakref.ref(model), weakref.ref(unit_of(model).runtime), weakref.ref(model.blocks[0].up.weight)
    del model, run
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]


@on_ranks(2)
def test_a_cast_between_a_forward_and_its_backward_is_an_error(rank, world):
    model = shard_decoder(build(), fully_shard)
    tokens = batches(0, world)[rank]
    loss = loss_of(model, tokens)
    model.double()
    with pytest.raises(StageError, match=r"group '.*': between this forward and its backward"):
        loss.backward()
    loss_of(model, tokens).backward()  # the next step is clean
    Run.of(model).step()
