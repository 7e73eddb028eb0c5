"""Plain full tensors on their way into a sharded model: each rank keeps its own rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.params.flat_param import original_name
from shardwright.params.param import ShardedParam
from shardwright.params.quantized.module import encode_entries


def shard_plain_entries(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    params: Sequence[ShardedParam],
    missing: list[str],
    errors: list[str],
) -> None:
    """Replace plain tensors of a parameter's logical shape in ``state`` by this rank's shard of them.

    module: the one being loaded; ``prefix`` is its name in ``state``. params: those that it shows, also
    where another group holds them (tied weights); flat ones are its own. Other entries (shards, other shapes)
    are left for ``load_state_dict`` to take or to complain of. No communication: every rank has the whole.
    Only shards of the members of a flat parameter are gathered, one at a time.
    missing, errors: what ``load_state_dict`` will say.
    """
    names = {id(child): f"{name}." if name else "" for name, child in module.named_modules()}
    for child in module.modules():
        encode_entries(child, state, prefix + names[id(child)])
    # A wrapper's own name isn't part of the names in a state dict, until that wrapper's hook puts it there.
    known = {original_name(key): key for key in state if key.startswith(prefix)}
    for param in params:
        if param.members and f"{prefix}{param.sites[0].name}" not in state:
            _flatten_entries(param, state, (prefix, known), missing, errors)
            continue
        for site in param.sites:
            if id(site.module) not in names:
                continue
            key = known.get(original_name(f"{prefix}{names[id(site.module)]}{site.name}"), "")
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == param.spec.shape:
                shard = param.shard_of(value.detach())
                # A copy: with assign=True it becomes the parameter, and the whole tensor must be let go.
                state[key] = param.dtensor(shard.to(param.home, copy=True).contiguous())


def _flatten_entries(
    param: ShardedParam,
    state: dict[str, Any],
    place: tuple[str, dict[str, str]],
    missing: list[str],
    errors: list[str],
) -> None:
    """Take the members of a flat parameter out of ``state``; put this rank's part of it in their place.

    place: the prefix of its module, and the keys of ``state`` by their original names.
    """
    prefix, known = place
    shard = param.local.detach()
    local = torch.zeros_like(shard, device=param.axis.device) if shard.is_meta else shard.clone()
    span = param.layout.span(param.axis.rank)
    for member in param.members:
        keys = [known.get(original_name(prefix + name), "") for name in member.names]
        values = [state.pop(key) for key in keys if key in state]
        shown = original_name(f"{prefix}{member.names[0]}")
        if not values:
            missing.append(shown)
        elif tuple(values[0].shape) != member.shape:
            errors.append(
                f"size mismatch for {shown}: the state dict has shape {list(values[0].shape)}, the model "
                f"{list(member.shape)}"
            )
        else:
            value = values[0].full_tensor() if isinstance(values[0], DTensor) else values[0]
            member.fill(local, span, value)
    state[f"{prefix}{param.sites[0].name}"] = param.dtensor(local)
