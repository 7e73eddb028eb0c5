"""Blocks may be compiled, each by itself: what is around their forward stays outside of the graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shardwright import fully_shard
from tests.ranks.models import Block, equal_steps
from tests.ranks.pool import run_ranks


def compiled_blocks(rank, world, when):
    torch.manual_seed(5)
    model = nn.Sequential(Block(), Block())
    torch.manual_seed(5)
    reference = nn.Sequential(Block(), Block())
    for block in model:
        if when == "before":
            block.compile(backend="aot_eager")
        fully_shard(block, reshard_after_forward=True)
        if when == "after":
            block.compile(backend="aot_eager")
    fully_shard(model)
    graphs = []

    def count() -> None:
        graphs.append(counters["stats"]["unique_graphs"])

    equal_steps(model, reference, rank, world, steps=4, after=count)
    assert 1 <= graphs[0] <= graphs[1] == graphs[3] <= 2  # the blocks' forwards, and nothing of ours


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_blocks_train_exactly_and_are_not_compiled_again(world, when):
    run_ranks(world, compiled_blocks, when)
