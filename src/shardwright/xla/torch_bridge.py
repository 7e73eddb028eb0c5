"""The only file that imports torchax: torch modules traced as jax functions, tensors seen from both sides.

torchax is a thin, young layer, so all that is asked of it stands here: a tensor that wraps a jax array, the
mode in which torch operators act on it, and the random key of that mode.
"""
# pyright: reportMissingImports=false

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
import torchax
from torchax.ops import mappings
from torchax.tensor import OperatorNotFound, Tensor
from torchax.view import View

from shardwright.torch_private import BATCH_NORM_OP

_NUMPY_DTYPE = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
_SAME_BITS = {1: torch.uint8, 2: torch.int16}
_TORCH_DTYPE = {dtype: ours for ours, dtype in _NUMPY_DTYPE.items()}


@functools.cache
def _environment() -> Any:
    """torchax's environment; made at first use, as it starts jax's backends (after jax.distributed must)."""
    env = torchax.default_env()
    for op in (torch.ops.aten.native_batch_norm, BATCH_NORM_OP):
        env.override_op_definition(op, _batch_norm)
    return env


def _batch_norm(
    input: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """``aten.native_batch_norm``, of which torchax's own computes the running statistics and drops them.

    rest: training, momentum, eps.
    """
    training, momentum, eps = rest
    x = as_jax(input)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = (0, *range(2, x.ndim))
    if training:
        used_mean, used_var = wide.mean(dims), wide.var(dims)
        count = x.size // x.shape[1]
        for running, new in ((mean, used_mean), (var, used_var * (count / max(count - 1, 1)))):
            if running is not None:
                old = as_jax(running)
                set_value(running, ((1 - momentum) * old + momentum * new).astype(old.dtype))
    else:
        used_mean, used_var = as_jax(mean), as_jax(var)
    inverse = jax.lax.rsqrt(used_var + eps)
    across = (1, -1, *(1 for _ in dims[1:]))
    scale = inverse if weight is None else inverse * as_jax(weight)
    result = (wide - used_mean.reshape(across)) * scale.reshape(across)
    if bias is not None:
        result = result + as_jax(bias).reshape(across)
    return as_torch(result.astype(x.dtype)), as_torch(used_mean), as_torch(inverse)


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype of a jax array that holds ``dtype`` (without 64-bit numbers, jax's default)."""
    return jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(dtype))


def as_torch(array: Any) -> torch.Tensor:
    """A jax array as a tensor that torch operators accept inside ``torch_mode``; no copy."""
    return Tensor(array, _environment())


def as_jax(tensor: torch.Tensor) -> Any:
    """The jax array of a tensor that ``as_torch`` made or an operator returned; no copy.

    A plain torch tensor (a constant that the module holds) becomes a constant of the program.
    """
    if isinstance(tensor, Tensor | View):
        return tensor.jax()  # type: ignore[attr-defined]
    return jax.numpy.asarray(to_numpy(tensor))


def set_value(tensor: torch.Tensor, array: Any) -> None:
    """Let a tensor that ``as_torch`` made show another array, for all that hold it."""
    tensor._elem = array  # type: ignore[attr-defined]


@contextlib.contextmanager
def torch_mode(key: Any) -> Iterator[None]:
    """Torch operators on ``as_torch`` tensors become jax ones; random ones draw from ``key``."""
    env = _environment()
    with env, env.override_property(prng=key):
        yield


@contextlib.contextmanager
def random_key(key: Any) -> Iterator[None]:
    """Inside ``torch_mode``: random operators draw from ``key``, after the end from what they did before."""
    with _environment().override_property(prng=key):
        yield


def current_key() -> Any:
    """The key that the next random operator of this thread will draw from."""
    return _environment().prng_key


def set_current_key(key: Any) -> None:
    """Go on from ``key``: what a traced function returned as its ``current_key``."""
    _environment().prng_key = key


def unsupported_op(error: BaseException) -> str | None:
    """What torchax can't do, in words, if that is what ``error`` says; else None."""
    if isinstance(error, OperatorNotFound):
        return f"torchax has no lowering of the operator ({error})"
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return "it reads a value (.item(), if, float()), and a traced program has none; use torch.where"
    if isinstance(error, AssertionError) and "mixed math" in str(error):
        return (
            "it mixes tensors of the compiled program with a plain torch tensor; make constants buffers "
            "(or with device=x.device), and call a module itself rather than reading weights of another unit"
        )
    return None


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as an array of the same bits (bf16 and float8 as ml_dtypes has them); shares memory."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in _NUMPY_DTYPE:
        bits = tensor.view(_SAME_BITS[tensor.element_size()])
        return bits.numpy().view(_NUMPY_DTYPE[tensor.dtype])
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """The inverse of ``to_numpy``, in memory of its own."""
    array = np.array(array)  # jax's host copies are read-only
    if array.dtype in _TORCH_DTYPE:
        bits = array.view({1: np.uint8, 2: np.int16}[array.dtype.itemsize])
        return torch.from_numpy(bits).view(_TORCH_DTYPE[array.dtype])
    return torch.from_numpy(array)
