"""Weights that are encoded at rest and on the wire. What is here is asked of every module, and imports no
codec: a model without encoded weights loads none of them."""

from typing import Any

from torch import nn

ENCODINGS = "_shardwright_encodings"
"""Of a module: how its weights are encoded."""


def encodings(module: nn.Module) -> dict[str, Any]:
    """How weights of this very module are encoded (``Encoding``), by name; empty for any other module."""
    return module.__dict__.get(ENCODINGS, {})
