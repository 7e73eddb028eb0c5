"""A unit: the parameters that share one all-gather and one reduce-scatter, and how they lie at rest.

at rest    each parameter (or all of a unit, flattened) is one jax array, split over the shard axis
in use     this device's parts are joined, all-gathered once, and cut into parameters of their own shape

rank 0  [ a0 a1 | b0 ]                     [ a0 a1 | b0 ]   column block a -> a0 a1 a2 a3 -> trim, view
rank 1  [ a2 a3 | b1 ]  -- all-gather -->  [ a2 a3 | b1 ]   column block b -> b0 b1       -> trim, view
"""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from shardwright.errors import InputError, StageError
from shardwright.schedule.layout import FlatLayout, ParamLayout
from shardwright.xla.mesh import Axes
from shardwright.xla.options import UnitOptions
from shardwright.xla.torch_bridge import jax_dtype, to_numpy


@dataclass(eq=False)
class Leaf:
    """One parameter. ``placeholder`` is the meta parameter that modules show for it, in each of ``sites``
    (module and attribute; several where it is shared)."""

    placeholder: nn.Parameter
    sites: list[tuple[nn.Module, str]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.placeholder.shape)

    @property
    def numel(self) -> int:
        return self.placeholder.numel()


@dataclass(eq=False)
class Stored:
    """One array at rest: a parameter, or all parameters of a unit that are trained (or not) with one dtype.

    ``array`` has dim 0 split evenly over the shard axis, padding at the end: of shape ``[padded_numel]``, or
    of the parameter's own with the rows padded if ``by_rows``. None until there are values (meta device).
    """

    leaves: tuple[Leaf, ...]
    axes: Axes
    options: UnitOptions
    array: Any = None

    @property
    def trainable(self) -> bool:
        return self.leaves[0].placeholder.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves[0].placeholder.dtype

    @property
    def numel(self) -> int:
        return self.flat.numel

    @cached_property
    def by_rows(self) -> bool:
        """Split in rows of the parameter rather than as one row of numbers. A scalar has no rows."""
        options = self.options
        return options.shard_param_on_dim_0 and not options.flatten_parameters and bool(self.leaves[0].shape)

    @cached_property
    def flat(self) -> FlatLayout:
        """The parameters one after another."""
        return FlatLayout.of([("", leaf.shape) for leaf in self.leaves])

    @cached_property
    def layout(self) -> ParamLayout:
        """Cut in rows of the parameter, or of ``pad_multiple`` numbers: the last rank pads to whole rows."""
        if self.by_rows:
            return ParamLayout(self.leaves[0].shape, self.axes.world)
        return self.flat.over(self.axes.world, self.options.pad_multiple)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the array, padding included."""
        if self.by_rows:
            return (self.layout.chunk_rows * self.axes.world, *self.leaves[0].shape[1:])
        return (self.layout.padded_numel,)

    @cached_property
    def shard_numel(self) -> int:
        """Elements on each device, padding included."""
        return self.layout.padded_numel // self.axes.world

    @property
    def shard_nbytes(self) -> int:
        return self.shard_numel * jnp.dtype(jax_dtype(self.dtype)).itemsize

    def abstract(self) -> Any:
        """The array's shape, dtype and sharding without values."""
        return jax.ShapeDtypeStruct(self.shape, jax_dtype(self.dtype), sharding=self.axes.sharded())

    def place(self, values: Sequence[torch.Tensor]) -> Any:
        """The array that holds ``values``, one per leaf, on the host. Each process places its own parts."""
        padded = np.zeros(self.layout.padded_numel, jax_dtype(self.dtype))
        for entry, value in zip(self.flat.entries, values, strict=True):
            assert tuple(value.shape) == entry.shape
            padded[entry.start : entry.start + entry.numel] = to_numpy(value).reshape(-1)
        padded = padded.reshape(self.shape)
        return jax.make_array_from_callback(self.shape, self.axes.sharded(), lambda index: padded[index])

    def values(self, array: Any = None) -> list[np.ndarray]:
        """Whole host arrays, one per leaf. Every process must call it. ``array``: another one laid out like
        this (state of the optimizer); None: the parameters."""
        if array is None:
            array = self.array
        if array is None:
            raise StageError(
                "the parameters have no values yet (they were built on the meta device); call "
                "xla.materialize(model) or xla.load_full_state_dict(model, ...)"
            )
        replicate = jax.jit(lambda x: x, out_shardings=self.axes.replicated())
        flat = np.asarray(replicate(array)).reshape(-1)
        return [
            flat[entry.start : entry.start + entry.numel].reshape(entry.shape) for entry in self.flat.entries
        ]


UNIT = "_shardwright_xla_unit"
"""Attribute of a sharded module that holds its unit."""


def unit_of(module: nn.Module) -> "XlaUnit | None":
    """The unit of a module that was given to ``fully_shard``."""
    return module.__dict__.get(UNIT)


@dataclass(eq=False)
class XlaUnit:
    """A module that was given to ``fully_shard``, and the parameters it takes care of."""

    module: nn.Module
    axes: Axes
    options: UnitOptions
    stored: list[Stored] = field(default_factory=list)
    spmd: Any = None  # of a root: its spmd_model.SpmdModel, made when it is first needed

    @property
    def leaves(self) -> list[Leaf]:
        return [leaf for stored in self.stored for leaf in stored.leaves]

    @property
    def innermost(self) -> bool:
        """Whether no other unit lies inside."""
        return all(unit_of(m) in (None, self) for m in self.module.modules())

    def store(self, values: dict[Leaf, torch.Tensor | None]) -> None:
        """Take the parameters of ``values`` (None: no values yet) besides those that are here already."""
        groups: dict[Any, list[Leaf]] = {}
        for leaf in values:
            p = leaf.placeholder
            key = (p.requires_grad, p.dtype) if self.options.flatten_parameters else leaf
            groups.setdefault(key, []).append(leaf)
        for leaves in groups.values():
            stored = Stored(tuple(leaves), self.axes, self.options)
            known = [value for leaf in leaves if (value := values[leaf]) is not None]
            if known and len(known) < len(leaves):
                raise InputError(
                    f"{type(self.module).__name__}: some parameters are on the meta device and some are not; "
                    "flatten_parameters needs all of one kind"
                )
            if known:
                stored.array = stored.place(known)
            self.stored.append(stored)

    def unshard(self, shards: Sequence[Any]) -> list[Any]:
        """Whole parameters, one per leaf, from this device's part of each stored array (inside shard_map).

        One all-gather for each dtype, apart for frozen parameters; its transpose is one reduce-scatter. What
        is split in rows has one of its own, of rows: no array is flattened on its way.
        """
        groups: dict[Any, list[int]] = {}
        whole: dict[int, Any] = {}
        for i, stored in enumerate(self.stored):
            if stored.by_rows:
                rows = self._all_gather(shards[i], stored.dtype, by_rows=True)
                whole[i] = rows[: stored.leaves[0].shape[0]]
            else:
                groups.setdefault((stored.trainable, stored.dtype), []).append(i)
        for (_, dtype), members in groups.items():
            joined = jnp.concatenate([shards[i].reshape(-1) for i in members])
            gathered = self._all_gather(joined, dtype)
            start = 0
            for i in members:
                stop = start + self.stored[i].shard_numel
                whole[i] = gathered[:, start:stop].reshape(-1)
                start = stop
        return [
            whole[i]
            if stored.by_rows
            else whole[i][entry.start : entry.start + entry.numel].reshape(entry.shape)
            for i, stored in enumerate(self.stored)
            for entry in stored.flat.entries
        ]

    def _all_gather(self, part: Any, dtype: torch.dtype, by_rows: bool = False) -> Any:
        """[ranks, *part], or by_rows the rows of all ranks one after another."""
        compute = self.options.compute_dtype
        if compute is None or not dtype.is_floating_point:
            return jax.lax.all_gather(part, self.axes.shard, tiled=by_rows)
        if self.options.fp32_reduce_scatter:
            return _gather_cast_reduce_fp32(self.axes.shard, jax_dtype(compute), by_rows, part)
        return jax.lax.all_gather(part.astype(jax_dtype(compute)), self.axes.shard, tiled=by_rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather_cast_reduce_fp32(axis: str, dtype: Any, by_rows: bool, part: Any) -> Any:
    """All-gather in ``dtype``; the gradient is widened first and reduce-scattered in fp32."""
    return jax.lax.all_gather(part.astype(dtype), axis, tiled=by_rows)


def _forward(axis: str, dtype: Any, by_rows: bool, part: Any) -> tuple[Any, Any]:
    # An empty array carries the dtype at rest to the backward: a residual must be an array.
    return _gather_cast_reduce_fp32(axis, dtype, by_rows, part), jnp.zeros((0,), part.dtype)


def _backward(axis: str, dtype: Any, by_rows: bool, at_rest: Any, gradient: Any) -> tuple[Any]:
    summed = jax.lax.psum_scatter(gradient.astype(jnp.float32), axis, tiled=by_rows)
    return (summed.astype(at_rest.dtype),)


_gather_cast_reduce_fp32.defvjp(_forward, _backward)
