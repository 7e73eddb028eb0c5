"""A caller's communication hook in the place of a group's reduce-scatter."""

from collections.abc import Callable
from typing import Any

import torch


class HookedReduceScatter:
    """``hook(state, whole, shard)`` in the shape that ``set_custom_reduce_scatter`` takes."""

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        self.state = state
        self.hook = hook

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for one flat tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        """Fill ``output_tensor``; the hook waits for its own collectives."""
        self.hook(self.state, input_tensor, output_tensor)
