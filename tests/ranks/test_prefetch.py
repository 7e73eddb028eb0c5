"""Every schedule policy computes the same, bit for bit; late collectives race with nothing."""

import copy
import time
from collections import Counter

import pytest
import torch
from torch import nn

import shardwright
from shardwright import SchedulePolicy, fully_shard, set_transport, stats
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.groups.reducer import Reducer
from shardwright.engine.unit import unit_of
from shardwright.recipe.config import ModelConfig, Recipe, ScheduleConfig
from shardwright.schedule.check import check
from shardwright.schedule.schedule import ActionKind, EventKind, Phase
from shardwright.train.eager import build_model
from shardwright.train.ranks import RankPlace
from tests.ranks import quantised
from tests.ranks.models import Run, batches, both_step, build, loss_of, shard_decoder, sharded, train_by
from tests.ranks.pool import on_ranks, run_ranks

POLICIES = {
    "default": SchedulePolicy(),
    "none": SchedulePolicy(backward_prefetch="none", forward_prefetch=False, keep_last=0),
    "post": SchedulePolicy(backward_prefetch="post"),
    "deep": SchedulePolicy(depth=3, max_reductions=4, keep_last=2),
    "bounded": SchedulePolicy(depth=3, budget_nbytes=4000, max_reductions=1),
    "apart": SchedulePolicy(bucket_cap_mb=0),
    "in pairs": SchedulePolicy(bucket_cap_mb=2 * 3000 / 2**20, keep_last=3),
}


def trained(rank, world, policy, transport="auto"):
    """Losses and shards after three steps."""
    set_transport(transport)
    model = shard_decoder(build(num_blocks=4), fully_shard)
    model.set_schedule_policy(policy)
    losses = train_by(Run.of(model), (loss_of(model, batches(step, world)[rank]) for step in range(3)))
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    return losses, [p.detach().to_local().numpy().tobytes() for p in model.parameters()], stats(model)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_losses_and_weights_are_the_same_bit_for_bit_with_every_policy(world):
    runs = {name: run_ranks(world, trained, policy) for name, policy in POLICIES.items()}
    runs["sockets"] = run_ranks(world, trained, SchedulePolicy(), "sockets")
    for rank in range(world):
        for name, run in runs.items():
            assert run[rank][:2] == runs["default"][rank][:2], name
    peaks = {name: run[0][2].peak_unsharded_nbytes for name, run in runs.items()}
    assert peaks["none"] < peaks["default"] <= peaks["deep"]


def delayed(rank, world, place, transport):
    """The same, with one rank late after the loss, or before every reduce-scatter or reshard."""

    def late(original):
        def call(*args, **kwargs):
            time.sleep(0.02 * (rank == 0))
            return original(*args, **kwargs)

        return call

    if place == "reduce":
        Reducer.inputs = late(Reducer.inputs)
    elif place == "reshard":
        ParamGroup.reshard = late(ParamGroup.reshard)
    else:
        torch.Tensor.backward = late(torch.Tensor.backward)
    return trained(rank, world, SchedulePolicy(), transport)[:2]


@pytest.mark.parametrize("transport", ["auto", "sockets"])
@pytest.mark.parametrize("place", ["loss", "reduce", "reshard"])
def test_a_late_rank_changes_nothing(place, transport):
    expected = [result[:2] for result in run_ranks(2, trained, SchedulePolicy())]
    assert run_ranks(2, delayed, place, transport) == expected


@on_ranks(2)
def test_listed_modules_are_gathered_ahead_instead_of_the_next(rank, world):
    model = shard_decoder(build(num_blocks=4), fully_shard)
    apart = SchedulePolicy(bucket_cap_mb=0)
    model.set_schedule_policy(apart)
    first, second, third, fourth = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    fourth.set_modules_to_backward_prefetch([second])
    run = Run.of(model)
    for step in range(2):
        loss_of(model, batches(step, world)[rank]).backward()
        run.step()
    schedule = model.schedule()
    check(schedule)
    index = {block: unit_of(model).runtime.groups.index(unit_of(block).group) for block in model.blocks}

    def issued(phase, kind, block):
        stop = next(s for s in schedule.phases[phase] if s.event == (kind, index[block]))
        gathered = [g for a in stop.actions if a.kind is ActionKind.UNSHARD for g in a.groups]
        return [group for group in gathered if group != index[block]]

    assert issued(Phase.FORWARD, EventKind.FORWARD_BEGIN, first) == [index[second], index[third]]
    assert issued(Phase.BACKWARD, EventKind.BACKWARD_BEGIN, fourth) == [index[second]]
    first.set_modules_to_forward_prefetch([])
    schedule = model.schedule()
    assert issued(Phase.FORWARD, EventKind.FORWARD_BEGIN, first) == [index[second]]


def loss_with_penalty(model, tokens):
    return model(tokens).square().mean() + getattr(model[0], "penalty", 0.0)


class Scaled(nn.Embedding):
    """A lookup whose backward reads the weight all the same."""

    def forward(self, tokens):
        return super().forward(tokens) * self.weight[0]


class Penalised(nn.Embedding):
    """A lookup beside which something is computed from the weight that its output doesn't show."""

    def forward(self, tokens):
        self.penalty = self.weight.square().mean()
        return super().forward(tokens)


def lookup(rank, world, kind):
    """Losses and gathers per step of a model whose embedding is a group that is freed after its forward."""
    torch.manual_seed(3)
    model = nn.Sequential(kind(11, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    reference = copy.deepcopy(model)
    sharded(model, reshard_after_forward=True)
    ours, theirs = Run.of(model), Run.of(reference)
    group = unit_of(model).runtime.groups.index(unit_of(model[0]).group)
    for step in range(4):
        tokens = torch.randint(0, 11, (world, 2, 5), generator=torch.Generator().manual_seed(step))
        loss_with_penalty(model, tokens[rank]).backward()
        torch.stack([loss_with_penalty(reference, rows) for rows in tokens]).mean().backward()
        both_step(ours, theirs)
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    stops = [stop for phase in model.schedule().phases.values() for stop in phase]
    return sum(a.kind is ActionKind.UNSHARD and group in a.groups for stop in stops for a in stop.actions)


def test_the_backward_of_a_lookup_gathers_nothing():
    assert run_ranks(2, lookup, nn.Embedding) == [1, 1]
    assert run_ranks(2, lookup, Scaled) == [2, 2]
    assert run_ranks(2, lookup, Penalised) == [2, 2]


class Tiny(nn.Module):
    """Residual layers of a few bytes, more than one of them in float64, with a large one in the middle."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))
        self.layers[num_layers // 2] = nn.Sequential(nn.Linear(6, 90_000), nn.Linear(90_000, 6))
        for layer in self.layers[1::7]:
            layer.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(next(layer.parameters()).dtype))).float()
        return x


def count_collectives(comm, counts):
    """Count a transport's all-gathers and reduce-scatters from now on."""
    for kind in ("all_gather", "reduce_scatter"):
        inner = getattr(comm, kind)

        def counted(*args, kind=kind, inner=inner):
            counts[kind] += not args[-1].startswith("agreement ")
            return inner(*args)

        setattr(comm, kind, counted)


def tiny_groups(rank, world, num_layers, transport, cap_mb):
    """Collectives of one step of a model of tiny groups, its losses and its shards."""
    set_transport(transport)
    model = Tiny(num_layers)
    sharded(model, model.layers).set_schedule_policy(SchedulePolicy(bucket_cap_mb=cap_mb))
    counts = Counter()

    def loss(step):
        if step == 2:
            count_collectives(unit_of(model.layers[0]).group.gatherer.comm, counts)
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(3, 6, generator=generator)).square().mean()

    losses = train_by(Run.of(model), map(loss, range(3)))
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    return counts, losses, [p.detach().to_local().numpy().tobytes() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "transport"), [(2, "auto"), (3, "sockets"), (2, "collectives")])
def test_a_model_of_200_tiny_groups_needs_a_handful_of_collectives(world, transport):
    apart = run_ranks(world, tiny_groups, 200, transport, 0)
    shared = run_ranks(world, tiny_groups, 200, transport, 1.0)
    for alone, together in zip(apart, shared, strict=True):
        assert alone[1:] == together[1:]
        # Each group but the last is gathered twice.
        assert alone[0] == {"all_gather": 399, "reduce_scatter": 200}
        # Forward and backward: the first group, what lies before the large one, it, what lies behind it.
        assert together[0]["all_gather"] <= 8
        assert together[0]["reduce_scatter"] == 2


@on_ranks(2)
def test_held_gradients_of_a_failed_backward_are_forgotten(rank, world):
    """Gradients that are held back when a backward fails are forgotten with it."""
    model, reference = Tiny(5), Tiny(5)
    ours, theirs = Run.of(sharded(model, model.layers)), Run.of(reference)
    inputs = torch.randn(world, 3, 6, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        first = model.layers[0].register_full_backward_hook(lambda *_: 1 / 0) if step == 1 else None
        loss = model(inputs[rank].requires_grad_()).square().mean()
        if first is not None:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            first.remove()
            continue
        loss.backward()
        torch.stack([reference(rows).square().mean() for rows in inputs]).mean().backward()
        both_step(ours, theirs)


class Once:
    """Calls ``method``; the call after ``number`` others raises, before it has run or after it."""

    def __init__(self, method, number, before):
        self.method, self.left, self.before = method, number, before

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == -1 and self.before:
            raise RuntimeError("on purpose")
        result = self.method(*args, **kwargs)
        if self.left == -1:
            raise RuntimeError("on purpose")
        return result


@pytest.mark.parametrize("agreement", ["strict", "off"])
@on_ranks(2)
def test_a_step_after_one_that_could_not_gather_or_decode_is_a_clean_one(rank, world, agreement):
    """Steps after one in which a gather can't be launched, or what it brought can't be decoded."""

    def check(model, loss, owner, name, before):
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each.set_schedule_policy(SchedulePolicy(agreement=agreement, bucket_cap_mb=0))
        ours, theirs = Run.of(model), Run.of(twin)
        for number in range(20):
            for run in (ours, theirs):
                loss(run.model).backward()
                run.step()
            method = getattr(owner, name)
            once = Once(method, number, before)
            setattr(owner, name, once)
            try:
                loss(model).backward()
            except RuntimeError as error:
                assert str(error) == "on purpose"
            setattr(owner, name, method)
            ours.optimizer.zero_grad()
            groups = unit_of(model).runtime.groups
            assert stats(model).unsharded_nbytes == sum(group.held_nbytes for group in groups)
            if once.left >= 0:
                break
        assert number > 1
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.to_local(), other.to_local())

    model = shard_decoder(build(), fully_shard)
    check(
        model,
        lambda m: loss_of(m, batches(0, world)[rank]),
        unit_of(model).group.gatherer.comm,
        "all_gather",
        True,
    )
    for before in (True, False):
        model = quantised.shard(quantised.build())
        x = torch.ones(2, quantised.COLS)
        decoding = unit_of(model[0]).group.gatherer.decoding
        check(model, lambda m: m(x).square().mean(), decoding, "arrive", before)  # noqa: B023


def accumulated(rank, world, cap_mb):
    """Shards after accumulating over microbatches, with and without communication, in buckets."""
    model = shard_decoder(build(), fully_shard)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=cap_mb))
    run = Run.of(model)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model.set_is_last_backward(step % 2 == 1)
        loss_of(model, batches(step, world)[rank]).backward()
        if step % 2:
            run.step()
    model.set_requires_gradient_sync(True)
    for step in range(4):
        model.set_is_last_backward(step % 2 == 1)
        loss_of(model, batches(step, world)[rank]).backward()
        if step % 2:
            run.step()
    return [p.detach().to_local().numpy().tobytes() for p in model.parameters()]


def test_accumulating_gradients_is_the_same_in_buckets():
    assert run_ranks(2, accumulated, 0) == run_ranks(2, accumulated, 1.0)


def train_recipe(rank, world, schedule):
    """The first losses of ``shardwright train``'s model under a recipe's schedule."""
    size = ModelConfig(num_layers=2, dim=16, num_heads=2, hidden_dim=24)
    recipe = Recipe(model=size, schedule=ScheduleConfig(**schedule))
    place = RankPlace(rank, world, torch.device("cpu"), shardwright.mesh())
    model = build_model(recipe, place)
    assert unit_of(model).runtime.policy == recipe.schedule.policy()
    losses = train_by(Run.of(model), (loss_of(model, batches(step, world)[rank]) for step in range(3)))
    return losses, type(unit_of(model.blocks[0]).group.axis.comm).__name__


def test_a_recipe_chooses_schedule_and_transport_and_no_loss_changes():
    least = {"backward_prefetch": "none", "forward_prefetch": False, "keep_last": 0, "max_reductions": 1}
    default = run_ranks(2, train_recipe, {})
    others = run_ranks(2, train_recipe, {**least, "transport": "sockets"})
    assert [losses for losses, _ in others] == [losses for losses, _ in default]
    assert {comm for _, comm in default} == {"ShmComm"}
    assert {comm for _, comm in others} == {"SocketComm"}
