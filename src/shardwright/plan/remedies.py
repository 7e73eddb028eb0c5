"""Which changes would have fitted, where a rank ran out of memory: priced as ``search`` prices them."""

import copy
import inspect
import math
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from shardwright.columns import in_words
from shardwright.engine.building.torch_state import methods_run_as_forward
from shardwright.engine.unit import TensorShape, Unit, unit_of, units_in
from shardwright.errors import ConfigError, InputError
from shardwright.module import original_class
from shardwright.observe.memory.accounts import group_names
from shardwright.observe.memory.out_of_memory import Exhausted
from shardwright.observe.memory.report import Category
from shardwright.plan.cluster import Cluster, DeviceSpec, device
from shardwright.plan.constants import MEMORY_ERROR
from shardwright.plan.file import offload_name
from shardwright.plan.levers import first_blocks
from shardwright.plan.predict import Choice
from shardwright.plan.search import Candidate, Space, Tried, any_loss, space_of
from shardwright.plan.subject import of_model
from shardwright.torch_private import STATE_KEY, current_graph_task, tree_map

_SHOWN = 3
_FREE_AT_MOST = "Of what was alive these can free most, each at most:"


def changes_that_fit(case: Exhausted) -> list[str]:
    """Lines for people: the changes of one lever that would fit, or of two where fewer than three do, by the
    seconds of a step. Where fewer than three kinds of change fit, one kind has several.

    The step is traced on the meta device and nothing is computed. Adam's states are counted where the
    optimizer has none yet. Of a model with flat or quantised parameters, which can't be traced, those that
    free most of what was alive. Raises: InputError for another one that can't be traced.
    """
    if torch.is_grad_enabled() and current_graph_task() == -1:
        return _changes_that_fit(case)
    with ThreadPoolExecutor(1) as thread:  # it isn't in this backward, and its tensors have gradients
        return thread.submit(_changes_that_fit, case).result()


def _changes_that_fit(case: Exhausted) -> list[str]:
    if (name := _without_price(case.model)) is not None:
        return [f"{name!r} is flat or quantised, so no step can be priced. {_FREE_AT_MOST}", *_by_alive(case)]
    space, plain = _space(case)
    base, measured = space.price(plain), case.report.by_category
    planned = space.seen[plain][1].peak.nbytes[Category.STATES]
    shards = sum(param.local.nbytes for group in group_names(case.model) for param in group.params)
    has_stepped = measured[Category.STATES] > shards
    more = measured[Category.OTHER] + (measured[Category.STATES] - planned) * has_stepped
    room = case.capacity_nbytes - more
    changes = space.changes(plain)
    both: list[Candidate] = []
    found = _fastest(_fitting(space, changes, base, room), base)
    if len(found) < _SHOWN:
        both = [
            plain._replace(recomputed=r, split=s)
            for r in space.values["recomputed"][1:]
            for s in space.values["split"][1:]
        ]
        found += _fastest(_fitting(space, both, base, room), base)
    most, there_is = in_words(base.nbytes + more), in_words(case.capacity_nbytes)
    head = f"As it is, a step takes {most} at most, of {there_is}"
    if not found:
        least = min(map(space.price, changes), key=lambda one: one.nbytes)
        return [
            f"{head}. Of {len(space.seen) - 1} changes that were priced none fits; least holds: "
            f"{_in_words(space, plain, least, base, more)}. Take more ranks, or a smaller model"
        ]
    others = [one for one in _fitting(space, changes + both, base, room) if one not in found]
    shown = sorted(found, key=_step_s)[:_SHOWN] + others[: max(0, _SHOWN - len(found))]
    lines = [f"  {_in_words(space, plain, one, base, more)}" for one in sorted(shown, key=_step_s)]
    return [
        f"{head}. By the plan's prices (+- {MEMORY_ERROR:.0%} of memory) these fit, the fastest first:",
        *lines,
    ]


def _by_alive(case: Exhausted) -> list[str]:
    """The three changes that can free most of what was alive, where no step can be priced."""
    alive, runtime = case.report.by_category, unit_of(case.model).runtime
    rows = "half of the rows in a microbatch, and twice as many microbatches"
    freed = [
        (alive[Category.ACTIVATIONS], "compute blocks again in the backward (torch.utils.checkpoint)"),
        (alive[Category.ACTIVATIONS] // 2, rows),
        (alive[Category.UNSHARDED], "reshard_after_forward=True, and smaller groups"),
        (alive[Category.STATES] // 2, "twice as many ranks"),
    ]
    if runtime.groups[0].axis.device.type != "cpu":
        freed.append((alive[Category.STATES], "keep parameters and states on the host (offload_policy)"))
    most = sorted((each for each in freed if each[0]), reverse=True)[:_SHOWN]
    return [f"  {words}: {in_words(nbytes)}" for nbytes, words in most]


def _without_price(model: nn.Module) -> str | None:
    """A parameter that the plan can't trace: a flat or quantised one."""
    return next(
        (
            param.fqn
            for unit in units_in(model)
            for group in unit.groups
            for param in group.params
            if param.members or param.extended or group.gatherer.decoding.frozen
        ),
        None,
    )


def _step_s(one: Tried) -> float:
    return one.step_s


def _fitting(space: Space, changes: list[Candidate], base: Tried, room: int) -> list[Tried]:
    """Return those that hold less and fit, the fastest first."""
    tried = sorted(map(space.price, changes), key=_step_s)
    return [one for one in tried if one.nbytes <= room and one.nbytes < base.nbytes]


def _fastest(fitting: list[Tried], base: Tried) -> list[Tried]:
    """The first of each kind of change."""
    best: dict[tuple[str, ...], Tried] = {}
    for one in fitting:
        kind = tuple(k for k in Candidate._fields if getattr(one.candidate, k) != getattr(base.candidate, k))
        best.setdefault(kind, one)
    return list(best.values())


def _in_words(space: Space, plain: Candidate, one: Tried, base: Tried, more: int) -> str:
    new, old, again = one.candidate, plain._asdict(), ""
    if new.recomputed != plain.recomputed:
        work, _ = space.prepare(new)
        counts = (len(first_blocks(work, share)) for share in (new.recomputed, 1.0))
        again = "compute {} of {} blocks again in the backward (torch.utils.checkpoint)".format(*counts)
    kept = f"False for the last {new.kept:.0%} of the groups alone" if new.kept else "True"
    levers = {
        "recomputed": again,
        "split": f"1/{new.split} of the rows in a microbatch, {new.split} microbatches for each one now",
        "groups": f"{new.groups} groups in the place of {plain.groups}",
        "shards": f"shard each parameter over {new.shards} ranks in the place of {plain.shards}",
        "reshards": f"reshard_after_forward={new.reshards}",
        "kept": f"reshard_after_forward={kept}",
        "ahead": "gather less ahead (SchedulePolicy.depth, budget_nbytes)",
        "offload": f"keep {new.offload} on the host (offload_policy)",
        "base": "quantise the frozen weights (quantize_)",
    }
    words = [text for lever, text in levers.items() if getattr(new, lever) != old[lever]]
    longer = one.step_s / base.step_s - 1
    return f"{' and '.join(words)}: {in_words(one.nbytes + more)}, a step takes {longer:+.1%}"


def _space(case: Exhausted) -> tuple[Space, Candidate]:
    """What can be changed, and the candidate that the model is now."""
    runtime, names = unit_of(case.model).runtime, group_names(case.model)
    first = runtime.groups[0]
    parts = [name.split("+") for name in names.values() if name != "(root)"]
    inner = [group for group, name in names.items() if name != "(root)"]
    stays = [runtime.requested(group).reshard_after_forward is False for group in inner] or [False]
    world = first.axis.world
    choice = Choice(groups=parts, mp_policy=first.policy, shards=world, policy=runtime.policy)
    ranks = world * first.axis.num_copies
    here = math.gcd(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    spec = _device(first.axis.device, case.capacity_nbytes)
    cluster = Cluster(spec, ranks, here, spec.host_network or 4e11)
    twin = twin_of(case.model)
    space = space_of(of_model(twin, _sample(twin, case.inputs), choice, any_loss), cluster, choice)
    count = space.values["groups"][0]
    ahead = space.values["ahead"][runtime.policy.depth > 1]
    offload = offload_name(first.params[0].split.offload) or "none"
    kept = sum(stays) / len(stays)
    return space, Candidate(count, 0.0, world, True, kept, ahead, 1, offload, "plain")


def _device(where: torch.device, nbytes: int) -> DeviceSpec:
    """As the library knows it; of any other only the order of changes by seconds depends on its numbers."""
    if where.type == "cpu":
        return DeviceSpec("cpu", 1e11, nbytes, 2e10, 1e10, float32=1.0, tf32=1.0)
    try:
        return device(torch.get_device_module(where).get_device_name(where))
    except ConfigError:
        return DeviceSpec("accelerator", 3e14, nbytes, 2e12, 1e11, float32=1 / 16, tf32=1 / 2)


def _sample(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = tree_map(_on_meta, inputs)
    return args if not kwargs else inspect.signature(model.forward).bind(*args, **kwargs).arguments


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, TensorShape):
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return made.requires_grad_(leaf.requires_grad)
    if isinstance(leaf, type):
        raise InputError(f"the forward takes a {leaf.__name__}, of which no shape is known")
    return leaf


def twin_of(model: nn.Module) -> nn.Module:
    """The model as it was before it was sharded, on the meta device; without hooks. Nothing is changed, and
    no other rank is needed, so that it can be made in the middle of a step.

    Raises: InputError for flat or quantised parameters.
    """
    if (name := _without_price(model)) is not None:
        raise InputError(f"{name!r} is flat or quantised, which has no price here")
    memo: dict[int, Any] = {}
    for unit in units_in(model):
        for group in unit.groups:
            for param in group.params:
                whole = torch.empty(param.spec.shape, dtype=param.local.dtype, device="meta")
                made = nn.Parameter(whole, requires_grad=param.trainable)
                memo[id(param.sharded)] = made
                if param.bound is not None:
                    memo[id(param.bound.param)] = made
    for tensor in (*model.parameters(), *model.buffers()):
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        memo.setdefault(id(tensor), nn.Parameter(plain, tensor.requires_grad) if is_param else plain)
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = object.__new__(original_class(type(module)))
    for module in modules:
        left_out = {STATE_KEY, *methods_run_as_forward(module)}
        memo[id(module)].__dict__ = {
            key: OrderedDict() if "hooks" in key and isinstance(value, dict) else copy.deepcopy(value, memo)
            for key, value in module.__dict__.items()
            if key not in left_out and not isinstance(value, Unit)
        }
    return memo[id(model)]
