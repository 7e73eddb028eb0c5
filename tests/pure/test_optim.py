"""Muon beside torch's, batched and of stacks; what of a model it is for."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright import optim
from shardwright.errors import InputError
from shardwright.optim import Muon, hidden_matrices
from shardwright.schedule.balance import newton_schulz_flops

SHAPES = [(8, 24), (24, 8), (8, 8), (8, 24), (3, 5), (1, 7)]
ADJUSTMENTS = [None, "original", "match_rms_adamw"]


def params(shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def steps(optimizers, listed, number=20):
    """Step optimizers over parameters of the same shapes with the same gradients."""
    for step in range(number):
        torch.manual_seed(step)
        for alike in zip(*listed, strict=True):
            grad = torch.randn_like(alike[0])
            for param in alike:
                param.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def equal(listed, tolerance=1e-6):
    for one, other in zip(*listed, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.fixture
def exact(monkeypatch):
    """torch's Muon with its iterations in the dtype of the gradients."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ADJUSTMENTS)
def test_twenty_steps_are_those_of_torchs_muon(exact, adjust_lr_fn, nesterov):
    listed = params(SHAPES), params(SHAPES)
    options = {"lr": 0.05, "weight_decay": 0.3, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    steps([torch.optim.Muon(listed[0], **options), Muon(listed[1], **options, ns_dtype="float32")], listed)
    equal(listed)


def test_in_bfloat16_too_to_its_precision_and_with_the_defaults():
    listed = params(SHAPES), params(SHAPES)
    steps([torch.optim.Muon(listed[0]), Muon(listed[1])], listed)
    equal(listed, 1e-3 * 20 * 2**-8)  # bit for bit on CPUs; elsewhere a batch may be summed in another order


@pytest.mark.parametrize("most", [1, 48, 1 << 24])
@pytest.mark.parametrize("adjust_lr_fn", ADJUSTMENTS[1:])
def test_a_stack_is_stepped_as_each_expert_alone_whatever_the_batches(monkeypatch, adjust_lr_fn, most):
    monkeypatch.setattr(optim, "_BATCH_NUMEL", most)
    stacks = params([(5, 4, 6), (3, 6, 4), (2, 4, 6), (0, 4, 6)], torch.float64)
    alone = [nn.Parameter(expert.detach().clone()) for stack in stacks for expert in stack]
    options = {"lr": 0.05, "adjust_lr_fn": adjust_lr_fn, "ns_dtype": "float64"}
    optimizers = [Muon(stacks, **options), Muon(alone, **options)]
    for step in range(20):
        torch.manual_seed(step)
        for stack in stacks:
            stack.grad = torch.randn_like(stack)
        for param, grad in zip(alone, [grad for stack in stacks for grad in stack.grad], strict=True):
            param.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    equal(([expert for stack in stacks for expert in stack], alone), 1e-12)


def test_the_rest_is_stepped_as_by_torchs_adamw():
    shapes = [(4, 6), (6,), (2, 3, 4, 5)]
    listed = params(shapes), params(shapes)
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    ours = Muon([], rest=listed[1], **{f"rest_{name}": value for name, value in options.items()})
    steps([torch.optim.AdamW(listed[0], **options), ours], listed)
    equal(listed, 0)
    assert [{*state} for state in ours.state.values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 3


def both(listed, **options):
    return Muon(listed[:2], lr=0.05, rest=listed[2:], rest_lr=0.01, **options)


@pytest.mark.parametrize("way", ["state dict", "pickle", "copy"])
def test_it_goes_on_from_its_state_as_if_it_had_not_stopped(way):
    listed = params([(4, 6), (2, 3, 4), (5,)]), params([(4, 6), (2, 3, 4), (5,)])
    optimizer = both(listed[0])
    steps([optimizer], listed[:1], 3)
    assert [[*optimizer.state[p]] for p in listed[0][:2]] == [["momentum_buffer"]] * 2
    with torch.no_grad():
        for old, new in zip(*listed, strict=True):
            new.copy_(old)
    if way == "copy":
        listed[1][:], other = copy.deepcopy((listed[0], optimizer))
    elif way == "state dict":
        other = both(listed[1])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        stored = io.BytesIO()
        torch.save((listed[0], optimizer), stored)
        stored.seek(0)
        listed[1][:], other = torch.load(stored, weights_only=False)
    steps([optimizer, other], listed, 3)
    equal(listed, 0)
    added = nn.Parameter(torch.ones(3))
    other.add_param_group({"params": [added], "use_muon": False})
    assert other.param_groups[-1]["lr"] == 0.01 and "momentum" not in other.param_groups[-1]


def test_it_goes_on_from_the_state_of_torchs_muon(exact):
    listed = params(SHAPES), params(SHAPES)
    theirs, ours = torch.optim.Muon(listed[0], lr=0.05), Muon(listed[1], ns_dtype="float32")
    steps([theirs], listed[:1], 3)
    with torch.no_grad():
        for old, new in zip(*listed, strict=True):
            new.copy_(old)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    steps([theirs, ours], listed, 3)
    equal(listed)


def test_schedulers_closures_and_groups_with_values_of_their_own_work_as_with_any_optimizer():
    (first, second, bias) = params([(4, 6), (4, 6), (6,)])
    optimizer = Muon([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, rest=[bias], rest_lr=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = (first + second + bias).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25, 0.1]
    optimizer.zero_grad()
    assert first.grad is None


def test_a_rank_that_owns_nothing_has_the_same_groups():
    owner, other = both(params([(4, 6), (2, 3, 4), (5,)])), Muon([], rest=params([(5,)]))
    assert [{*group} for group in owner.param_groups] == [{*group} for group in other.param_groups]
    other.step()


@pytest.mark.parametrize("shapes", [[(8, 24)] * 5 + [(24, 8)], [(7, 8, 24)], [(6, 6), (3, 5, 2)]])
def test_each_matrix_is_orthogonalised_once_a_step_and_costs_what_the_balance_counts(shapes):
    listed = params(shapes)
    with FlopCounterMode(display=False) as counted:
        steps([Muon(listed, ns_steps=4)], [listed], 2)
    assert counted.get_total_flops() == 2 * sum(newton_schulz_flops(shape, 4) for shape in shapes)


def test_matrices_of_one_shape_are_orthogonalised_in_one_batch():
    listed = params([(8, 24)] * 5 + [(3, 8, 24)])
    with torch.profiler.profile() as profile:
        steps([Muon(listed, ns_steps=4)], [listed], 1)
    assert {event.key: event.count for event in profile.key_averages()}["aten::baddbmm"] == 8


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((6,), {}, r"shape \[6\] .* pass it in rest="),
        ((2, 3, 4, 4), {}, r"shape \[2, 3, 4, 4\]"),
        ((2, 3), {"lr": -1.0}, "lr=-1.0, expected 0 or more"),
        ((2, 3), {"momentum": 1.0}, "of 1.0, expected 0 <= it < 1"),
        ((2, 3), {"rest_betas": (0.9, 1.5)}, "of 1.5, expected 0 <= it < 1"),
        ((2, 3), {"adjust_lr_fn": "rms", "ns_steps": 0}, "adjust_lr_fn='rms'.*; ns_steps=0"),
        ((2, 3), {"ns_coefficients": (1, 2), "ns_dtype": "half"}, "ns_coefficients.*; ns_dtype=.half., exp"),
    ],
)
def test_what_it_can_not_step_is_refused_with_the_remedy(given, options, said):
    with pytest.raises(InputError, match=said):
        Muon(params([given]), rest=params([(2,)]), **options)


def test_a_group_that_is_refused_is_not_added_and_a_sparse_gradient_steps_nothing():
    (matrix, bias) = params([(3, 4), (4,)])
    optimizer = Muon([matrix])
    with pytest.raises(InputError, match="pass it in rest="):
        optimizer.add_param_group({"params": [bias]})
    assert len(optimizer.param_groups) == 1
    table = nn.Embedding(3, 4, sparse=True)
    optimizer.add_param_group({"params": table.parameters(), "use_muon": False})
    table(torch.tensor([1])).sum().backward()
    matrix.grad, before = torch.ones_like(matrix), matrix.detach().clone()
    with pytest.raises(InputError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(matrix, before)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.gate_up_bias = nn.Parameter(torch.ones(4, 8, 6)), nn.Parameter(torch.ones(4, 8))


class Model(nn.Module):
    def __init__(self, tied=False, rows=9):
        super().__init__()
        self.head = nn.Linear(6, 9, bias=False)
        self.table, self.places = nn.Embedding(rows, 6), nn.Embedding(5, 6)
        self.class_token, self.position_embedding = (
            nn.Parameter(torch.ones(1, 6, 6)),
            nn.Parameter(torch.ones(5, 6)),
        )
        self.patches, self.tones = nn.Conv2d(3, 6, 2), nn.Conv1d(6, 6, 3)
        self.up, self.router, self.one = nn.Linear(6, 9), nn.Linear(6, 4), nn.Linear(6, 1)
        self.attention, self.experts, self.norm = nn.MultiheadAttention(6, 2), Experts(), nn.LayerNorm((5, 6))
        self.up.lora_A, self.up.lora_B = nn.Linear(6, 2), nn.Linear(2, 9)
        self.rates = nn.Parameter(torch.ones(6, 4))
        self.rates._no_weight_decay = True
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        if tied:
            self.head.weight = self.table.weight


INSIDE = [
    "up.weight",
    "router.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "experts.gate_up",
]


def test_hidden_matrices_are_the_weights_between_embeddings_and_head():
    model = Model(tied=True)
    assert hidden_matrices(model) == INSIDE
    assert hidden_matrices(Model()) == [
        "head.weight",
        *INSIDE[1:],
    ]  # of two that could be, the last is the head
    model = Model()
    model.get_output_embeddings, model._no_split_modules = lambda: model.head, []
    assert hidden_matrices(model) == INSIDE
    assert hidden_matrices(Model(rows=10)) == ["head.weight", *INSIDE]
