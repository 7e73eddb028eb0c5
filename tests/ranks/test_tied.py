"""Weights that are tied across groups: each name of theirs is loaded from plain full tensors."""

import torch
from torch import nn

from shardwright import fully_shard
from shardwright.wrapper import FSDP, ModuleWrapPolicy
from tests.ranks.models import assert_same, batches, build, full, loss_of, sharded
from tests.ranks.pool import on_ranks


def embedding_alone(model):
    return sharded(model, [model.embedding])


def both_alone(model):
    return sharded(model, [model.head, model.embedding, *model.blocks])


def without_a_root(model):
    for child in (model.embedding, *model.blocks, model.norm, model.head):
        fully_shard(child)
    return model


def wrapped(model):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, nn.Linear}))


@on_ranks(2)
def test_a_plain_full_state_dict_is_loaded_into_weights_tied_across_groups(rank, world):
    for shard in (embedding_alone, both_alone, without_a_root, wrapped):
        other = build(seed=11, tied=True)
        whole = {name: value.clone() for name, value in other.state_dict().items()}
        for options in ({}, {"assign": True}):
            model = shard(build(tied=True))
            loss_of(model, batches(0, world)[rank]).backward()
            assert not any(model.load_state_dict(dict(whole), **options))
            own = model.module if shard is wrapped else model
            assert own.head.weight is own.embedding.weight or options
            saved = {name: full(value) for name, value in model.state_dict().items()}
            assert saved.keys() == whole.keys()
            for name, value in saved.items():
                assert torch.equal(value, whole[name]), name
            model.zero_grad()
            with torch.no_grad():
                assert abs(loss_of(model, batches(1, world)[0]) - loss_of(other, batches(1, world)[0])) < 1e-6
        assert not any(model.load_state_dict(saved))  # its own
        if shard is not wrapped:
            assert_same(model, other, 0.0)


class Chain(nn.Module):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@on_ranks(2)
def test_a_tied_weight_that_a_later_call_finds_is_shown_in_every_place_though_its_group_has_run():
    model, reference, x = Chain(), Chain(), torch.ones(2, 4)
    fully_shard(model.first)
    model.first(x).sum().backward()  # its group has listed the one place that shows the weight
    model.zero_grad()
    fully_shard(model)
    for each in (model, reference):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), 0.1).step()
    assert_same(model, reference, 1e-6)
