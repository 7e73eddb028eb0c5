"""Lookups: modules whose forward reads rows of their weight, and whose backward reads nothing of it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from shardwright.engine.group import ParamGroup
from shardwright.params.flat_param import FlatParam
from shardwright.params.rows import Rows, rows_in
from shardwright.policy import SchedulePolicy
from shardwright.schedule.schedule import GroupSpec
from shardwright.torch_private import forward_hooks_of, forward_pre_hooks_of

logger = logging.getLogger(__name__)


def is_lookup(module: nn.Module, output: Any) -> bool:
    """Whether a module has done nothing but look up rows of its weight, and that is its output.

    Its class has the forward of ``nn.Embedding`` (one of its own may use the weight in ways that the output
    doesn't show), and no hook has changed the output since.
    """
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    return _looks_up(module) and node is not None and node.name() == "EmbeddingBackward0"


def _looks_up(module: nn.Module) -> bool:
    return type(module).forward is nn.Embedding.forward


def choose_row_wise(
    groups: Sequence[ParamGroup], facts: Callable[[int], GroupSpec], policy: SchedulePolicy
) -> None:
    """Have the groups of lookups move rows in use only, where the policy says so, and all others everything.

    Every rank decides alike, from what the groups are. Says once why a lookup's group can't.
    """
    for index, group in enumerate(groups):
        group.rows = None
        by_rows = (param for param in group.params if not isinstance(param, FlatParam))
        lookups = any(_looks_up(site.module) for param in by_rows for site in param.sites)
        if not policy.row_wise or not lookups or group.axis.world == 1:
            continue
        why = _why_not(group, facts(index).reshard_after_forward is False, policy)
        if not why:
            group.rows = Rows(group.params[0].layout)
        elif group not in _said:
            _said.add(group)
            logger.info("group %s moves whole weights, not rows in use: %s (said once)", group.name, why)


_said: WeakSet[ParamGroup] = WeakSet()


def _why_not(group: ParamGroup, stays: bool, policy: SchedulePolicy) -> str:
    """Why code other than the lookup could read the weight while it is unsharded, or why it isn't in rows."""
    param = group.params[0]
    module = param.sites[0].module
    if len(group.params) > 1:
        return "it has other parameters; call fully_shard on the embedding by itself"
    if len(param.sites) > 1:
        return "its weight is tied, and another module reads all of it"
    if stays:
        return "it stays unsharded after its forward (reshard_after_forward=False, or the outermost module)"
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return "its forward changes the weight (max_norm)"
    if param.layout.dim != 0 or param.inner is not None or param.split.on_host:
        return "its weight isn't sharded by rows on this device"
    if group.decoding.extended:
        return "its weight is a tensor subclass that says itself what is gathered"
    if group.near is not None or group.comm is not group.axis.comm:
        return "its collectives were replaced, or it is resharded to a smaller world"
    if param.layout.numel * param.local.element_size() <= policy.bucket_cap_nbytes:
        return f"it is small, and shares collectives instead (bucket_cap_mb={policy.bucket_cap_mb:g})"
    return ""


@contextmanager
def wanted_rows(rows: Rows, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """While the group of ``rows`` is unsharded for this call of ``module``, those that it looks up
    suffice."""
    inputs = (*args, *kwargs.values())
    # Hooks of others, or methods that run as its forward, might read the rest of the weight.
    alone = len(forward_pre_hooks_of(module)) == len(forward_hooks_of(module)) == 1
    if alone and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor) and _is_as_built(module):
        rows.wanted = rows_in(inputs[0], rows.num_rows)
    try:
        yield
    finally:
        rows.wanted = None


def _is_as_built(module: nn.Module) -> bool:
    """Whether no method of the instance was replaced."""
    return not any(callable(value) for value in module.__dict__.values())
