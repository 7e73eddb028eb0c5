"""Parameters that sharding doesn't reach are named: those that came later, other references to a weight."""

from functools import partial

import pytest
import torch
from torch import nn

from shardwright import clip_grad_norm_, fully_shard
from tests.ranks.models import sharded, warned
from tests.ranks.pool import on_ranks


class Layer(nn.Module):
    """Keeps another reference to its weight, in one of ``WAYS``."""

    def __init__(self, keep):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        keep(self)

    def forward(self, x):
        return self.lin(x)


def closure(layer):
    weight = layer.lin.weight
    layer.penalty = lambda: weight.square().sum()


WAYS = {
    "list": lambda layer: setattr(layer, "all", [layer.lin.weight]),
    "dict of tuples": lambda layer: setattr(layer, "all", {"a": (layer.lin.bias, 3)}),
    "closure": closure,
    "partial": lambda layer: setattr(layer, "call", partial(torch.matmul, layer.lin.weight)),
    "transposed": lambda layer: layer.__dict__.update(turned=layer.lin.weight.t()),
    "detached": lambda layer: setattr(layer, "kept", layer.lin.weight.detach()),
    "buffer": lambda layer: layer.register_buffer("kept", layer.lin.weight.data[0]),
}
ALLOWED = {
    "copy": lambda layer: setattr(layer, "kept", layer.lin.weight.detach().clone()),
    "module": lambda layer: setattr(layer, "all", [layer.lin]),
    "tied": lambda layer: setattr(layer, "again", layer.lin),
    "recurrent": lambda layer: setattr(layer, "rnn", nn.LSTM(4, 4)),
    "normed": lambda layer: nn.utils.parametrizations.weight_norm(layer.lin),
}


@on_ranks(1)
def test_another_reference_to_a_weight_is_named_when_it_is_sharded():
    for way, keep in (WAYS | ALLOWED).items():
        model = nn.Sequential(Layer(keep))
        told = [
            each for each in warned(lambda model=model: fully_shard(model)) if "refers to parameter" in each
        ]
        assert len(told) == (way in WAYS), (way, told)
        assert all("of the model refers to parameter '0.lin." in each for each in told)


@pytest.mark.each_case
@pytest.mark.parametrize("late", [0, 2, None])
@on_ranks(2)
def test_parameters_that_are_put_in_after_sharding_are_named_once(late):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    left = nn.Parameter(torch.ones(4))
    model.scale = left
    fully_shard(model, ignored_params={left})
    x, told = torch.ones(1, 4), []

    def inject():
        model[1].adapter = nn.Parameter(torch.zeros(4))
        optimizer.add_param_group({"params": [model[1].adapter]})

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == late:
            inject()
        told += [each for each in warned(lambda: model(x).sum().backward()) if "in no group" in each]
        optimizer.step()
        optimizer.zero_grad()
    assert len(told) == (late is not None)
    assert all("1 parameters of the model are in no group (1.adapter)" in each for each in told)


@on_ranks(2)
def test_what_stays_unsharded_after_a_backward_is_clipped():
    """Clipping by ``model.parameters()`` finds the gradients of what stays unsharded after a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded(model, [model[0]]).set_reshard_after_backward(False)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        assert clip_grad_norm_(model.parameters(), 1e-3) > 1
        assert clip_grad_norm_(model.parameters(), 1.0) < 2e-3
        model.zero_grad()
