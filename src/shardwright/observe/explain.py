"""``explain(model)``: how a model is sharded, one row for each group, as data and as text."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.engine.building.deferred import halves, is_large
from shardwright.engine.groups.gatherer import has_lookup
from shardwright.engine.groups.group import ParamGroup, gathered_nbytes
from shardwright.engine.unit import Unit, units_in
from shardwright.errors import InputError
from shardwright.policy import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy, ReductionPolicy
from shardwright.quantized.codec import Encoding
from shardwright.schedule.check import exposed
from shardwright.schedule.schedule import Phase
from shardwright.torch_private import parameters_of

PUBLISHED = "_shardwright_published"
"""Of a module: weak references to its publishers; a copy of the module has them, too."""


@dataclass(frozen=True)
class ParamRow:
    """One parameter. ``shape`` is the logical one; dtypes at rest (also of its gradient and the optimizer),
    in compute, and in which its gradient is summed. codec: of a quantised weight's codes, what they decode
    to. sent_dtype: in which it is gathered."""

    name: str
    shape: tuple[int, ...]
    placements: str
    at_rest_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool
    codec: str = ""
    sent_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class GroupRow:
    """One group: what is gathered and reduced together.

    modules: names in the model; of a further group of the same modules, those that show its parameters.
    axis: its mesh. at_rest_nbytes: bytes of this rank's shards.
    unsharded_nbytes: bytes of all its parameters unsharded, without padding (of weights that are decoded
    then, the decoded ones). resharded: when they are freed.
    kept_nbytes: bytes of the copy on the host that its all-gathers send changes of (``SchedulePolicy.wire``).
    gradients: how they are reduced. changed: what differs from the defaults.
    exposed_nbytes: bytes that this rank receives for it in a step of training with nothing computed beside
    them, by the schedule of the last step and before ``SchedulePolicy.wire`` makes them fewer; 0 before a
    step. exposed: which collectives those are, and the call that would hide them or have them move less, if
    there is one.
    """

    modules: tuple[str, ...]
    axis: str
    params: tuple[ParamRow, ...]
    at_rest_nbytes: int
    unsharded_nbytes: int
    kept_nbytes: int
    resharded: str
    gradients: str
    changed: tuple[str, ...]
    exposed_nbytes: int
    exposed: str


@dataclass(frozen=True)
class Explanation:
    """How a model is sharded, as data. ``print`` it for a table.

    Attributes:
        groups: one row for each group, with its mesh, its parameters with shapes and dtypes, and its bytes.
        unmanaged: names of the parameters that no group has.
        published: where the model is published to, and the host memory that takes.
    """

    groups: tuple[GroupRow, ...]
    unmanaged: tuple[str, ...]
    published: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = []
        for number, group in enumerate(self.groups):
            lines.append(
                f"group {number}: {', '.join(group.modules) or '(root)'}  on {group.axis}  "
                f"{_size(group.at_rest_nbytes)} at rest, {_size(group.unsharded_nbytes)} unsharded"
            )
            lines.append(f"    resharded {group.resharded}; gradients: {group.gradients}")
            lines += [f"    not the default: {change}" for change in group.changed]
            lines += [f"    exposed: {group.exposed}"] if group.exposed else []
            width = max(len(param.name) for param in group.params)
            for param in group.params:
                dtypes = [param.at_rest_dtype, param.compute_dtype, param.reduce_dtype]
                lines.append(
                    f"      {param.name:<{width}}  {list(param.shape)!s:<14}  {param.placements:<12}  "
                    + " -> ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                    + ("" if param.trainable else "  frozen")
                    + (f"  sent in {param.sent_dtype}" if param.sent_dtype != param.compute_dtype else "")
                    + (f"  {param.codec}" if param.codec else "")
                )
        at_rest = sum(group.at_rest_nbytes for group in self.groups)
        whole = sum(group.unsharded_nbytes for group in self.groups)
        lines.append(
            f"{len(self.groups)} groups: {_size(at_rest)} at rest on this rank, {_size(whole)} unsharded"
        )
        lines.append("dtypes: at rest -> in compute and on the wire -> in reduction")
        exposed_nbytes = sum(group.exposed_nbytes for group in self.groups)
        if exposed_nbytes:
            uncoded = ", uncoded," if any(group.kept_nbytes for group in self.groups) else ""
            lines.append(
                f"{_size(exposed_nbytes)}{uncoded} a step are received with nothing computed beside them"
            )
        if self.unmanaged:
            lines.append(f"not sharded: {', '.join(self.unmanaged)}")
        lines += self.published
        return "\n".join(lines)


def explain(model: nn.Module) -> Explanation:
    """How a model is sharded on this rank: its groups, in the order in which they were created. No
    communication.

    Args:
        model: a model with at least one sharded module.

    Returns:
        An ``Explanation``; print it.

    Raises:
        InputError: the model has no sharded module.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> print(shardwright.explain(model))  # doctest: +ELLIPSIS
        group 0: (root)  on ...
        >>> [param.name for param in shardwright.explain(model).groups[0].params]
        ['weight', 'bias']
    """
    units = units_in(model)
    if not units:
        raise InputError(
            f"{type(model).__name__} has no sharded module; call shardwright.fully_shard on it first"
        )
    names = {id(module): name for name, module in model.named_modules()}
    owned = [(unit, group) for unit in units for group in unit.groups]
    owned.sort(key=lambda pair: pair[0].runtime.groups.index(pair[1]))
    managed = {
        (id(site.module), site.name) for _, group in owned for param in group.params for site in param.sites
    }
    unmanaged = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, param in parameters_of(module).items()
        if param is not None and (id(module), name) not in managed
    ]
    found = [(module, ref()) for module in model.modules() for ref in module.__dict__.get(PUBLISHED, ())]
    published = tuple(each.said for module, each in found if each is not None and each.model is module)
    return Explanation(tuple(_row(unit, group, names) for unit, group in owned), tuple(unmanaged), published)


def _row(unit: Unit, group: ParamGroup, names: dict[int, str]) -> GroupRow:
    codecs = {pair.codes: _codec(pair.encoding) for pair in group.gatherer.decoding.frozen}
    params = []
    for param in group.params:
        place = names.get(id(param.sites[0].module), "")
        params.append(
            ParamRow(
                f"{place}.{param.sites[0].name}" if place else param.sites[0].name,
                tuple(param.spec.shape),
                ", ".join(map(str, param.spec.placements)),
                param.sharded.dtype,
                param.compute_dtype(group.policy),
                param.reduce_dtype(group.policy),
                param.trainable,
                codecs.get(param, ""),
                param.sent_dtype(group.policy),
            )
        )
    modules = unit.modules if group is unit.group else [param.sites[0].module for param in group.params]
    mesh = group.axis.mesh
    axes = mesh.mesh_dim_names or ("shard",) * mesh.ndim
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(axes, mesh.shape, strict=True))
    return GroupRow(
        tuple(dict.fromkeys(names[id(module)] for module in modules if id(module) in names)),
        f"{mesh.device_type} [{sizes}]",
        tuple(params),
        sum(param.local.nbytes for param in group.params),
        _unsharded_nbytes(group),
        gathered_nbytes(group) if group.gatherer.sends.changes else 0,
        _resharded(unit, group),
        _gradients(group),
        tuple(_changes(unit, group)),
        *_exposed(unit, group, names),
    )


def _exposed(unit: Unit, group: ParamGroup, names: dict[int, str]) -> tuple[int, str]:
    """Bytes that this rank receives with nothing beside them, and which those are."""
    runtime, axis = unit.runtime, group.axis
    spec, number = runtime.effective(group), runtime.groups.index(group)
    found = [each for each in exposed(runtime.schedule) if each.group == number and axis.world > 1]
    if not found:
        return 0, ""
    share = (axis.world - 1) / axis.world
    sizes = [round((spec.grad_nbytes if each.reduces else spec.nbytes) * share) for each in found]
    sends = group.gatherer.sends
    named = [
        f"{'reduce-scatter at the end of' if each.reduces else 'all-gather in'} {each.phase} ({_size(size)}"
        f"{', uncoded' * (sends.gradients if each.reduces else sends.changes)})"
        for each, size in zip(found, sizes, strict=True)
    ]
    return sum(sizes), f"{', '.join(named)}, with nothing computed beside; {_hides(unit, group, names)}"


def _hides(unit: Unit, group: ParamGroup, names: dict[int, str]) -> str:
    """The call that would hide some of a group's collectives behind computation, or have them move less; or
    that there is none."""
    if group.gatherer.rows is not None:
        return "no fully_shard call hides it: only rows in use are moved already"
    if len(unit.runtime.groups) == 1 and len(_modules_of(group)) > 1:
        return "call fully_shard on the blocks of the model first: one group has nothing to hide behind"
    policy = unit.runtime.policy
    if not (
        policy.depth and policy.forward_prefetch and policy.backward_prefetch is not BackwardPrefetch.NONE
    ):
        return "leave depth and prefetch of SchedulePolicy at their defaults: then groups are gathered ahead"
    return (
        _moves_by_rows(unit, group, names)
        or _hides_in_parts(unit, group, names)
        or "no fully_shard call hides it: a step needs these bytes first, or has them last"
    )


def _moves_by_rows(unit: Unit, group: ParamGroup, names: dict[int, str]) -> str:
    """The call that has a lookup's weight move rows in use only; "" where none would."""
    runtime, gatherer = unit.runtime, group.gatherer
    lookups = [param for param in group.params if has_lookup([param])]
    found = [param for param in lookups if not gatherer.why_no_rows_of(param, runtime.policy)]
    if not found or gatherer.sends.codes:  # what has changed of it is less than its rows in use
        return ""
    call = "take SchedulePolicy(row_wise=True)"
    if len(group.params) > 1 or group in runtime.table.root:
        name = names.get(id(found[0].sites[0].module), found[0].fqn)
        call = f"call fully_shard on {name} by itself, with SchedulePolicy(row_wise=True)"
    elif runtime.requested(group).reshard_after_forward is False:
        call = f"leave out its reshard_after_forward=False, and {call}"
    return f"{call}: then only rows in use are moved"


def _hides_in_parts(unit: Unit, group: ParamGroup, names: dict[int, str]) -> str:
    """The call that makes two groups of one, of which one hides behind the other's computation, or behind
    the blocks'; "" where none would."""
    if len(_modules_of(group)) == 1 or any(owner.deferred for owner in (unit, *unit.parts)):
        return ""  # of two parts it is one already
    if group in unit.runtime.table.root:
        large = [p for p in group.params if is_large([p], group.policy) and not has_lookup([p])]
        found = [names[id(p.sites[0].module)] for p in large if len(p.sites) == 1]
        return (
            f"call fully_shard on {found[0]} by itself, before: it is gathered beside the blocks"
            if found
            else ""
        )
    if len(unit.modules) > 1:
        return "call fully_shard on each of its modules: one hides behind another's computation"
    (block,) = unit.modules or (None,)
    if block is None or len(units_in(block)) > 1:
        return ""
    _, last = halves(group.params, block, group.policy)
    if not last:
        return ""
    half = ", ".join(dict.fromkeys(names[id(param.sites[0].module)] for param in last))
    return f"call fully_shard([{half}]) before: each half hides behind the other's computation"


def _modules_of(group: ParamGroup) -> set[int]:
    """Return the modules that show its parameters, each by the first that does."""
    return {id(param.sites[0].module) for param in group.params}


def _codec(encoding: Encoding) -> str:
    when = "where it is read" if encoding.per_use else "when unsharded"
    dtype = str(encoding.compute_dtype).removeprefix("torch.")
    return f"{encoding.codec.name} of {list(encoding.shape)}, decoded to {dtype} {when}"


def _unsharded_nbytes(group: ParamGroup) -> int:
    decoded = sum(
        math.prod(e.shape) * e.compute_dtype.itemsize
        for e in (pair.encoding for pair in group.gatherer.decoding.pairs)
    )
    shown = [param for param in group.params if param not in group.gatherer.decoding.parts]
    return decoded + sum(p.layout.numel * p.compute_dtype(group.policy).itemsize for p in shown)


def _resharded(unit: Unit, group: ParamGroup) -> str:
    facts, smaller = unit.runtime.effective(group), group.gatherer.smaller_world
    if smaller is not None:
        whom = "ranks of the node" if smaller.comm in group.axis.hops else "neighbours"
        when = f"after forward to {smaller.comm.world} {whom}, and after backward"
    elif facts.keeps(Phase.FORWARD):
        when = "after backward"
    elif facts.is_open:
        when = "after forward (unless the backward needs it first) and after backward"
    else:
        when = "after forward and after backward"
    return when if facts.reshard_after_backward else when.replace("after backward", "by the next change")


def _gradients(group: ParamGroup) -> str:
    policy, ranks = group.reducer.policy, group.axis.world * group.axis.num_copies
    if not policy.reduce:
        return "kept unsharded and added up (set_requires_gradient_sync(False))"
    if policy.weighted:
        return f"summed over {ranks} ranks, each loss weighted by its share of the step (loss_weights)"
    if policy.divide_factor is None:
        return f"averaged over {ranks} ranks"
    if policy.divide_factor == 1:
        return f"summed over {ranks} ranks"
    return f"summed over {ranks} ranks and divided by {policy.divide_factor:g}"


def _changes(unit: Unit, group: ParamGroup) -> list[str]:
    facts, changed = unit.runtime.requested(group), list(group.gatherer.unmet)
    smaller = group.gatherer.smaller_world
    if facts.reshard_after_forward is not None and smaller is None:
        changed.append(f"reshard_after_forward={facts.reshard_after_forward}, by its caller")
    if group.axis.hops:
        changed.append("gathered between nodes, then inside of each, by fully_shard's shard_over_all")
    elif smaller is not None:
        changed.append(f"reshard_after_forward={smaller.comm.world}, by fully_shard's caller")
    for name in ("reshard_after_backward", "unshard_in_backward"):
        if not getattr(facts, name):
            changed.append(f"{name}=False, by set_{name}")
    if facts.ahead_in_forward is not None or facts.ahead_in_backward is not None:
        changed.append("prefetch lists, by set_modules_to_*_prefetch")
    if group.policy != MixedPrecisionPolicy():
        changed.append(f"{group.policy}, by fully_shard's mp_policy")
    if group.reducer.policy != ReductionPolicy():
        changed.append(f"{group.reducer.policy}, by the gradient setters")
    if isinstance(group.params[0].split.offload, CPUOffloadPolicy):
        changed.append(f"{group.params[0].split.offload}, by fully_shard's offload_policy")
    if group.gatherer.sends.changes:
        changed.append(
            f"all-gathers send what has changed{', coded' * group.gatherer.sends.codes}, "
            f"{_size(gathered_nbytes(group))} kept on the host for it, by SchedulePolicy.wire"
        )
    if group.reducer.hook is not None:
        changed.append("a hook sees reduced gradients, by set_all_reduce_hook")
    if group.gatherer.comm is not group.axis.comm:
        changed.append("custom collectives, by set_custom_all_gather/reduce_scatter")
    return changed


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
