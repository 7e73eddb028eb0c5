"""The options of a unit, as a frozen dataclass that checks itself."""

from dataclasses import dataclass, fields

import torch

from shardwright.errors import InputError


@dataclass(frozen=True)
class UnitOptions:
    """How the parameters of one unit are kept and unsharded; see ``fully_shard`` for each."""

    reshard_after_forward: bool = True
    flatten_parameters: bool = False
    shard_param_on_dim_0: bool = False
    pad_multiple: int = 128
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    fp32_reduce_scatter: bool = False
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for field in ("compute_dtype", "buffer_dtype"):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InputError(f"{field} must be a floating-point torch.dtype or None, got {dtype!r}")
        if not isinstance(self.pad_multiple, int) or self.pad_multiple < 1:
            raise InputError(f"pad_multiple must be an int of at least 1, got {self.pad_multiple!r}")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise InputError(f"{each.name} must be True or False, got {value!r}")
