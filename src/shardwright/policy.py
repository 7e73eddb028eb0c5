"""Every option, as frozen dataclasses that check themselves.

A policy never changes: a setter replaces the whole object (``dataclasses.replace``), so that a schedule
planned from it can tell by identity whether it is still the one in force.
"""

from dataclasses import dataclass

import torch

from shardwright.errors import InputError


def _check_dtype(owner: str, field: str, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(
            f"{owner}.{field} must be a floating-point torch.dtype or None, got {dtype!r}; "
            f"for example {owner}({field}=torch.bfloat16)"
        )


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype is used where (all ``None``: the dtype that the parameter has at rest).

    param_dtype: dtype of the all-gather and of the parameters that the forward and backward see.
    reduce_dtype: dtype in which gradients are summed over ranks (``None``: ``param_dtype``). Gradients
        whose own dtype converts to it exactly travel in their own dtype and are converted on arrival.
    output_dtype: floating-point outputs of the module's forward are cast to it.
    cast_forward_inputs: floating-point inputs of the module's forward are cast to ``param_dtype``.

    At rest, parameters, gradients and so the optimizer keep the dtype that the module was built with.
    Raises: InputError for a dtype that isn't floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            _check_dtype("MixedPrecisionPolicy", field, getattr(self, field))


DEFAULT_PRECISION = MixedPrecisionPolicy()


@dataclass(frozen=True)
class SchedulePolicy:
    """How far ahead collectives are issued, and how many may be outstanding.

    forward_prefetch: number of groups whose all-gather is issued ahead of the one in use, in forward.
    backward_prefetch: the same in backward. 0 issues each all-gather when its group is needed.
    max_reductions: reduce-scatters in flight; the oldest is waited for before one more is issued, so that
        at most this many groups hold an unsharded gradient besides the one being computed.

    Raises: InputError for a negative prefetch or fewer than one reduction in flight.
    """

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    max_reductions: int = 2

    def __post_init__(self) -> None:
        for field, least in (("forward_prefetch", 0), ("backward_prefetch", 0), ("max_reductions", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < least:
                raise InputError(f"SchedulePolicy.{field} must be an int >= {least}, got {value!r}")
