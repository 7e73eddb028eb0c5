"""What can be said of a sharded module after ``fully_shard``: its gradients, its schedule, its collectives.

Each setter only replaces a frozen policy, or asks the runtime; what they mean is written where it is done.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shardwright.engine.group import ParamGroup
from shardwright.engine.unit import Unit, is_sharded, unit_of, units_in
from shardwright.errors import InputError
from shardwright.policy import SchedulePolicy
from shardwright.schedule.schedule import Phase


class Owner:
    """A sharded module, as what it owns."""

    def _unit(self) -> Unit:
        return unit_of(cast(nn.Module, self))

    def _units(self, recurse: bool) -> list[Unit]:
        return units_in(cast(nn.Module, self)) if recurse else [self._unit()]

    def _groups_on_one_mesh(self, setter: str) -> list[ParamGroup]:
        groups = self._unit().groups
        meshes = {group.axis for group in groups}
        if len(meshes) > 1:
            raise InputError(
                f"{setter} is not supported with multiple param groups (parameters of this module are on "
                f"{len(meshes)} meshes); call fully_shard on its parts, and the setter on each"
            )
        return groups


class GradientSetters(Owner):
    """How gradients are reduced."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over ranks. False keeps them unsharded and adds them up.

        For gradient accumulation: False for all microbatches but the last. ``recurse=False``: only this
        module's own group. Gradients that are kept take the memory of the unsharded parameters.
        """
        self._set_reduction(recurse, reduce=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the copies of a 2-D mesh. False keeps what was reduced over the
        sharded axis, and adds it up: accumulation in the memory of the shards."""
        self._set_reduction(recurse, all_reduce=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the next backwards don't wait for their reductions at the end; the last one does for all."""
        runtime = self._unit().runtime
        runtime.step = replace(runtime.step, is_last_backward=is_last_backward)

    def set_gradient_averaging(self, averaging: str, *, recurse: bool = True) -> None:
        """``"average"``: gradients are the mean over ranks, as by default; ``"sum"``: their sum.

        The third way, by the weight of each loss, is ``shardwright.loss_weights``. Raises: InputError.
        """
        factors = {"average": None, "sum": 1.0}
        if averaging not in factors:
            raise InputError(f'averaging must be "average" or "sum", got {averaging!r}')
        self._set_reduction(recurse, divide_factor=factors[averaging], weighted=False)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks."""
        self._set_reduction(False, divide_factor=float(factor), weighted=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of ``set_gradient_divide_factor``."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters without a gradient take part in reductions with zeros: for models in which
        different ranks use different parameters."""
        self._set_reduction(recurse, unused_params=reduce_scatter_unused_params)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(flat)`` with this module's reduced gradients, divided, before they are added to the
        shards'; what it changes in place is what is added. ``flat``: 1-D, in the reduce dtype, padding-free.

        stream: CUDA stream to run it in; not with a 2-D mesh. Raises: InputError.
        """
        groups = self._groups_on_one_mesh("set_all_reduce_hook")
        if stream is not None and any(group.axis.replicate is not None for group in groups):
            raise InputError("stream cannot be set when using native HSDP: pass it on a 1-D mesh only")
        for group in groups:
            group.reducer.hook, group.reducer.stream = hook, stream

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted and true already: every reduction here sums, and divides afterwards."""

    def _set_reduction(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                group.reducer.policy = replace(group.reducer.policy, **changes)


class ScheduleSetters(Owner):
    """When parameters are unsharded, and how bytes are moved."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether groups are resharded between forward and backward, from the next step on."""
        if not isinstance(reshard_after_forward, bool):
            raise InputError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}; an int world "
                "is given to fully_shard"
            )
        for unit in self._units(recurse):
            for group in unit.groups:
                group.request(smaller_world=group.axis.node if reshard_after_forward else None)
        self._request(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether groups are resharded after backward. False saves the next forward's all-gather where the
        parameters weren't changed in between: for accumulation, at the memory of unsharded parameters."""
        self._request(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: this module's backward doesn't read its parameters (an embedding), so don't gather them."""
        self._request(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """All-gather these modules' groups when this one's forward begins, in order, instead of the next.

        An empty list goes back to the next ones in the recorded order.
        """
        self._set_ahead(Phase.FORWARD, modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """The same for this module's backward."""
        self._set_ahead(Phase.BACKWARD, modules)

    def set_schedule_policy(self, policy: SchedulePolicy) -> None:
        """How far ahead collectives are issued, for the whole model, from the next forward or backward on.

        Raises: InputError where it names a group that the model hasn't; MissingExtra for a ``wire`` that
        takes ``pip install 'shardwright[wire]'``.
        """
        self._unit().runtime.set_policy(policy)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatters of the whole model may be in flight at once."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise InputError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        runtime = self._unit().runtime
        runtime.set_policy(replace(runtime.policy, max_reductions=max_input_buffers))

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward's all-gathers wait for ``event`` (recorded after the optimizer's step), once."""
        runtime = self._unit().runtime
        runtime.step = replace(runtime.step, optimizer_event=event)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Move this module's all-gathers with ``comm``: ``allocate(size, *, dtype, device)`` and
        ``__call__(output_tensor, input_tensor, group, async_op)``. Raises: InputError with several groups."""
        self._set_custom("set_custom_all_gather", all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """The same for reduce-scatters, whose call also takes ``op`` (always a sum; divided afterwards)."""
        self._set_custom("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted and true already: reductions have process groups of their own here, always."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted, without effect: collectives here move straight between the places of use, so there is no
        staging memory that a process group could allocate."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Symmetric memory isn't supported. Raises: NotImplementedError, always."""
        raise NotImplementedError(
            f"symmetric memory ({backend}) needs buffers at the same address on every rank, which regrown "
            "buffers are not; leave this call out: results are the same without it"
        )

    def _request(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                unit.runtime.change(group, **changes)

    def _set_ahead(self, phase: Phase, modules: Sequence[Any]) -> None:
        for module in modules:
            if not isinstance(module, nn.Module) or not is_sharded(module):
                raise InputError(f"Expects FSDPModule but got {type(module)}: {module}")
        unit = self._unit()
        groups = [group for module in modules for group in unit_of(module).groups]
        for group in unit.groups[:1]:
            unit.runtime.set_ahead(group, phase, groups or None)

    def _set_custom(self, setter: str, **comms: Any) -> None:
        for group in self._groups_on_one_mesh(setter):
            group.request(**comms)
