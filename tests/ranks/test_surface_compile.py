"""Blocks may be compiled, each by itself: what is around their forward stays outside of the graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shardwright import fully_shard, stats
from tests.ranks.models import Block, Run, assert_same
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
    ours, theirs = Run.of(model), Run.of(reference)
    graphs = []
    for step in range(4):
        x = torch.randn(world, 5, 13, generator=torch.Generator().manual_seed(step))
        model(x[rank]).square().mean().backward()
        torch.stack([reference(rows).square().mean() for rows in x]).mean().backward()
        ours.step()
        theirs.step()
        assert_same(model, reference)
        assert stats(model).unsharded_nbytes == 0
        graphs.append(counters["stats"]["unique_graphs"])
    assert 1 <= graphs[0] <= graphs[1] == graphs[3] <= 2  # the blocks' forwards, and nothing of ours


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_blocks_train_exactly_and_are_not_compiled_again(world, when):
    run_ranks(world, compiled_blocks, when)
