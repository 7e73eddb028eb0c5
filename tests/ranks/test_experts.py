"""Top-k routed experts, expert-parallel over a mesh axis: examples/experts.py beside one process."""

import argparse
import copy
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import shardwright
from examples import experts as example
from shardwright import (
    SchedulePolicy,
    checkpoint,
    clip_grad_norm_,
    expert_parallel,
    full_state_dict,
    fully_shard,
)
from shardwright.errors import InputError
from shardwright.parallel import tokens_per_expert
from shardwright.wrapper import FSDP
from tests.ranks.models import Run, both_step, full, mean_over_ranks
from tests.ranks.pool import on_ranks, run_ranks

STEPS = 4
TOLERANCE = 1e-12


def build(num=6) -> example.Model:
    torch.manual_seed(3)
    return example.Model(width=5, num=num).double()


def sharded_on(shape, api, make=build) -> nn.Module:
    """A model whose experts are sharded over the first axis of a mesh, and distributed over its second."""
    return example.APIS[api](make(), shardwright.mesh(ep=shape[1]))


def texts(step, world):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 256, (world, 2, 7), generator=generator)


def send_to_the_first(model, only_first):
    """Choose the first two experts for every token, or leave it to the router."""
    for block in model.blocks:
        block.routed.bias.zero_()
        block.routed.bias[:2] = 2.0 * only_first


def train_beside(ours, theirs, rank, world, steps=range(STEPS)):
    """Losses, norms and weights equal those of one process that sees all ranks' texts."""
    model, reference = ours.model, theirs.model
    for step in steps:
        for each in (model, reference):
            send_to_the_first(each, only_first=step % 2)
        text = texts(step, world)
        loss = example.loss_of(model, text[rank])
        loss.backward()
        expected = torch.stack([example.loss_of(reference, rows) for rows in text]).mean()
        expected.backward()
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), atol=TOLERANCE, rtol=TOLERANCE)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        norm_of_one = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(norm, norm_of_one, atol=TOLERANCE, rtol=TOLERANCE)
        both_step(ours, theirs, TOLERANCE)


def trains(rank, world, shape, api, agreement):
    mesh, reference = shardwright.mesh(ep=shape[1]), build()
    model = example.APIS[api](build(), mesh)
    getattr(model, "module", model).set_schedule_policy(SchedulePolicy(agreement=agreement))
    train_beside(Run.of(model), Run.of(reference), rank, world)
    # In steps 1 and 3 all tokens are for the ranks that have the first two experts.
    sent = texts(0, world).numel()
    loads = [load.tolist() for load in tokens_per_expert(model, mesh).values()]
    assert loads == [[sent, sent, 0, 0, 0, 0]] * 2
    weights = full_state_dict(model)
    assert bool(weights) == (rank == 0)
    for name, value in weights.items():
        torch.testing.assert_close(value, reference.state_dict()[name], atol=TOLERANCE, rtol=TOLERANCE)
    return model.blocks[0].routed.experts.up.to_local().shape[0]


@pytest.mark.sampled
@pytest.mark.parametrize("agreement", ["off", "strict"])
@pytest.mark.parametrize("api", list(example.APIS))
@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (2, 2)], ids=str)
def test_routed_experts_train_as_in_one_process_also_where_a_rank_gets_no_tokens(shape, api, agreement):
    held = run_ranks(shape[0] * shape[1], trains, shape, api, agreement)
    assert sum(held) == 6, "every expert is on one rank"


@pytest.mark.parametrize("api", list(example.APIS))
@pytest.mark.slow
@on_ranks(4)
def test_recomputed_experts_exchange_their_tokens_again_in_the_same_order_on_all_ranks(rank, world, api):
    model = sharded_on((2, 2), api)
    for block in model.blocks:
        inner = getattr(block, "module", block)
        inner.routed.forward = partial(recompute, inner.routed.forward, use_reentrant=False)
    train_beside(Run.of(model), Run.of(build()), rank, world)


def saves(rank, world, folder, api):
    ours, theirs = Run.of(sharded_on((2, 2), api)), Run.of(build())
    train_beside(ours, theirs, rank, world, range(2))
    checkpoint.save(folder, model=ours.model, optimizer=ours.optimizer, step=2)
    return theirs.model.state_dict(), theirs.optimizer.state_dict()


def resumes(rank, world, folder, shape, api, saved):
    ours, theirs = Run.of(sharded_on(shape, api)), Run.of(build())
    checkpoint.load(folder, model=ours.model, optimizer=ours.optimizer)
    theirs.model.load_state_dict(saved[0])
    theirs.optimizer.load_state_dict(saved[1])
    train_beside(ours, theirs, rank, world, range(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("api", list(example.APIS))
def test_a_checkpoint_of_experts_is_resumed_by_ranks_that_share_them_otherwise(api, tmp_path):
    saved = run_ranks(4, saves, tmp_path, api)[0]
    for shape in ((1, 3), (3, 1), (1, 1)):
        run_ranks(shape[0] * shape[1], resumes, tmp_path, shape, api, saved)


@pytest.mark.slow
@on_ranks(4)
def test_whole_state_dicts_of_the_wrapper_have_every_expert_and_load_into_another_mesh(rank, world):
    ours, theirs = Run.of(sharded_on((2, 2), "wrapper")), Run.of(build())
    train_beside(ours, theirs, rank, world, range(2))
    state, moments = ours.model.state_dict(), FSDP.optim_state_dict(ours.model, ours.optimizer)["state"]
    for name, param in theirs.model.named_parameters():
        kept = theirs.optimizer.state[param]["momentum_buffer"]
        for found, expected in ((state[name], param.detach()), (moments[name]["momentum_buffer"], kept)):
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
    other = Run.of(sharded_on((1, 4), "wrapper", partial(build, num=8)))
    ours = Run.of(sharded_on((2, 2), "wrapper", partial(build, num=8)))
    ours.model.load_state_dict(other.model.state_dict())
    for one, two in zip(ours.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(full(one), full(two))


def runs_example(rank, world, api):
    return example.run(argparse.Namespace(api=api, ep=None, steps=60, rows=4, length=32, lr=0.01, out=None))


@pytest.mark.parametrize("api", list(example.APIS))
def test_the_example_learns_and_the_collected_model_has_the_loss_of_the_ranks(api):
    (sharded, plain), (other, _) = run_ranks(2, runs_example, api)
    assert sharded == pytest.approx(plain, abs=1e-5)
    assert sharded == pytest.approx(other, abs=1e-5)
    assert sharded < 3.0, "an untrained model has 5.5"


class Listed(nn.Module):
    """Experts in a list, of a user's own."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)) for _ in range(4)
        )

    def forward(self, x, experts, weights):
        said = torch.zeros_like(x)
        for number, expert in enumerate(self.each):
            token, place = torch.where(experts == number)
            said = said.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return said


def with_listed():
    model = build(num=4)
    for block in model.blocks:
        block.routed.experts = Listed().double()
    return model


def trains_listed(rank, world, sizes):
    mesh, reference = shardwright.mesh(**sizes), with_listed()
    model = expert_parallel(copy.deepcopy(reference), mesh, experts=Listed)
    model = fully_shard(copy.deepcopy(model), mesh=mesh.shard, groups="auto")
    model.set_gradient_averaging("average")  # experts' too: not over the ranks of their own mesh alone
    stacked = expert_parallel(reference, dataclasses.replace(mesh, ep=None), experts=Listed)
    train_beside(Run.of(model), Run.of(stacked), rank, world)
    weights = full_state_dict(model)
    return {name: tuple(weights[name].shape) for name in weights if "blocks.0.routed.experts" in name}


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (2, {"ep": 2}), (4, {"ep": 2})], ids=str)
def test_experts_in_a_list_are_stacked_and_train_as_in_one_process(world, sizes):
    x, index, weights = torch.randn(9, 5), torch.randint(4, (9, 2)), torch.rand(9, 2)
    plain, place = Listed(), "blocks.0.routed.experts.each."
    expected = plain(x, index, weights)
    found = expert_parallel(plain, SimpleNamespace(ep=None), experts=Listed)(x, index, weights)
    torch.testing.assert_close(found, expected)
    shapes = {"0.weight": (4, 7, 5), "0.bias": (4, 7), "2.weight": (4, 5, 7), "2.bias": (4, 5)}
    assert run_ranks(world, trains_listed, sizes)[0] == {
        place + name: shape for name, shape in shapes.items()
    }


class Scaled(example.Experts):
    """With one argument more."""

    def forward(self, hidden_states, top_k_index, top_k_weights, scale=1.0):
        return scale * super().forward(hidden_states, top_k_index, top_k_weights)


def test_an_argument_that_would_not_travel_with_the_tokens_is_refused():
    given = torch.ones(3, 5), torch.ones(3, 1, dtype=torch.int64), torch.ones(3, 1)
    model = expert_parallel(Scaled(4, 5, 5), SimpleNamespace(ep=None))
    assert model(*given).shape == (3, 5)
    with pytest.raises(InputError, match=r"Scaled was called with hidden_states, top_k_index, .*, scale,"):
        model(*given, scale=2.0)


class Refused(nn.Module):
    """With a weight that is no expert's."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.up, self.scale = 4, nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5))

    def forward(self, hidden_states, top_k_index, top_k_weights): ...


@on_ranks(2)
def test_experts_that_can_not_be_distributed_are_refused_and_left_as_they_are(rank, world):
    mesh = shardwright.mesh(ep=2)
    for model, message in [
        (
            nn.Linear(2, 2),
            "Linear has no module whose forward takes hidden_states, top_k_index, top_k_weights;",
        ),
        (nn.Sequential(build(), Refused()), r"1 holds scale, expected weights of \[4, ...\] only"),
        (
            nn.Sequential(build(), build(num=5)),
            "ep=2 doesn't divide the 5 experts of 1.blocks.0.routed.experts",
        ),
        (fully_shard(build()), "blocks.0.routed.experts is sharded already; call expert_parallel before"),
        (expert_parallel(build(), mesh), "blocks.0.routed.experts is expert-parallel already"),
    ]:
        before = [(name, id(param)) for name, param in model.named_parameters()]
        with pytest.raises(InputError, match=message):
            expert_parallel(model, mesh)
        assert before == [(name, id(param)) for name, param in model.named_parameters()]
    with pytest.raises(InputError, match="tokens_per_expert: call expert_parallel on Linear first"):
        tokens_per_expert(nn.Linear(2, 2), mesh)
