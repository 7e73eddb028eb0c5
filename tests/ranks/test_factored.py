"""Optimizers of torch that shards make harder, and torch's replicate around sharded parts."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward

from shardwright import checkpoint, fully_shard
from shardwright.errors import InputError, StageError
from shardwright.optim import Muon, hidden_matrices
from tests.ranks.models import full
from tests.ranks.pool import on_ranks, run_ranks


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def step_both(model, whole, optimizers, rank, world, steps=range(4)):
    """Largest difference of the weights after steps on halves, and on all, of the same rows."""
    for step in steps:
        rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        model(rows.chunk(world)[rank]).square().mean().backward()
        whole(rows).square().mean().backward()
        before = [p.grad for p in model.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
        model.zero_grad()
        whole.zero_grad()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max((full(p) - q).abs().max().item() for p, q in pairs)


def adafactor(rank, world, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
    model = fully_shard(build(), mesh=mesh)
    whole = build()
    make = [torch.optim.Adafactor(m.parameters(), lr=0.05, weight_decay=0.1) for m in (model, whole)]
    begun = step_both(model, whole, make, rank, world, range(2))
    saved = copy.deepcopy(make[0].state_dict())
    make[0] = torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.1)
    make[0].load_state_dict(saved)
    return max(begun, step_both(model, whole, make, rank, world, range(2, 5)))


@pytest.mark.each_case
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.slow
def test_adafactor_over_shards_steps_as_one_process_and_its_state_is_loaded_again(shape):
    world = 3 if shape == (3,) else 4
    assert max(run_ranks(world, adafactor, shape)) < 1e-6


@on_ranks(2)
def test_adafactor_steps_each_parameter_by_name_where_a_rank_lists_them_in_another_order(rank, world):
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whole.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    params = list(model.parameters())
    make = [
        torch.optim.Adafactor(params[::-1] if rank else params, lr=0.05),
        torch.optim.Adafactor(whole.parameters(), lr=0.05),
    ]
    assert step_both(model, whole, make, rank, world) < 1e-6


def muon(rank, world):
    model, whole = (
        fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False))),
        nn.Sequential(nn.Linear(8, 8, bias=False)),
    )
    with model.unsharded(), torch.no_grad():
        whole[0].weight.copy_(model[0].weight)
    optimizers = [torch.optim.Muon(m.parameters(), lr=0.01) for m in (model, whole)]
    with pytest.warns(UserWarning, match=r"torch\.optim\.Muon over shards isn't exact"):
        return step_both(model, whole, optimizers, rank, world)


def test_muon_over_shards_says_that_it_is_not_exact_and_is_near():
    assert max(run_ranks(2, muon)) < 1e-2


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(5, 8, 8, dtype=torch.float64))
        self.head = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, rows):
        return self.head(torch.einsum("bi,eoi->beo", rows.double(), self.up).tanh().sum(1))


def muon_of(model):
    """Muon for the stack, AdamW for the layer."""
    named = dict(model.named_parameters())
    rest = [named["head.weight"], named["head.bias"]]
    return Muon([named["up"]], lr=0.05, ns_dtype="float64", rest=rest, rest_lr=0.05)


def stacks(rank, world, folder):
    model, whole = fully_shard(Stacked()), Stacked()
    assert "up" in hidden_matrices(model)
    with pytest.raises(InputError, match=r'shape \[3, 8\] .* a part only .*layout="owner".*owned_params'):
        Muon([model.head.weight])
    pair = [muon_of(model), muon_of(whole)]
    begun = step_both(model, whole, pair, rank, world, range(2))
    checkpoint.save(folder, model=model, optimizer=pair[0], step=2)
    model = fully_shard(Stacked())
    pair[0] = muon_of(model)
    checkpoint.load(folder, model=model, optimizer=pair[0])
    return max(begun, step_both(model, whole, pair, rank, world, range(2, 4)))


def test_muon_steps_the_whole_experts_of_a_sharded_stack_as_one_process_and_resumes(tmp_path):
    assert max(run_ranks(2, stacks, tmp_path)) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize("first", [True, False])
@on_ranks(2)
def test_torchs_optimizer_in_the_backward_is_refused_with_ours_named(first):
    model = build()
    params = list(model.parameters())
    if first:
        _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})
    fully_shard(model)
    if not first:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(StageError, match=r"_apply_optimizer_in_backward.*use shardwright\.StepInBackward"):
        model(torch.randn(4, 8)).sum().backward()


@on_ranks(2)
def test_replicate_around_sharded_parts_averages_the_rest_as_in_torch(rank, world):
    model = build()
    whole = build()
    fully_shard(model[0])
    replicate(model)
    optimizers = [torch.optim.Adam(m.parameters(), 0.05) for m in (model, whole)]
    assert step_both(model, whole, optimizers, rank, world) < 1e-6
