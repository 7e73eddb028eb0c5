"""Sequences that ranks share (Ulysses): training equals that of one process that has whole sequences."""

import copy
import sys
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

import shardwright
from shardwright import clip_grad_norm_, context_parallel, fully_shard
from shardwright.errors import InputError, StageError
from shardwright.parallel import document_positions, mean_over_tokens, shift_labels
from tests.ranks.models import Run, both_step
from tests.ranks.pool import on_ranks, run_ranks

TOLERANCE = 1e-12
VOCAB, LENGTH = 19, 12


class Attention(nn.Module):
    """Grouped key/value heads; ``mask``: given to torch, of the whole sequence, for each head."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.into = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.out = nn.Linear(width, width)
        self.mask = None

    def forward(self, x):
        heads = self.into(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], 1)
        given = {"is_causal": True} if self.mask is None else {"attn_mask": self.mask}
        seen = F.scaled_dot_product_attention(q, k, v, scale=0.4, enable_gqa=True, **given)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, groups)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, position_ids=None):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Causal; ``gives``: whether its blocks are given the positions; ``around``: how a block is called."""

    def __init__(self, heads=4, groups=2, width=16, gives=False):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)
        self.gives, self.around = gives, lambda block, *args: block(*args)

    def forward(self, tokens, position_ids):
        x = self.embedding(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = self.around(block, x, position_ids) if self.gives else self.around(block, x)
        return self.head(x)


def build(**options):
    torch.manual_seed(3)
    return Transformer(**options).double()


def sharded(model, mesh):
    context_parallel(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh.shard)
    return fully_shard(model, mesh=mesh.shard)


def batch_of(step, samples, positions=None):
    """All samples, and labels that are learned: more of them in some parts of a sequence than in others."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (samples, 2, LENGTH), generator=generator)
    learned = torch.rand(tokens.shape, generator=generator) < torch.linspace(0.05, 0.95, LENGTH)
    labels = tokens.masked_fill(~learned, -100)
    positions = torch.arange(LENGTH)[None] if positions is None else positions
    return tokens, torch.stack([shift_labels(each, positions) for each in labels]), positions


def sum_of(model, tokens, labels, positions):
    logits = model(tokens, positions).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def blocked(documents, rows):
    """For the reference: a causal mask of documents that are packed, as attention of one process takes it."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()).expand(rows, -1, -1)[:, None]


def train_beside(model, mesh, reference, positions=None, steps=3):
    """Clipped steps with momentum; losses, norms and parameters equal those of one process."""
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(steps):
        tokens, labels, whole = batch_of(step, mesh.num_samples, positions)
        own = {"tokens": tokens[mesh.sample_rank], "labels": labels[mesh.sample_rank], "position_ids": whole}
        part = mesh.split(own)
        total = sum_of(model, part["tokens"], part["labels"], part["position_ids"])
        loss = mean_over_tokens(total, (part["labels"] != -100).sum(), mesh)
        loss.backward()
        expected = sum(sum_of(reference, *pair, whole) for pair in zip(tokens, labels, strict=True))
        expected = expected / (labels != -100).sum()
        expected.backward()
        norm, norm_of_one = (clip_grad_norm_(each.parameters(), 0.1) for each in (model, reference))
        torch.testing.assert_close(loss, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(norm, norm_of_one, atol=TOLERANCE, rtol=0)
        both_step(ours, theirs, TOLERANCE)
    return loss.item()


def trains(rank, world, sizes, options):
    mesh = shardwright.mesh(**sizes)
    return train_beside(sharded(build(**options), mesh), mesh, build(**options))


@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    [
        (2, {"cp": 2}, {}),
        (4, {"cp": 2}, {}),
        (4, {"cp": 4}, {"groups": 4}),
        (4, {"cp": 4}, {"groups": 1}),
        (3, {"cp": 3}, {"heads": 6, "groups": 2, "width": 12}),
        (4, {"replicate": 2, "dp": 1, "cp": 2}, {}),
        (4, {"cp": 4, "ep": 2}, {}),
    ],
    ids=str,
)
def test_steps_over_sequences_that_ranks_share_are_those_of_one_process(world, sizes, options):
    losses = run_ranks(world, trains, sizes, options)
    assert len(set(losses)) == 1, "the loss is equal on all ranks"
