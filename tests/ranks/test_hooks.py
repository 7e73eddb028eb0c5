"""Hooks on parameters run on the sharded gradient, once for each reduction; also earlier ones."""

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.errors import InputError
from shardwright.wrapper import FSDP
from tests.ranks.models import assert_same_grads
from tests.ranks.pool import on_ranks, run_ranks


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def shard(model):
    fully_shard(model[0])
    return fully_shard(model)


def halve(grad):
    grad.mul_(0.5)


WAYS = {
    "nothing": lambda grad: None,
    "another": lambda grad: grad * 0.5,
    "in place": halve,
    "clamped": lambda grad: grad.clamp(-0.01, 0.01),
}


def watch(model, change):
    """What hooks of both kinds see, by the names of parameters; and their handles."""
    seen, handles = [], []
    for name, param in model.named_parameters():

        def note(grad, name=name):
            seen.append(name)
            return change(grad)

        handles.append(param.register_hook(note))
        handles.append(
            param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name} is there"))
        )
    return seen, handles


@pytest.mark.each_case
@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_hooks_on_parameters_run_once_on_the_reduced_gradient(rank, world, late):
    for change in WAYS.values():
        ours, whole = model_of(), model_of()
        if late:
            shard(ours)
        (seen, handles), (expected, _) = watch(ours, change), watch(whole, change)
        if not late:
            shard(ours)
        for step in range(2):
            rows = [torch.ones(4, 5) * (step + other) / 9 for other in range(world)]
            for microbatch in range(2):
                ours.set_requires_gradient_sync(microbatch == 1)
                ours(rows[rank].chunk(2)[microbatch]).sum().backward()
            (sum(whole(each).sum() for each in rows) / world).backward()
            assert_same_grads(ours, whole)
        assert sorted(seen) == sorted(expected) and seen
        for handle in handles:
            handle.remove()
        seen.clear()
        ours(torch.ones(2, 5)).sum().backward()
        assert not seen


@on_ranks(2)
def test_a_hook_that_returns_no_sharded_gradient_is_named():
    model = shard(model_of())
    model[0].weight.register_hook(lambda grad: grad.full_tensor())
    with pytest.raises(InputError, match="hook on the gradient of sharded parameter 'weight' returned"):
        model(torch.ones(2, 5)).sum().backward()


def wrapped(rank, world):
    seen = []
    model = model_of()
    for param in model.parameters():
        param.register_hook(lambda grad: seen.append(float(grad.norm().full_tensor())))
    model = FSDP(model)
    model(torch.ones(2, 5)).sum().backward()
    assert len(seen) == 4
    return seen


def test_hooks_run_under_the_wrapper_class():
    first, second = run_ranks(2, wrapped)
    assert first == second
