"""Blocks may be compiled, each by itself: what is around their forward stays outside of the graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shardwright import fully_shard
from tests.ranks.models import Block, equal_steps, twins
from tests.ranks.pool import on_ranks


def compiled_blocks(rank, world, when, fullgraph):
    torch._dynamo.reset()
    counters.clear()
    model, reference = twins(lambda: nn.Sequential(Block(), Block()))
    for block in model:
        if when == "before":
            block.compile(backend="aot_eager", fullgraph=fullgraph)
        fully_shard(block, reshard_after_forward=True)
        if when == "after":
            block.compile(backend="aot_eager", fullgraph=fullgraph)
    fully_shard(model)
    seen = []

    def count() -> None:
        seen.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))

    equal_steps(model, reference, rank, world, steps=4, after=count)
    # A block's forward, once for an input that asks for no gradient (the first block's) and once for others.
    assert seen == [(2, {})] * 4
    with torch.no_grad():
        model(torch.zeros(5, 13))
        model(torch.zeros(5, 13))
    count()
    assert seen[-1] == (3, {})


@pytest.mark.slow
@on_ranks(1, 2)
def test_compiled_blocks_are_one_graph_each_without_a_break(rank, world):
    for when in ("before", "after"):
        for fullgraph in (False, True):
            compiled_blocks(rank, world, when, fullgraph)
