"""What ``fully_shard`` is made of: checks (``checks.py``), then parameters, groups, unit and hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.engine.building.checks import check_composes, check_foreign
from shardwright.engine.building.deferred import Deferred, ends, halves, hardly_computes, shown_by
from shardwright.engine.groups.gatherer import GatherOptions
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.listeners import listeners
from shardwright.engine.optimizers.guard import leave_out
from shardwright.engine.step.hooks import ModuleHooks
from shardwright.engine.step.runtime import Runtime
from shardwright.engine.unit import (
    Unit,
    is_sharded,
    made_of,
    mark,
    remember_replaced,
    take_over,
    unit_of,
    units_in,
)
from shardwright.errors import InputError, MisuseError, warn
from shardwright.params.binding import PRE, is_extended, packs
from shardwright.params.param import ParamSite, ShardedParam
from shardwright.params.placement import Split
from shardwright.policy import (
    CHECKSUMS,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReductionPolicy,
    adopt,
)
from shardwright.schedule.schedule import GroupSpec
from shardwright.torch_private import buffers_of, parameters_of
from shardwright.transport.mesh import Axis, resolve, smaller_world

Found = dict[nn.Parameter, tuple[str, list[ParamSite]]]
"""Parameter -> its name in the tree, and the places that show it."""


def _named_sites(modules: Sequence[nn.Module]) -> Iterator[tuple[str, ParamSite, nn.Parameter]]:
    """Every place in the trees that shows a parameter, tied ones each time, with its name in the tree."""
    seen: set[tuple[int, str]] = set()
    for root in modules:
        for prefix, m in root.named_modules():
            for name, param in parameters_of(m).items():
                if param is not None and (id(m), name) not in seen:
                    seen.add((id(m), name))
                    yield f"{prefix}.{name}" if prefix else name, ParamSite(m, name), param


def numbered_without(modules: Sequence[nn.Module], ignored: set[int]) -> dict[str, str]:
    """Names of parameters, and what they would be if lists had no modules that are ignored as a whole.

    Ranks may ignore different numbers of modules; what comes after them in a list has other numbers then.
    """
    found: dict[str, str] = {}

    def visit(module: nn.Module, path: str, counted: str) -> None:
        for name in parameters_of(module):
            found.setdefault(path + name, counted + name)
        skipped = 0
        for name, child in module.named_children():
            params = list(child.parameters())
            if params and all(id(param) in ignored for param in params):
                skipped += 1
            else:
                number = str(int(name) - skipped) if name.isdecimal() else name
                visit(child, f"{path}{name}.", f"{counted}{number}.")

    for module in modules:
        visit(module, "", "")
    return found


def find_params(modules: Sequence[nn.Module], nested: Sequence[Unit], ignored: set[int]) -> Found:
    """Parameters that no nested call has taken, with the places that show them."""
    taken = {id(param.sharded) for unit in nested for param in unit.params}
    found: Found = {}
    for fqn, site, param in _named_sites(modules):
        if id(param) not in taken and id(param) not in ignored:
            found.setdefault(param, (fqn, []))[1].append(site)
    return found


def shard_params(
    found: Found, splits: dict[nn.Parameter, Split], unit: Unit
) -> tuple[list[ShardedParam], tuple[Unit, ...]]:
    """Shard what is found. Parameters that another unit has sharded (tied weights) are shown, not taken."""
    params: list[ShardedParam] = []
    shared_owners: dict[Unit, None] = {}
    for param, (fqn, sites) in found.items():
        made = made_of(param)
        if made is not None:
            owner, sharded = made
            sharded.sites.extend(sites)
            sharded.show(sharded.sharded)
            owner.deferred = None  # what is read at the new places is not seen
            shared_owners[owner] = None
            continue
        kind = ShardedParam
        if is_extended(param):
            from shardwright.params.subclass import ExtendedParam  # noqa: PLC0415 such classes

            kind = ExtendedParam
        sharded = kind(fqn, sites, param, splits[param])
        remember_replaced(param, unit, sharded)
        params.append(sharded)
    return params, tuple(shared_owners)


def check_shared_flat(found: Found, flat: bool) -> None:
    """Raises: InputError for a parameter that can't lie in a flat one, or that lies in another unit's."""
    if flat:
        from shardwright.params.flat_param import check_flat  # noqa: PLC0415 flat parameters

        check_flat(found)
    for param, (fqn, _) in found.items():
        made = made_of(param)
        if made is not None and (flat or made[1].members):
            raise InputError(
                f"use_orig_params=False: {fqn!r} is shared with {made[0].name!r}, which was wrapped before; "
                "wrap the module that holds both as one, or leave the argument out"
            )


def flatten(found: Found, splits: dict[nn.Parameter, Split], unit: Unit) -> list[ShardedParam]:
    """One flat parameter for all that is found; one for each dtype, and apart for
    frozen ones and those that are never cast."""
    from shardwright.params.flat_param import NAME, FlatParam  # noqa: PLC0415 flat parameters

    kinds: dict[Any, Found] = {}
    for param, places in found.items():
        kinds.setdefault((param.dtype, param.requires_grad, splits[param].keeps_dtype), {})[param] = places
    flats: list[ShardedParam] = []
    for place, members in enumerate(kinds.values()):
        site = ParamSite(unit.modules[0], f"{NAME}_{place}" if place else NAME)
        flats.append(FlatParam(site, members, replace(splits[next(iter(members))], dim=0)))
        for param in members:
            remember_replaced(param, unit, flats[-1])
    return flats


PlacementFunction = Callable[[nn.Parameter], Any]


@dataclass(frozen=True)
class ShardPlacementResult:
    """The result of ``shard_placement_fn`` for a parameter that is sharded on a separate mesh.

    Args:
        placement: ``Shard(dim)``, ``Owned``, ``Blocks``, or None for equal rows.
        mesh_info: the DeviceMesh, 1-D or 2-D, or an object that has it as ``.mesh``.
        num_averaged: over how many ranks its gradient is the mean; None: over those of the mesh.
    """

    placement: Any
    mesh_info: Any
    num_averaged: int | None = None


@dataclass(frozen=True)
class GroupOptions:
    """What ``fully_shard`` was told of the group. ``flat``: its parameters lie in a ``FlatParam``.
    ``over_all``: both axes of the mesh shard, and shards over a node are kept from forward to backward."""

    reshard_after_forward: bool | int | None
    placement_fn: PlacementFunction | None
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    dims: DataParallelMeshDims | None = None
    flat: bool = False
    over_all: bool = False
    layout: Any = None

    def __post_init__(self) -> None:
        for name in ("precision", "offload", "dims"):
            object.__setattr__(self, name, adopt(getattr(self, name)))

    def check(self) -> None:
        """Raises: InputError for what isn't of its type."""
        if not isinstance(self.precision, MixedPrecisionPolicy):
            raise InputError(f"mp_policy must be a MixedPrecisionPolicy, got {type(self.precision).__name__}")
        if not isinstance(self.offload, OffloadPolicy):
            raise InputError(f"offload_policy must be an OffloadPolicy, got {type(self.offload).__name__}")
        if self.layout is not None:
            from shardwright.params.ragged import check_layout  # noqa: PLC0415 chosen sizes

            check_layout(self.layout)
        reshard = self.reshard_after_forward
        if reshard is not None and not isinstance(reshard, int):
            raise InputError(
                "reshard_after_forward should be a bool or an int representing the group size to reshard to, "
                f"not {reshard!r}"
            )

    def check_world(self, axis: Axis) -> None:
        """Raises: InputError for a smaller world to reshard to that the axis doesn't have."""
        size = self.reshard_after_forward
        if size is None or isinstance(size, bool):
            return
        if self.over_all:
            raise InputError(
                f"reshard_after_forward={size} doesn't go with shard_over_all, which keeps shards over the "
                "ranks of a node in between; leave it out, or give a bool"
            )
        if not 1 <= size <= axis.world or axis.world % size:
            raise InputError(
                "If passing reshard_after_forward as an int, it should be a factor of "
                f"{axis.world}, not {size}: the world of the sharded axis is split into equal parts"
            )


def shard_modules(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    options: GroupOptions,
    ignored: set[int],
) -> Sequence[nn.Module]:
    """Shard the parameters that no nested call has taken, and set the hooks. Returns the modules.

    Around those that are sharded already (by another group of theirs) the new group is unsharded too.
    """
    check_foreign(modules, ignored)
    nested = list(dict.fromkeys(unit for m in modules for unit in units_in(m)))
    fresh = tuple(m for m in modules if not is_sharded(m))
    axis = resolve(mesh, options.dims, options.over_all)
    for tell in listeners.sharding:
        tell()
    found = find_params(modules, nested, ignored)
    check_shared_flat(found, options.flat)
    splits = {param: _split(fqn, param, sites, axis, options) for param, (fqn, sites) in found.items()}
    if options.layout is not None or any(split.layout for split in splits.values()):
        from shardwright.params.ragged import laid_out  # noqa: PLC0415 chosen sizes

        plain = {param: split for param, split in splits.items() if not is_extended(param)}
        splits |= laid_out({param: fqn for param, (fqn, _) in found.items()}, plain, options)
    for each in (axis, *(split.axis for split in splits.values())):
        options.check_world(each)
    _warn_of_references(modules, {param: fqn for param, (fqn, _) in found.items()})
    # From here on nothing is refused any more.
    leave_out(param for module in modules for param in module.parameters() if id(param) in ignored)
    runtime = Runtime()
    unit = Unit("+".join(type(m).__name__ for m in modules), fresh, None, (), options.precision, runtime)
    _move_buffers(modules, axis.device)
    _name_by_path(modules)
    numbered = numbered_without(modules, ignored) if ignored else {}
    if options.flat:
        params = flatten(found, splits, unit)
    else:
        params, unit.shared_owners = shard_params(found, splits, unit)
    if any(param.split.on_host for param in params):
        from shardwright.params.offload import place_shards  # noqa: PLC0415 offloaded shards

        place_shards(params)
    for param in params:
        param.compared = numbered
    for inner in (*nested, *unit.shared_owners):
        if inner.runtime is not runtime:
            runtime.absorb(inner.runtime)
    if not options.flat:
        _cut_first_block(nested)
    groups = _by_axis(params)
    last: list[ShardedParam] = []
    if len(groups) == len(modules) == 1 and not options.flat:
        first, last = ends(
            params, modules[0], (m for each in nested for m in each.modules), options.precision
        )
        groups = [members for members in (first, last) if members]
    for place, members in enumerate(groups):
        part = f".{shown_by(members, modules[0]) if members is last else place}" if place else ""
        axis, reshards = members[0].axis, options.reshard_after_forward
        asked = GatherOptions(smaller_world=smaller_world(axis, reshards))
        group = _group_class()(unit.name + part, members, axis, options.precision, asked)
        late = Deferred(members) if members is last else None
        if reshards is not None and not isinstance(reshards, bool):
            reshards = reshards != 1  # in a world of one all is kept
        if place:
            _add_part(unit, group, late, reshards)
        else:
            unit.group, unit.deferred = group, late
            runtime.add(group, reshards)
    runtime.table.root = tuple(unit.groups)
    _join(unit, list(dict.fromkeys(unit_of(m) for m in modules if m not in fresh)))
    mark(unit)
    ModuleHooks(unit)
    return modules


def _group_class() -> type[ParamGroup]:
    if CHECKSUMS != "all":
        return ParamGroup
    from shardwright.engine.groups.summed import SummedGroup  # noqa: PLC0415 by an option

    return SummedGroup


def _add_part(unit: Unit, group: ParamGroup, deferred: Deferred | None, reshards: bool | None) -> None:
    """Have ``unit``'s modules need one more group of parameters of theirs."""
    runtime = unit.runtime
    part = Unit(group.name, (), group, (), unit.policy, runtime, deferred=deferred)
    take_over(part, group.params)
    runtime.add(group, reshards)
    runtime.change(group, part_of=runtime.table.number(unit.groups[0]))
    unit.parts = (*unit.parts, part)


def _cut_first_block(nested: Sequence[Unit]) -> None:
    """Hold the parameters of the first of ``nested`` that does more than look up in two groups (see
    ``halves``), if it is one module, nothing was asked of it, and no other unit is cut."""
    groups = ((unit, unit.group) for unit in nested if unit.group)
    unit = next((unit for unit, g in groups if not hardly_computes(g.params, g.policy)), None)
    if unit is None or unit.group is None or len(unit.modules) != 1:
        return
    (block,) = unit.modules
    if any(owner.deferred for each in nested for owner in (each, *each.parts)):
        return
    group, runtime = unit.group, unit.runtime
    spec = runtime.requested(group)
    special = spec != GroupSpec(spec.reshard_after_forward) or group.reducer.hook is not None
    if special or group.reducer.policy != ReductionPolicy():
        return
    first, last = halves(group.params, block, group.policy)
    if last:
        name = f"{unit.name}.{shown_by(last, block)}"
        part = type(group)(name, last, group.axis, group.policy, group.gatherer.options)
        runtime.regroup(group, first)
        _add_part(unit, part, Deferred(last), spec.reshard_after_forward)


def _join(unit: Unit, others: list[Unit]) -> None:
    """Have ``unit``'s groups unsharded around the modules of other units too, which share these with it.

    One without modules of its own becomes a part of the first, whose modules then hold its groups.
    """
    if others and not unit.modules:
        others[0].parts = (*others[0].parts, *(owner for owner in (unit, *unit.parts) if owner.group))
        others[0].shared_owners = (*others[0].shared_owners, *unit.shared_owners)
        others = others[1:]
    for other in others:
        other.shared_owners = (*other.shared_owners, *unit.owners)


def _name_by_path(modules: Sequence[nn.Module]) -> None:
    """Name nested groups by where they are in the outermost module sharded so far, for messages."""
    for root in modules:
        paths: dict[Unit, list[str]] = {}
        for path, m in root.named_modules():
            if path and is_sharded(m):
                paths.setdefault(unit_of(m), []).append(path)
        for nested, found in paths.items():
            for group in nested.groups:
                group.rename("+".join(found) + group.name.removeprefix(nested.name))
            nested.name = "+".join(found)


def _by_axis(params: Sequence[ShardedParam]) -> list[list[ShardedParam]]:
    """Parameters that can share a group: those on one axis."""
    members: dict[Axis, list[ShardedParam]] = {}
    for param in params:
        members.setdefault(param.axis, []).append(param)
    return list(members.values())


def _split(
    fqn: str, param: nn.Parameter, sites: Sequence[ParamSite], axis: Axis, options: GroupOptions
) -> Split:
    """How to shard a parameter. Raises: InputError for a placement that it can't have."""
    wanted: Any = options.placement_fn(param) if options.placement_fn is not None else None
    own, num_averaged = getattr(sites[0].module, "shard_placement", None), None  # as experts have it
    if own is not None and (wanted is None or isinstance(wanted, Shard) or hasattr(wanted, "sizes")):
        wanted = replace(own, placement=wanted)
    if wanted is not None and not isinstance(wanted, Shard) and not hasattr(wanted, "sizes"):
        if not hasattr(wanted, "mesh_info"):
            raise InputError(
                f"Invalid shard_placement_fn result: {wanted!r} for {fqn!r}; expected None, Shard(dim), "
                "Owned, Blocks or ShardPlacementResult"
            )
        info = wanted.mesh_info
        axis = resolve(info if isinstance(info, DeviceMesh) else getattr(info, "mesh", info))
        num_averaged = getattr(wanted, "num_averaged", None)  # torch's own class lacks it
        wanted = wanted.placement
    ndim = param.ndim
    dim = wanted.dim if isinstance(wanted, Shard) else 0
    if ndim and not -ndim <= dim < ndim:
        raise MisuseError(
            f"Shard dim {dim} is invalid for {ndim}D tensor: {param.shape}, which is parameter {fqn!r}"
        )
    check_composes(fqn, param, axis, options.dims)
    if is_extended(param) and (dim % max(ndim, 1) or not ndim or isinstance(param, DTensor)):
        from shardwright.params.subclass import not_extensible  # noqa: PLC0415 such classes

        raise InputError(not_extensible(fqn, param))
    if packs(param) and not hasattr(param, PRE):
        from shardwright.params.subclass import check_packed  # noqa: PLC0415 such classes

        check_packed(fqn, param, axis.world)
    if axis.world > 1 and any(getattr(site.module, "max_norm", None) is not None for site in sites):
        raise InputError(
            f"max_norm of {fqn.rpartition('.')[0]!r} (an Embedding) changes rows of its weight in each "
            "forward: on each rank those of its own batch, most of which others hold. Set max_norm = None, "
            "and between steps call torch.embedding_renorm_ on the weight inside of "
            "`with model.unsharded():`"
        )
    # Kernels of batch norms take weights of the dtype of their running statistics, which aren't cast.
    normalizes = any(getattr(site.module, "running_mean", None) is not None for site in sites)
    keeps_dtype = options.precision.keeps_dtype(fqn, param) or normalizes
    layout = None if isinstance(wanted, Shard) else wanted
    if layout is not None and is_extended(param):
        raise InputError(
            f"{fqn!r} is a {type(param.data).__name__}, whose class says what is gathered of equal rows; "
            "have shard_placement_fn return None for it"
        )
    dim = dim % ndim if ndim else None
    return Split(axis, dim, options.offload, options.dims, keeps_dtype, num_averaged, layout)


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for m in modules:
        for child in m.modules():
            for name, buffer in buffers_of(child).items():
                if buffer is not None and buffer.device not in (device, torch.device("meta")):
                    buffers_of(child)[name] = buffer.to(device)


# ---- other references to the memory of parameters


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}  # which recurrent modules make anew


def _warn_of_references(modules: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
    """Say which modules hold the memory of a parameter by another way than as a parameter: what they compute
    with is its value as it is now, for ever.

    names: of the parameters that are about to be sharded.
    """
    by_memory = {_memory_of(param): name for param, name in names.items() if not isinstance(param, DTensor)}
    for root in modules:
        for path, module in root.named_modules():
            held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
            for attribute, value in (held | buffers_of(module)).items():
                found = [by_memory.get(_memory_of(tensor)) for tensor in _tensors_in(value)]
                name = next((each for each in found if each is not None), None)
                if name is not None:
                    where = f"{path}.{attribute}" if path else attribute
                    warn(
                        f"{where!r} of the model refers to parameter {name!r} by another name: after "
                        "fully_shard that stays the value of now, and isn't trained. Read the parameter by "
                        "its own name in the forward, or keep a copy (.clone()) where a constant is meant",
                    )


def _memory_of(tensor: torch.Tensor) -> int:
    # By the storage itself: the address of tensors on the meta device, and of empty ones, is always 0.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in attributes, containers, closures and partial calls, but not in other modules."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor) and value.layout is torch.strided:
            yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif isinstance(value, partial):
        inside = (value.func, *value.args, *value.keywords.values())
    else:
        cells = getattr(value, "__closure__", None) or ()
        inside = [cell.cell_contents for cell in cells if _is_filled(cell)]
    for each in inside if depth else ():
        yield from _tensors_in(each, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    # The cell of a name that a function refers to and that isn't assigned yet.
    except ValueError:
        return False
