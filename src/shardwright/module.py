"""``FSDPModule``: what a module can do once ``fully_shard`` was called on it.

Each setter only replaces a frozen policy, or asks the runtime; what they mean is written where it is done.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shardwright.comm.custom import CustomComm
from shardwright.errors import InputError, StageError
from shardwright.motion.clone import Blueprint, deep_copy, pack, rebuild
from shardwright.motion.hooks import reset_step
from shardwright.motion.methods import run_as_forward
from shardwright.motion.unit import Unit, unit_of, units_in
from shardwright.observe.trace import Trace
from shardwright.plan.schedule import ActionKind, Phase, Schedule
from shardwright.policy import SchedulePolicy
from shardwright.state.group import ParamGroup


class FSDPModule:
    """What a module is besides its own class once ``fully_shard`` was called on it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the module's own class: ``model[:2]`` of a sharded Sequential is a plain one."""
        own = original_class(cls)
        return own(*args, **kwargs) if own is not cls else object.__new__(cls)

    # ---- unsharding by hand

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """All-gather this module's own parameters now (not its children's); every rank of the mesh calls it.

        async_op: return a handle whose ``wait`` makes them readable, instead of waiting here. The module's
            forward waits for it in any case.
        """
        handle = _UnitHandle(self._unit())
        for group in self._unit().groups:
            self._unit().runtime.do(ActionKind.UNSHARD, group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters (not its children's) and show the shards."""
        for group in self._unit().groups:
            self._unit().runtime.do(ActionKind.RESHARD, group)

    @contextmanager
    def unsharded(self, recurse: bool = True) -> Iterator[None]:
        """``with model.unsharded():`` the parameters are plain and whole; what was edited is written back.

        For reading or editing weights outside of a forward. Every rank of the mesh enters and leaves it,
        between steps; all must make the same edits, since each rank keeps its own rows of its own copy.
        Parameters are in ``param_dtype`` here; those that nobody edited keep their full precision.
        """
        pairs = [(unit.runtime, group) for unit in self._units(recurse) for group in unit.groups]
        if any(runtime.phase is not None for runtime, _ in pairs):
            raise StageError("unsharded() was entered inside a forward or backward; enter it between steps")
        for kind in (ActionKind.RESHARD, ActionKind.UNSHARD, ActionKind.WAIT):
            for runtime, group in pairs:
                runtime.do(kind, group)
        versions = [group.unsharded_versions() for _, group in pairs]
        try:
            yield
        finally:
            for (runtime, group), before in zip(pairs, versions, strict=True):
                group.write_back(before)
                runtime.do(ActionKind.RESHARD, group)

    def reset_iter_state(self) -> None:
        """Forget a step that an exception ended; on the root only.

        The next forward does the same by itself. Waits for what is in flight, reshards every group and
        drops the step's gradients, those of earlier microbatches included.
        Raises: StageError on a module that isn't the model's root.
        """
        unit = self._unit()
        inside = {group for other in self._units(True) for group in other.groups}
        if set(unit.runtime.groups) - inside:
            raise StageError(
                f"reset_iter_state must be called on the root FSDP module; {unit.name} is inside another one"
            )
        reset_step(unit.runtime)

    def join_evaluations(self) -> None:
        """Take part in the other ranks' evaluations, until every rank has called this.

        For ranks that evaluate different numbers of batches, before what comes next if that is neither a
        training forward nor an evaluation of this model: a save, a reduction of losses. Every rank of the
        mesh calls it, between steps.
        """
        self._unit().runtime.join_evaluations()

    # ---- gradients

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

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks."""
        self._set_reduction(False, divide_factor=float(factor))

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
        group = self._one_group("set_all_reduce_hook")
        if group is None:
            return
        if stream is not None and group.axis.replicate is not None:
            raise InputError("stream cannot be set when using native HSDP: pass it on a 1-D mesh only")
        group.reducer.hook, group.reducer.stream = hook, stream

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted and true already: every reduction here sums, and divides afterwards."""

    # ---- when parameters are unsharded

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether groups are resharded between forward and backward, from the next step on."""
        if not isinstance(reshard_after_forward, bool):
            raise InputError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}; an int world "
                "is given to fully_shard"
            )
        for unit in self._units(recurse):
            for group in unit.groups:
                group.near = None
        self._set_facts(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether groups are resharded after backward. False saves the next forward's all-gather where the
        parameters weren't changed in between: for accumulation, at the memory of unsharded parameters."""
        self._set_facts(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: this module's backward doesn't read its parameters (an embedding), so don't gather them."""
        self._set_facts(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """All-gather these modules' groups when this one's forward begins, in order, instead of the next.

        An empty list goes back to the next ones in the recorded order.
        """
        self._set_ahead(Phase.FORWARD, modules)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """The same for this module's backward."""
        self._set_ahead(Phase.BACKWARD, modules)

    def set_schedule_policy(self, policy: SchedulePolicy) -> None:
        """How far ahead collectives are issued, for the whole model, from the next forward or backward on."""
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

    # ---- how bytes are moved

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
        """Not applicable: collectives here move straight between the places of use, without staging memory.

        Raises: NotImplementedError where ``enable`` is true.
        """
        if enable:
            raise NotImplementedError(
                "collectives here have no staging buffers to allocate: they read and write parameters and "
                "gradients in place; leave this call out"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Symmetric memory isn't supported. Raises: NotImplementedError, always."""
        raise NotImplementedError(
            f"symmetric memory ({backend}) needs buffers at the same address on every rank, which regrown "
            "buffers are not; leave this call out: results are the same without it"
        )

    # ---- what is planned, what did happen

    def trace(self) -> Trace:
        """What did happen in the last forward, evaluation and backward, with times of the host."""
        return self._unit().runtime.trace

    def schedule(self) -> Schedule:
        """The schedule planned from the last recorded step: print it, compare it. Empty before one."""
        return self._unit().runtime.schedule

    # ---- inside

    def _unit(self) -> Unit:
        return unit_of(cast(nn.Module, self))

    def _units(self, recurse: bool) -> list[Unit]:
        return units_in(cast(nn.Module, self)) if recurse else [self._unit()]

    def _set_reduction(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                group.reducer.policy = replace(group.reducer.policy, **changes)

    def _set_facts(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                unit.runtime.set_facts(group, **changes)

    def _set_ahead(self, phase: Phase, modules: Sequence["FSDPModule"]) -> None:
        for module in modules:
            if not isinstance(module, FSDPModule):
                raise InputError(f"Expects FSDPModule but got {type(module)}: {module}")
        unit = self._unit()
        groups = [group for module in modules for group in module._unit().groups]
        for group in unit.groups[:1]:
            unit.runtime.set_ahead(group, phase, groups or None)

    def _one_group(self, setter: str) -> ParamGroup | None:
        groups = self._unit().groups
        if len(groups) > 1:
            raise InputError(
                f"{setter} is not supported with multiple param groups (parameters of this module are on "
                f"{len(groups)} meshes); call fully_shard on its parts, and the setter on each"
            )
        return groups[0] if groups else None

    def _set_custom(self, setter: str, **comms: Any) -> None:
        group = self._one_group(setter)
        if group is None:
            return
        known = group.comm if isinstance(group.comm, CustomComm) else None
        before = {
            "all_gather": known and known.custom_all_gather,
            "reduce_scatter": known and known.custom_reduce_scatter,
        }
        group.comm = group.reducer.comm = CustomComm(group.axis.comm, group.axis.group, **{**before, **comms})

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double(), .to_empty(): they act on the shards, so the shards must be what modules show.
        self._unit().runtime.rest()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own, sharded alike on the same mesh, with copies of the shards; at rest."""
        return _restore(*deep_copy(cast(nn.Module, self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's shards and how they were made; every rank unpickles its own, on as many."""
        return _unpickle, pack(cast(nn.Module, self))


class UnshardHandle:
    """What ``FSDPModule.unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Return when the module shows its unsharded parameters. A second call does nothing."""


class _UnitHandle(UnshardHandle):
    """The all-gathers of one module."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        if self._unit is not None:
            for group in self._unit.groups:
                self._unit.runtime.do(ActionKind.WAIT, group)
            self._unit = None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Unshard ``module`` around another of its methods too, as around its forward.

    For modules with several entries (``encode``, ``generate``). No-op for a module that isn't sharded.
    Raises: InputError for a method that it doesn't have.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise InputError(f"{type(module)} does not have a method {method_name}")
    run_as_forward(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted and true already: models on one mesh share its process groups, and no model has streams of
    its own. Raises: InputError for a module that isn't sharded."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise InputError(f"Expects list of FSDPModules but got {module}")


_classes: dict[type, type] = {}


def become_fsdp_module(module: nn.Module) -> None:
    """Swap the module's class for a subclass of it and FSDPModule, one for each class."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module.__class__ = _classes[cls]


def original_class(cls: type) -> type:
    """The class that a module had before it was sharded."""
    return cls.__mro__[2] if cls.__mro__[1] is FSDPModule else cls


def _restore(model: nn.Module, blueprint: Blueprint) -> nn.Module:
    for module in rebuild(model, blueprint):
        become_fsdp_module(module)
    return model


def _unpickle(data: bytes, blueprint: Blueprint) -> nn.Module:
    return _restore(pickle.loads(data), blueprint)
