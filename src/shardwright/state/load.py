"""Plain full tensors on their way into a sharded model: each rank keeps its own rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.state.encoded import encode_entries
from shardwright.state.param import ShardedParam

WRAPPED = "_fsdp_wrapped_module"  # what torch, and so our wrapper, calls the module inside of it


def shard_plain_entries(
    module: nn.Module, state: dict[str, Any], prefix: str, params: Sequence[ShardedParam]
) -> None:
    """Replace plain tensors of a parameter's logical shape in ``state`` by this rank's shard of them.

    module: the one being loaded; ``prefix`` is its name in ``state``. Other entries (shards, other shapes)
    are left for ``load_state_dict`` to take or to complain of. No communication: every rank has the whole.
    """
    names = {id(child): f"{name}." if name else "" for name, child in module.named_modules()}
    for child in module.modules():
        encode_entries(child, state, prefix + names[id(child)])
    for param in params:
        for slot in param.slots:
            if id(slot.module) not in names:
                continue
            # A wrapper's own name isn't part of the names in a state dict.
            key = f"{prefix}{names[id(slot.module)].replace(WRAPPED + '.', '')}{slot.name}"
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == param.spec.shape:
                shard = param.shard_of(value.detach())
                # A copy: with assign=True it becomes the parameter, and the whole tensor must be let go.
                state[key] = param.dtensor(shard.to(param.local.device, copy=True).contiguous())
