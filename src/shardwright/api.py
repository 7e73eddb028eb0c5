"""``fully_shard``: the interface of ``torch.distributed.fsdp.fully_shard`` over our own runtime."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.building.build import GroupOptions, PlacementFunction, shard_modules
from shardwright.engine.building.checks import check_modules, has_no_forward
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.listeners import State
from shardwright.engine.step.hooks import guard_optimizers
from shardwright.engine.unit import unit_of, units_in
from shardwright.errors import InputError, StageError, warn
from shardwright.module import become_fsdp_modules
from shardwright.policy import (
    DEFAULT_OFFLOAD,
    DEFAULT_PRECISION,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwright.torch_private import before_backwards, when_default_group_changes

if TYPE_CHECKING:
    from shardwright.engine.building.grouping import Groups
    from shardwright.engine.costs import Stats
    from shardwright.observe.memory.out_of_memory import Exhausted
    from shardwright.params.ragged import Layout
    from shardwright.plan.cluster import Cluster
    from shardwright.plan.file import Plan

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = DEFAULT_OFFLOAD,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    groups: "Groups | None" = None,
    shard_over_all: bool = False,
    layout: "Layout" = None,
    plan: "Plan | str | Path | None" = None,
    cluster: "Cluster | str | Path | None" = None,
    sample: Any = None,
) -> M:
    """Shard the parameters of a module (or of several, as one group) over the ranks of a mesh.

    Call it bottom-up, on each block and then on the whole model. Every rank of the mesh must make the same
    calls in the same order. A call doesn't take parameters that a nested call has taken; if none are left, it
    makes no group. Build the optimizer afterwards. The module is changed in place: it keeps its identity and
    its names, and its class becomes a subclass that is also an ``FSDPModule``.

    At rest each parameter is a DTensor of its logical shape; this rank stores the rows that ``torch.chunk``
    gives it (scalars are stored whole). The memory of the original parameter is freed. Around a module's
    forward and backward its group's parameters are plain tensors, unsharded in ``param_dtype``. Gradients are
    averaged over ranks.

    Args:
        module: a module, or a list of modules that become one group. Of an ``nn.ModuleList`` or
            ``ModuleDict``, which has no forward, each child is sharded.
        mesh: a 1-D DeviceMesh to shard over, or a 2-D one that replicates along its first axis and shards
            along its second (hybrid sharding); None: all ranks. Without a launcher that is a world of one.
            Parameters and buffers are moved to its device.
        reshard_after_forward: free the unsharded parameters after the forward and gather them again for the
            backward. False keeps them in between. None means True for nested modules and False for the root.
            With an int (a divisor of the number of ranks) they are sharded over that many neighbouring ranks
            in between, and from a microbatch that doesn't reduce (``set_requires_gradient_sync(False)``) to
            the next one.
        shard_placement_fn: called with each parameter. It returns the ``Shard(dim)`` to split it on (uneven
            splits are allowed), None for equal rows, an ``Owned`` or ``Blocks`` for other ones, or a
            ``ShardPlacementResult`` to shard it on another mesh.
        mp_policy: mixed precision; see ``MixedPrecisionPolicy``.
        offload_policy: what is on the host at rest; see ``CPUOffloadPolicy``.
        ignored_params: parameters that are neither sharded nor moved; their gradients aren't reduced.
        dp_mesh_dims: the data-parallel axes of a larger ``mesh``, by name. The parameters are DTensors on it
            already, replicated along those axes.
        groups: make all groups of one model at once: a list of lists of names or modules inside it, one for
            each group, or "auto" or a ``Grouping`` to choose them. The remaining parameters become groups of
            neighbouring modules, in the order of definition, so that the model itself owns nothing that
            another module can hold.
        shard_over_all: shard over both axes of a 2-D mesh (nodes, ranks of a node), so that nothing is stored
            twice. The first forward of a step gathers over all ranks, between nodes first; shards over the
            node are kept for the backward, and for the next microbatch after one that doesn't reduce.
        layout: which part of a parameter each rank has, where ``shard_placement_fn`` doesn't say. None or
            "rows": equal rows. "owner": each hidden matrix, and each expert of a stack, is whole on one
            rank, so that all own about as much; see ``owned_params``. An ``Owned`` or ``Blocks`` is for all
            parameters.
        plan: the plan that ``shardwright.plan.search`` found for this model, or the path of its file. It sets
            all groups, what is resharded, the dtypes, copies of shards, the schedule's policy, what is on the
            host at rest, whether frozen weights are quantised, and the modules under activation
            checkpointing. It can be combined with ``mesh``, ``ignored_params``, ``shard_placement_fn`` and
            ``layout``, and with ``offload_policy`` if the plan has none, but not with the others.
        cluster: with ``groups="auto"``, the cluster that the model runs on, or the path of its file.
            ``shardwright.plan`` chooses which blocks share a group, so that the step is shortest. The number
            of ranks is that of the mesh.
        sample: with ``cluster``, one microbatch of one rank: a tensor, a sequence of arguments or a mapping
            of named ones, of the same shapes on all ranks. The model is traced with it once, without data.

    Returns:
        The argument ``module``.

    Raises:
        InputError: a module is sharded already, the mesh has the wrong shape or lacks this rank, options
            don't fit each other, or the plan is for another model or number of ranks. Nothing is changed
            then.
        ConfigError: the file of ``plan`` or ``cluster`` isn't one. Nothing is changed then.
        StageError: the plan quantises weights, and the call was made inside a step.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> for block in (model[0], model[2]):
        ...     _ = shardwright.fully_shard(block)
        >>> _ = shardwright.fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> optimizer.step()
        >>> model[0].weight.shape, model[0].weight.placements
        (torch.Size([8, 8]), (Shard(dim=0),))
    """
    given: Any = layout
    if layout == "owner":
        from shardwright.optim import balanced  # noqa: PLC0415 owned matrices

        given = balanced(module)
    options = GroupOptions(
        reshard_after_forward,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        dp_mesh_dims,
        over_all=shard_over_all,
        layout=given,
    )
    ignored = {id(param) for param in ignored_params or ()}
    if plan is not None or cluster is not None or sample is not None:
        from shardwright.plan import apply  # noqa: PLC0415 the planner

        if plan is not None:
            apply.check_alone(groups, cluster)
            apply.shard_as_planned(module, plan, mesh, options, ignored, _shard)
            return module
        groups = apply.groups_for(module, groups, cluster, sample, mesh, options)
    if groups is not None:
        from shardwright.engine.building.grouping import shard_groups  # noqa: PLC0415 chosen groups

        options.check()
        shard_groups(module, groups, ignored, partial(_shard, mesh, options))
        return module
    if isinstance(module, list | tuple):
        shard_as(list(module), mesh, options, ignored)
    else:
        _shard_each(module, mesh, options, ignored)
    return module


def _shard_each(module: Any, mesh: DeviceMesh | None, options: GroupOptions, ignored: set[int]) -> None:
    """Shard each child of a container that has no forward."""
    if not (isinstance(module, nn.ModuleList | nn.ModuleDict) and has_no_forward(module)):
        shard_as([module], mesh, options, ignored)
        return
    check_modules(list(module.children()))
    for child in module.children():
        _shard_each(child, mesh, options, ignored)


def shard_as(
    modules: Sequence[nn.Module], mesh: DeviceMesh | None, options: GroupOptions, ignored: set[int]
) -> None:
    """Shard modules as one group, without what is ignored, by id. Raises: InputError."""
    check_modules(modules)
    options.check()
    if not any(True for module in modules for _ in module.parameters()):
        names = " and ".join(type(module).__name__ for module in modules)
        warn(f"{names} has no parameter, so nothing was sharded: leave the call out")
    _attach()
    become_fsdp_modules(shard_modules(modules, mesh, options, ignored))


def _shard(
    mesh: DeviceMesh | None, options: GroupOptions, modules: Sequence[nn.Module], ignored: set[int]
) -> None:
    """As ``shard_as``, of modules that were checked before any group was made."""
    _attach()
    become_fsdp_modules(shard_modules(modules, mesh, options, ignored))


def _attach() -> None:
    """Have what follows every sharded model be there, from the first call on."""
    _watch()
    guard_optimizers()
    before_backwards(_refuse_shards)


def _refuse_shards(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    from shardwright.engine.asked import refuse_shards  # noqa: PLC0415 chosen inputs

    refuse_shards(outputs, inputs)


def _watch() -> None:
    from shardwright.observe.attached import attach  # noqa: PLC0415 the watch

    attach(_changes_that_fit)


# Ranks wait for each other before the first fully_shard, too.
when_default_group_changes(_watch)


def _changes_that_fit(case: "Exhausted") -> list[str]:
    from shardwright.plan.remedies import changes_that_fit  # noqa: PLC0415 the planner

    return changes_that_fit(case)


def stats(model: nn.Module) -> "Stats":
    """Bytes and seconds of a sharded model on this rank. Any rank may call it, at any time; no communication.

    Args:
        model: a module that ``fully_shard`` was called on; the whole model that it is part of is counted.

    Returns:
        The ``Stats``.

    Raises:
        InputError: the module isn't sharded.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> shardwright.stats(model).at_rest_nbytes  # 8 * 4 + 4 elements of 4 bytes, on one rank
        144
    """
    from shardwright.engine import costs  # noqa: PLC0415 planned schedules

    return costs.stats(unit_of(model).runtime.executor)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every entry of ``model.state_dict()`` as a whole, plain CPU tensor: on rank 0, while other ranks get
    ``{}``.

    Every rank of the model's mesh calls it, between steps. Parameters are collected in the dtype at rest, by
    all-gathers that take at most 128 MiB of each device's memory. Names that share a parameter share a
    tensor. The model is at rest afterwards: unsharded parameters are freed.

    Args:
        model: a model with at least one sharded module.

    Returns:
        The names and tensors, each in its full shape and the dtype at rest, on the mesh's first rank; ``{}``
            on the others.

    Raises:
        InputError: the model has no sharded module.
        StageError: its parameters are on the host by ``offload_states``.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> {name: tuple(tensor.shape) for name, tensor in shardwright.full_state_dict(model).items()}
        {'weight': (4, 8), 'bias': (4,)}
    """
    return dict(_whole(model, None, shared=True))


def stream_state_dict(
    model: nn.Module, decoded: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole model one tensor after another, on the CPU of rank 0, for models that don't fit into one
    host.

    Every rank of the model's mesh iterates to the end, between steps; only rank 0 gets tensors. One parameter
    is collected at a time (on an accelerator, smaller ones together up to 128 MiB), and ranks wait until rank
    0 asks for the next one. The host's memory holds what the caller keeps (a ``for`` loop keeps its last
    tensor until it has the next one), what is being collected, and at most 128 MiB in flight. A tied weight
    is collected under each of its names.

    Args:
        model: a model with at least one sharded module.
        decoded: give quantised weights in this dtype under their own names, instead of codes and scales.

    Returns:
        An iterator of ``(name, tensor)``, with tensors in their full shapes and the dtype at rest.

    Raises:
        InputError: the model has no sharded module.
        StageError: its parameters are on the host by ``offload_states``.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> [name for name, tensor in shardwright.stream_state_dict(model)]
        ['weight', 'bias']
    """
    return _whole(model, decoded, shared=False)


def _whole(model: nn.Module, decoded: torch.dtype | None, shared: bool) -> Iterator[tuple[str, torch.Tensor]]:
    from shardwright.engine.gather_full import stream_full  # noqa: PLC0415 whole weights

    units = units_in(model)
    if not units:
        raise InputError(f"{type(model).__name__} has no sharded module; its own state_dict() is whole")
    for unit in units:
        unit.runtime.rest()
    params = {id(p.sharded): p for unit in units for group in unit.groups for p in group.params}
    is_destination = all(p.is_first for p in params.values())
    whole = stream_full(model.state_dict(keep_vars=True), params, decoded=decoded, shared=shared)
    return (entry for entry in whole if is_destination)


def offload_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    params: bool = True,
    grads: bool = True,
) -> None:
    """Free the device memory of a sharded model's parameters, gradients and optimizer, until
    ``reload_states``.

    Use it between steps, if generation or another model needs that memory. Any rank may call it alone; no
    communication. Shards are copied to pinned memory of the host in their dtypes, and the call returns when
    all copies have ended. Unsharded parameters are freed as well. Parameters, gradients and state keep their
    identity, shape and placements; only the local tensor is on the host. ``torch.accelerator.empty_cache()``
    then releases the memory for other processes. What is on the host already, by an earlier call or by
    ``offload_policy``, is left as it is; CPU ranks copy nothing.

    Until ``reload_states``, every call that needs them raises StageError. Forward, backward, ``unshard``, and
    saving, loading, moving or casting the model need the parameters. A forward that records a graph, a
    backward, and clipping need the gradients. An optimizer's step needs all of them. The state of an
    optimizer can be saved.

    Args:
        model: a model with at least one sharded module.
        optimizer: move its state of the model's sharded parameters, every tensor that has a dimension. Call
            again for a second optimizer.
        params: False leaves the parameters on the device.
        grads: False leaves the gradients on the device.

    Raises:
        InputError: the model has no sharded module.
        StageError: it was called inside a forward or backward, or between the microbatches of a step.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> shardwright.offload_states(model, optimizer)
        >>> shardwright.reload_states(model)
    """
    from shardwright.engine.optimizers import away  # noqa: PLC0415 offloaded states

    groups = between_steps(model, "offload_states")
    away.check_reduced(groups)
    if params:
        for unit in units_in(model):
            unit.runtime.executor.rest()
    wanted = {State.PARAMS: params, State.GRADS: grads, State.OPTIMIZER: optimizer is not None}
    away.put_away(groups, [state for state in State if wanted[state]], optimizer)


def reload_states(
    model: nn.Module, *, params: bool = True, grads: bool = True, optimizer_state: bool = True
) -> None:
    """Copy back to the device what ``offload_states`` has put on the host: everything, or only some of it.

    Any rank may call it by itself, between steps; no communication. Copies are queued on the current stream
    and the host doesn't wait. If nothing is on the host, it does nothing.

    Args:
        model: a model with at least one sharded module.
        params: bring back the parameters.
        grads: bring back the gradients.
        optimizer_state: bring back the state of optimizers.

    Raises:
        InputError: the model has no sharded module.
        StageError: it was called inside a forward or backward.
    """
    wanted = {State.PARAMS: params, State.GRADS: grads, State.OPTIMIZER: optimizer_state}
    from shardwright.engine.optimizers import away  # noqa: PLC0415 offloaded states

    away.bring_back(between_steps(model, "reload_states"), [state for state in State if wanted[state]])


def between_steps(model: nn.Module, caller: str) -> list[ParamGroup]:
    """The groups of a model. Raises: InputError, StageError."""
    units = units_in(model)
    if not units:
        raise InputError(
            f"{caller}: {type(model).__name__} has no sharded module; call fully_shard on it first"
        )
    phases = [phase for unit in units if (phase := unit.runtime.running()) is not None]
    if phases:
        raise StageError(
            f"{caller} was called inside a {phases[0]}; call it between steps; where an exception has ended "
            "a step, call model.reset_iter_state() first"
        )
    return [group for unit in units for group in unit.groups]


def communication_s(model: nn.Module) -> float:
    """Seconds that one step's all-gathers and reduce-scatters take without compute, as the schedule launches
    them.

    Every rank of the model's mesh calls it, between steps. This is how long a step would wait without
    overlap: the median of three measurements. Before there is a schedule, each group's collectives run one
    after another. Groups that move only rows in use move all rows here. Gradients and parameters don't
    change, and unsharded parameters are freed.

    Args:
        model: a module that ``fully_shard`` was called on; the whole model that it is part of is measured.

    Returns:
        Seconds, on this rank.

    Raises:
        InputError: the module isn't sharded.
        StageError: it was called inside a step, or the parameters are on the host by ``offload_states``.
    """
    from shardwright.engine import costs  # noqa: PLC0415 planned schedules

    return costs.communication_s(unit_of(model).runtime)
