"""Stepping inside of the backward is stepping after it, bit for bit, or is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwright import SchedulePolicy, StepInBackward, clip_grad_norm_, fully_shard
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError, StageError
from shardwright.schedule.check import check
from shardwright.schedule.schedule import ActionKind, EventKind, Phase, Schedule
from tests.ranks.models import batches, build, loss_of, shard_decoder
from tests.ranks.pool import on_ranks, run_ranks

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def trained(rank, world, name, in_backward, shape=None, accumulate=""):
    """Shards after three steps, of one or of two microbatches."""
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    model = shard_decoder(build(), fully_shard, mesh=mesh)
    if in_backward:
        StepInBackward(model, OPTIMIZERS[name])
    plain = None if in_backward else OPTIMIZERS[name](model.parameters())
    for step in range(6):
        last = not accumulate or step % 2 == 1
        if accumulate:
            model.set_requires_gradient_sync(last)
        loss_of(model, batches(step, world)[rank]).backward()
        if plain is not None and last:
            plain.step()
            plain.zero_grad()
        assert not last or all(param.grad is None for param in model.parameters())
    return [param.detach().to_local().numpy().tobytes() for param in model.parameters()]


@pytest.mark.parametrize(
    ("world", "name", "shape", "accumulate"),
    [
        (1, "adamw", None, ""),
        (2, "adamw", None, ""),
        (2, "sgd", None, "unsharded"),
        (3, "sgd", None, ""),
        (4, "sgd", (2, 2), "unsharded"),
    ],
)
def test_stepping_in_the_backward_equals_stepping_after_it_bit_for_bit(world, name, shape, accumulate):
    after, inside = (run_ranks(world, trained, name, way, shape, accumulate) for way in (False, True))
    assert after == inside


@on_ranks(2)
def test_a_parameter_steps_as_soon_as_its_reduction_has_landed(rank, world):
    """Where the backward stands as each parameter steps, and that nothing steps any more after remove()."""
    model = shard_decoder(build(), fully_shard)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0, max_reductions=1))
    left = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            left.append(sum(group.has_grads for group in unit_of(model).runtime.groups))
            assert unit_of(model).runtime.phase is Phase.BACKWARD
            return super().step(closure)

    stepping = StepInBackward(model, lambda params: Noted(params, lr=0.1))
    assert list(stepping.optimizers) == [name for name, _ in model.named_parameters()]
    loss_of(model, batches(0, world)[rank]).backward()
    assert len(left) == len(stepping.optimizers)
    with pytest.raises(InputError, match="stepped in the backward already"):
        StepInBackward(model, OPTIMIZERS["sgd"])
    with pytest.raises(StageError, match="stepped these parameters already"):
        clip_grad_norm_(model.parameters(), 1.0)
    stepping.remove()
    loss_of(model, batches(1, world)[rank]).backward()
    assert len(left) == len(stepping.optimizers)
    assert clip_grad_norm_(model.parameters(), 1.0) > 0
    # One reduction in flight: two blocks have stepped while the root, whose embedding comes last, holds some.
    early_ones = left[: sum(len(list(block.parameters())) for block in model.blocks[1:])]
    assert min(early_ones) >= 1
    assert left[-1] == 0


@pytest.mark.parametrize("agreement", ["strict", "off"])
@pytest.mark.parametrize(("world", "shape"), [(2, None), (4, (2, 2))])
@on_ranks()
def test_the_schedule_says_where_each_group_steps_and_the_trace_that_it_did(rank, world, shape, agreement):
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    model = shard_decoder(build(), fully_shard, mesh=mesh)
    policy = SchedulePolicy(bucket_cap_mb=0, max_reductions=1, agreement=agreement)
    model.set_schedule_policy(policy)
    stepping = StepInBackward(model, OPTIMIZERS["sgd"])
    for step in range(3):
        loss_of(model, batches(step, world)[rank]).backward()
    assert model.trace().schedule() == model.schedule()
    check(model.schedule())
    schedule = model.schedule()
    assert Schedule.parse(str(schedule), schedule.names) == schedule
    named = {
        kind: [
            group
            for stop in model.schedule().phases[Phase.BACKWARD]
            if (stop.event.kind is EventKind.STEP_END) == kind
            for action in stop.actions
            if action.kind is ActionKind.STEP
            for group in action.groups
        ]
        for kind in (False, True)
    }
    stepping.remove()
    loss_of(model, batches(3, world)[rank]).backward()
    assert "step" not in str(model.schedule())
    early_ones, late_ones, num_groups = named[False], named[True], len(unit_of(model).runtime.groups)
    assert sorted(early_ones + late_ones) == list(range(num_groups))
    # Sums over copies of the model are complete at the end only; one reduction is in flight until then.
    assert len(late_ones) == (1 if shape is None else num_groups)


@on_ranks(2)
def test_what_a_failed_backward_left_due_is_dropped(rank, world):
    """A backward that raises steps nothing that had landed, neither then nor in the next one."""
    model = shard_decoder(build(), fully_shard)
    model.set_schedule_policy(SchedulePolicy(agreement="off"))
    stepping = StepInBackward(model, OPTIMIZERS["sgd"])
    runtime = unit_of(model).runtime
    steps = dict.fromkeys(stepping.optimizers, 0)
    for name, optimizer in stepping.optimizers.items():
        optimizer.register_step_post_hook(lambda *_, name=name: steps.update({name: steps[name] + 1}))
    runtime.executor.pending_steps[0] = {lambda: pytest.fail("a step of a backward that was cut short"): None}
    runtime.abandon()
    loss_of(model, batches(0, world)[rank]).backward()
    assert set(steps.values()) == {1}


class Shared(torch.nn.Module):
    """A layer that two reentrant checkpoints share: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 5)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def reduced_twice(rank, world):
    model = Shared()
    fully_shard(model.layer)
    fully_shard(model)
    StepInBackward(model, OPTIMIZERS["sgd"])
    with pytest.raises(StageError, match="reduced twice in one backward"):
        model(torch.ones(2, 5, requires_grad=True)).sum().backward()


def reduced_in_two_backwards(rank, world, max_reductions):
    """Refused before anything is stepped, whether a part lands in the first backward or in the second one."""
    model = shard_decoder(build(), fully_shard)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0, max_reductions=max_reductions))
    before = [param.detach().to_local().clone() for param in model.parameters()]
    StepInBackward(model, OPTIMIZERS["sgd"])
    with pytest.raises(StageError, match="accumulate with set_requires_gradient_sync"):
        for last in (False, True):
            model.set_is_last_backward(last)
            loss_of(model, batches(0, world)[rank]).backward()
    model.reset_iter_state()
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.slow
def test_a_gradient_that_comes_in_two_parts_is_refused():
    run_ranks(2, reduced_twice)
    run_ranks(2, reduced_in_two_backwards, 1)
    run_ranks(2, reduced_in_two_backwards, 8)
