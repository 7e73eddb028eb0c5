"""Moving averages, teachers and targets beside a model, in every state that either of them can be in."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from tests.ranks.models import Run, full, sharded, squared, train_by
from tests.ranks.pool import on_ranks


def model_of(reshard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if reshard != "plain":
        sharded(model, [model[0]], reshard_after_forward=reshard)
    return model


def average(mean, model):
    with torch.no_grad():
        for own, param in zip(mean.parameters(), model.parameters(), strict=True):
            own.lerp_(param, 0.25)


def average_data(mean, model):
    for module in (*mean.modules(), *model.modules()):
        getattr(module, "reshard", lambda: None)()
    for own, param in zip(mean.parameters(), model.parameters(), strict=True):
        own.data.mul_(0.75).add_(param.data, alpha=0.25)


def copied(mean, model):
    mean.load_state_dict(model.state_dict())


@pytest.mark.each_case
@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_averages_are_those_of_one_process_whatever_ran_before(reshard):
    """Each way to update, after each of what may come before it: none, an evaluation of one or both."""
    x = torch.linspace(-1, 1, 12).view(2, 6)
    for update, *runs in product((average, average_data, copied), (False, True), (False, True)):
        ours, whole = ([model_of(each), model_of(each)] for each in (reshard, "plain"))
        for student, mean in (ours, whole):
            mean.requires_grad_(False)
            run = Run.of(student, lr=0.1)
            for _ in range(3):
                train_by(run, [squared(student, x)])
                with torch.no_grad():
                    for model, runs_it in zip((student, mean), runs, strict=True):
                        if runs_it:
                            model(x)
                update(mean, student)
        with torch.no_grad():
            for mine, other in zip(ours, whole, strict=True):
                assert torch.allclose(mine(x), other(x), atol=1e-6), (update.__name__, runs)
                for a, b in zip(mine.parameters(), other.parameters(), strict=True):
                    assert torch.allclose(full(a), b, atol=1e-6), (update.__name__, runs)


@on_ranks(2)
def test_torchs_averaged_model_may_be_sharded():
    plain = model_of("plain")
    mean = torch.optim.swa_utils.AveragedModel(plain)
    model = fully_shard(copy.deepcopy(plain))
    fully_shard(mean)
    for _ in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        mean.update_parameters(model)
    expected = [param + 2.0 for param in plain.parameters()]  # the mean of 1, 2 and 3 more
    for param, other in zip(mean.parameters(), expected, strict=True):
        assert torch.allclose(full(param), other, atol=1e-5)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", ["before the forward", "in a backward of its own"])
@on_ranks(2)
def test_a_penalty_on_weights_outside_of_the_forward_is_that_of_one_process(way, reshard):
    """Two steps of a loss and a penalty on all weights, beside one process."""

    def penalty(model):
        return 0.1 * sum(p.square().sum() for p in model.parameters())

    torch.manual_seed(1)
    ours, whole = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)) for _ in range(2))
    whole.load_state_dict(ours.state_dict())
    sharded(ours, reshard_after_forward=reshard)
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        (whole(x).square().mean() + penalty(whole)).backward()
        if way == "before the forward":
            extra = penalty(ours).full_tensor()
            (ours(x).square().mean() + extra).backward()
        else:
            ours(x).square().mean().backward()
            penalty(ours).backward()
        for own, other in zip(ours.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(own.grad.full_tensor(), other.grad, atol=1e-6), step
            with torch.no_grad():
                own -= 0.1 * own.grad
                other -= 0.1 * other.grad
            own.grad = other.grad = None
