"""Where the runtime meets PyTorch: the only file that touches module, autograd or optimizer hooks.

hook                                 event
module, before forward               F+ of the groups it needs (R+ inside a backward: recomputation)
module, after forward                F-
gradient of one of its outputs       B+
gradient of one of its inputs        B-, when those of all inputs are there
a parameter's gradient accumulated   G, when those of all trainable parameters of the group are there
end of the backward                  G of groups that still hold gradients, then E
"""

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwright.engine.groups.gatherer import is_lookup, looks_up
from shardwright.engine.groups.group import Stage
from shardwright.engine.listeners import listeners
from shardwright.engine.optimizers.guard import after_step, before_step, warn_of_late
from shardwright.engine.optimizers.registry import registry
from shardwright.engine.step.backward import Call, backward_of
from shardwright.engine.step.runtime import CallingFrame, Entry, Runtime
from shardwright.engine.unit import Unit, shapes_in, unit_of
from shardwright.errors import StageError, warn
from shardwright.params.at_rest import name_remedy
from shardwright.policy import CHECKSUMS
from shardwright.schedule.schedule import EventKind, Phase
from shardwright.torch_private import (
    base_of,
    beneath_transforms,
    copies_what_is_saved,
    current_graph_task,
    forward_pre_hooks_of,
    is_alias_of,
    peek_transforms,
    register_optimizer_kernels,
    skipped_by_compiler,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from shardwright.transport.process import process_is_ours, process_state


def _watch_grads(owner: Unit) -> None:
    """Have the backward told of each gradient of an unsharded parameter of the owner's group, where these are
    not the parameters that it was told of before."""
    assert owner.group is not None
    params = owner.group.params
    if owner.watched is params[0].unsharded:
        return
    owner.watched = params[0].unsharded
    # Weak: autograd keeps the hook where Python's collector doesn't look, so that a model which was dropped
    # would never be freed.
    of = weakref.ref(owner)

    @skipped_by_compiler
    def arrived(_: torch.Tensor) -> None:
        unit = of()
        assert unit is not None
        assert unit.group is not None
        runtime = unit.runtime
        backward_of(runtime).arrived(runtime, unit.group)

    for unsharded in (param.unsharded for param in params):
        if unsharded.is_floating_point() or unsharded.is_complex():
            # A hook can only be set on a parameter that asks for a gradient; it may be unfrozen later.
            trainable = unsharded.requires_grad
            with beneath_transforms():
                unsharded.requires_grad_(True).register_post_accumulate_grad_hook(arrived)
                unsharded.requires_grad_(trainable)


class _RootLeftOut:
    """Finds, and says once, that a module which was sharded as a model of its own is fed by another of its
    class: layers of one model, on whose root ``fully_shard`` was not called."""

    def __init__(self) -> None:
        self.said = False
        self._left: tuple[weakref.ref[nn.Module], weakref.ref[torch.Tensor]] | None = None

    def leave(self, module: nn.Module, output: Any) -> None:
        """Remember the outermost sharded module, which has run, and its first output."""
        if not self.said:
            first = next(tensors_in(output), None)
            self._left = None if first is None else (weakref.ref(module), weakref.ref(first))

    def enter(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        """Warn where the outermost sharded module begins with the output of another model's."""
        if self.said or self._left is None:
            return
        before, output = self._left[0](), self._left[1]()
        if before is None or output is None or type(before) is not type(module):
            return
        other = unit_of(before)
        if other.runtime is unit.runtime or all(tensor is not output for tensor in tensors_in(inputs)):
            return
        self.said = True
        warn(
            f"{other.name!r} and {unit.name!r} were sharded as two separate models, but the output of the "
            "first is the input of the second. Each plans by itself, so the second isn't gathered ahead, and "
            "gradients of parameters outside of both are not averaged over ranks. Call fully_shard on the "
            "module that holds them, too, after them (this warning is given once)",
        )


# Of this process, since the two models that it compares have nothing else in common, and said once in all.
_root_left_out = _RootLeftOut()


class ModuleHooks:
    """The hooks of one unit's modules, known by ``ids``. Stays alive through them."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._calls: list[Call] = []
        self.ids: set[int] = set()
        self._has_lookups = any(map(looks_up, unit.modules))
        for module in unit.modules:
            handles = (
                # Before hooks of others, which may read the weights; and also after a forward that raised,
                # whose groups are to be resharded.
                module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.after, always_call=True),
                module.register_state_dict_pre_hook(self._at_rest),
                module.register_load_state_dict_pre_hook(self._before_load),
                module.register_load_state_dict_post_hook(self._after_load),
            )
            self.ids.update(handle.id for handle in handles)

    def _at_rest(self, *_: Any) -> None:
        self.unit.runtime.rest()

    @cached_property
    def _loads(self) -> Any:
        from shardwright.params.load_plain import PlainLoads  # noqa: PLC0415 loaded states

        units = (self.unit, *self.unit.shared_owners)
        return PlainLoads(self._at_rest, lambda: [param for unit in units for param in unit.params])

    def _before_load(self, *of_load: Any) -> None:
        self._loads.before(*of_load)

    def _after_load(self, *of_load: Any) -> None:
        self._loads.after(*of_load)

    # ---- before the forward

    # Traced by torch.compile it would be compiled with buffers of the size that they had then. Where a
    # compiled module is called (``block.compile()``) dynamo comes to it as to a frame of its own, passes it
    # over with what it calls, and the forward is one graph without a break.
    @skipped_by_compiler
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard what the module's forward needs; cast and watch its inputs."""
        unit, runtime, owners = self.unit, self.unit.runtime, self.unit.owners
        call = Call(recomputed=current_graph_task() != -1)
        if call.recomputed:
            self._calls.append(call)
            backward_of(runtime).begin()
            for owner in owners:
                runtime.at(EventKind.RECOMPUTE, owner.group)
        else:
            if runtime.depth == 0:
                if copies_what_is_saved():
                    raise StageError(
                        "a sharded model was called inside of allow_mutation_on_saved_tensors(), which takes "
                        "gathering weights for changing what autograd has saved: call it outside, and change "
                        "a copy (.clone()) where a saved tensor is to be changed in place"
                    )
                _root_left_out.enter(unit, module, (args, kwargs))
                listeners.last = weakref.ref(module), shapes_in(args, kwargs)
                if not runtime.pass_number & (runtime.pass_number + 1):
                    for tell in listeners.forward:
                        tell(module)
            if unit.group is None or unit.group.gatherer.rows is None:
                self._enter(call, runtime, owners)
            else:
                with unit.group.gatherer.rows.wanted_by(module, args, kwargs):
                    self._enter(call, runtime, owners)
        for owner in owners:
            if owner.deferred is None or call.recomputed:
                _watch_grads(owner)
        if runtime.depth == 1:
            device = next((owner.group.axis.device for owner in owners if owner.group is not None), None)
            if device is not None and device.type != "cpu":
                args, kwargs = map_tensors(lambda t: t.to(device, non_blocking=True), (args, kwargs))
        dtype = unit.policy.param_dtype if unit.policy.cast_forward_inputs else None
        if dtype is not None:
            args, kwargs = map_tensors(lambda t: cast_floating(t, dtype), (args, kwargs))
        if owners and torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(call, args, kwargs)
        return args, kwargs

    def _enter(self, call: Call, runtime: Runtime, owners: tuple[Unit, ...]) -> None:
        unit = self.unit
        if runtime.running() and runtime.abandoned:
            runtime.abandon()  # an action has failed in it, and the caller goes on
        root, outermost = unit.modules[0], runtime.depth == 0
        gathers = outermost and any(group.stage is Stage.SHARDED for group in runtime.groups)
        if outermost:
            runtime.listed = []  # an exception may have ended the one before
            # Before the first forward, and before the first one after an optimizer's first step, or one with
            # other parameters; in ``around`` modules show others' until the forward begins.
            if runtime.num_checked != registry.num_checked and not runtime.table.around:
                runtime.num_checked = registry.num_checked
                warn_of_late(root, runtime)
            phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
            # torch doesn't call ``after`` for a KeyboardInterrupt: the stack says whether the forward runs.
            # A ``__call__`` of the swapped class would be a frame more in each call of each sharded module,
            # and in tracebacks, and no faster: 0.06 us for each; this takes 0.7 us once a forward.
            runtime.begin(phase, CallingFrame(2).runs, Entry(unit.name, unit.groups_needed))
        if unit.now.number != runtime.pass_number:
            self._calls.clear()
            unit.enter_pass(runtime.pass_number)
        self._calls.append(call)
        runtime.depth += 1
        unit.now.running += 1
        if not unit.now.awaited:
            unit.now.awaited = set(unit.modules)
            if len(unit.modules) > 1:
                runtime.listed.append(unit)
            if unit.now.running == 1:
                for owner in owners:
                    owner.enter_pass(runtime.pass_number)
                    if owner.deferred is None:
                        owner.now.users += 1
                        runtime.at(EventKind.FORWARD_BEGIN, owner.group)
                    else:
                        owner.deferred.wait(partial(self._read, owner))
        # Before the first forward that trains, and the first evaluation after one. Where nothing is gathered
        # a rank may run it alone.
        phase, compared = runtime.phase, unit.buffers_compared
        if gathers and phase and phase not in compared and (phase is Phase.FORWARD or compared):
            from shardwright.engine.step.same_model import compare_buffers  # noqa: PLC0415 several ranks

            compared.add(phase)
            compare_buffers(root, runtime.table.comms(), phase)

    @skipped_by_compiler
    def _read(self, owner: Unit) -> None:
        """Begin the forward of a group that was deferred, since its parameters are about to be read."""
        runtime = self.unit.runtime
        # Else that forward was abandoned.
        if runtime.running() and runtime.depth and self.unit.now.number == runtime.pass_number:
            owner.now.users += 1
            runtime.at(EventKind.FORWARD_BEGIN, owner.group)
            _watch_grads(owner)

    def _watch_inputs(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        objects = [leaf for leaf in leaves if not isinstance(leaf, (*_PLAIN, torch.Tensor))]
        if any(tensor.requires_grad for tensor in tensors_in(objects)):
            # Those can't be replaced by aliases, and without them nobody knows when the module's share of
            # the gradient is done: then the end of the backward reshards.
            return args, kwargs
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided:
                # The hook of an alias tells when the module's own share of the gradient is done, however else
                # the caller uses the tensor. It is a native one, so that a module may change its input in
                # place, which fails where torch's FSDP has passed that through an autograd.Function.
                alias = leaf.view_as(leaf)
                alias.register_hook(partial(self._input_arrived, call))
                leaves[index] = alias
                call.num_inputs += 1
        return tree_unflatten(leaves, spec) if call.num_inputs else (args, kwargs)

    def _input_arrived(self, call: Call, grad: torch.Tensor) -> None:
        if grad.requires_grad:
            # With create_graph: a backward through this gradient reads the same weights again.
            grad.register_hook(lambda _: backward_of(self.unit.runtime).enter(self.unit, call))
        backward_of(self.unit.runtime).input_done(self.unit, call)

    # ---- after the forward

    @skipped_by_compiler
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard after the module's forward; cast and watch its outputs."""
        if not self._calls:
            return None  # another hook failed before ours ran
        call, unit = self._calls.pop(), self.unit
        runtime, owners = unit.runtime, unit.owners
        error = sys.exc_info()[1] if output is None else None
        failed = error is not None
        if failed:
            listeners.amend(error)
        whole = output
        if not failed:
            output = without_weights(unit.name, owners, output)
        if not call.recomputed:
            if torch.is_grad_enabled() and not any(t.requires_grad for t in tensors_in(output)):
                # Nothing tells when a backward comes to it (it returns None, a closure, a generator, what was
                # detached), so what is trained stays until one has ended.
                unit.now.unseen = True
            self._leave(module, runtime, failed)
        if failed:
            name_remedy(sys.exc_info()[1])
            return None
        dtype = unit.policy.output_dtype
        if dtype is not None:
            output = map_tensors(lambda t: cast_floating(t, dtype), output)
        if runtime.depth == 0 and not call.recomputed:
            _root_left_out.leave(module, output)
        if owners and torch.is_grad_enabled():
            hooked = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
            call.reads_weights = not (self._has_lookups and is_lookup(module, output))
            call.memory = {
                owner.group: owner.group.buffer
                for owner in owners
                if owner.group is not None and (owner.deferred is None or owner.deferred.was_read)
            }
            for tensor in hooked:
                self._watch_output(call, tensor)
            if hooked and len(unit.modules) > 1:
                unit.now.calls.append(call)
        return output if output is not whole else None

    def _leave(self, module: nn.Module, runtime: Runtime, failed: bool) -> None:
        unit = self.unit
        if unit.now.number != runtime.pass_number:
            return  # it belongs to a forward that was abandoned, and a new one has begun since
        runtime.depth -= 1
        unit.now.running -= 1
        unit.now.awaited.discard(module)
        ended = [unit] if unit.now.running == 0 and not unit.now.awaited else []
        if runtime.depth == 0:
            # Of a list only some modules may have run: a chunked loss calls the head alone.
            ended += [each for each in runtime.listed if each.now.awaited]
        for each in ended:
            each.now.awaited.clear()
            for owner in each.owners:
                if owner.deferred is not None and owner.deferred.waits:
                    owner.deferred.stop()
                elif not failed:
                    owner.now.users -= 1
                    owner.now.unseen |= each.now.unseen
                    if owner.now.users == 0:
                        holds = owner.now.unseen and owner.group is not None and owner.group.trainable != 0
                        runtime.at(EventKind.FORWARD_END, owner.group, holds)
        if runtime.depth == 0:
            runtime.end(failed)

    def _watch_output(self, call: Call, output: torch.Tensor) -> None:
        output.register_hook(lambda _: backward_of(self.unit.runtime).enter(self.unit, call))
        base = base_of(output)
        if base is not None and base.grad_fn is not None:
            # An in-place change of a view gives it a new node and drops its hook; its base's node stays.
            base.grad_fn.register_prehook(lambda _: self._enter_if_missed(call))

    def _enter_if_missed(self, call: Call) -> None:
        if call.task != current_graph_task():
            backward_of(self.unit.runtime).enter(self.unit, call)


def hooks_of(module: nn.Module) -> ModuleHooks:
    """The hooks of a sharded module."""
    owners = (getattr(hook, "__self__", None) for hook in forward_pre_hooks_of(module).values())
    return next(owner for owner in owners if isinstance(owner, ModuleHooks))


def reset_step(runtime: Runtime) -> None:
    """Forget a step that was cut short, after what is in flight has ended."""
    backward_of(runtime).launched = 0
    runtime.abandon()
    runtime.rest()
    runtime.executor.land(runtime.groups)
    for group in runtime.groups:
        group.reducer.gradients.forget()


def watch_sharded_grad(param: torch.Tensor, call: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``call(param)`` whenever a gradient was reduced and added to a sharded parameter's."""
    return param.register_post_accumulate_grad_hook(call)


def guard_optimizers() -> None:
    """From now on refuse to step an optimizer that holds parameters which sharding has replaced.

    And have every elementwise optimizer of ``torch.optim`` work on those that it has made, and the recorder
    told when one steps and when garbage is collected.
    """
    if not registry.is_hooked:
        register_optimizer_kernels()
        listeners.failed.append(name_remedy)
        registry.is_hooked = True
        if CHECKSUMS == "all":
            from shardwright.engine.groups import summed  # noqa: PLC0415 by an option

            register_optimizer_step_pre_hook(summed.before_step)
            register_optimizer_step_post_hook(summed.after_step)
        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_pre_hook(process_state.recorder.begin_optimizer)
        register_optimizer_step_post_hook(after_step)
        register_optimizer_step_post_hook(process_state.recorder.end_optimizer)
        if process_is_ours():
            gc.callbacks.append(process_state.recorder.collected)


# ---- weights that leave a forward: their memory is given back after it, so copies leave


def without_weights(name: str, owners: Sequence[Unit], output: Any) -> Any:
    """``output`` of the modules called ``name`` with copies of what lies in the memory of a parameter of
    ``owners``: itself, a view of it. Raises: StageError for one in an object, which can't be replaced."""

    def is_weight(tensor: torch.Tensor) -> bool:
        base = base_of(tensor)
        root = tensor if base is None else base
        if root.grad_fn is not None or root.layout is not torch.strided or peek_transforms() is not None:
            return False
        groups = [owner.group for owner in owners if owner.group is not None]
        unsharded = [group for group in groups if group.stage is Stage.UNSHARDED]
        return any(is_alias_of(root, face) for group in unsharded for face in group.faces)

    if not any(map(is_weight, tensors_in(output))):
        return output
    output = map_tensors(lambda tensor: tensor.clone() if is_weight(tensor) else tensor, output)
    if any(map(is_weight, tensors_in(output))):
        raise StageError(
            f"the forward of {name!r} gives a view of one of its parameters in an object; give a copy of it "
            "(.clone()), since the memory of parameters is given back after the forward"
        )
    return output


# ---- tensors inside of what a forward takes and gives: any nesting of containers, dataclasses and objects


_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside ``value``, each once: in containers, and in the attributes of any object."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, _PLAIN) or id(leaf) in seen:
                continue
            seen.add(id(leaf))
            if isinstance(leaf, torch.Tensor):
                yield leaf
            else:
                waiting.extend(_inside(leaf))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor changed: containers and dataclasses are made anew, other objects kept."""

    def at_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, set | frozenset):
            return type(leaf)(at_leaf(item) for item in leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [f.name for f in dataclasses.fields(leaf) if f.init]
            return dataclasses.replace(
                leaf, **{name: map_tensors(change, getattr(leaf, name)) for name in fields}
            )
        return leaf

    return tree_map(at_leaf, value)


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype`` where it is floating point, else as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _inside(leaf: Any) -> list[Any]:
    if isinstance(leaf, set | frozenset):
        return list(leaf)
    declared = (cls.__dict__.get("__slots__", ()) for cls in type(leaf).__mro__)
    slots = (name for names in declared for name in ((names,) if isinstance(names, str) else names))
    return [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, n) for n in slots if hasattr(leaf, n))]
