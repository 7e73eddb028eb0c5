"""What torch's wrapper class shows of itself, and what may be wrapped."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.wrapper import (
    FSDP,
    ModuleWrapPolicy,
    ShardingStrategy,
    size_based_auto_wrap_policy,
)
from tests.ranks.models import Block, build
from tests.ranks.pool import run_ranks
from tests.ranks.wrapped import nested


def attributes(rank, world):
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    model = nested(build(), forward_prefetch=True, limit_all_gathers=False)
    assert (model.rank, model.world_size) == (rank, world)
    assert model.process_group is dist.group.WORLD
    assert model.compute_device == torch.device("cpu")
    assert (model.forward_prefetch, model.limit_all_gathers) == (True, False)
    assert {id(param) for param in model.params} == {
        id(param)
        for name, param in model.named_parameters()
        if "blocks.0" not in name and "blocks.1" not in name
    }
    assert [tuple(param.shape) for param in FSDP(nn.Linear(3, 5), use_orig_params=False).params] == [(20,)]
    half = FSDP(build(), process_group=pair)
    assert (half.rank, half.world_size) == (rank % 2, 2)
    assert half.process_group is pair
    copied = FSDP(build(), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert (copied.rank, copied.world_size) == (rank, world)
    across = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    hybrid = FSDP(build(), process_group=(pair, across), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert (hybrid.rank, hybrid.world_size) == (rank % 2, 2)  # of the shards, as in torch


def test_a_wrapper_tells_its_ranks_its_device_and_what_it_was_given():
    run_ranks(4, attributes)


class Towers(nn.Module):
    """Modules in containers that have no forward, called one by one."""

    def __init__(self, wrapped):
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        self.layers = nn.ModuleList(FSDP(layer) if wrapped else layer for layer in layers)
        if wrapped:
            self.layers = FSDP(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def containers(rank, world):
    x = torch.randn(world, 5, 4)
    ours, plain = FSDP(Towers(True)), Towers(False)
    assert isinstance(ours.layers, FSDP)
    ours(x[rank]).sum().backward()
    torch.stack([plain(rows).sum() for rows in x]).mean().backward()
    expected = dict(plain.named_parameters())
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[name].grad)
    with pytest.warns(UserWarning, match="ModuleList has no forward of its own"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_container_without_a_forward_may_be_wrapped_and_warns_where_it_holds_parameters():
    run_ranks(2, containers)


def policies(rank, world):
    assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    model = build()
    model.blocks[1].up = FSDP(model.blocks[1].up)
    with pytest.raises(InputError, match=r"'blocks\.1\.up' is wrapped already"):
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


def test_the_sets_of_the_size_policy_stand_where_torch_has_them_and_errors_name_what_is_wrapped():
    run_ranks(1, policies)


class Apart(nn.Module):
    """Layers that all ranks share; between them as many as the rank has of its own."""

    def __init__(self, num_own):
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = [nn.Linear(4, 4) for _ in range(num_own)]
        self.layers = nn.Sequential(first, *self.own, last)

    def forward(self, x):
        return self.layers(x)


def ignored(rank, world, flat):
    model = Apart(num_own=rank + 1)
    inner, options = model.own, {"use_orig_params": not flat}
    model.layers = FSDP(model.layers, ignored_modules=inner, **options)
    model = FSDP(model, ignored_modules=inner, **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert not any(isinstance(param, DTensor) for layer in inner for param in layer.parameters())
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("flat", [False, True], ids=["apart", "flat"])
def test_ranks_may_ignore_different_numbers_of_modules(flat):
    run_ranks(3, ignored, flat)
