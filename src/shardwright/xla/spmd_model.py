"""A whole sharded model at rest: its units, names, buffers and random key; made at its first use."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from shardwright.errors import InputError, StageError
from shardwright.torch_private import buffers_of, tree_flatten, tree_unflatten
from shardwright.xla import torch_bridge as bridge
from shardwright.xla.mesh import Axes
from shardwright.xla.trace import ProgramTrace, buffer_at, buffer_sites, installed, read_buffers, tracing
from shardwright.xla.unit import Leaf, Stored, XlaUnit, unit_of


def spmd_model_of(model: nn.Module) -> "SpmdModel":
    """The arrays of a model.

    Raises: InputError for a module that isn't sharded, or whose parts were sharded over other devices.
    """
    unit = unit_of(model)
    if unit is None:
        raise InputError(
            f"{type(model).__name__} isn't sharded; call xla.fully_shard(model) on the whole model"
        )
    if unit.spmd is None:
        unit.spmd = SpmdModel(unit)
    return unit.spmd


class SpmdModel:
    """All arrays of one model, for one program that runs on all devices (SPMD).

    buffers: one array for each buffer, every device's own copy stacked on dim 0 (BatchNorm's statistics may
    differ between devices). key: random state, the same on all devices.
    """

    def __init__(self, root: XlaUnit) -> None:
        self.root = root
        self.axes: Axes = root.axes
        units = [unit for module in root.module.modules() if (unit := unit_of(module)) is not None]
        self.units = list(dict.fromkeys(units))
        for unit in self.units:
            if unit.axes.mesh != self.axes.mesh:
                raise InputError(
                    f"{type(unit.module).__name__} is sharded over {unit.axes.mesh}, the model over "
                    f"{self.axes.mesh}; give every fully_shard of a model the same mesh"
                )
        self.stored: list[Stored] = [stored for unit in self.units for stored in unit.stored]
        self.trained = [stored for stored in self.stored if stored.trainable]
        self.frozen = [stored for stored in self.stored if not stored.trainable]
        self.sites = buffer_sites(root.module)
        self._stacked: list[Any] | None = None
        self._forwards: dict[Any, Any] = {}
        self.key = self.place(np.asarray(jax.random.key_data(jax.random.key(torch.initial_seed() % 2**32))))

    def place(self, value: np.ndarray) -> Any:
        """The same array on every device, without asking other processes whether theirs is equal."""
        return jax.make_array_from_callback(value.shape, self.axes.replicated(), lambda index: value[index])

    @cached_property
    def names(self) -> dict[Leaf, list[str]]:
        """All names of each parameter, as the model's ``state_dict`` has them."""
        found: dict[int, list[str]] = {}
        for name, parameter in self.root.module.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(name)
        return {leaf: found[id(leaf.placeholder)] for stored in self.stored for leaf in stored.leaves}

    @cached_property
    def buffer_names(self) -> list[list[str]]:
        """All names of each buffer."""
        prefixes = {id(module): name for name, module in self.root.module.named_modules()}
        return [[f"{prefixes[id(m)]}.{name}".lstrip(".") for m, name in same] for same in self.sites]

    @property
    def buffers(self) -> list[Any]:
        """One array per entry of ``sites``, of shape [devices, ...]."""
        if self._stacked is None:
            self.load_buffers()
        assert self._stacked is not None
        return self._stacked

    @buffers.setter
    def buffers(self, arrays: Sequence[Any]) -> None:
        self._stacked = list(arrays)

    def load_buffers(self) -> None:
        """Give every device a copy of the buffers that the torch modules hold."""
        host = [buffer_at(same) for same in self.sites]
        for names, buffer in zip(self.buffer_names, host, strict=True):
            if buffer is None or buffer.is_meta:
                raise StageError(f"buffer {names[0]} is on the meta device; call xla.materialize(model)")
        self._stacked = [self._stack(buffer) for buffer in host]

    def _stack(self, buffer: torch.Tensor) -> Any:
        value = bridge.to_numpy(buffer).astype(bridge.jax_dtype(buffer.dtype))
        shape = (self.axes.num_devices, *value.shape)
        return jax.make_array_from_callback(shape, self.axes.batch(), lambda _: value[None])

    def abstract_buffers(self) -> list[Any]:
        """Shapes, dtypes and shardings of ``buffers``."""
        sharding, devices = self.axes.batch(), self.axes.num_devices
        host = [buffer_at(same) for same in self.sites]
        return [
            jax.ShapeDtypeStruct((devices, *b.shape), bridge.jax_dtype(b.dtype), sharding=sharding)
            for b in host
        ]

    def store_buffers(self) -> None:
        """Copy the first device's buffers back into the torch modules. Every process must call it."""
        if self._stacked is None:
            return
        first = jax.jit(lambda x: x[0], out_shardings=self.axes.replicated())
        for same, array in zip(self.sites, self._stacked, strict=True):
            new = bridge.from_numpy(np.asarray(first(array))).to(buffer_at(same).dtype)
            for owner, name in same:
                buffers_of(owner)[name] = new

    def flags(self) -> tuple[bool, ...]:
        """The training mode of every module: a program is compiled for one of them."""
        return tuple(module.training for module in self.root.module.modules())

    def require_values(self) -> None:
        """Raises: StageError if parameters have no values yet."""
        for stored in self.stored:
            if stored.array is None:
                raise StageError(
                    f"{self.names[stored.leaves[0]][0]} has no values yet (it was built on the meta device); "
                    "call xla.materialize(model) or xla.load_full_state_dict(model, ...)"
                )

    def run(self, trace: ProgramTrace, function: Any, buffers: Sequence[Any], key: Any, batch: Any) -> Any:
        """``function(model, *batch)`` on this device, inside a program: ``(result, spec, buffers, key)``.

        buffers: without the device dim. batch: ``(leaves, spec)`` of the arguments, leaves as jax arrays.
        result: the tensors that the function returned, as jax arrays, and their structure.
        """
        leaves, spec = batch
        with tracing(trace, key), installed(list(zip(self.sites, buffers, strict=True)), ()):
            args = tree_unflatten([bridge.as_torch(leaf) for leaf in leaves], spec)
            outputs, out_spec = tree_flatten(function(self.root.module, *args))
            result = [bridge.as_jax(leaf) for leaf in outputs]
            after = [
                new.astype(old.dtype) for new, old in zip(read_buffers(self.sites), buffers, strict=True)
            ]
            return result, out_spec, after, bridge.current_key()

    def batch_of(self, args: Any, parts: int = 1) -> tuple[list[Any], Any]:
        """``(arrays, spec)`` of a batch: this process's rows, split over its devices.

        Raises: InputError for what isn't a tensor, or rows that don't split into ``parts`` on each device.
        """
        leaves, spec = tree_flatten(args)
        count = len([d for d in self.axes.mesh.devices.flat if d.process_index == jax.process_index()])
        arrays = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf = bridge.to_numpy(leaf)
            if not isinstance(leaf, np.ndarray) or not leaf.ndim:
                raise InputError(
                    f"batch item {i} is {type(leaf).__name__}, expected a tensor or array with rows on dim 0"
                )
            if leaf.shape[0] % (count * parts):
                raise InputError(
                    f"batch item {i} has {leaf.shape[0]} rows, which can't be split over {count} devices"
                    + (f" and {parts} microbatches" if parts > 1 else "")
                    + "; drop or pad the last rows"
                )
            leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
            arrays.append(jax.make_array_from_process_local_data(self.axes.batch(), leaf))
        return arrays, spec

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of the model for a batch, as host tensors; this process's rows. No gradient.

        Dim 0 of every input is split over the devices, and that of every output joined. Buffers that the
        forward changes are not kept. Every process must call it.
        """
        self.require_values()
        arrays, spec = self.batch_of((args, kwargs))
        cache_key = (spec, self.flags())
        if cache_key not in self._forwards:
            self._forwards[cache_key] = self._compile_forward(spec)
        function, known = self._forwards[cache_key]
        results = function([s.array for s in self.stored], self.buffers, self.key, arrays)
        host = [bridge.from_numpy(_local_rows(result)) for result in results]
        return tree_unflatten([tensor.as_subclass(Output) for tensor in host], known["spec"])

    def _compile_forward(self, spec: Any) -> Any:
        known: dict[str, Any] = {}
        axes = self.axes

        def local(shards: list[Any], buffers: list[Any], key_data: Any, leaves: list[Any]) -> list[Any]:
            trace = ProgramTrace(self.root, dict(zip(self.stored, shards, strict=True)), reshard=False)
            key = device_key(axes, key_data)
            result, known["spec"], _, _ = self.run(
                trace,
                lambda model, args, kwargs: model(*args, **kwargs),
                [b[0] for b in buffers],
                key,
                (leaves, spec),
            )
            return result

        specs = (axes.shard_spec, axes.batch_spec, jax.sharding.PartitionSpec(), axes.batch_spec)
        function = jax.shard_map(
            local, mesh=axes.mesh, in_specs=specs, out_specs=axes.batch_spec, check_vma=False
        )
        return jax.jit(function), known


def device_key(axes: Axes, key_data: Any) -> Any:
    """A random key of each device's own (inside a program)."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), jax.lax.axis_index(axes.names))


def _local_rows(array: Any) -> np.ndarray:
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


class Output(torch.Tensor):
    """What calling a sharded model returns: a host tensor of a program that keeps nothing for a backward."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise StageError(
            "an XLA model has no .backward(): its gradient is part of a compiled step; use "
            "xla.make_train_step(model, loss_fn, optimizer)"
        )
