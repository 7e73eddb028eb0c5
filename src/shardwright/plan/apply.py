"""What ``fully_shard`` does with ``plan=`` and ``cluster=``; loaded when one of them is passed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.building.build import GroupOptions
from shardwright.engine.building.grouping import Groups, shard_groups
from shardwright.errors import InputError
from shardwright.module import FSDPModule
from shardwright.plan.cluster import Cluster
from shardwright.plan.file import OFFLOADS, Plan
from shardwright.plan.predict import Choice
from shardwright.plan.search import grouped
from shardwright.policy import DEFAULT_OFFLOAD, DEFAULT_PRECISION
from shardwright.quantize import quantisable, quantize_
from shardwright.transport.mesh import default_mesh

MakeGroup = Callable[[DeviceMesh | None, GroupOptions, Sequence[nn.Module], set[int]], None]


def check_alone(groups: Groups | None, cluster: Cluster | str | Path | None) -> None:
    """Raises: InputError where arguments are passed beside ``plan=`` that it sets."""
    if groups is not None:
        raise InputError("fully_shard got plan= and groups=, which the plan sets: leave one of them out")
    if cluster is not None:
        raise InputError(
            "fully_shard got plan= and cluster=, for which the plan was made: leave one of them out"
        )


def groups_for(
    model: Any,
    groups: Groups | None,
    given: Cluster | str | Path | None,
    sample: Any,
    mesh: DeviceMesh | None,
    options: GroupOptions,
) -> list[list[str]]:
    """The groups that are best on a cluster: ``fully_shard(groups="auto", cluster=, sample=)``.

    Raises: InputError, ConfigError.
    """
    if given is None or sample is None or groups != "auto" or not isinstance(model, nn.Module):
        raise InputError(
            'cluster= and sample= go together with groups="auto" and one model: fully_shard(model, '
            'groups="auto", cluster="cluster.toml", sample=torch.empty(4, 2048, dtype=torch.int64))'
        )
    options.check()
    if (
        options.dims is not None
        or options.over_all
        or not isinstance(options.reshard_after_forward, bool | None)
    ):
        raise InputError(
            "cluster= plans for shards over one axis, not for dp_mesh_dims, shard_over_all or a smaller "
            "world to reshard to: leave it out"
        )
    mesh = default_mesh() if mesh is None else mesh
    cluster = given if isinstance(given, Cluster) else Cluster.load(given)
    here = cluster.of(mesh.size())
    reshards = options.reshard_after_forward is not False
    choice = Choice(mp_policy=options.precision, reshard_after_forward=reshards, shards=mesh.shape[-1])
    return grouped(model, sample, here, choice)


def shard_as_planned(
    model: Any,
    given: Plan | str | Path,
    mesh: DeviceMesh | None,
    options: GroupOptions,
    ignored: set[int],
    make_group: MakeGroup,
) -> None:
    """``fully_shard(plan=)``: each group by ``make_group``.

    Raises: InputError, ConfigError; nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"plan= takes one model, got {type(model).__name__}; make a plan for each model")
    plan = given if isinstance(given, Plan) else Plan.load(given)
    planned = replace(options, placement_fn=None, offload=DEFAULT_OFFLOAD, layout=None)
    if planned != GroupOptions(None, None, DEFAULT_PRECISION, DEFAULT_OFFLOAD):
        raise InputError(
            "fully_shard got plan= and one of reshard_after_forward, mp_policy, dp_mesh_dims and "
            "shard_over_all, which the plan sets: leave that argument out, or leave the plan out"
        )
    mesh = default_mesh(plan.shards) if mesh is None else mesh
    plan.check(model, mesh.size())
    if plan.offload != "none" and options.offload != DEFAULT_OFFLOAD:
        raise InputError(
            f"fully_shard got plan= and offload_policy=, and the plan's offload is {plan.offload!r}: leave "
            'offload_policy out, or write offload = "none" into the plan'
        )
    if mesh.shape[-1] != plan.shards:
        raise InputError(
            f"the plan shards over {plan.shards} of {plan.ranks} ranks, got a mesh of {tuple(mesh.shape)}; "
            f"pass one of {(plan.ranks // plan.shards, plan.shards)}, or leave it to the plan"
        )
    if plan.base != "plain":
        frozen = [name for name in quantisable(model) if not model.get_parameter(name).requires_grad]
        quantize_(model, plan.base, frozen)
    said = {model.get_submodule(name): g.reshard_after_forward for g in plan.groups for name in g.modules}

    def shard(modules: list[nn.Module], ignored: set[int]) -> None:
        reshards = next((said[module] for module in modules if said.get(module, True) is not True), None)
        offload = options.offload if plan.offload == "none" else OFFLOADS[plan.offload]
        of_group = replace(options, reshard_after_forward=reshards, precision=plan.mp_policy, offload=offload)
        make_group(mesh, of_group, modules, ignored)

    shard_groups(model, [group.modules for group in plan.groups], ignored, shard)
    cast(FSDPModule, model).set_schedule_policy(plan.policy)
    plan.recompute(model)
