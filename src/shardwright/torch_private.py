"""Every private name of torch that this package uses: no other file may have one (tests/pure/house.py). And
every public one that is newer than the oldest supported torch (``torch_fsdp`` has those of its module).

Torch changes private names without notice, and has no public name that does the same. So each stands here
once, under a name of ours, with its reason, and is looked up when this file is imported: a torch that lacks
one is refused at once, by its version. Of a name that only one feature needs, only that feature is refused,
when it is used. Unless its comment says otherwise, each was seen to work on every version in ``SEEN_ON``;
docs/versions.md says what was run there.

What is read in every step is an alias or an ``operator.attrgetter``, so that it costs no Python call.
What torch reads of our modules, the other way round, stands in engine/building/torch_state.py.
"""

import inspect
import logging
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from shardwright.errors import UnsupportedTorch

SEEN_ON = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Versions of torch that the package's tests were run on."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def _known() -> Iterator[None]:
    """Around uses of private names. Raises: UnsupportedTorch where torch lacks one."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorch(
            f"torch {torch.__version__} lacks a name that Shardwright needs: {error}. Install a "
            f"torch that Shardwright was seen to work on ({', '.join(SEEN_ON)}), or a newer Shardwright"
        ) from error


def _reader(owner: object, name: str) -> Callable[[Any], Any]:
    """What reads this attribute of objects such as ``owner``, as quickly as the attribute itself."""
    getattr(owner, name)
    return attrgetter(name)


def _newest_reader(owner: object, *names: str) -> Callable[[Any], Any]:
    """As ``_reader``, of the first of these names that ``owner`` has: the newest one stands first."""
    return _reader(owner, next((name for name in names if hasattr(owner, name)), names[0]))


with _known():
    # ---- tensors

    # The count of changes in place: tells edits from what was left alone, and what autograd may still use.
    version_of: Callable[[Tensor], int] = _reader(Tensor, "_version")
    # A tensor of a class without memory of its own.
    make_wrapper: Callable[..., Tensor] = Tensor._make_wrapper_subclass
    # Has each of a tuple of tensors count from another number on.
    set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
        torch._C._autograd._unsafe_set_version_counter  # pyright: ignore[reportAttributeAccessIssue]
    )
    # Whether two tensors share their memory.
    is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]
    # The tensor that a view is of: it keeps its autograd node when the view is changed in place.
    base_of: Callable[[Tensor], Tensor | None] = _reader(Tensor, "_base")
    # Hooks of ``register_hook``, which autograd never calls of a shard, either.
    hooks_of: Callable[[Tensor], dict[int, Callable[[Tensor], Tensor | None]] | None] = _reader(
        Tensor, "_backward_hooks"
    )
    # Hooks of ``register_post_accumulate_grad_hook``: autograd never calls those of a shard, so we do.
    post_accumulate_grad_hooks_of: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = _reader(
        Tensor, "_post_accumulate_grad_hooks"
    )
    # Where the data of a tensor that was loaded under FakeTensorMode lies in its file, in bytes.
    file_offset_of: Callable[[torch.UntypedStorage], Any] = _reader(
        torch.UntypedStorage, "_checkpoint_offset"
    )
    # A mode in which torch.load reads the structure of a file without its data, and a model runs without any.
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

    # What an operation raises in it whose result, or the shape of that, is decided by values.
    NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
    # Where torch writes the traceback of an operation that fails in it, also of one that is caught.
    fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")

    # Sees every operation that is dispatched inside of it.
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    # Whether a tensor subclass is made of inner tensors, which are gathered and moved in its place.
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

    # Operations on lists of tensors, one kernel for all.
    foreach_add = torch._foreach_add  # pyright: ignore[reportPrivateImportUsage]
    foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    foreach_div = torch._foreach_div  # pyright: ignore[reportPrivateImportUsage]
    foreach_div_ = torch._foreach_div_  # pyright: ignore[reportPrivateImportUsage]
    foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    foreach_zero_ = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]

    # ---- DTensors and meshes

    # What a collective gives that may not be done: made of another tensor, and a plain one once it is used.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor

    # ``to_local`` and ``from_local`` do the same with a graph of autograd, and with checks, for each call.
    local_of: Callable[[Any], Tensor] = _reader(DTensor, "_local_tensor")
    spec_of: Callable[[Any], Any] = _reader(DTensor, "_spec")
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta

    # Rows cut by a later axis of the mesh before an earlier one: FSDP around tensor parallelism.
    from torch.distributed.tensor.placement_types import _StridedShard

    StridedShard = _StridedShard
    # What torch's older checkpoints load, and among whom it is sharded.
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor

    process_group_of: Callable[[Any], Any] = attrgetter("_process_group")
    # One axis of several; one mesh of two (``init_device_mesh`` makes process groups anew).
    _flatten, _concatenate = DeviceMesh._flatten, DeviceMesh._concatenate
    # Rules of DTensor for kernels. Of the public ``register_sharding`` each argument needs one by placement.
    # torch 2.11 hasn't this name: only fused SGD and Adagrad are refused there (``has_optimizer_kernels``).
    from torch.distributed.tensor._ops import _pointwise_ops

    _register_single_dim_pointwise = getattr(_pointwise_ops, "_register_single_dim_pointwise", None)
    _dispatcher = DTensor._op_dispatcher
    # Operations of DTensors that a function of ours takes over, by operation.
    _handlers: dict[Any, Callable[..., Any]] = _dispatcher._custom_op_handlers
    _fused = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_)

    # ---- modules

    # The tables in which modules show their tensors. The public ways to set one check its name, call the
    # hooks of registration, and cost ten times as much; the public ways to list them leave out the tied ones.
    _module = nn.Module()
    parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _reader(_module, "_parameters")
    buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = _reader(_module, "_buffers")
    children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _reader(_module, "_modules")
    unsaved_buffers_of: Callable[[nn.Module], set[str]] = _reader(_module, "_non_persistent_buffers_set")
    forward_pre_hooks_of: Callable[[nn.Module], Mapping[int, Any]] = _reader(_module, "_forward_pre_hooks")
    forward_hooks_of: Callable[[nn.Module], Mapping[int, Any]] = _reader(_module, "_forward_hooks")
    # All tables that our hooks stand in: they are taken out for a copy of the plain module.
    hook_tables_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    hook_tables_of(_module)
    # Methods that our modules override, and torch calls: for .to(), for a module's repr, in load_state_dict.
    attrgetter("_apply", "_get_name", "_load_from_state_dict")(_module)
    # Of the key in a state dict under which ``get_extra_state`` stands.
    EXTRA_STATE: str = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    # The base of all batch norms, which FSDP1's mixed precision leaves alone.
    from torch.nn.modules.batchnorm import _BatchNorm

    BatchNorm = _BatchNorm
    # The operation that a batch norm is whose statistics are trained.
    BATCH_NORM_OP = torch.ops.aten._native_batch_norm_legit.default
    # Nested arguments and outputs, as torch itself takes them apart.
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    # ---- autograd and transforms

    # The number of the backward that this thread runs; -1 outside of one.
    current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
    # Has autograd call a function at the end of the backward that runs.
    queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    # Whether a transform of torch.func is entered, and a context beneath all of them.
    from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    # Whether ``torch.autograd.graph.allow_mutation_on_saved_tensors()`` is entered.
    _copies_saved = _reader(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled")
    copies_what_is_saved: Callable[[], bool] = partial(_copies_saved, torch.autograd.graph)
    peek_transforms: Callable[[], Any] = _functorch.peek_interpreter_stack
    beneath_all_transforms = temporarily_clear_interpreter_stack

    # ---- what watches: torch.compile, modes, other data parallelism

    # Of ``torch.compiler.disable``, whose own import of the compiler takes 1 to 2 s.
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # How many dispatch modes are entered (0.2 us), and which.
    num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    dispatch_modes = _get_current_dispatch_mode_stack
    # The operations that CommDebugMode counts. The public names are functions around them.
    ALL_GATHER_OP = torch.ops.c10d._allgather_base_
    REDUCE_SCATTER_OP = torch.ops.c10d._reduce_scatter_base_
    # Where torch's composable calls write down what was done with a module, and with which state.
    from torch.distributed._composable.contract import REGISTRY_KEY as REGISTRY_KEY
    from torch.distributed._composable.contract import STATE_KEY as STATE_KEY

    # ---- process groups
    # Collectives of one tensor, and of several at once. torch 2.13 has them under the first names; earlier
    # ones under the second, which take the same arguments and warn from 2.13 on that they are deprecated.
    all_gather_of = _newest_reader(dist, "all_gather_single", "all_gather_into_tensor")
    reduce_scatter_of = _newest_reader(dist, "reduce_scatter_single", "reduce_scatter_tensor")
    all_gather_coalesced_of = _newest_reader(
        dist.ProcessGroup, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
    )
    reduce_scatter_coalesced_of = _newest_reader(
        dist.ProcessGroup, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    )
    # torch 2.11 sorts the ranks of a new group: see ``check_order``.
    keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    # The process groups that there are, and the store of each. ``get_group_store`` has another prefix. What
    # both ``init_process_group`` and ``destroy_process_group`` call with the default one, or None.
    from torch.distributed import distributed_c10d as _c10d
    from torch.distributed.distributed_c10d import _world

    _c10d._update_default_pg  # noqa: B018 it is there

    _backend_of, _devices_of = dist.ProcessGroup._get_backend, attrgetter("_device_types")
    _devices_of(dist.ProcessGroup)
    rendezvous_handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers  # by scheme
    # Torch's flight recorders (NCCL's; Gloo's and others'): what each collective was, how far it has come.
    from torch._C import _distributed_c10d

    _flight_recorders: list[Callable[..., bytes]] = [
        getattr(_distributed_c10d, name)
        for name in ("_dump_nccl_trace", "_dump_fr_trace")
        if hasattr(_distributed_c10d, name)
    ]


COMM_DEBUG_MODE = "torch.distributed.tensor.debug._comm_mode"
"""The module of ``CommDebugMode``: whoever uses it has imported that, and our own import would take 1 s."""

FSDP_MODULES = (
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Further modules that clients take FSDP's names from, beside the public ones."""

IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""The attribute of parameters that torch's ``_apply_optimizer_in_backward`` was given."""

CHECKPOINTED = "_checkpoint_wrapped_module"
"""What torch's wrapper for activation checkpointing calls the module inside of it."""

COMPILED = "_orig_mod."
"""What torch.compile leaves in the names of parameters, and in the keys of state dicts."""

STATE_FUNCTIONS = (
    "FSDP",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "_get_fqns",
    "_iterate_valid_model_state",
    "_load_model_state_dict",
)
"""Of ``torch.distributed.checkpoint.state_dict``: the class of torch's wrapper, what is its state, the names
of a tensor, all tensors of a model, and what loads them."""

DCP_PLACE = "_StorageInfo"
DCP_CLASSES = ("_MEM_FORMAT_ENCODING", DCP_PLACE)
"""Private classes that the metadata of torch.distributed.checkpoint's files names."""

DCP_LAYOUT = ("torch.serialization", "_get_layout")
"""The function that this metadata names for a tensor's layout."""


def state_functions() -> ModuleType:
    """The module that has ``STATE_FUNCTIONS``. Raises: UnsupportedTorch."""
    with _known():
        module = import_module("torch.distributed.checkpoint.state_dict")  # 80 modules, which no step needs
        attrgetter(*STATE_FUNCTIONS)(module)
    return module


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the axes of several, in this order.

    Raises: RuntimeError or TypeError where they aren't of one mesh with named axes.
    """
    return _concatenate(meshes)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one of this name. Every rank of the mesh calls it."""
    return _flatten(mesh, name)


def register_optimizer_kernels() -> None:
    """Make the fused kernels of ``torch.optim`` work on DTensors that have no rule there; once is enough.

    A shard is stepped by the elementwise kernel on each rank's own rows, so the rule that torch registers for
    ``_fused_adam_`` is right for these too. Without it ``SGD(fused=True)`` and ``Adagrad(fused=True)`` raise
    "does not have a sharding strategy registered". (``Rprop`` assigns through a mask, which DTensor refuses.)
    """
    if _register_single_dim_pointwise is None:
        return
    known = _dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    for packet in _fused:
        for op in (packet.default, packet.tensor_lr):
            if op not in known:
                _register_single_dim_pointwise(op)


_INSIDE_NONE = nullcontext()


def beneath_transforms() -> AbstractContextManager[None]:
    """A context in which no transform of ``torch.func`` and no inference mode is entered. 0.1 us where none
    was.

    Inside of one, every tensor that the transformed function did not make is a constant that may not be
    written to. The buffers of unsharded weights are such: they are filled beneath all transforms, and what
    runs inside reads them as it reads any captured tensor. What an inference mode makes may not be trained
    with after it.
    """
    if torch.is_inference_mode_enabled():
        return _beneath(torch.inference_mode(False), torch.no_grad())
    return _INSIDE_NONE if peek_transforms() is None else _beneath()


@contextmanager
def _beneath(*modes: AbstractContextManager[None]) -> Generator[None]:
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        with beneath_all_transforms():
            yield


def before_backwards(call: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """Call ``call(outputs, inputs)`` before each ``backward(inputs=)`` and ``autograd.grad``: both go by this
    function, and torch has no hook that fires where nothing of what is asked for is in the graph. Once is
    enough."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    if hasattr(run, "__wrapped__"):
        return

    @wraps(run)
    def checked(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if args[3:4] and args[3]:
            call(outputs, args[3])
        return run(outputs, *args, **options)

    torch.autograd._engine_run_backward = checked  # type: ignore[attr-defined]


def has_optimizer_kernels() -> bool:
    """Whether this torch takes a rule for them."""
    return _register_single_dim_pointwise is not None


def take_over_hooks(before: Tensor, param: Tensor) -> None:
    """Have ``param`` call the hooks of the parameter ``before`` it; handles that were given for them hold."""
    if hooks_of(before):
        param._backward_hooks = hooks_of(before)
    if post_accumulate_grad_hooks_of(before):
        param._post_accumulate_grad_hooks = (  # pyright: ignore[reportAttributeAccessIssue]
            post_accumulate_grad_hooks_of(before)
        )


def before_numbers(check: Callable[[Any], None]) -> None:
    """From now on call ``check(tensor)`` before a number is read from a DTensor (``item()``, ``float()``)."""

    def number(operation: Any, args: Any, kwargs: Any) -> Any:
        check(args[0])
        return operation(local_of(args[0]), *args[1:], **(kwargs or {}))

    _handlers[torch.ops.aten._local_scalar_dense.default] = number


def new_group_of(ranks: Sequence[int], timeout: timedelta, backend: str) -> Any:
    """``dist.new_group`` among ``ranks``, which all call it, in this order (see ``check_order``)."""
    options: dict[str, Any] = {"sort_ranks": False} if keeps_order else {}
    return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True, **options)


def check_order(ranks: Sequence[int]) -> None:
    """Raises: UnsupportedTorch where this torch can't make a process group of ``ranks`` in this order."""
    if not keeps_order and list(ranks) != sorted(ranks):
        raise UnsupportedTorch(
            f"a process group of ranks in the order {list(ranks)}, which shard_over_all=True makes for a 2-D "
            f"mesh, needs torch 2.12 or newer, and this is {torch.__version__}: install a newer torch, or "
            "leave shard_over_all out"
        )


def set_local(tensor: DTensor, local: Tensor) -> None:
    """Have a DTensor lie in other memory; the object, its placements and its gradient stay."""
    tensor._local_tensor = local


def replace_parameters_of(module: nn.Module, table: dict[str, nn.Parameter | None]) -> None:
    """Have a module show its parameters from another table."""
    module.__dict__["_parameters"] = table


def look_up_again(model: nn.Module) -> None:
    """Have every module of ours under ``model`` look up its parameters again, as after ``model.to``."""
    model._apply(lambda tensor: tensor)


def skipped_by_compiler(function: _Function) -> _Function:
    """Have torch.compile break its graph where a frame calls ``function``, and pass its own frame over."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "a hook of Shardwright"
    marked._torchdynamo_disable_recursive = True
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def process_groups() -> list[dist.ProcessGroup]:
    """All of this process, the caller's own too."""
    return list(_world.pg_map)


def when_default_group_changes(call: Callable[[], None]) -> None:
    """From now on ``call()`` follows the begin of each default process group, and its end."""
    before = _c10d._update_default_pg

    def told(group: dist.ProcessGroup | None) -> None:
        before(group)
        call()

    _c10d._update_default_pg = told


def default_store() -> Store:
    """The store that the job was started with, as its default process group has it."""
    default = dist.group.WORLD
    assert default is not None
    return _world.pg_map[default][1]


@contextmanager
def default_store_is(store: Store) -> Generator[None]:
    """``dist.new_group``, which takes no store, makes its keys in this one meanwhile. It doesn't split the
    communicator of a world that is bound to a device, which waits for all its ranks. Not for two threads."""
    default: Any = dist.group.WORLD
    (kind, before), device = _world.pg_map[default], default.bound_device_id
    _world.pg_map[default], default.bound_device_id = (kind, store), None
    try:
        yield
    finally:
        _world.pg_map[default], default.bound_device_id = (kind, before), device


def flight_records(entries: bool) -> list[dict[str, Any]]:
    """What each of torch's flight recorders holds of this process, in torch's own format (version 2.10).

    "pg_status": by group how many collectives were launched, begun and ended; 30 us. entries: also "entries",
    one for each collective that is remembered; 35 ms for the 2,000 of ``TORCH_FR_BUFFER_SIZE``'s default.
    """
    return [
        pickle.loads(dump(includeCollectives=entries, includeStackTraces=False, onlyActive=False))
        for dump in _flight_recorders
    ]


def backend_names(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of a group's backend for each device type, as ``{"cpu": "gloo"}``.

    ``get_backend_config`` names what was asked for, also for devices that this build of torch lacks.
    """
    return {device.type: _backend_of(group, device).name() for device in _devices_of(group)}


def timeouts(group: dist.ProcessGroup) -> list[timedelta]:
    """How long a wait may take, by each of the group's backends that has such a limit."""
    options = [_backend_of(group, device).options for device in _devices_of(group)]
    with _known():
        return [each._timeout for each in options if each is not None]


def see_collectives(
    begin: Callable[[dist.ProcessGroup, str], Any], waiting: Callable[[Any], AbstractContextManager[None]]
) -> None:
    """Have ``begin(group, what)`` called for each functional collective on CPU tensors from now on (those of
    DTensors), and its wait put into the block that ``waiting`` makes of what that returned. Once for all."""
    with _known():
        functional = import_module("torch.distributed._functional_collectives")
        wait_tensor = functional.wait_tensor
    if hasattr(wait_tensor, "__wrapped__"):
        return
    told = {
        "all_reduce": "all-reduce",
        "all_gather_tensor": "all-gather",
        "all_gather_single": "all-gather",  # since 2.13
        "reduce_scatter_tensor": "reduce-scatter",
        "reduce_scatter_single": "reduce-scatter",  # since 2.13
        "all_to_all_single": "all-to-all",
    }

    inside: list[Any] = []  # one of them waits itself, and some call others of them
    in_flight: dict[int, Any] = {}  # by memory: views of what isn't there yet may be waited for in its place

    def seen(function: Any, what: str) -> Any:
        @wraps(function)
        def launch(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or inside or tensor.device.type != "cpu":
                return function(tensor, *args, **kwargs)
            group = next((g for each in (*args, *kwargs.values()) if (g := _group_of(each))), None)
            inside.append(None if group is None else begin(group, what))
            try:
                result = function(tensor, *args, **kwargs)
                if isinstance(result, AsyncCollectiveTensor):
                    in_flight[result.elem.untyped_storage().data_ptr()] = inside[0]
                return result
            finally:
                inside.clear()

        return launch

    @wraps(wait_tensor)
    def wait(tensor: Any) -> Any:
        if torch.compiler.is_compiling():
            return wait_tensor(tensor)
        begun = in_flight.pop(tensor.untyped_storage().data_ptr(), None) or (inside[0] if inside else None)
        with nullcontext() if begun is None else waiting(begun):
            return wait_tensor(tensor)

    functional.wait_tensor = wait  # type: ignore[attr-defined]
    for name, what in told.items():
        if hasattr(functional, name):
            setattr(functional, name, seen(getattr(functional, name), what))


def _group_of(given: Any) -> dist.ProcessGroup | None:
    """What a functional collective is given as its group."""
    if isinstance(given, tuple) and given and isinstance(given[0], DeviceMesh):
        return given[0].get_group(given[1])
    return given if isinstance(given, dist.ProcessGroup) else None


WAIT_BATCH_P2P = "_wait_batch_p2p"
"""Where a rank waits for other stages, as stacks name it."""


class _Works(list[Any]):
    """Of messages in flight, with what was noted as they began."""

    begun: Any = ()


def see_messages(
    begin: Callable[[Sequence[dist.P2POp]], Any], waiting: Callable[[Any], AbstractContextManager[None]]
) -> None:
    """The same of messages on CPUs between stages of ``torch.distributed.pipelining``."""
    with _known():
        schedules = import_module("torch.distributed.pipelining.schedules")
        batch, wait_batch = schedules._batch_p2p, getattr(schedules, WAIT_BATCH_P2P)
    if hasattr(batch, "__wrapped__"):
        return

    @wraps(batch)
    def launch(p2p_ops: Sequence[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
        on_host = bool(p2p_ops) and p2p_ops[0].tensor.device.type == "cpu"
        begun = begin(p2p_ops) if on_host else ()
        works = _Works(batch(p2p_ops, *args, **kwargs))
        works.begun = begun
        return works

    @wraps(wait_batch)
    def wait(work: Any) -> None:
        with waiting(work.begun) if getattr(work, "begun", ()) else nullcontext():
            wait_batch(work)

    schedules._batch_p2p = launch  # type: ignore[attr-defined]
    setattr(schedules, WAIT_BATCH_P2P, wait)


def ring_attention(device_type: str) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Torch's ring attention by its flash kernels for a device: forward, backward, and its options."""
    with _known():
        module = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
        aten = torch.ops.aten
        forward, backward = (
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_flash_attention_backward,
        )
        if device_type == "cpu":
            forward = aten._scaled_dot_product_flash_attention_for_cpu
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (
            partial(module._templated_ring_attention, seq_dim=2, op=forward.default),
            partial(
                module._templated_ring_attention_backward,
                seq_dim=2,
                op=backward.default,
                grad_out_name="grad_out",
            ),
            module._cp_options,
        )
