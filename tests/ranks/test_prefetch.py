"""Every schedule policy computes the same, bit for bit; late collectives race with nothing."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from shardwright import SchedulePolicy, fully_shard, set_transport, stats
from shardwright.motion.unit import unit_of
from shardwright.plan.schedule import ActionKind, EventKind, Phase, check
from shardwright.state.group import ParamGroup
from shardwright.state.reducer import Reducer
from shardwright.train.config import ModelConfig, Recipe, ScheduleConfig
from shardwright.train.loop import build_model
from shardwright.train.ranks import Place
from tests.ranks.models import Run, assert_same, batches, build, loss_of, shard_decoder
from tests.ranks.pool import run_ranks

POLICIES = {
    "default": SchedulePolicy(),
    "none": SchedulePolicy(backward_prefetch="none", forward_prefetch=False, keep_last=0),
    "post": SchedulePolicy(backward_prefetch="post"),
    "deep": SchedulePolicy(depth=3, max_reductions=4, keep_last=2),
    "bounded": SchedulePolicy(depth=3, budget_nbytes=4000, max_gathers=1, max_reductions=1),
}


def trained(rank, world, policy, transport="auto"):
    """Losses and shards after three steps."""
    set_transport(transport)
    model = shard_decoder(build(num_blocks=4), fully_shard)
    model.set_schedule_policy(policy)
    run, losses = Run.of(model), []
    for step in range(3):
        loss = loss_of(model, batches(step, world)[rank])
        loss.backward()
        run.step()
        losses.append(loss.item())
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    return losses, [p.detach().to_local().numpy().tobytes() for p in model.parameters()], stats(model)


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
        Reducer.reduce = late(Reducer.reduce)
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


def explicit_lists(rank, world):
    model = shard_decoder(build(num_blocks=4), fully_shard)
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
        return [a.group for a in stop.actions if a.kind is ActionKind.UNSHARD and a.group != index[block]]

    assert issued(Phase.FORWARD, EventKind.FORWARD_BEGIN, first) == [index[second], index[third]]
    assert issued(Phase.BACKWARD, EventKind.BACKWARD_BEGIN, fourth) == [index[second]]
    first.set_modules_to_forward_prefetch([])
    schedule = model.schedule()
    assert issued(Phase.FORWARD, EventKind.FORWARD_BEGIN, first) == [index[second]]


def test_listed_modules_are_gathered_ahead_instead_of_the_next():
    run_ranks(2, explicit_lists)


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
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    ours, theirs = Run.of(model), Run.of(reference)
    group = unit_of(model).runtime.groups.index(unit_of(model[0]).group)
    for step in range(4):
        tokens = torch.randint(0, 11, (world, 2, 5), generator=torch.Generator().manual_seed(step))
        loss_with_penalty(model, tokens[rank]).backward()
        torch.stack([loss_with_penalty(reference, rows) for rows in tokens]).mean().backward()
        ours.step()
        theirs.step()
        assert_same(model, reference)
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    stops = [stop for phase in model.schedule().phases.values() for stop in phase]
    return sum(action == (ActionKind.UNSHARD, group) for stop in stops for action in stop.actions)


def test_the_backward_of_a_lookup_gathers_nothing():
    assert run_ranks(2, lookup, nn.Embedding) == [1, 1]
    assert run_ranks(2, lookup, Scaled) == [2, 2]
    assert run_ranks(2, lookup, Penalised) == [2, 2]


def train_recipe(rank, world, schedule):
    """The first losses of ``shardwright train``'s model under a recipe's schedule."""
    size = ModelConfig(num_layers=2, dim=16, num_heads=2, hidden_dim=24)
    recipe = Recipe(model=size, schedule=ScheduleConfig(**schedule))
    place = Place(rank, world, torch.device("cpu"), init_device_mesh("cpu", (world,)))
    model = build_model(recipe, place)
    assert unit_of(model).runtime.policy == recipe.schedule.policy()
    run, losses = Run.of(model), []
    for step in range(3):
        tokens = batches(step, world)[rank]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        run.step()
        losses.append(loss.item())
    return losses, type(unit_of(model.blocks[0]).group.axis.comm).__name__


def test_a_recipe_chooses_schedule_and_transport_and_no_loss_changes():
    least = {"backward_prefetch": "none", "forward_prefetch": False, "keep_last": 0, "max_reductions": 1}
    default = run_ranks(2, train_recipe, {})
    others = run_ranks(2, train_recipe, {**least, "transport": "sockets"})
    assert [losses for losses, _ in others] == [losses for losses, _ in default]
    assert {comm for _, comm in default} == {"ShmComm"}
    assert {comm for _, comm in others} == {"GlooComm"}
