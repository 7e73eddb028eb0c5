"""An optimizer that steps inside of the backward: each group's as soon as its gradients are reduced.

A gradient that has landed makes a step due; it is taken where the schedule says ``step``. In a backward that
departs from the schedule that is where its reduction is waited for, and for what is left the end.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.optimizers.registry import registry
from shardwright.engine.step.backward import backward_of
from shardwright.engine.step.hooks import watch_sharded_grad
from shardwright.engine.unit import unit_of, units_in
from shardwright.errors import InputError, StageError


class StepInBackward:
    """An optimizer that steps a sharded model's parameters in the backward, and frees each gradient there.

    The result is bit for bit that of ``step`` and ``zero_grad`` of one such optimizer after the backward, for
    every optimizer that updates each parameter independently. Every rank must create it, with the same
    arguments. Each backward is a step, with these exceptions:

    - while accumulating with ``set_requires_gradient_sync(False)`` nothing is stepped, until the backward
      that reduces all; gradients reduced in several backwards (``set_is_last_backward(False)``) raise an
      error;
    - gradients can't be clipped by their total norm, which isn't known yet: ``clip_grad_norm_`` raises;
    - the caller has to step parameters that aren't sharded.

    Its attribute ``optimizers`` maps the names of parameters to their optimizers: for schedulers, and to save
    their state.

    Args:
        model: the module that ``fully_shard`` was last called on.
        make_optimizer: called once for each parameter that is trainable now, with a list of that one.

    Raises:
        InputError: the model isn't sharded, nothing is trainable, or another object steps a parameter
            already.
        StageError: raised by the backward, if a parameter's gradient comes in several reductions.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> before = model.weight.to_local().clone()
        >>> step = shardwright.StepInBackward(model, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> model.weight.grad is None, torch.equal(model.weight.to_local(), before)
        (True, False)
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable[[list[torch.Tensor]], Optimizer]) -> None:
        self._unit = unit_of(model)
        self._handles: list[RemovableHandle] = []
        self._stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        owners = {
            id(p.sharded): group for unit in units_in(model) for group in unit.groups for p in group.params
        }
        named = [(n, p) for n, p in model.named_parameters() if id(p) in owners and p.requires_grad]
        # Before any optimizer is made: a refusal leaves nothing half done.
        taken = [name for name, param in named if param in registry.steppers]
        if taken or not named:
            what = f"{taken[:3]} are stepped in the backward already" if taken else "nothing is trainable"
            raise InputError(f"StepInBackward: {what}; remove() the other one, or unfreeze parameters first")
        self.optimizers = {name: make_optimizer([param]) for name, param in named}
        for name, param in named:
            registry.steppers[param] = name
            self._handles.append(watch_sharded_grad(param, self._stepper(name, owners[id(param)])))
        self._params = [param for _, param in named]
        self._groups = list(dict.fromkeys(owners[id(param)] for param in self._params))
        self._plan(True)

    def remove(self) -> None:
        """Stop stepping in the backward; the optimizers keep their state. All ranks call it."""
        self._plan(False)
        for handle in self._handles:
            handle.remove()
        for param in self._params:
            registry.steppers.pop(param, None)
        self._handles, self._params, self._groups = [], [], []

    def _plan(self, steps: bool) -> None:
        """Have the schedule step these groups in the backward, or no longer."""
        for group in self._groups:
            self._unit.runtime.change(group, steps=steps)

    def _stepper(self, name: str, group: ParamGroup) -> Callable[[torch.Tensor], None]:
        optimizer = self.optimizers[name]

        def step() -> None:
            self._stepped[optimizer] = backward_of(self._unit.runtime).number
            optimizer.step()
            # This is what saves the memory: no gradient outlives the step of its parameter.
            optimizer.zero_grad()

        def landed(_: torch.Tensor) -> None:
            runtime = self._unit.runtime
            backward = backward_of(runtime)
            if backward.partial or not runtime.step.is_last_backward:
                raise StageError(
                    f"StepInBackward got a part of the gradient of {name!r}: of a backward that was not the "
                    "last one of its step; accumulate with set_requires_gradient_sync(False) instead"
                )
            if self._stepped.get(optimizer) == backward.number:
                raise StageError(
                    f"the gradient of {name!r} was reduced twice in one backward (a layer that several "
                    "checkpointed calls share), so it was stepped with a part of it; use a plain optimizer, "
                    "or checkpoint with use_reentrant=False"
                )
            # Not at once: the schedule has a step of its own for it, where simulation and trace see it, too.
            pending = runtime.executor.pending_steps
            pending.setdefault(runtime.table.number(group), {})[step] = None

        return landed


def steps_in_backward(param: torch.Tensor) -> bool:
    """Whether a ``StepInBackward`` steps the parameter: its gradient is gone when a backward returns."""
    return param in registry.steppers
