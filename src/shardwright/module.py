"""``FSDPModule``: what a module can do once ``fully_shard`` was called on it."""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from shardwright.engine.step.backward import Backward, backward_of
from shardwright.engine.step.hooks import reset_step
from shardwright.engine.step.runtime import Runtime
from shardwright.engine.unit import Unit
from shardwright.errors import InputError, StageError
from shardwright.params.param import keep_attributes
from shardwright.schedule.schedule import ActionKind, Phase, Schedule
from shardwright.setters import GradientSetters, ScheduleSetters
from shardwright.torch_fsdp import RefusingFSDPModule, TorchFSDPModule
from shardwright.torch_private import STATE_KEY

if TYPE_CHECKING:
    from shardwright.observe.memory.log import MemoryLog
    from shardwright.observe.memory.report import MemoryReport
    from shardwright.observe.steps.trace import Trace


class FSDPModule(GradientSetters, ScheduleSetters, RefusingFSDPModule):
    """The class that a module gets, in addition to its own, by ``fully_shard``: it adds these methods.

    It has the name of torch's class because frameworks check for it by ``isinstance``, but inherits nothing
    from it: methods of the installed torch's class that aren't here raise InputError.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the module's own class: ``model[:2]`` of a sharded Sequential is a plain one."""
        own = original_class(cls)
        return own(*args, **kwargs) if own is not cls else object.__new__(cls)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As of ``nn.Module``. Local.

        A stage of ``torch.distributed.pipelining`` that computes the gradients of its input and of its
        weights apart gets the unsharded parameters, which are those of the graph; they stay so until its
        last microbatch. Every rank of the mesh runs that schedule.

        Args:
            recurse: also those of modules inside.

        Returns:
            An iterator of parameters.
        """
        # As ``backward_maybe_with_nosync`` asks, in a lambda, before it computes the gradients of the input.
        asking = sys._getframe(1)
        stage = asking.f_globals.get("__name__") == "torch.distributed.pipelining.stage"
        if stage and asking.f_code.co_name == "<lambda>":
            groups = [(unit.runtime, group) for unit in self._units(True) for group in unit.groups]
            for kind in (ActionKind.UNSHARD, ActionKind.WAIT):
                for runtime, group in groups:
                    runtime.do(kind, group)
        return cast(Any, super()).parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of ``nn.Module``; after a backward that raised these are the shards again. Local.

        Args:
            *args: as of ``nn.Module``.
            **kwargs: as of ``nn.Module``.

        Returns:
            An iterator of names and parameters.
        """
        self._unit().runtime.running()
        return cast(Any, super()).named_parameters(*args, **kwargs)

    # ---- unsharding by hand

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """All-gather this module's own parameters now (not those of nested sharded modules).

        Every rank of the mesh calls it. The unsharded parameters take memory until ``reshard``, or until the
        schedule frees them after the module's next forward or backward.

        Args:
            async_op: return immediately; the parameters can be read after ``wait`` of the handle. The
                module's forward waits automatically.

        Returns:
            The handle with ``async_op``, else None.

        Raises:
            StageError: ``offload_states`` has put the parameters on the host.
        """
        handle = _UnitHandle(self._unit())
        for group in self._unit().groups:
            self._unit().runtime.do(ActionKind.UNSHARD, group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters (not those of nested sharded modules) and show the
        shards.

        What is kept of them over a smaller world (``reshard_after_forward=int``, ``shard_over_all``) is freed
        too. Call it after an edit of ``param.data`` between microbatches whose gradients aren't synchronised:
        such edits leave no mark, so that the next forward would gather what was kept before them.

        No communication; a single rank may call it.
        """
        for group in self._unit().groups:
            self._unit().runtime.do(ActionKind.RESHARD, group)
            group.forget_copies()

    @contextmanager
    def unsharded(self, recurse: bool = True) -> Iterator[None]:
        """A context in which the parameters are plain and whole, for reading or editing weights outside of a
        forward.

        Every rank of the mesh enters and leaves it, between steps. Edits are written back when it ends. All
        ranks must make the same edits, since each rank writes back its own rows of its own copy. Parameters
        are in ``param_dtype`` here; parameters without edits keep their full precision. A forward or backward
        inside, which every rank calls, computes with the edits. The unsharded parameters are freed at the
        end.

        Args:
            recurse: also those of nested sharded modules.

        Raises:
            StageError: it was entered inside a forward or backward, or the parameters are on the host.

        Examples:
            >>> model = shardwright.fully_shard(nn.Linear(8, 4))
            >>> with model.unsharded(), torch.no_grad():
            ...     model.bias.zero_()
            Parameter containing:
            tensor([0., 0., 0., 0.], requires_grad=True)
        """
        owners = [(unit.runtime, owner) for unit in self._units(recurse) for owner in unit.owners]
        pairs = list(dict.fromkeys((runtime, owner.group) for runtime, owner in owners if owner.group))
        if any(runtime.running() is not None for runtime, _ in pairs):
            raise StageError("unsharded() was entered inside a forward or backward; enter it between steps")

        def show(phase: Phase | None = None) -> None:
            for runtime, group in pairs:
                if phase is None:
                    runtime.do(ActionKind.UNSHARD, group)
                else:  # which will reshard them
                    group.write_back(unmarked=True)
            for runtime, group in pairs if phase is None else ():
                runtime.do(ActionKind.WAIT, group)

        for runtime, group in pairs:
            runtime.do(ActionKind.RESHARD, group)
        show()
        runtimes = {runtime for runtime, _ in pairs}
        for runtime in runtimes:
            runtime.table.around.append(show)
        try:
            yield
        finally:
            for runtime in runtimes:
                runtime.table.around.remove(show)
            for runtime, group in pairs:
                group.write_back(unmarked=True)
                runtime.do(ActionKind.RESHARD, group)

    def reset_iter_state(self) -> None:
        """Discard a step that ended with an exception; call it on the root.

        It waits for everything in flight, reshards every group and drops the step's gradients, including
        those of earlier microbatches. The next forward does the same automatically, but keeps those of
        earlier microbatches, as one process does; where the backward that failed had already taken them, a
        later backward raises unless ``zero_grad()`` was called. It launches no collective; call it on each
        rank whose step ended with an exception.

        Raises:
            StageError: the module isn't the model's root.
        """
        reset_step(self._root_runtime("reset_iter_state"))

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether ``finalize_backward`` ends the backwards of a step, instead of the last backward itself.

        For schedules in which reducing gradients is a step of its own (``torch.distributed.pipelining``).
        While it is on, ``set_is_last_backward`` has no effect. Call it on the root, on every rank, between
        the steps; it communicates nothing. As in torch 2.15.

        Args:
            enabled: True before the first forward of a step.

        Raises:
            StageError: the module isn't the model's root, or a step has begun that isn't finalized yet.
        """
        runtime = self._root_runtime("set_manual_backward_finalization")
        if enabled != runtime.step.finalizes_by_hand:
            if runtime.running() is Phase.BACKWARD or backward_of(runtime).partial:
                raise StageError(
                    f"set_manual_backward_finalization({enabled}) was called in a step whose backward has "
                    "begun; call it before the forward, or end the step with finalize_backward or "
                    "reset_iter_state"
                )
            runtime.step = replace(runtime.step, finalizes_by_hand=enabled, is_last_backward=not enabled)

    def finalize_backward(self, *, async_op: bool = False) -> "GradientReductionHandle | None":
        """Reduce what the step's backwards have kept, reshard, and wait until all gradients are reduced.

        After ``set_manual_backward_finalization(True)`` call it on the root after all backwards of a step,
        before gradients are read; every rank of the mesh calls it. If there were several backwards, only the
        setting of ``set_requires_gradient_sync`` that holds now counts for what they have kept. Groups whose
        ``set_reshard_after_backward`` is True are resharded. Before the first forward it does nothing.

        Args:
            async_op: return when the reductions are launched; gradients are complete after the handle's
                ``wait``.

        Returns:
            The handle with ``async_op``, else None.

        Raises:
            StageError: the module isn't the model's root, the mode is off, a backward is running, or an
                earlier handle wasn't waited for.
        """
        runtime = self._root_runtime("finalize_backward")
        backward = backward_of(runtime)
        if not runtime.step.finalizes_by_hand:
            raise StageError(
                "finalize_backward was called without set_manual_backward_finalization(True); the last "
                "backward of a step ends it otherwise: leave this call out, or call that before the forward"
            )
        if runtime.pass_number:
            backward.finalize(settles=not async_op)
            for group in runtime.groups:
                if runtime.requested(group).reshard_after_backward:
                    runtime.do(ActionKind.RESHARD, group)
        if not async_op:
            return None
        handle = GradientReductionHandle()
        if backward.launched:
            handle._backward, handle._number = backward, backward.launched
        return handle

    def join_evaluations(self) -> None:
        """Take part in the other ranks' evaluations, until every rank has called this.

        Use it if ranks evaluate different numbers of batches and the next operation is neither a training
        forward nor an evaluation of this model, such as a save or a reduction of losses. Every rank of the
        mesh calls it, between steps.
        """
        self._unit().runtime.join_evaluations()

    # ---- what is held

    def memory(self) -> "MemoryReport":
        """The memory in use on this rank now, by category and by group. Any rank may call it, at any time.

        Shards, optimizer states (of optimizers that have made a step), unsharded parameters, gradients and
        collectives in flight are counted tensor by tensor. Activations are all other bytes allocated since
        the forward began, and ``other`` is what the process held before. No communication.

        Returns:
            The report, in bytes on the kind of device that the groups are sharded for; print it.
        """
        from shardwright.observe.memory.accounts import memory_of  # noqa: PLC0415 asked reports

        return memory_of(cast(nn.Module, self))

    @contextmanager
    def record_memory(self) -> "Iterator[MemoryLog]":
        """A context that records the memory of one step: ``with model.record_memory() as log:``, then
        ``log.save(path)``.

        A report is taken before and after the actions of each event of a forward and backward, with
        activations by group and those of the loss separately. A step inside it takes longer. Any rank may
        enter it, between steps; no communication.

        Yields:
            The log, filled while the step runs; ``log.save("memory.html")`` draws it.

        Raises:
            StageError: it was entered inside a forward or backward.
        """
        from shardwright.observe.memory.log import recorded  # noqa: PLC0415 recorded steps

        with recorded(cast(nn.Module, self)) as log:
            yield log

    # ---- what is planned, what did happen

    def trace(self) -> "Trace":
        """What happened in the last forward, evaluation and backward on this rank. No communication.

        Returns:
            The events with their actions, and when they happened by the host's clock.
        """
        from shardwright.observe.steps.trace import last_trace  # noqa: PLC0415 pages too

        return last_trace(self._unit().runtime.table.labels)

    def schedule(self) -> Schedule:
        """The schedule that was planned from the last recorded step. No communication.

        Returns:
            A value that can be printed and compared; empty before the first step.
        """
        return self._unit().runtime.schedule

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, for the gradients of the shards, also while parameters are unsharded.

        Local; no communication.

        Args:
            set_to_none: free the gradients; False fills them with zeros instead.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        params = [param.sharded for unit in self._units(True) for param in unit.params]
        nn.ParameterList(params).zero_grad(set_to_none)

    # ---- inside

    def _root_runtime(self, caller: str) -> Runtime:
        """Raises: StageError where the module is inside of another sharded one."""
        unit = self._unit()
        inside = {group for other in self._units(True) for group in other.groups}
        if set(unit.runtime.groups) - inside:
            raise StageError(
                f"{caller} must be called on the root FSDP module; {unit.name} is inside another one"
            )
        return unit.runtime

    def _get_name(self) -> str:
        """The original class's: libraries look it up in their tables, and ``print(model)`` shows it."""
        return original_class(type(self)).__name__

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # .to(), .double(), .to_empty(): they act on the shards, so the shards must be what modules show.
        self._unit().runtime.rest()
        super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for param in self._unit().params:
            keep_attributes(param)
        return self

    def share_memory(self) -> Any:
        """Refused: each rank has only its rows, and with torch the process crashes. No communication.

        Returns:
            Nothing.

        Raises:
            InputError: always.
        """
        raise InputError(
            "share_memory() of a sharded module: each rank has only its rows, in memory that is allocated "
            "anew. Share full_state_dict(model) instead"
        )

    def _get_fsdp_state(self) -> Any:
        from shardwright.engine.building.torch_state import TorchState  # noqa: PLC0415 torch pipelining

        return TorchState(cast(nn.Module, self))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted, without effect: all-gathers are launched ahead here anyway."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own, at rest, sharded alike on the same mesh, with copies of the shards."""
        from shardwright.engine.building.clone import deep_copy  # noqa: PLC0415 copies alone

        model, modules = deep_copy(cast(nn.Module, self), memo)
        become_fsdp_modules(modules)
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """``pickle``, ``torch.save`` and ``copy.copy`` ask for this. Raises: InputError, always."""
        raise InputError(
            f"{original_class(type(self)).__name__} is sharded, and a sharded module can't be pickled or "
            "copied by copy.copy: this rank holds its own shards alone. Save "
            "shardwright.checkpoint.save(folder, model=model) or shardwright.full_state_dict(model), called "
            "on every rank; copy.deepcopy(model) copies it"
        )


class UnshardHandle:
    """The handle that ``FSDPModule.unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Return when the module shows its unsharded parameters. A second call does nothing.

        Every rank that called ``unshard`` calls it, or runs the module's forward.
        """


class _UnitHandle(UnshardHandle):
    """The all-gathers of one module."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        if self._unit is not None:
            for group in self._unit.groups:
                self._unit.runtime.do(ActionKind.WAIT, group)
            self._unit = None


class GradientReductionHandle:
    """The handle that ``FSDPModule.finalize_backward(async_op=True)`` returns."""

    _backward: Backward | None = None
    _number = 0

    def wait(self) -> None:
        """Return when all gradients of the step are reduced. A second call does nothing.

        Every rank that called ``finalize_backward`` calls it.

        Raises:
            StageError: ``reset_iter_state`` has discarded the step since.
        """
        backward, self._backward = self._backward, None
        if backward is not None:
            backward.settle(self._number)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Unshard a module around another one of its methods, as it is unsharded around its forward.

    For modules with several entries (``encode``, ``generate``). It does nothing for a module that isn't
    sharded. Every rank calls it. The method is then treated like a forward: every rank must call it.

    Args:
        module: a module, sharded or not.
        method_name: the method's name.

    Raises:
        InputError: the sharded module doesn't have such a method.

    Examples:
        >>> class Model(nn.Linear):
        ...     def encode(self, x):
        ...         return self.weight @ x
        >>> model = shardwright.fully_shard(Model(8, 4))
        >>> shardwright.register_fsdp_forward_method(model, "encode")
        >>> model.encode(torch.ones(8)).shape
        torch.Size([4])
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise InputError(f"{type(module)} does not have a method {method_name}")
    from shardwright.engine.building.torch_state import run_as_forward  # noqa: PLC0415 such methods

    run_as_forward(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted without effect: models on one mesh always share its process groups, and no model has separate
    streams.

    Args:
        modules: sharded modules.

    Raises:
        InputError: one of them isn't sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise InputError(f"Expects list of FSDPModules but got {module}")


def _save_pretrained(self: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """As of the model's own class, where that gathers the shards or gets a whole ``state_dict``.

    Raises: InputError where neither holds. CheckpointError: it gathers, and not all ranks call it.
    """
    own: Any = original_class(type(self))
    if _gathers(self, own):
        from shardwright.checkpoint.agree import ranks  # noqa: PLC0415 a step needs none of its 28 modules

        ranks().arrive(f"{own.__name__}.save_pretrained")
    elif kwargs.get("state_dict") is None and len(args) < 2:
        raise InputError(
            "this model is sharded, and its own save_pretrained would write this rank's rows alone: call "
            "shardwright.hf.save_pretrained(model, folder) on every rank, or pass state_dict= on rank 0, "
            "from shardwright.full_state_dict(model)"
        )
    return own.save_pretrained(self, folder, *args, **kwargs)


def _gathers(model: Any, own: type) -> bool:
    """Whether transformers has sharded it (``distributed_config``): its ``save_pretrained`` then gathers from
    all ranks, also where a ``state_dict`` is given."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return hasattr(own, "gather_sharded_state_dict_for_save") and getattr(config, "dp_size", 1) > 1


def become_fsdp_modules(modules: Iterable[nn.Module]) -> None:
    """Swap each module's class for a subclass of it and FSDPModule, one for each class."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            module.__class__ = _sharded_class(type(module))
            module.__dict__[STATE_KEY] = _States(module)


class _States(dict[Any, Any]):
    """A module's states, by the function that has made each: of ``fully_shard``, whosever, ours."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.__dict__.get(STATE_KEY, {}))
        self._module = weakref.ref(module)

    def get(self, key: Any, default: Any = None) -> Any:
        module = self._module()
        # By its name: torch's function and ours are both asked for their state, with or without install().
        if module is not None and getattr(key, "__name__", "") == "fully_shard":
            from shardwright.engine.building.torch_state import TorchState  # noqa: PLC0415 torch pipelining

            return TorchState(module)
        return super().get(key, default)


@cache
def _sharded_class(cls: type) -> type:
    own: dict[str, Any] = {"__module__": cls.__module__}
    if hasattr(cls, "save_pretrained"):
        own["save_pretrained"] = _save_pretrained
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)


def original_class(cls: type) -> type:
    """The class that a module had before it was sharded."""
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls
