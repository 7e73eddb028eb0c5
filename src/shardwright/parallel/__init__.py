"""Meshes of several kinds of parallelism, and long sequences and experts that ranks share."""

from shardwright.parallel.experts import expert_parallel, tokens_per_expert
from shardwright.parallel.mesh import Mesh, mesh
from shardwright.parallel.sequence import document_positions, shift_labels
from shardwright.parallel.tensor import tensor_parallel
from shardwright.parallel.ulysses import context_parallel, mean_over_tokens

__all__ = [
    "Mesh",
    "context_parallel",
    "document_positions",
    "expert_parallel",
    "mean_over_tokens",
    "mesh",
    "shift_labels",
    "tensor_parallel",
    "tokens_per_expert",
]
