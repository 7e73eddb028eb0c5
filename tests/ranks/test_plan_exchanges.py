"""Predicted bytes of what ranks of cp and tp exchange are those that collectives are called with."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwright
from shardwright.plan import Architecture, Choice, Microbatch, estimate
from shardwright.plan.cluster import Cluster, device
from tests.ranks.pool import run_ranks

SEQUENCE, ROWS = 16, 2
SIZES = {"n_layers": 3, "d_model": 32, "n_heads": 8, "head_dim": 4, "ffn_dim": 48, "vocab_size": 64}


class Attention(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(32, 4 * n, False) for n in (8, kv_heads, kv_heads))
        self.wo = nn.Linear(32, 32, False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Block(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(kv_heads), nn.LayerNorm(32), nn.LayerNorm(32)
        self.ffn = nn.Sequential(nn.Linear(32, 48, False), nn.ReLU(), nn.Linear(48, 32, False))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, kv_heads, recompute):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(Block(kv_heads) for _ in range(3))
        self.head, self.recompute = nn.Linear(32, 64, False), recompute

    def forward(self, input_ids, position_ids=None):
        x = self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            again = self.recompute and index < 2  # as a plan, which leaves out the last
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(self.norm(x))


def predicted(axis, kv_heads, recompute):
    """Bytes of a microbatch, in 16 bits."""
    arch = Architecture(n_kv_heads=kv_heads, gated=False, **SIZES)
    cluster = Cluster(device("H100"), ranks=2, ranks_per_host=2)
    choice = Choice(recompute=float(recompute), **{axis: 2})
    return estimate(arch, Microbatch(SEQUENCE, ROWS), cluster, choice).exchanged[axis]


def traced(kv_heads, recompute):
    """The same of the module itself, by a trace."""
    with torch.device("meta"):
        model, ids = Decoder(kv_heads, recompute), torch.empty(ROWS, SEQUENCE, dtype=torch.int64)
    cluster = Cluster(device("H100"), ranks=2, ranks_per_host=2)
    alone, shared = (
        estimate(model, ids, cluster, Choice(cp=cp), loss=lambda out: out.float().sum()) for cp in (1, 2)
    )
    assert shared.tokens == alone.tokens
    assert shared.model_flops == pytest.approx(alone.model_flops / 2)  # attention is of all tokens
    return shared.exchanged["cp"]


def exchanged_by_cp(rank, world, kv_heads, recompute):
    mesh, sent = shardwright.mesh(cp=2), []
    model = shardwright.context_parallel(Decoder(kv_heads, recompute).bfloat16(), mesh)
    part, exchange = (
        mesh.split({"input_ids": torch.ones(ROWS, SEQUENCE, dtype=torch.int64)}),
        dist.all_to_all_single,
    )

    def counted(received, given, **options):
        sent.append(given.nbytes)
        return exchange(received, given, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        model(**part).float().sum().backward()
    return sum(sent)


class Counted(TorchDispatchMode):
    """Bytes of all-gathers as they come out, and of reduce-scatters as they go in."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.nbytes += args[0].nbytes * args[1]
        elif func is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def exchanged_by_tp(rank, world, kv_heads, recompute):
    mesh, whole = shardwright.mesh(tp=2).tp, {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    model = Decoder(kv_heads, recompute).bfloat16()
    col, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**whole),
        "blocks.*.attention.wq": col,
        "blocks.*.attention.wk": col,
        "blocks.*.attention.wv": col,
        "blocks.*.attention.wo": row,
        "blocks.*.ffn": PrepareModuleInput(**whole),
        "blocks.*.ffn.0": col,
        "blocks.*.ffn.2": row,
    }
    parallelize_module(model, mesh, plan)
    ids = torch.ones(ROWS, SEQUENCE, dtype=torch.int64)
    with Counted() as counted, loss_parallel():
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return counted.nbytes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_predicted_all_to_alls_of_cp_are_those_that_are_called(kv_heads, recompute):
    found = run_ranks(2, exchanged_by_cp, kv_heads, recompute)
    assert found == [predicted("cp", kv_heads, recompute)] * 2
    assert traced(kv_heads, recompute) == found[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_predicted_gathers_and_scatters_of_tp_are_those_that_are_called(recompute):
    found = run_ranks(2, exchanged_by_tp, 2, recompute)
    assert found == [predicted("tp", 2, recompute)] * 2
