"""Ranks that use different parts of a model train as one process does, and launch the same collectives."""

import random
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardwright import FSDPModule, MixedPrecisionPolicy, SchedulePolicy, fully_shard
from shardwright.engine.step.consensus import Consensus
from shardwright.engine.unit import unit_of
from shardwright.errors import Diverged, InputError, StageError
from shardwright.schedule import recorded
from shardwright.schedule.sync import Synchronize, SyncPoint
from shardwright.wrapper import FSDP, ModuleWrapPolicy
from tests.ranks.models import Run, assert_same_grads, both_step, sharded, twins
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.routes import Log, Part, Step, built, inputs, loss_of, train_beside_one_process

STEPS = 6
ALL = ("a", "b", "c")


def same(rank, world, step):
    return Step((ALL,))


def skips_in_turn(rank, world, step):
    return Step((("a", "c") if (step + rank) % world == 0 else ALL,))


def nobody(rank, world, step):
    return Step((ALL if step % 3 == 0 else ("a", "c"),))


def any_subset(rank, world, step):
    draw = random.Random(100 * step + rank)
    return Step((tuple(name for name in ALL if draw.random() < 0.5),))


def late(rank, world, step):
    return Step((ALL if step >= 3 and (step + rank) % 2 else ("a", "c"),))


def other_order(rank, world, step):
    return Step((ALL if rank % 2 == 0 else ALL[::-1],))


def shared_layers(rank, world, step):
    return Step((("a", "b", "a", "b") if rank % 2 == 0 else ("a", "c", "b"),))


def detached(rank, world, step):
    return Step((ALL,), detached=("b",) if (step + rank) % 2 else ())


def own_parameter(rank, world, step):
    return Step((("a", "b+" if step % 3 != 0 and rank == step % world else "b"),))


def everything(rank, world, step):
    draw = random.Random(100 * step + rank)
    routes = [tuple(draw.sample(ALL, draw.randint(0, 3))) for _ in range(4)]
    detached = tuple(draw.sample(ALL, 1))
    return Step(tuple(routes[:2]), tuple(routes[2:] * 2)[: 2 + rank], detached, draw.random() * 2e-3)


PLANS = (
    same,
    skips_in_turn,
    nobody,
    any_subset,
    late,
    other_order,
    shared_layers,
    detached,
    own_parameter,
    everything,
)
STRICT = SchedulePolicy(agreement="strict")
PREFETCH = {
    "none": replace(STRICT, backward_prefetch="none", forward_prefetch=False, keep_last=0, bucket_cap_mb=0),
    "pre": STRICT,
    "post": replace(STRICT, backward_prefetch="post", depth=2, bucket_cap_mb=0),
}


def by_fully_shard(**options):
    model = built()
    sharded(model, model.parts.values(), **options).set_schedule_policy(STRICT)
    return model


def by_wrapper():
    return FSDP(built(), auto_wrap_policy=ModuleWrapPolicy({Part}))


def exactness(rank, world, make, prefetch, plans=PLANS):
    for plan in plans:
        model = make()
        model.set_schedule_policy(PREFETCH[prefetch])
        asked = train_beside_one_process(model, plan, rank, world, STEPS)
        assert asked[0] > 0, plan.__name__
        if plan not in (any_subset, everything):  # those may go a new way in any step
            assert asked[-1] == 0, f"{plan.__name__}: {asked}"


@pytest.mark.sampled
@pytest.mark.parametrize("make", [by_fully_shard, by_wrapper])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_every_way_to_skip_is_exact(prefetch, world, make):
    run_ranks(world, exactness, make, prefetch)


@pytest.mark.slow
@on_ranks(4)
def test_copies_post_forward_shards_and_kept_weights_are_exact_under_skips(rank, world):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for plan in (skips_in_turn, any_subset, other_order):
        for options in ({"mesh": grid}, {"reshard_after_forward": 2}, {"reshard_after_forward": False}):
            train_beside_one_process(by_fully_shard(**options), plan, rank, world, STEPS)


@on_ranks(3)
def test_groups_whose_matrices_are_cut_on_the_last_dim_are_exact_under_skips(rank, world):
    make = partial(by_fully_shard, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None)
    exactness(rank, world, make, "pre", (skips_in_turn, any_subset, other_order))


@pytest.mark.slow
@on_ranks(4)
def test_groups_on_two_meshes_are_exact_under_skips(rank, world):
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for plan in (skips_in_turn, any_subset, other_order):
        model = built()
        for part, mesh in zip(model.parts.values(), (flat, grid, flat), strict=True):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=grid).set_schedule_policy(STRICT)
        train_beside_one_process(model, plan, rank, world, STEPS)


@pytest.mark.slow
@on_ranks(2, 3)
def test_groups_inside_of_a_part_that_ranks_skip_are_exact(rank, world):
    for plan in (any_subset, other_order, own_parameter, shared_layers):
        for recomputes in (False, True):
            model = built()
            model.recomputes = recomputes
            for part in model.parts.values():
                sharded(part, [part.linear])  # runs where its part does; what is left is used by "b+" only
            fully_shard(model).set_schedule_policy(STRICT)
            train_beside_one_process(model, plan, rank, world, STEPS)


class Around(nn.Module):
    """Calls a model that isn't its child, as one calls a teacher or a reward model."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).double()
        self.other = [other]

    def forward(self, x: torch.Tensor, route: tuple[str, ...]) -> torch.Tensor:
        return self.linear(self.other[0](x, route))


class Taught(Around):
    """The other model has no backward."""

    def forward(self, x: torch.Tensor, route: tuple[str, ...]) -> torch.Tensor:
        with torch.no_grad():
            taught = self.other[0](x, route)
        return self.linear(taught)


def reduced_between(rank, world):
    """The caller's own collectives, wherever one may want them."""
    model = by_fully_shard()
    for step in range(STEPS):
        plan = everything(rank, world, step)
        for route in plan.forwards:
            with torch.no_grad():
                dist.all_reduce(model(inputs(rank, step), route).sum())
        losses = []
        for route in plan.forwards:
            losses.append(model(inputs(rank, step), route).square().mean())
            dist.all_reduce(losses[-1].detach())
        sum(losses).backward()
        dist.barrier()
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_go_other_ways_meet_again_in_collectives_of_the_callers_own(world):
    assert all(run_ranks(world, reduced_between))


def in_turn(rank, world, step):
    return Step((ALL[step % 3 :],))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("kind", "plan"), [(Around, in_turn), (Taught, any_subset)], ids=["with a backward", "without"]
)
@on_ranks()
def test_a_root_inside_of_another_ones_forward_is_exact(rank, world, kind, plan):
    ours, theirs = kind(by_fully_shard()), kind(built())
    theirs.linear.load_state_dict(ours.linear.state_dict())
    fully_shard(ours)
    for step in range(STEPS):
        ours(inputs(rank, step), plan(rank, world, step).forwards[0]).square().mean().backward()
        losses = [theirs(inputs(r, step), plan(r, world, step).forwards[0]) for r in range(world)]
        torch.stack([loss.square().mean() for loss in losses]).mean().backward()
    for model, whole in ((ours, theirs), (ours.other[0], theirs.other[0])):
        assert_same_grads(model, whole, 1e-10)


@on_ranks(2)
def test_recomputation_is_exact_under_skips(rank, world):
    for plan in (skips_in_turn, any_subset, shared_layers):
        model = by_fully_shard()
        model.recomputes = True
        train_beside_one_process(model, plan, rank, world, STEPS)


class Experts(nn.Module):
    """Each row of the input goes to one expert; one that gets none doesn't run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        rows = [
            expert(x[chosen == number])
            for number, expert in enumerate(self.experts)
            if (chosen == number).any()
        ]
        return torch.cat(rows)


@on_ranks(2, 3)
def test_an_expert_without_tokens_on_some_ranks_is_exact(rank, world):
    model, reference = twins(lambda: Experts().double())
    sharded(model, model.experts).set_schedule_policy(STRICT)
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(STEPS):
        ours.model(inputs(rank, step)).square().sum().backward()
        sums = [theirs.model(inputs(r, step)).square().sum() for r in range(world)]
        torch.stack(sums).mean().backward()
        both_step(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [(MixedPrecisionPolicy(), 1e-12), (MixedPrecisionPolicy(torch.bfloat16, torch.float32), 5e-2)],
    ids=["float64", "bf16 reduced in fp32"],
)
@on_ranks(2)
def test_what_some_ranks_accumulated_is_reduced_by_all(rank, world, precision, tolerance):
    model = by_fully_shard(mp_policy=precision)
    reference = built()
    routes = [[("a", "b"), ("a",)], [("c",), ("a",)]]  # the second time nobody uses b or c
    for step, number in product(range(2), range(2)):
        model.set_requires_gradient_sync(number == 1)
        loss_of(model, Step((routes[rank][number],)), rank, 10 * step + number).backward()
        for r, route in enumerate(routes):
            (loss_of(reference, Step((route[number],)), r, 10 * step + number) / world).backward()
    assert_same_grads(model, reference, tolerance)


@on_ranks(2, 3)
def test_ranks_may_evaluate_different_numbers_of_batches(rank, world):
    model = by_fully_shard()
    loss_of(model, Step((ALL,)), rank, 0).backward()
    log, total = Log.of(model), torch.zeros(())
    with torch.no_grad():
        for number in range(2 + 2 * rank):
            total += model(inputs(rank, number), ALL).sum()
    model.join_evaluations()
    dist.all_reduce(total)  # a collective of the caller's own: all ranks are here
    expected = sum(built()(inputs(r, number), ALL).sum() for r in range(world) for number in range(2 + 2 * r))
    torch.testing.assert_close(total.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    log.assert_same_on_all_ranks()
    loss_of(model, Step((ALL,)), rank, 1).backward()


def unsharded_by_hand(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


@on_ranks(2)
def test_ranks_that_have_evaluated_differently_agree_on_the_backward_of_what_was_unsharded_by_hand(rank):
    model = by_fully_shard()
    with torch.no_grad():
        for number in range(rank):
            model(inputs(rank, number), ALL)
    model.join_evaluations()
    unsharded_by_hand(model)
    loss_of(model, Step((ALL,)), rank, 1).backward()


@pytest.mark.parametrize("by_hand", [False, True])
@on_ranks(2)
def test_a_forward_goes_on_after_a_backward_inside_of_it(rank, by_hand):
    model = by_fully_shard()
    if by_hand:
        unsharded_by_hand(model)
    part = model.parts["b"]
    handle = part.register_forward_pre_hook(lambda *_: model.parts["a"](inputs(rank, 1)).sum().backward())
    loss_of(model, Step((("b", "a"),)), rank, 0).backward()
    handle.remove()
    reference = built()
    for r in range(2):
        (reference.parts["a"](inputs(r, 1)).sum() / 2).backward()
        (loss_of(reference, Step((("b", "a"),)), r, 0) / 2).backward()
    assert_same_grads(model.parts["a"], reference.parts["a"])


def diverges(rank, world, how):
    model = by_fully_shard()
    loss_of(model, Step((ALL,)), rank, 0).backward()
    loss = loss_of(model, Step((ALL,)), rank, 1)
    if how == "sync":
        model.set_requires_gradient_sync(rank == 0)
    elif how == "policy":
        model.set_schedule_policy(replace(STRICT, depth=2 + rank))
    elif how == "frozen":
        loss.backward()
        model.parts["a"].requires_grad_(rank == 0)
        loss = loss_of(model, Step((ALL,)), rank, 1)
    with pytest.raises(Diverged, match="different calls") as error:
        if how == "no backward" and rank == 1:
            model(inputs(rank, 2), ALL)
        elif how == "end" and rank == 1:
            model.join_evaluations()
        else:
            loss.backward()
    return str(error.value)


@pytest.mark.parametrize("how", ["no backward", "end", "sync", "policy", "frozen"])
def test_ranks_in_different_calls_are_told_which_and_where(how):
    first, second = run_ranks(2, diverges, how)
    assert first == second
    lines = first.splitlines()
    assert lines[1].startswith("  rank 0: the backward")
    assert lines[2].startswith("  rank 1: ")
    assert all("test_participation.py:" in line for line in lines[1:3])
    theirs = {"no backward": "the forward of ", "end": "join_evaluations"}.get(how, "the backward")
    assert theirs in lines[2]


@on_ranks(2)
def test_a_rank_that_leaves_a_step_of_its_optimizer_out_is_told_at_the_next_forward(rank):
    model = by_fully_shard()
    run = Run.of(model)
    for number in range(3):
        loss_of(model, Step((ALL,)), rank, number).backward()
        other = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        other.step() if rank else None  # of no sharded model
        run.step() if number < 2 or rank else run.optimizer.zero_grad()
    with pytest.raises(Diverged, match=r"rank 0: .*after 2 steps of opt.*\n.*rank 1: .*after 3 steps of opt"):
        model(inputs(rank, 3), ALL)


@on_ranks(2)
def test_no_optimizer_steps_with_a_backward_that_did_not_end_on_all_ranks(rank):
    model = by_fully_shard()
    run = Run.of(model)
    with pytest.MonkeyPatch.context() as patch:
        exchange = Consensus.exchange

        def failing(self, sync):
            if isinstance(sync, Synchronize) and sync.point is SyncPoint.BACKWARD_END:
                raise RuntimeError("the network is gone")
            return exchange(self, sync)

        patch.setattr(Consensus, "exchange", failing)
        with pytest.raises(RuntimeError, match="network is gone"):
            loss_of(model, Step((ALL,)), rank, 0).backward()
    params = run.optimizer.param_groups[0]["params"]
    before = [p.detach().to_local().clone() for p in params]
    with pytest.raises(StageError, match="didn't end on all ranks"):
        run.optimizer.step()
    assert all(torch.equal(p.to_local(), old) for p, old in zip(params, before, strict=True))
    loss_of(model, Step((ALL,)), rank, 0).backward()  # afresh
    run.step()


def idles(rank, world):
    model = by_fully_shard()
    model.set_schedule_policy(replace(STRICT, bucket_cap_mb=0))
    launched = []

    def plan(rank, world, step):
        return Step((("a", "c") if 1 <= step < 7 or (step > 7 and rank == 0) else ALL,))

    log = Log.of(model)
    for step in range(11):
        log.keys.clear()
        log.agreed.clear()
        with mock.patch.object(recorded, "FORGET_AFTER", 3):
            loss_of(model, plan(rank, world, step), rank, step).backward()
        gathers = sum("all-gather parts.b" in key for key in log.keys)
        launched.append((gathers, log.num_asked > 0))
    return launched


def test_what_nobody_uses_any_more_leaves_the_schedule_and_comes_back():
    first, second = run_ranks(2, idles)
    assert first == second
    steps = [gathers for gathers, _ in first]
    assert steps[0] > 0
    assert all(steps[1:4])  # three backwards without it: its bytes still move
    assert not any(steps[4:7])
    assert all(steps[7:])  # rank 1 uses it again, and rank 0 takes part
    assert [asked for _, asked in first] == [True] + 6 * [False] + [True] + 3 * [False]


def used_now_and_then(rank, world, step):
    return Step((("a", "c") if step % 5 or rank == 0 else ALL,), (ALL,) if step == 3 else ())


@on_ranks(2, 3)
def test_what_leaves_the_schedule_and_comes_back_is_exact(rank, world):
    model = by_fully_shard()
    model.set_schedule_policy(STRICT)
    with mock.patch.object(recorded, "FORGET_AFTER", 2):
        train_beside_one_process(model, used_now_and_then, rank, world, 12)


def exchanges(rank, world, agreement):
    model = by_fully_shard()
    model.set_schedule_policy(SchedulePolicy(agreement=agreement))
    loss_of(model, Step((ALL,)), rank, 0).backward()
    log = Log.of(model)
    for step in range(2):
        loss_of(model, Step((ALL,)), rank, step).backward()
    return len(log.agreed), unit_of(model).runtime.schedule


def test_the_environment_says_what_policies_leave_out(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_AGREEMENT", "off")
    assert SchedulePolicy().agreement == "off"
    assert SchedulePolicy(agreement="strict").agreement == "strict"
    monkeypatch.setenv("SHARDWRIGHT_AGREEMENT", "maybe")
    with pytest.raises(InputError, match='"strict" or "off", got \'maybe\''):
        SchedulePolicy()


def test_a_step_exchanges_words_four_times_and_none_alone_or_where_it_is_off():
    assert [count for count, _ in run_ranks(2, exchanges, "strict")] == [8, 8]
    alone, off = run_ranks(1, exchanges, "strict"), run_ranks(2, exchanges, "off")
    assert alone[0][0] == off[0][0] == 0
    assert run_ranks(2, exchanges, "strict")[0][1] == off[0][1]  # and the plan is the same
