"""One compiled training step: forward, backward, reduction, clipping and the optimizer's update."""
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec
from torch import nn

from shardwright.errors import InputError
from shardwright.torch_private import tree_flatten
from shardwright.xla import torch_bridge as bridge
from shardwright.xla.optim import Optimizer
from shardwright.xla.spmd_model import SpmdModel, device_key, spmd_model_of
from shardwright.xla.trace import ProgramTrace
from shardwright.xla.unit import Stored

LossFn = Callable[..., torch.Tensor]


def make_train_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    clip_norm: float | None = None,
    accumulation: int = 1,
    sync_buffers: bool = True,
) -> "TrainStep":
    """Compile forward, backward, reduction, clipping and the optimizer's update into one step of training.

    Every process must call it, with the same arguments.

    Args:
        model: the outermost module given to ``fully_shard``.
        loss_fn: called as ``loss_fn(model, *batch)``; returns a scalar tensor, the mean over the rows it was
            given. It is traced: it runs once for each shape of batch, on tensors without values.
        optimizer: ``xla.SGD``, ``xla.AdamW``, or an optax transformation that works element by element.
        clip_norm: largest global norm of the gradient, as of ``torch.nn.utils.clip_grad_norm_``; None: not
            clipped.
        accumulation: microbatches that each device's rows are cut into; their gradients are averaged.
        sync_buffers: average floating-point buffers (BatchNorm's statistics) over devices after each step.
            False: each device keeps its own, and the first one's are saved.

    Returns:
        A function of a batch; see ``TrainStep``.

    Raises:
        InputError: the model isn't sharded, or an option is out of range.
    """
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise InputError(f"accumulation must be an int of at least 1, got {accumulation!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm must be above 0 or None, got {clip_norm!r}")
    if not isinstance(optimizer, Optimizer | optax.GradientTransformation):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}, expected xla.SGD, xla.AdamW or an optax "
            "transformation (a torch.optim one can't be compiled into the step)"
        )
    return TrainStep(spmd_model_of(model), loss_fn, optimizer, (clip_norm, accumulation, sync_buffers))


class TrainStep:
    """Call it with a batch: it trains by one step and returns the loss before it. Made by
    ``make_train_step``.

    Every process calls it with its own rows, on dim 0 of each tensor, the same number on every process; they
    are split over its devices. The loss is a 0-d jax array, averaged over all devices; ``float(loss)`` waits
    for it. Parameters, buffers and the optimizer's state are updated in place (their memory is donated). A
    unit that the loss doesn't depend on is left alone by the optimizer. It is compiled once for each shape of
    batch and each combination of ``module.training``.

    Its attribute ``grad_norm`` is the gradient's global norm in the last step, before clipping: a 0-d jax
    array, None without ``clip_norm``.
    """

    def __init__(
        self, spmd: SpmdModel, loss_fn: LossFn, optimizer: Any, options: tuple[Any, int, bool]
    ) -> None:
        self.spmd = spmd
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.clip_norm, self.accumulation, self.sync_buffers = options
        self.grad_norm: Any = None
        self.state: list[Any] | None = None
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *batch: Any) -> Any:
        spmd = self.spmd
        spmd.require_values()
        arrays, spec = spmd.batch_of(batch, self.accumulation)
        if self.state is None:
            self.state = self.initial_state()
        trained, frozen = ([s.array for s in part] for part in (spmd.trained, spmd.frozen))
        trained, spmd.buffers, self.state, spmd.key, loss, norm = self._function(spec)(
            trained, spmd.buffers, self.state, spmd.key, frozen, arrays
        )
        for stored, array in zip(spmd.trained, trained, strict=True):
            stored.array = array
        self.grad_norm = None if self.clip_norm is None else norm
        return loss

    def lower(self, *batch: Any) -> Any:
        """The program for a batch, to see its text and memory. No values are needed: the model may be on the
        meta device.

        Args:
            *batch: tensors of the right shapes and dtypes, on the meta device or any.

        Returns:
            A ``jax.stages.Lowered``; call its ``compile()``.

        Raises:
            InputError: an optimizer's ``decayed`` is true for some parameters of one array
                (``flatten_parameters``) and false for others.
        """
        spmd = self.spmd
        leaves, spec = tree_flatten(batch)
        sharding = spmd.axes.batch()
        arrays = [
            jax.ShapeDtypeStruct(tuple(x.shape), bridge.jax_dtype(x.dtype), sharding=sharding) for x in leaves
        ]
        state = [self._abstract_state(stored) for stored in spmd.trained]
        trained, frozen = ([s.abstract() for s in part] for part in (spmd.trained, spmd.frozen))
        return self._function(spec).lower(trained, spmd.abstract_buffers(), state, spmd.key, frozen, arrays)

    def initial_state(self) -> list[Any]:
        """The optimizer's state before the first step, placed on the devices. Every process calls it.

        Returns:
            One tree for each trained array, sharded as it is.

        Raises:
            InputError: as ``lower``.
        """
        found = []
        for stored in self.spmd.trained:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self._abstract_state(stored))
            found.append(jax.jit(self.transform(stored).init, out_shardings=shardings)(stored.array))
        return found

    def count(self) -> int:
        """Optimizer steps done, as its state counts them.

        Returns:
            The number; 0 where the state keeps no count.
        """
        counts = [
            leaf
            for leaf in jax.tree.leaves(self.state)
            if not leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.integer)
        ]
        return max(map(int, counts), default=0)

    def is_decayed(self, stored: Stored) -> bool:
        """Whether the optimizer's weight decay is for an array.

        Args:
            stored: the array, with the parameters in it.

        Returns:
            The answer.

        Raises:
            InputError: it holds parameters of both kinds (``flatten_parameters``).
        """
        decayed = self.optimizer.decayed if isinstance(self.optimizer, Optimizer) else None
        if decayed is None:
            return True
        names = self.spmd.names
        found = {bool(decayed(names[leaf][0], leaf.shape)) for leaf in stored.leaves}
        if len(found) > 1:
            raise InputError(
                f"{[names[leaf][0] for leaf in stored.leaves][:5]} are one array at rest, but not all "
                "of them are to be decayed; shard them without flatten_parameters"
            )
        return found.pop()

    def transform(self, stored: Stored) -> optax.GradientTransformation:
        """What the optimizer does to an array.

        Args:
            stored: the array, with the parameters in it.

        Returns:
            A transformation of optax.

        Raises:
            InputError: as ``is_decayed``.
        """
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer.transform(self.is_decayed(stored))
        return self.optimizer

    def _abstract_state(self, stored: Stored) -> Any:
        axes = self.spmd.axes
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=axes.sharded() if leaf.ndim else axes.replicated()
            ),
            jax.eval_shape(self.transform(stored).init, stored.abstract()),
        )

    def _function(self, spec: Any) -> Any:
        key = (spec, self.spmd.flags())
        if key not in self._compiled:
            axes, whole = self.spmd.axes, PartitionSpec()
            state = [
                jax.tree.map(lambda leaf: leaf.sharding.spec, self._abstract_state(stored))
                for stored in self.spmd.trained
            ]
            local = jax.shard_map(
                lambda *args: self._local(spec, *args),
                mesh=axes.mesh,
                in_specs=(axes.shard_spec, axes.batch_spec, state, whole, axes.shard_spec, axes.batch_spec),
                out_specs=(axes.shard_spec, axes.batch_spec, state, whole, whole, whole),
                check_vma=False,
            )
            self._compiled[key] = jax.jit(local, donate_argnums=(0, 1, 2, 3))
        return self._compiled[key]

    def _local(self, spec: Any, *args: Any) -> Any:
        """The step on one device, inside shard_map."""
        trained, buffers, state, key_data, frozen, leaves = args
        axes = self.spmd.axes
        buffers = [buffer[0] for buffer in buffers]
        key = device_key(axes, key_data)
        loss, grads, buffers, reached = self._accumulate(trained, buffers, key, frozen, (leaves, spec))
        grads, norm = self._reduced(grads)
        loss = jax.lax.pmean(loss, axes.names)
        if self.sync_buffers:
            buffers = [
                jax.lax.pmean(b, axes.names) if jnp.issubdtype(b.dtype, jnp.floating) else b for b in buffers
            ]
        new, new_state = [], []
        for stored, param, grad, old in zip(self.spmd.trained, trained, grads, state, strict=True):
            if stored in reached:
                updates, old = self.transform(stored).update(grad, old, param)
                param = optax.apply_updates(param, updates)
            new.append(param)
            new_state.append(old)
        next_key = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(key_data))[0])
        return new, [buffer[None] for buffer in buffers], new_state, next_key, loss, norm

    def _accumulate(
        self,
        trained: list[Any],
        buffers: list[Any],
        key: Any,
        frozen: list[Any],
        batch: tuple[list[Any], Any],
    ) -> tuple[Any, list[Any], list[Any], set[Stored]]:
        """``(mean loss, gradients summed over microbatches and shards, buffers, arrays that have one)``."""
        spmd, (leaves, spec) = self.spmd, batch
        reached: set[Stored] = set()

        def loss_of(trained: list[Any], buffers: list[Any], key: Any, leaves: list[Any]) -> Any:
            noted = [
                _noted(array, reached, stored) for stored, array in zip(spmd.trained, trained, strict=True)
            ]
            shards = dict(zip((*spmd.trained, *spmd.frozen), (*noted, *frozen), strict=True))
            trace = ProgramTrace(spmd.root, shards, reshard=True)
            result, _, buffers, key = spmd.run(trace, self.loss_fn, buffers, key, (leaves, spec))
            if len(result) != 1 or result[0].shape:
                raise InputError(
                    "loss_fn must return one scalar tensor, got shapes "
                    + str([list(r.shape) for r in result])
                )
            return result[0].astype(jnp.float32), (buffers, key)

        graded = jax.value_and_grad(loss_of, has_aux=True)
        if self.accumulation == 1:
            (loss, (buffers, _)), grads = graded(trained, buffers, key, leaves)
            return loss, grads, buffers, reached

        def microbatch(carry: Any, leaves: list[Any]) -> Any:
            total, sums, buffers, key = carry
            (loss, (buffers, key)), grads = graded(trained, buffers, key, leaves)
            return (total + loss, [a + b for a, b in zip(sums, grads, strict=True)], buffers, key), None

        parts = [leaf.reshape(self.accumulation, -1, *leaf.shape[1:]) for leaf in leaves]
        zeros = [jnp.zeros_like(param) for param in trained]
        carry, _ = jax.lax.scan(microbatch, (jnp.float32(0), zeros, buffers, key), parts)
        return carry[0] / self.accumulation, carry[1], carry[2], reached

    def _reduced(self, grads: Sequence[Any]) -> tuple[list[Any], Any]:
        """Gradients averaged over all devices and microbatches, and clipped; their norm before (0: not
        asked for)."""
        axes = self.spmd.axes
        if axes.replicate is not None:
            grads = [jax.lax.psum(grad, axes.replicate) for grad in grads]
        grads = [grad / np.float32(axes.num_devices * self.accumulation).astype(grad.dtype) for grad in grads]
        if self.clip_norm is None:
            return grads, jnp.float32(0)
        squares = sum((jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in grads), jnp.float32(0))
        norm = jnp.sqrt(jax.lax.psum(squares, axes.shard))
        scale = jnp.minimum(1.0, self.clip_norm / (norm + 1e-6))
        return [grad * scale.astype(grad.dtype) for grad in grads], norm


def _noted(array: Any, reached: set[Stored], stored: Stored) -> Any:
    """``array``; while a program is traced, ``stored`` is put into ``reached`` if a gradient comes to it. JAX
    asks nobody for one that is known to be zero."""

    @jax.custom_vjp
    def same(value: Any) -> Any:
        return value

    def backward(_: None, gradient: Any) -> tuple[Any]:
        reached.add(stored)
        return (gradient,)

    same.defvjp(lambda value: (value, None), backward)
    return same(array)
