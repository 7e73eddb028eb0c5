"""``FullyShardedDataParallel``: the interface of torch's wrapper class (FSDP1) over our own runtime.

The wrapped module is sharded by ``fully_shard``; the wrapper translates arguments, keeps names clean, casts
inputs and says what state dicts look like. Parameters lie as DTensors of their logical shapes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.api import shard_as
from shardwright.engine.building.build import GroupOptions
from shardwright.engine.building.checks import check_foreign, check_modules, has_no_forward
from shardwright.engine.step.hooks import map_tensors
from shardwright.engine.unit import Unit, units_in
from shardwright.errors import InputError, StageError, warn
from shardwright.module import FSDPModule
from shardwright.ops.clip import clip_grad_norm_
from shardwright.params.load_plain import WRAPPED, key_of
from shardwright.policy import DEFAULT_OFFLOAD, DEFAULT_PRECISION, CPUOffloadPolicy
from shardwright.setters import without_sync
from shardwright.wrapper import policies, prepare, states
from shardwright.wrapper.meshes import mesh_for
from shardwright.wrapper.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
    adopt,
    schedule_policy,
)
from shardwright.wrapper.saving import StatefulWrapper
from shardwright.wrapper.torch_functions import teach


class FullyShardedDataParallel(StatefulWrapper):
    """Shards a module's parameters over ranks, with the interface of torch's class of this name (FSDP1).

    docs/from-fsdp1.md lists each argument and method. Wrap bottom-up, or choose nested modules with
    ``auto_wrap_policy``; every rank of the mesh wraps the same modules in the same order. Build the optimizer
    afterwards. ``.module`` is the wrapped module, and attributes that the wrapper doesn't have are looked up
    in it. Parameters and buffers keep the names that they had before. The memory of the original parameters
    is freed; at rest each parameter is a DTensor of its logical shape.

    Args:
        module: the module to wrap.
        process_group: ranks to shard over; for hybrid strategies ``(shard, replicate)``. None: all ranks;
            hybrid strategies then shard over the ranks of a host. With a group of one rank, parameters aren't
            sharded and gradients aren't reduced.
        sharding_strategy: what is sharded and when it is resharded; None: ``FULL_SHARD``.
        cpu_offload: whether shards, their gradients and the optimizer's step are on the host; None: they
            aren't.
        auto_wrap_policy: which modules inside are wrapped first, with the same options; see
            ``ModuleWrapPolicy``.
        backward_prefetch: when the next group's all-gather is issued in the backward; None: when it is
            needed.
        mixed_precision: dtypes of parameters, gradients and buffers; None: those of the model.
        ignored_modules: modules that aren't sharded, nor any module inside them.
        param_init_fn: called with each module that is on the meta device, to allocate and initialise it;
            None: its ``reset_parameters()`` is called.
        device_id: only its type is read; a CUDA process uses its current device.
        sync_module_states: give every rank the parameters and buffers of the mesh's first rank.
        forward_prefetch: accepted without effect; the next group is always prefetched in the forward here.
        limit_all_gathers: accepted without effect; at most two all-gathers are in flight here.
        use_orig_params: False puts the parameters of this wrapper into one flat DTensor, ``_flat_param``,
            split evenly over ranks regardless of their borders (``_flat_param_1``, ... for other dtypes, and
            frozen ones). ``parameters()`` returns it; modules have views of it in forward and backward. State
            dicts have the original names either way. Parameters that several wrappers share aren't supported.
        ignored_states: parameters, or modules, that aren't sharded.
        device_mesh: a 1-D mesh, or a 2-D one (replicas, shards), instead of ``process_group``.

    Raises:
        InputError: arguments contradict each other or don't fit the model, or ``param_init_fn`` left a module
            on the meta device.
        Diverged: ``sync_module_states=True``, and ranks have parameters or buffers of different names, order,
            shapes or dtypes.

    Examples:
        >>> from shardwright.wrapper import FullyShardedDataParallel as FSDP, ModuleWrapPolicy
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> _ = model.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> list(model.state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: prepare.InitFn | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        teach()
        check_modules([module])
        given = (sharding_strategy, cpu_offload, backward_prefetch, mixed_precision)
        sharding_strategy, cpu_offload, self.backward_prefetch, mixed_precision = map(adopt, given)
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.cpu_offload = cpu_offload or CPUOffload()
        self.forward_prefetch, self.limit_all_gathers = forward_prefetch, limit_all_gathers
        self.mixed_precision = mixed_precision or MixedPrecision()
        schedule = schedule_policy(self.backward_prefetch)
        modules, params = _ignored(module, ignored_modules, ignored_states)
        ignored = [*params, *(param for each in modules for param in each.parameters())]
        check_foreign([module], {id(param) for param in ignored})
        device_type = torch.device(device_id).type if device_id is not None else None
        mesh = mesh_for(self.sharding_strategy, process_group, device_mesh, device_type)
        if auto_wrap_policy is not None:
            arguments = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "ignored_modules": modules,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": params,
                "device_mesh": device_mesh,
            }
            _wrap_inside(module, auto_wrap_policy, modules, arguments)
        nested = self.fsdp_modules(module)
        own = prepare.own_modules(module, [*nested, *modules])
        prepare.materialise(own, param_init_fn, torch.device(mesh.device_type))
        if sync_module_states:
            prepare.broadcast(module, own, mesh)
        options = GroupOptions(
            reshard_after_forward=self.sharding_strategy.reshard_after_forward,
            placement_fn=None,
            precision=self.mixed_precision.policy if mixed_precision else DEFAULT_PRECISION,
            offload=CPUOffloadPolicy() if self.cpu_offload.offload_params else DEFAULT_OFFLOAD,
            flat=not use_orig_params,
        )
        shard_as([module], mesh, options, {id(param) for param in ignored})
        cast(FSDPModule, module).set_schedule_policy(schedule)
        self._fsdp_wrapped_module = module
        self._mesh = mesh
        _warn_of_container(module, self._wrapped_unit)
        before = prepare.cast_buffers(own, self.mixed_precision.buffer_dtype)
        self._buffer_dtypes = {name: before[id(b)] for name, b in self.named_buffers() if id(b) in before}
        self._is_root = True
        self._summoned = False
        for each in nested:
            each._is_root = False

    # ---- the wrapped module

    @property
    def _wrapped_unit(self) -> Unit:
        """Return the unit of the module that was sharded: the first one inside, whatever is in between."""
        return units_in(self._fsdp_wrapped_module)[0]

    def __getattr__(self, name: str) -> Any:
        """What the wrapper doesn't have is looked up in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED or name.startswith("__"):
                raise  # copying and pickling ask for methods that are the wrapped module's own
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return cast(Any, self.module)[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward. Every rank calls it.

        Args:
            *args: for the module; floating-point tensors in them are cast to ``param_dtype`` if mixed
                precision requires it.
            **kwargs: the same.

        Returns:
            What the module returns.
        """
        precision = self.mixed_precision
        casts = precision.cast_root_forward_inputs if self._is_root else precision.cast_forward_inputs
        dtype = precision.param_dtype
        if casts and dtype is not None:
            args, kwargs = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the model before it was wrapped, with its names and logical shapes; after a backward that
        raised these are what is stored at rest again.

        Local.

        Args:
            *args: as of ``nn.Module``.
            **kwargs: as of ``nn.Module``.

        Returns:
            An iterator of names and parameters.
        """
        self._wrapped_unit.runtime.running()
        for name, param in super().named_parameters(*args, **kwargs):
            yield key_of(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of the model before it was wrapped, with its names.

        Local.

        Args:
            *args: as of ``nn.Module``.
            **kwargs: as of ``nn.Module``.

        Returns:
            An iterator of names and buffers.
        """
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield key_of(name), buffer

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call a function on every module while its parameters are unsharded, and keep its changes.

        Every rank calls it, between steps, with a function that does the same on each.

        Args:
            fn: called with each module, the innermost first.

        Returns:
            The wrapper itself.

        Raises:
            StageError: it was called inside a step, or inside ``summon_full_params``.
        """
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one.

        Local.

        Returns:
            True for the outermost wrapper.
        """
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """The wrappers in a tree of modules, the module itself included.

        Local.

        Args:
            module: the top of the tree.
            root_only: only wrappers that have none around them.

        Returns:
            The wrappers, outer ones first.
        """
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m._is_root] if root_only else found

    @property
    def training_state(self) -> TrainingState:
        """Whether the model is in a forward or backward, in ``summon_full_params``, or between steps
        (``IDLE``).
        """
        if self._summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        running = self._wrapped_unit.runtime.running() is not None
        return TrainingState.FORWARD_BACKWARD if running else TrainingState.IDLE

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that this wrapper shards (not those of wrappers inside it), as stored at rest."""
        return [param.sharded for param in self._wrapped_unit.params]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that it shards over; with ``NO_SHARD``, the ranks that it all-reduces over."""
        copies_only = self.sharding_strategy is ShardingStrategy.NO_SHARD
        return self._mesh.get_group(0 if copies_only else self._mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """This rank's place in ``process_group``."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """Number of ranks in ``process_group``."""
        return dist.get_world_size(self.process_group)

    @property
    def compute_device(self) -> torch.device:
        """The device that parameters are unsharded on."""
        groups = [owner.group for owner in self._wrapped_unit.owners if owner.group is not None]
        # None where nested calls have taken all parameters.
        return groups[0].axis.device if groups else torch.device(self._mesh.device_type)

    # ---- gradients

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for gradient accumulation: backwards inside it add up unsharded gradients and reduce
        nothing.

        The first backward outside reduces them all. Every rank enters it. The accumulated gradients take as
        much memory as the unsharded parameters.

        Returns:
            The context; it may be entered once.
        """
        return without_sync(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all parameters, on one or several meshes. Every rank calls it.

        Args:
            max_norm: gradients with a larger norm are scaled down to it.
            norm_type: the order of the norm, above 0; ``math.inf`` is one.

        Returns:
            The norm before clipping, a plain 0-d tensor in the dtype of the gradients, with the same value on
                every rank.

        Raises:
            InputError: ``norm_type`` isn't above 0.
            StageError: as ``shardwright.clip_grad_norm_``.
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients with your own function, in this wrapper and those inside it. Every rank calls it.

        Args:
            state: passed to the hook unchanged.
            hook: called as ``hook(state, whole, shard)``. ``whole`` is this rank's flat 1-D gradient of a
                group: one part for each rank, padded to equal sizes. It must fill ``shard`` with this rank's
                part, already divided: nothing is divided afterwards.

        Raises:
            InputError: parameters are replicated (hybrid strategies, ``NO_SHARD``).
        """
        units = [unit for unit in units_in(self) if unit.group is not None]
        if any(group.axis.replicate is not None for unit in units for group in unit.groups):
            raise InputError(
                "register_comm_hook replaces the reduce-scatter, and this model all-reduces over copies too; "
                "use it with FULL_SHARD or SHARD_GRAD_OP"
            )
        for unit in units:
            for module in unit.modules:
                module.set_custom_reduce_scatter(_HookedReduceScatter(state, hook))  # type: ignore[operator]
                module.set_gradient_divide_factor(1.0)  # type: ignore[operator]

    # ---- whole parameters

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """A context in which parameters are unsharded plain tensors, in the dtype at rest.

        Every rank enters it, between steps, and all make the same edits. The unsharded tensors are freed at
        its end. Inside of it a forward, which every rank calls, gathers as ever, and computes with the edits.

        Args:
            module: a wrapper, or a module that contains some.
            recurse: also the parameters of wrappers inside.
            writeback: keep the edits.
            rank0_only: only the mesh's first rank has them; the others see and hold only their shards.
            offload_to_cpu: the unsharded parameters are on the host.
            with_grads: gradients are unsharded too.

        Raises:
            InputError: ``rank0_only`` with ``writeback``.
            StageError: it was entered inside a step, or inside itself; or a backward began inside of it.
        """
        if rank0_only and writeback:
            raise InputError("writeback=True with rank0_only=True would leave the ranks with different edits")
        roots = FullyShardedDataParallel.fsdp_modules(module)
        units = [wrapper._wrapped_unit for wrapper in (roots if recurse else roots[:1])]
        if any(unit.runtime.running() is not None for unit in units) or any(w._summoned for w in roots):
            raise StageError("summon_full_params was entered inside a step, or inside of itself")
        with ExitStack() as stack:
            summoned = states.Summoned(units, rank0_only, offload_to_cpu, writeback, with_grads)
            stack.callback(summoned.close)
            for runtime in summoned.runtimes:
                runtime.table.around.append(summoned)
                stack.callback(runtime.table.around.remove, summoned)
            for wrapper in roots if recurse else roots[:1]:
                stack.callback(setattr, wrapper, "_summoned", False)
                wrapper._summoned = True
            yield


class _HookedReduceScatter:
    """A caller's ``hook(state, whole, shard)`` in the shape that ``set_custom_reduce_scatter`` takes."""

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        self.state = state
        self.hook = hook

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for one flat tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        """Fill ``output_tensor``; the hook waits for its own collectives."""
        self.hook(self.state, input_tensor, output_tensor)


def _warn_of_container(module: nn.Module, unit: Unit) -> None:
    if has_no_forward(module) and unit.params:
        warn(
            f"{type(module).__name__} has no forward of its own, so nothing gathers its parameters: "
            f"{[param.fqn for param in unit.params][:5]}; wrap the modules in it that are called",
        )


def _ignored(
    wrapped: nn.Module, modules: Iterable[nn.Module] | None, listed: Iterable[Any] | None
) -> tuple[set[nn.Module], list[nn.Parameter]]:
    """The modules, with all inside of them, and the parameters that are left alone. Raises: InputError."""
    tops, params = list(modules or ()), []
    for each in listed or ():
        (tops if isinstance(each, nn.Module) else params).append(each)
    for each in tops:
        if not isinstance(each, nn.Module) or isinstance(each, FullyShardedDataParallel):
            raise InputError(
                f"ignored modules must be modules that aren't wrapped, got a {type(each).__name__}"
            )
    if wrapped in tops:
        warn(
            f"ignored_modules has the {type(wrapped).__name__} that is being wrapped: every parameter is "
            "left as it is, and no gradient is reduced; leave the module out of it to shard it",
        )
    return {inner for each in tops for inner in each.modules()}, params


def _wrap_inside(module: nn.Module, policy: Any, ignored: set[nn.Module], options: dict[str, Any]) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, FullyShardedDataParallel):
            raise InputError(
                f"auto_wrap_policy is for a model without wrapped modules, and {name!r} is wrapped already; "
                "either wrap all by hand, from the inside out, or all by the policy"
            )

    def wrap_one(each: nn.Module, **changes: Any) -> nn.Module:
        if has_no_forward(each):
            return each
        return FullyShardedDataParallel(each, **{**options, **changes})

    precision = options["mixed_precision"]
    if precision is not None and precision._module_classes_to_ignore:
        plain = policies.ModuleWrapPolicy(precision._module_classes_to_ignore)
        policies.wrap_tree(module, plain, ignored, lambda each: wrap_one(each, mixed_precision=None))
        ignored = ignored | {
            inner for found in FullyShardedDataParallel.fsdp_modules(module) for inner in found.modules()
        }
    policies.wrap_tree(module, policy, ignored, wrap_one)
