"""What is seen to before an optimizer's step: that its gradients are those of all ranks, and before its first
one that it holds shards and steps them fast."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Muon
from torch.optim.optimizer import Optimizer

from shardwright.engine.groups.gradient_state import mark_of
from shardwright.engine.groups.group import ParamGroup, Stage
from shardwright.engine.groups.table import tables
from shardwright.engine.listeners import State, listeners
from shardwright.engine.optimizers.registry import KnownOptimizer, registry
from shardwright.engine.step.runtime import Runtime, unsettled
from shardwright.engine.unit import made_of
from shardwright.errors import InputError, StageError, UnsupportedTorch, warn
from shardwright.params.placement import SHARD, part_of
from shardwright.torch_private import current_graph_task, has_optimizer_kernels, local_of

_LEFT_OUT = "_left_out_of_sharding"


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Torch calls it before each step of any optimizer."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    params = [getattr(param, SHARD, param) for param in held]
    if listeners.needs:
        listeners.need(f"a step of {type(optimizer).__name__}", *State, params=params)
    groups = _groups()
    if current_graph_task() == -1:  # else it steps from inside the backward
        if unsettled:
            _check_settled(optimizer, params)
        _before_writes(groups, params)
    known = registry.known.setdefault(optimizer, KnownOptimizer())
    # Once, and again where `add_param_group` has given it more.
    if known.num_params != len(params):
        _check(optimizer, params, held)
        known.num_params = len(params)
        known.tables = WeakSet(table for table in tables if table.holds_any(params))
    pages = [group for group in groups if group.params[0].split.pages_state]
    splits = {id(param.sharded): param.split for group in pages for param in group.params}
    places = zip(held, params, strict=True) if pages else ()
    known.paged = {param: splits[id(shard)] for param, shard in places if id(shard) in splits}
    known.owned = [param for param, shard in zip(held, params, strict=True) if param is not shard]
    for param in known.owned:
        param.follow()
    if known.paged:
        from shardwright.engine.optimizers import away  # noqa: PLC0415 offloaded states

        away.bring_state(optimizer, known.paged, known.on_host)
    # Here, and not in a wrapper: whoever builds torch's Adafactor (a recipe, transformers' Trainer) writes no
    # line for it, and other optimizers pay 0.08 us a step.
    # Not those of a step that raised: the caller may have cleared these gradients since.
    known.hidden = step_whole(optimizer) if isinstance(optimizer, Adafactor) else []
    if kwargs.get("closure") is None and not any(map(callable, args[1:])):  # a closure brings gradients
        known.hidden += _set_aside_waiting(optimizer, params)


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """Torch calls it after each step: show the gradients that it wasn't to see, and put state that a
    policy has on the host there again."""
    known = registry.known.get(optimizer, KnownOptimizer())
    for param, grad in known.hidden:
        param.grad = grad
    known.hidden = []
    for param in known.owned:  # it counts changes of its own
        increment_version(local_of(getattr(param, SHARD)))
    for table in known.tables:  # inside of a backward the groups that all ranks have reduced are stepped
        table.num_steps += current_graph_task() == -1
    if known.paged:
        from shardwright.engine.optimizers import away  # noqa: PLC0415 offloaded states

        away.page_out(optimizer, known.paged, known.on_host)
        known.paged = {}


def _check(optimizer: Optimizer, params: list[Any], held: list[Any]) -> None:
    stale = [found[1].fqn for found in map(made_of, params) if found is not None]
    if stale:
        raise StageError(
            f"{type(optimizer).__name__} holds {len(stale)} parameters that fully_shard has replaced, "
            f"or quantize_ has ({', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}): stepping it "
            "would train nothing. Build the optimizer after both, from model.parameters()"
        )
    _check_sharded(optimizer, params)
    _check_kernels(optimizer)
    _check_runs_on_shards(optimizer, held)
    registry.num_checked += 1
    _choose_foreach(optimizer)
    warn_of_roundings(optimizer, held)
    _warn_of_left_out(optimizer, params)


def _groups() -> list[ParamGroup]:
    """The groups of every sharded model that is alive."""
    # A copy, since another thread may shard a model meanwhile.
    return [group for table in tuple(tables) for group in table.groups if group.params]


def _check_settled(optimizer: Optimizer, params: list[Any]) -> None:
    if any(model.table.holds_any(params) for model in tuple(unsettled)):
        raise StageError(
            f"{type(optimizer).__name__} would step with gradients of a backward that didn't end on all "
            "ranks: parameters would differ between them. Leave the step out where backward() raised; the "
            "next forward starts afresh"
        )


def _before_writes(groups: list[ParamGroup], written: list[Any]) -> None:
    """What stayed unsharded after an evaluation, or in flight after a failure, isn't used again where the
    optimizer writes its shards; shards on the host are written once no gather (of an evaluation since) reads
    them any more."""
    # Few are, if any: parameters are looked up only then.
    concerned = [g for g in groups if g.stage is not Stage.SHARDED or g.params[0].split.on_host]
    ids = {id(param) for param in written} if concerned else set()
    owners = [group for group in concerned if any(id(param.sharded) in ids for param in group.params)]
    for group in owners:
        if group.stage is not Stage.SHARDED:
            group.face_versions.gathered = ()  # so that it is stale
    for streams in {split.offload_streams for g in owners if (split := g.params[0].split).on_host}:
        if streams is not None:
            streams.settle()


def _check_sharded(optimizer: Optimizer, params: list[Any]) -> None:
    faces = {id(param.unsharded): param.fqn for group in _groups() for param in group.params if param.bound}
    names = [faces[id(param)] for param in params if id(param) in faces]
    if names:
        raise StageError(
            f"{type(optimizer).__name__} was built on {len(names)} parameters while they were unsharded, as "
            f"after an evaluation ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): stepping it "
            "would train nothing. Call reshard() on their modules and build it then, or build it earlier"
        )


_NOT_ON_SHARDS = (
    (torch.optim.LBFGS, "it joins all gradients to one, which torch can't do with shards: use AdamW"),
    (torch.optim.Rprop, "it writes where signs differ, which torch can't do in shards: use RMSprop or AdamW"),
)


def _check_runs_on_shards(optimizer: Optimizer, params: list[Any]) -> None:
    """Raises: InputError for one that torch can't run on DTensors, instead of an error from inside of it."""
    for kind, reason in _NOT_ON_SHARDS:
        if isinstance(optimizer, kind) and any(isinstance(param, DTensor) for param in params):
            names = {id(param.sharded): param.fqn for group in _groups() for param in group.params}
            first = next((names[id(param)] for param in params if id(param) in names), "of a DTensor")
            raise InputError(
                f"{type(optimizer).__name__} holds sharded parameters ({first!r}, ...), and can't step them: "
                f"{reason}, or give it the parameters of a model that isn't sharded"
            )


def _check_kernels(optimizer: Optimizer) -> None:
    """Raises: UnsupportedTorch for fused kernels that this torch can't be told to run on shards."""
    fused = [param for group in optimizer.param_groups if group.get("fused") for param in group["params"]]
    kinds = () if has_optimizer_kernels() else (torch.optim.SGD, torch.optim.Adagrad)
    if isinstance(optimizer, kinds) and any(isinstance(param, DTensor) for param in fused):
        raise UnsupportedTorch(
            f"{type(optimizer).__name__}(fused=True) steps sharded parameters with torch 2.12 or newer, and "
            f"this is {torch.__version__}: build it with foreach=True, or install a newer torch"
        )


def _set_aside_waiting(optimizer: Optimizer, params: list[Any]) -> list[tuple[Any, Any]]:
    """Gradients that wait to be reduced are none for this step; parameters and what stands for these
    gradients. Raises: StageError where all wait."""
    pairs = [(param, mark_of(param.grad)) for param in params]
    waiting = [param for param, mark in pairs if mark is not None]
    if not waiting:
        return []
    marks = [mark for _, mark in pairs if mark is not None]
    if len(waiting) == sum(param.grad is not None for param in params) and not all(m.is_zero for m in marks):
        raise StageError(
            f"{type(optimizer).__name__} would step nothing: the gradients of all its {len(waiting)} "
            f"parameters ({marks[0].fqn!r}, ...) wait to be reduced, since the last backward was one of "
            "set_requires_gradient_sync(False), no_sync() or set_requires_all_reduce(False). Step after a "
            "backward that synchronises"
        )
    hidden = [(param, param.grad) for param in waiting]
    for param, mark in zip(waiting, marks, strict=True):
        # Also where it was cleared in place: on ranks that ran other layers there is none.
        param.grad = mark.earlier
    return hidden


def leave_out(params: Iterable[torch.Tensor]) -> None:
    """The caller has said that these are not to be sharded: what becomes of their gradients is known."""
    for param in params:
        setattr(param, _LEFT_OUT, True)


def is_left_out(param: torch.Tensor) -> bool:
    """Whether the caller has said so of a parameter."""
    return hasattr(param, _LEFT_OUT)


def _warn_of_left_out(optimizer: Optimizer, params: list[Any]) -> None:
    ours = {id(param.sharded): group.axis.world for group in _groups() for param in group.params}
    if max((ours.get(id(param), 1) for param in params), default=1) == 1:
        return
    plain = [p for p in params if id(p) not in ours and not isinstance(p, DTensor) and p.grad is not None]
    left = [list(param.shape) for param in plain if not is_left_out(param)]
    if left:
        warn(
            f"{type(optimizer).__name__} steps {len(left)} parameters that no fully_shard call has taken, of "
            f"shapes {', '.join(map(str, left[:3]))}{', ...' if len(left) > 3 else ''}, beside sharded ones: "
            "their gradients are not averaged over ranks, so the ranks' copies become different. Call "
            "fully_shard on the module that holds them (the whole model, last), or, where you average them "
            "yourself, pass them as ignored_params",
        )


def warn_of_late(root: nn.Module, runtime: Runtime) -> None:
    """Name the parameters that no call has taken, as those are that were put in after it; each once."""
    if all(group.axis.world * group.axis.num_copies == 1 for group in runtime.groups):
        return
    ours = {id(param.unsharded) for group in runtime.groups for param in group.params if param.bound}
    late = [
        name
        for name, param in root.named_parameters()
        if param.requires_grad
        and name not in runtime.late
        and not (isinstance(param, DTensor) or id(param) in ours or is_left_out(param))
    ]
    runtime.late.update(late)
    if late:
        warn(
            f"{len(late)} parameters of the model are in no group ({', '.join(late[:3])}"
            f"{', ...' if len(late) > 3 else ''}), so each rank trains its own: their gradients aren't "
            "averaged. Put them in before fully_shard, or pass those that you average yourself as "
            "ignored_params",
        )


def _choose_foreach(optimizer: Optimizer) -> None:
    """Step DTensors with foreach kernels where torch would for plain parameters: on an accelerator."""
    for group in optimizer.param_groups:
        asked = group.get("fused") or group.get("differentiable") or group.get("foreach", False) is not None
        sharded = [param for param in group["params"] if isinstance(param, DTensor)]
        if not asked and sharded and sharded[0].device.type != "cpu":
            # With neither ``foreach`` nor ``fused`` given, torch takes foreach for plain CUDA parameters but,
            # not knowing a DTensor for one, a Python loop over sharded ones.
            group["foreach"] = True


# ---- optimizers that read rows and columns of whole matrices


@torch.no_grad()
def step_whole(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """Step what is sharded of an ``Adafactor``, and hide its gradients from the step that follows; these.

    Torch's keeps a mean of each row and each column, and fails on DTensors. Its state is small, so a sharded
    parameter is stepped whole, one after another: gathered, stepped by torch's own code in the same way on
    every rank, and cut again.
    Every rank calls it with the same parameters, which may be listed in an order of its own on each. Memory:
    one whole parameter, its gradient and its update.
    """
    hidden: list[tuple[Any, Any]] = []
    names = {id(param.sharded): (group.name, param.fqn) for group in _groups() for param in group.params}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for param in sorted(group["params"], key=lambda each: names.get(id(each), ("", ""))):
            if not isinstance(param, DTensor) or param.grad is None:
                continue
            whole: Any = param.full_tensor().detach().clone().requires_grad_()
            whole.grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            # Torch's own step, so that its formulas and its state are those of one process.
            alone = Adafactor([whole])
            alone.param_groups[0].update(options)
            alone.state[whole] = optimizer.state[param]
            alone.step()
            optimizer.state[param] = alone.state[whole]
            param.to_local().copy_(part_of(param, whole.detach()))
            hidden.append((param, param.grad))
            param.grad = None
    return hidden


def warn_of_roundings(optimizer: Optimizer, params: list[Any]) -> None:
    """Say once that sharded matrices aren't stepped to the last digit as one process would."""
    if isinstance(optimizer, Muon) and any(isinstance(param, DTensor) for param in params):
        warn(
            "torch.optim.Muon over shards isn't exact: it orthogonalises in bfloat16, and the products of "
            "sharded matrices are summed in another order than one process sums them (seen: weights that "
            "differ by 1e-3 after three steps). It is exact, and sends nothing, where a matrix is whole on "
            'one rank: fully_shard(..., layout="owner"), and an optimizer of shardwright.owned_params(model)',
        )
