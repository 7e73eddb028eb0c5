"""``FSDPModule``: what a module can do once ``fully_shard`` was called on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from shardwright.engine.clone import deep_copy, rebuild
from shardwright.engine.edits import unsharded_versions, write_back
from shardwright.engine.hooks import reset_step
from shardwright.engine.memory import memory_of, recorded
from shardwright.engine.methods import run_as_forward
from shardwright.engine.setters import GradientSetters, ScheduleSetters
from shardwright.engine.torch_state import TorchState, show_state
from shardwright.engine.unit import Unit
from shardwright.errors import InputError, StageError
from shardwright.observe.memory import MemoryLog, MemoryReport
from shardwright.observe.trace import Trace
from shardwright.params.param import keep_attributes
from shardwright.schedule.schedule import ActionKind, Schedule
from shardwright.torch_fsdp import TorchFSDPModule


class FSDPModule(GradientSetters, ScheduleSetters, TorchFSDPModule):
    """What a module is besides its own class once ``fully_shard`` was called on it.

    Of torch's class of that name nothing is inherited but the name: frameworks ask for it by ``isinstance``.
    """

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
        versions = [unsharded_versions(group) for _, group in pairs]
        try:
            yield
        finally:
            for (runtime, group), before in zip(pairs, versions, strict=True):
                write_back(group, before)
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

    # ---- what is held

    def memory(self) -> MemoryReport:
        """What is alive on this rank now, by category and by group, in bytes: ``print(model.memory())``.

        Bytes are those on the kind of device that the groups are sharded for. Shards, optimizer states (of
        optimizers that have made a step), unsharded parameters, gradients and collectives in flight are
        counted tensor by tensor; activations are what was allocated besides, since the forward began, and
        ``other`` what the process held before. Any rank may call it, at any time; no communication.
        """
        return memory_of(cast(nn.Module, self))

    @contextmanager
    def record_memory(self) -> Iterator[MemoryLog]:
        """``with model.record_memory() as log:`` a step is made; then ``log.save("memory.html")``.

        A report is taken before and after the actions of each event of a forward and backward, with
        activations by group and those of the loss apart; inside of it a step takes longer. Any rank may enter
        it, between steps; no communication. Raises: StageError inside of a forward or backward.
        """
        with recorded(cast(nn.Module, self)) as log:
            yield log

    # ---- what is planned, what did happen

    def trace(self) -> Trace:
        """What did happen in the last forward, evaluation and backward, with times of the host."""
        return self._unit().runtime.trace

    def schedule(self) -> Schedule:
        """The schedule planned from the last recorded step: print it, compare it. Empty before one."""
        return self._unit().runtime.schedule

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, also where parameters are unsharded now: shards have the gradients."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        params = [param.sharded for unit in self._units(True) for param in unit.params]
        nn.ParameterList(params).zero_grad(set_to_none)

    # ---- inside

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

    def _get_fsdp_state(self) -> Any:
        return TorchState(cast(nn.Module, self))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted, without effect: all-gathers are launched ahead here anyway."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own, sharded alike on the same mesh, with copies of the shards; at rest."""
        model, blueprint = deep_copy(cast(nn.Module, self), memo)
        for module in rebuild(model, blueprint):
            become_fsdp_module(module)
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


def _save_pretrained(self: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """As of the model's own class, where a whole ``state_dict`` is given. Raises: InputError without one."""
    if kwargs.get("state_dict") is None and len(args) < 2:
        raise InputError(
            "this model is sharded, and its own save_pretrained would write this rank's rows alone: call "
            "shardwright.hf.save_pretrained(model, folder) on every rank, or pass state_dict= on rank 0, "
            "from shardwright.full_state_dict(model)"
        )
    return original_class(type(self)).save_pretrained(self, folder, *args, **kwargs)  # type: ignore[attr-defined]


def become_fsdp_module(module: nn.Module) -> None:
    """Swap the module's class for a subclass of it and FSDPModule, one for each class."""
    cls = type(module)
    if cls not in _classes:
        own: dict[str, Any] = {"__module__": cls.__module__}
        if hasattr(cls, "save_pretrained"):
            own["save_pretrained"] = _save_pretrained
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)
    module.__class__ = _classes[cls]
    show_state(module)


def original_class(cls: type) -> type:
    """The class that a module had before it was sharded."""
    return cls.__bases__[1] if cls.__bases__[0] is FSDPModule else cls
