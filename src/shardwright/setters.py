"""What can be said of a sharded module after ``fully_shard``: its gradients, its schedule, its collectives.

Each setter only replaces a frozen policy, or asks the runtime; what they mean is written where it is done.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.unit import Unit, is_sharded, unit_of, units_in
from shardwright.errors import InputError, warn
from shardwright.policy import SchedulePolicy
from shardwright.transport.mesh import smaller_world


class Owner:
    """A sharded module, as what it owns."""

    def _unit(self) -> Unit:
        return unit_of(cast(nn.Module, self))

    def _units(self, recurse: bool) -> list[Unit]:
        return units_in(cast(nn.Module, self)) if recurse else [self._unit()]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [group for unit in self._units(recurse) for group in unit.groups]

    def _groups_on_one_mesh(self, setter: str) -> list[ParamGroup]:
        groups = self._unit().groups
        meshes = {group.axis for group in groups}
        if len(meshes) > 1:
            raise InputError(
                f"{setter} is not supported with multiple param groups (parameters of this module are on "
                f"{len(meshes)} meshes); call fully_shard on its parts, and the setter on each"
            )
        return groups


@contextmanager
def without_sync(root: nn.Module) -> Iterator[None]:
    """Backwards through the groups below ``root`` reduce nothing; afterwards each does what it did before."""
    groups = [group for unit in units_in(root) for group in unit.groups]
    before = [group.reducer.policy for group in groups]
    for group in groups:
        group.reducer.policy = replace(group.reducer.policy, reduce=False, all_reduce=False)
    try:
        yield
    finally:
        for group, policy in zip(groups, before, strict=True):
            group.reducer.policy = policy


class GradientSetters(Owner):
    """How gradients are reduced. Every rank must call these setters, with the same arguments; they
    communicate nothing.
    """

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the backward reduces gradients over ranks. False keeps them unsharded and adds them up.

        For gradient accumulation: False for all microbatches but the last. The accumulated gradients take as
        much memory as the unsharded parameters. Until they are reduced, ``param.grad`` stands for them: to
        clear it (``zero_grad()``, ``param.grad = None``) clears them, and to read it raises StageError, as
        does an optimizer's step with nothing else. Every rank must call it, with the same arguments; it
        communicates nothing.

        Args:
            requires_gradient_sync: False to accumulate, True before the last microbatch.
            recurse: also for nested sharded modules.

        Examples:
            >>> model = shardwright.fully_shard(nn.Linear(8, 4))
            >>> microbatches = torch.ones(4, 2, 8)
            >>> for number, batch in enumerate(microbatches):
            ...     model.set_requires_gradient_sync(number == len(microbatches) - 1)
            ...     (model(batch).mean() / len(microbatches)).backward()
        """
        self._set_reduction(recurse, reduce=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for gradient accumulation, as of DistributedDataParallel: backwards inside it add up
        unsharded gradients, and the first one outside reduces them all.

        It is ``set_requires_gradient_sync(False)`` for its length, with the same memory. Every rank enters
        it.

        Returns:
            The context; it may be entered once.

        Examples:
            >>> model = shardwright.fully_shard(nn.Linear(8, 4))
            >>> with model.no_sync():
            ...     model(torch.ones(2, 8)).mean().backward()
            >>> model(torch.ones(2, 8)).mean().backward()
        """
        return without_sync(cast(nn.Module, self))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the backward all-reduces gradients over the replicas of a 2-D mesh.

        False keeps the gradients that were reduced over the sharded axis and adds them up: gradient
        accumulation in the memory of the shards. Every rank must call it, with the same arguments; it
        communicates nothing.

        Args:
            requires_all_reduce: False to accumulate, True before the last microbatch.
            recurse: also for nested sharded modules.
        """
        self._set_reduction(recurse, all_reduce=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the coming backward is the last one of its step, for the whole model.

        False: the backward doesn't wait at its end for the reductions that it started. The last backward
        waits for all of them, and only then ``.grad`` is complete. Every rank must call it, with the same
        arguments; it communicates nothing.

        Args:
            is_last_backward: False before all backwards of a step but the last.
        """
        runtime = self._unit().runtime
        if not runtime.step.finalizes_by_hand:
            runtime.step = replace(runtime.step, is_last_backward=is_last_backward)

    def set_gradient_averaging(self, averaging: str, *, recurse: bool = True) -> None:
        """Whether gradients are the mean over ranks or their sum.

        A third way, a weighted mean, is ``shardwright.loss_weights``. Every rank must call it, with the same
        arguments; it communicates nothing.

        Args:
            averaging: ``"average"``, the default, or ``"sum"``.
            recurse: also for nested sharded modules.

        Raises:
            InputError: ``averaging`` is neither.
        """
        factors = {"average": None, "sum": 1.0}
        if averaging not in factors:
            raise InputError(f'averaging must be "average" or "sum", got {averaging!r}')
        self._set_reduction(recurse, divide_factor=factors[averaging], weighted=False)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by a number of your own instead of the number of ranks.

        Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            factor: above 0; with 1.0 the gradient is the sum.

        Raises:
            InputError: ``factor`` isn't above 0.
        """
        self._set_reduction(False, divide_factor=float(factor), weighted=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of ``set_gradient_divide_factor``.

        Every rank must call it, with the same arguments.

        Args:
            factor: as there.

        Raises:
            InputError: as there.

        Warns:
            FutureWarning: always.
        """
        warn("Use `set_gradient_divide_factor` instead", FutureWarning)
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that got no gradient on this rank take part in reductions with zeros.

        For models in which different ranks use different parameters. Every rank must call it, with the same
        arguments; it communicates nothing.

        Args:
            reduce_scatter_unused_params: True lets them take part.
            recurse: also for nested sharded modules.
        """
        self._set_reduction(recurse, unused_params=reduce_scatter_unused_params)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call a hook with this module's reduced gradients, before they are added to those of the shards.

        Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            hook: called with one 1-D tensor in the reduce dtype, already divided and without padding; it can
                change the tensor in place before it is added.
            stream: a CUDA stream to run it in, on a 1-D mesh only; None: the stream of the reductions.

        Raises:
            InputError: ``stream`` was given on a 2-D mesh, or the module's parameters are on several meshes.
        """
        groups = self._groups_on_one_mesh("set_all_reduce_hook")
        if stream is not None and any(group.axis.replicate is not None for group in groups):
            raise InputError("stream cannot be set when using native HSDP: pass it on a 1-D mesh only")
        for group in groups:
            group.reducer.hook, group.reducer.stream = hook, stream

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted without effect: every reduction here is a sum, divided afterwards.

        Args:
            enable: without effect.
        """

    def _set_reduction(self, recurse: bool, **changes: Any) -> None:
        for group in self._groups(recurse):
            group.reducer.policy = replace(group.reducer.policy, **changes)


class ScheduleSetters(Owner):
    """When parameters are unsharded, and how bytes are moved. Every rank must call these setters, with
    the same arguments, between steps; they communicate nothing.
    """

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether groups are resharded between forward and backward, from the next step on.

        Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            reshard_after_forward: False keeps the unsharded parameters, which saves an all-gather and takes
                memory.
            recurse: also for nested sharded modules.

        Raises:
            InputError: it isn't a bool (pass an int to ``fully_shard`` instead).
        """
        if not isinstance(reshard_after_forward, bool):
            raise InputError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}; an int world "
                "is given to fully_shard"
            )
        for group in self._groups(recurse):
            group.request(smaller_world=smaller_world(group.axis, reshard_after_forward))
        self._request(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether groups are resharded after the backward.

        False saves the next forward's all-gather if the parameters weren't changed in between. It is meant
        for gradient accumulation; the unsharded parameters stay in memory. Every rank must call it, with the
        same arguments; it communicates nothing.

        Args:
            reshard_after_backward: True is the default.
            recurse: also for nested sharded modules.
        """
        self._request(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this module's parameters are gathered for its backward.

        Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            unshard_in_backward: False for a module whose backward doesn't read its parameters, such as an
                embedding.
        """
        self._request(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch the groups of these modules, in order, when this module's forward begins, instead of the
        next ones. Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            modules: sharded modules of the same model; an empty list restores the recorded order.

        Raises:
            InputError: one of them isn't a sharded module.
        """
        self._set_ahead("ahead_in_forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch the groups of these modules, in order, when this module's backward begins, instead of the
        next ones. Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            modules: sharded modules of the same model; an empty list restores the recorded order.

        Raises:
            InputError: one of them isn't a sharded module.
        """
        self._set_ahead("ahead_in_backward", modules)

    def set_schedule_policy(self, policy: SchedulePolicy) -> None:
        """Set when collectives are issued, for the whole model, from the next forward or backward on.

        Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            policy: the same on all ranks; see ``SchedulePolicy``.

        Raises:
            MissingExtra: its ``wire`` needs ``pip install 'shardwright[wire]'``.
        """
        self._unit().runtime.set_policy(policy)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatters of the whole model may be in flight at once.

        Every rank must call it, with the same arguments; it communicates nothing.

        Args:
            max_input_buffers: at least 1; as ``SchedulePolicy.max_reductions``.
            recurse: without effect.

        Raises:
            TypeError: it isn't an int.
            InputError: it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise InputError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        runtime = self._unit().runtime
        runtime.set_policy(replace(runtime.policy, max_reductions=max_input_buffers))

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward's all-gathers wait for an event, once. Local; any rank may call it.

        Args:
            event: a ``torch.Event`` that was recorded after the optimizer's step.
        """
        runtime = self._unit().runtime
        runtime.step = replace(runtime.step, optimizer_event=event)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Use your own all-gathers for this module. Every rank must call it; it communicates nothing.

        Args:
            comm: an object with ``allocate(size, *, dtype, device)`` and ``__call__(output_tensor,
                input_tensor, group, async_op)``.

        Raises:
            InputError: the module's parameters are on several meshes.
        """
        self._set_custom("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Use your own reduce-scatters for this module. Every rank must call it; it communicates nothing.

        Args:
            comm: as for ``set_custom_all_gather``; its call also takes ``op``, which is always a sum;
                gradients are divided afterwards.

        Raises:
            InputError: the module's parameters are on several meshes.
        """
        self._set_custom("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters have a process group of their own, beside all-gathers. On CPUs they have.

        Every rank must call it, with the same arguments, between steps. On an accelerator it makes one more
        communicator for each mesh of these modules, which all that is sharded over it uses.

        Args:
            enable: False goes back to the group of the all-gathers.
            recurse: also for nested sharded modules.
        """
        for group in self._groups(recurse):
            group.axis.comm.separate_reductions(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted without effect: collectives read and write the buffers where the data is used, so there is
        no staging memory that a process group could allocate.

        Args:
            enable: without effect.
        """

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Symmetric memory isn't supported.

        Args:
            backend: without effect.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"symmetric memory ({backend}) needs buffers at the same address on every rank, which regrown "
            "buffers are not; leave this call out: results are the same without it"
        )

    def _request(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                unit.runtime.change(group, **changes)

    def _set_ahead(self, direction: str, modules: Sequence[Any]) -> None:
        for module in modules:
            if not isinstance(module, nn.Module) or not is_sharded(module):
                raise InputError(f"Expects FSDPModule but got {type(module)}: {module}")
        unit, number = self._unit(), self._unit().runtime.table.number
        numbers = tuple(number(group) for module in modules for group in unit_of(module).groups)
        for group in unit.groups[:1]:
            unit.runtime.change(group, **{direction: numbers or None})

    def _set_custom(self, setter: str, **comms: Any) -> None:
        for group in self._groups_on_one_mesh(setter):
            group.request(**comms)
