"""Meshes of several kinds of parallelism, and long sequences that ranks share."""

from shardwright.parallel.mesh import Mesh, mesh
from shardwright.parallel.sequence import document_positions, shift_labels
from shardwright.parallel.tensor import tensor_parallel
from shardwright.parallel.ulysses import context_parallel, mean_over_tokens

__all__ = [
    "Mesh",
    "context_parallel",
    "document_positions",
    "mean_over_tokens",
    "mesh",
    "shift_labels",
    "tensor_parallel",
]
