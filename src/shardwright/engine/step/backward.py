"""One backward of a model, told by hooks: which modules' share of it runs, which groups have their gradients.

begin ── enter(unit, call) ──> B+ ── input_done, the last one ──> B-
      └─ arrived(group), the last of its gradients ──> G            end ──> G of those left, E
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.step.runtime import Runtime
from shardwright.engine.unit import Unit
from shardwright.errors import StageError
from shardwright.params.binding import Buffer
from shardwright.schedule.schedule import EventKind, Phase
from shardwright.torch_private import current_graph_task, queue_callback


@dataclass(eq=False)
class Call:
    """One forward of a module: whether it is a recomputation, and the input gradients still to come.

    reads_weights: whether its backward needs the unsharded parameters. A lookup's doesn't: it adds rows up.
    memory: the buffers of the groups whose parameters it has read, where autograd has saved their weights.
    task: the backward that it was last entered in.
    """

    recomputed: bool
    reads_weights: bool = True
    memory: dict[ParamGroup, Buffer | None] = field(default_factory=dict)
    num_inputs: int = 0
    left: int = 0
    task: int = -1

    def check_memory(self) -> None:
        """Raises: StageError where what autograd has saved lies in memory that was given up since."""
        for group, buffer in self.memory.items():
            if group.buffer is not buffer:
                raise StageError(
                    f"group {group.name!r}: between this forward and its backward its unsharded parameters "
                    "came to lie in other memory, since they were cast or quantised; do that before a "
                    "forward or after its backward"
                )


class Backward:
    """The backward of one model: begins with the first hook that fires, ends with autograd's callback.

    number: how many have begun. partial: the one before wasn't the last of its step, so that reductions of
        it may land in this one. launched: the one that ``finalize`` ran and that nobody has waited for; or 0.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)  # which holds this
        self.number = 0
        self.partial = False
        self.launched = 0
        self._active: dict[Unit, set[Call]] = {}
        self._arrived: dict[ParamGroup, int] = {}
        self._ending: Callable[[], Callable[[], None] | None] = lambda: None

    @property
    def runtime(self) -> Runtime:
        """The runtime whose backward this is."""
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    def begin(self) -> None:
        """Enter the backward, once per backward."""
        if self.runtime.running() is not Phase.BACKWARD:  # an exception may have ended the one before
            queue_callback(self._enter_phase())

    def _enter_phase(self) -> Callable[[], None]:
        """Returns what is to be called at the end."""
        # Only autograd holds it, until then or until an exception ended the backward, of which it tells
        # nobody: so whether it lives tells whether that backward, or one around this, still runs.
        ending = partial(self.end)
        self._ending = weakref.ref(ending)
        self.number += 1
        self.runtime.begin(Phase.BACKWARD, self._lives)
        for group in self.runtime.groups:
            group.reducer.done, group.reducer.reduces = False, group.reducer.policy.reduce
        return ending

    def _lives(self) -> bool:
        return self._ending() is not None

    def enter(self, unit: Unit, call: Call) -> None:
        """The gradient of one of the call's outputs is there: its backward begins."""
        self.begin()
        call.task = current_graph_task()
        active = self._active.setdefault(unit, set())
        if call in active:
            return
        # Modules that share a group (norm and head) end their backward together, or the group would be
        # resharded, gathered again and reduced again between them.
        together = unit.now.calls if call in unit.now.calls else [call]
        for each in together:
            each.left = each.num_inputs
        active.update(together)
        if any(each.reads_weights for each in together):
            for owner in unit.owners:
                if owner.group is not None and any(owner.group in each.memory for each in together):
                    # An optimizer may have stepped what stayed unsharded, and autograd must see that.
                    owner.group.follow_writes()
                    self.runtime.at(EventKind.BACKWARD_BEGIN, owner.group)
            for each in together:
                each.check_memory()

    def input_done(self, unit: Unit, call: Call) -> None:
        """The gradient of one of the call's inputs is there; with the last one its backward has ended."""
        call.left -= 1
        active = self._active.get(unit, set())
        if call.left or call not in active:
            return
        active.remove(call)
        if active:
            return
        del self._active[unit]  # those that have ended are not looked through for each that ends
        for owner in unit.owners:
            group = owner.group
            if group is None or any(calls and owner in other.owners for other, calls in self._active.items()):
                continue  # another call still adds to these gradients and reads these weights
            if group.has_grads:
                self._arrived.pop(group, None)
                self.runtime.at(EventKind.GRADS_READY, group)
            self.runtime.at(EventKind.BACKWARD_END, group)

    def arrived(self, runtime: Runtime, group: ParamGroup) -> None:
        """One more parameter of the group has its gradient."""
        if runtime.phase is not Phase.BACKWARD or not self._lives():
            self.begin()
        number = self._arrived[group] = self._arrived.get(group, 0) + 1
        if number >= group.trainable.bit_count():
            del self._arrived[group]
            runtime.at(EventKind.GRADS_READY, group)  # all that this backward can bring by now are there

    def finalize(self, settles: bool) -> None:
        """As ``reduce_held``, in a step whose backwards don't end it themselves. settles: wait for all
        reductions; else ``settle`` does. Raises: StageError inside of a phase, and before ``settle``."""
        if self.runtime.running() is not None:
            raise StageError(
                f"finalize_backward was called inside a {self.runtime.phase}; call it after the last "
                "backward of the step has ended"
            )
        if self.launched:
            raise StageError(
                "finalize_backward was called again before wait() of its handle: call that first"
            )
        self._reduce(settles)
        self.launched = 0 if settles else self.number

    def settle(self, launched: int) -> None:
        """Wait for the reductions that this one launched. Raises: StageError where they were discarded."""
        if launched != self.launched:
            raise StageError(
                "the gradients of this handle were discarded by reset_iter_state: leave wait() out"
            )
        self.launched = 0
        self._reduce(settles=True)

    def _reduce(self, settles: bool) -> None:
        step = self.runtime.step
        self.runtime.step = replace(step, is_last_backward=settles)
        try:
            self.reduce_held()
        finally:
            self.runtime.step = step

    def reduce_held(self) -> None:
        """Reduce the gradients that earlier backwards have kept, as a backward that brings none; every rank
        of the model's meshes calls it."""
        ending = self._enter_phase()
        for group in self.runtime.groups:
            if group.reducer.keeps_grads or group.has_grads:
                self.runtime.at(EventKind.GRADS_READY, group)
        ending()

    def forget(self) -> None:
        """Drop the calls of a backward that an exception ended, and the gradients that it had counted."""
        self.partial = False
        self._active.clear()
        self._arrived.clear()

    def end(self) -> None:
        """Autograd has ended it: reduce what is left, and wait."""
        if self.runtime.phase is not Phase.BACKWARD:
            return
        # Of calls whose inputs asked for no gradient no end was seen.
        self.forget()
        for group in self.runtime.groups:
            reducer = group.reducer
            others_may = reducer.policy.unused_params and not reducer.done and group.buffer is not None
            # An earlier microbatch ran what this one, which reduces, left out (an adapter, a vision tower).
            kept = reducer.policy.reduce and reducer.keeps_grads
            if group.has_grads or others_may or kept:
                self.runtime.at(EventKind.GRADS_READY, group)
        self.runtime.at(EventKind.STEP_END)
        self.partial = not self.runtime.step.is_last_backward
        self.runtime.end()


def backward_of(runtime: Runtime) -> Backward:
    """The one ``Backward`` of a runtime."""
    if runtime.backward is None:
        runtime.backward = Backward(runtime)
    return runtime.backward
