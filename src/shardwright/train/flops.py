"""Model FLOPs utilisation (MFU): what a token needs by the model's shape, over what the devices could do.

Of every weight but the embedding's a token takes 2 FLOPs in the forward and 2 in the backward for what came
in, and 2 more where the weight is trained; attention takes 6 x layers x width x tokens of a sequence, half of
what it would without a causal mask. What is computed again counts nothing. Of all trained weights that is the
usual ``6 N + 12 L d T``, halved in the second term, as in ``plan.Estimate.mfu``.
"""

import torch

from shardwright.errors import ConfigError
from shardwright.plan.cluster import device
from shardwright.plan.trace import multiplied_in


def flops_per_token(parameters: int, trained: int, attention: int) -> float:
    """parameters: elements of weights but the embedding's, unless the head shares that. trained: of them.
    attention: layers x width of all heads x tokens of a sequence."""
    return 4.0 * parameters + 2.0 * trained + 6.0 * attention


def peak_flops(device_type: str, stated_tflops: float, dtype: torch.dtype) -> float | None:
    """FLOP/s of one device: what is stated, else those of dense matmuls in ``dtype`` (TF32 for float32, where
    this process lets torch take it) by the data sheet of a device that the planner knows; None: not known."""
    if stated_tflops:
        return stated_tflops * 1e12
    if device_type in ("cpu", "xla"):
        return None
    try:
        name = torch.get_device_module(device_type).get_device_name()
        return device(name).flops_in(multiplied_in(dtype))
    except ConfigError:
        return None
