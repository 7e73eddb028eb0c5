"""Tensors of a wrapped model as state dicts have them: whole, sharded, or this rank's plain shards."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine.gather_full import stream_full
from shardwright.engine.unit import Unit, units_in
from shardwright.errors import InputError, StageError
from shardwright.params.at_rest import keep_per_rank
from shardwright.params.flat_param import cut_by_rows
from shardwright.params.load_plain import original_name
from shardwright.params.param import ShardedParam
from shardwright.schedule.schedule import Phase
from shardwright.torch_private import ShardedTensor, local_of, process_group_of
from shardwright.wrapper.options import StateDictSettings, StateDictType

Params = Mapping[int, ShardedParam]


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the model as it was, by identity; of tied ones the first."""
    return {id(param): original_name(name) for name, param in model.named_parameters()}


def params_in(model: nn.Module) -> list[ShardedParam]:
    """Every sharded parameter of a tree."""
    return [param for unit in units_in(model) for group in unit.groups for param in group.params]


def params_by_id(model: nn.Module) -> dict[int, ShardedParam]:
    """Every sharded parameter of a tree, by the identity of what modules show at rest."""
    return {id(param.sharded): param for param in params_in(model)}


def params_by_name(model: nn.Module) -> dict[str, ShardedParam | None]:
    """What each parameter is, by its name in the model as it was; None of one that isn't sharded."""
    params = params_by_id(model)
    return {original_name(path): params.get(id(each)) for path, each in model.named_parameters()}


def mesh_of(model: nn.Module) -> DeviceMesh:
    """That of the most ranks. Raises: InputError where nothing is sharded."""
    meshes = [param.spec.mesh for param in params_in(model)]
    if not meshes:
        raise InputError(f"the {type(model).__name__} has no sharded parameter; wrap it first")
    return max(meshes, key=lambda mesh: mesh.size())


def convert(value: Any, kind: StateDictType, on_host: bool) -> Any:
    """A tensor as a state dict of this kind has it, in memory of its own, which the next step doesn't change;
    anything else as it is. Every rank calls it for FULL."""
    if not isinstance(value, torch.Tensor):
        return value
    value = live = value.detach()
    if isinstance(value, DTensor) and kind is StateDictType.FULL_STATE_DICT:
        value = value.full_tensor()  # in a world of one it is the shard's own memory
    elif isinstance(value, DTensor) and kind is StateDictType.LOCAL_STATE_DICT:
        value = value.to_local()
    value = value.cpu() if on_host else value
    return keep_per_rank(value.clone() if _memory_of(value) == _memory_of(live) else value)


def _memory_of(value: torch.Tensor) -> int:
    return (local_of(value) if isinstance(value, DTensor) else value).data_ptr()


def entries(key: str, value: Any, params: Params, settings: StateDictSettings) -> dict[str, Any]:
    """What a state dict has in the place of one live entry: see ``split``. Every rank calls it for whole
    tensors."""
    config, kind = settings.state_dict_config, settings.state_dict_type
    if isinstance(value, DTensor) and getattr(config, "rank0_only", False):
        return dict(stream_full({key: value}, params))
    param = params.get(id(value))
    if param is None:
        return {key: convert(value, kind, config.offload_to_cpu)}
    return split(param, key, value, kind, config.offload_to_cpu)


def names_for(key: str, param: ShardedParam | None, settings: StateDictSettings) -> list[str]:
    """The keys of ``entries`` for a live entry."""
    if param is None or not param.members or settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        return [key]
    prefix = key.removesuffix(param.sites[0].name)
    return [prefix + name for member in param.members for name in member.names]


def split(
    param: ShardedParam, key: str, value: torch.Tensor, kind: StateDictType, on_host: bool
) -> dict[str, Any]:
    """A parameter, or a DTensor that lies like it, by the names of the model: converted; of a flat one each
    member, whole or cut by rows. Local state has them as they lie, in one. Every rank calls it."""
    is_cut = kind is StateDictType.SHARDED_STATE_DICT and param.members
    if not is_cut and kind is not StateDictType.FULL_STATE_DICT:
        return {key: convert(value, kind, on_host)}
    whole = convert(value, StateDictType.FULL_STATE_DICT, on_host)
    parts = param.entries(key, whole)
    if kind is StateDictType.FULL_STATE_DICT:
        return dict(parts)
    return {name: keep_per_rank(cut_by_rows(part, param.axis)) for name, part in parts}


def sharded_like(value: torch.Tensor, param: ShardedParam) -> DTensor:
    """The DTensor of a plain tensor: of the whole one, or of this rank's shard. Raises: InputError."""
    if value.shape == param.spec.shape:
        local = param.shard_of(value)
    elif value.shape == param.local.shape:
        local = value
    else:
        raise InputError(
            f"{param.fqn!r}: a tensor of shape {list(value.shape)} is neither the whole parameter "
            f"{list(param.spec.shape)} nor this rank's shard {list(param.local.shape)}"
        )
    return param.dtensor(local.to(param.local.device, copy=True).contiguous())


def is_sharded(value: Any) -> bool:
    """Whether each rank has a part of it: a DTensor, or the ShardedTensor that torch's older checkpoints
    load."""
    return isinstance(value, DTensor | ShardedTensor)


def whole_of(value: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    """A tensor that goes to a parameter, whole. Every rank that has a part of it calls it."""
    if isinstance(value, ShardedTensor):
        whole = torch.zeros(value.size(), dtype=value.dtype, device=param.local.device)
        for shard in value.local_shards():
            place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            whole[tuple(slice(first, first + size) for first, size in place)] = shard.tensor
        dist.all_reduce(whole, group=process_group_of(value))
        return whole
    return value.full_tensor() if isinstance(value, DTensor) else value


def as_it_lies(value: torch.Tensor, param: ShardedParam) -> DTensor:
    """A copy of a sharded tensor, sharded like a parameter. Every rank calls it with one that lies
    otherwise."""
    spec = param.spec
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (spec.mesh, spec.placements):
        return cast(DTensor, value.detach().clone())
    return sharded_like(whole_of(value, param), param)


# ---- whole parameters


class Summoned:
    """Whole parameters in the dtype at rest, which modules show outside of the model's forwards.

    A forward works on shards, as ever: it takes edits with it, and ``close`` undoes them unless they are to
    be kept.
    """

    def __init__(
        self, units: Sequence[Unit], first_only: bool, on_host: bool, writeback: bool, with_grads: bool
    ) -> None:
        self._writeback, self._with_grads = writeback, with_grads
        self.runtimes = {unit.runtime for unit in units}
        params = [param for unit in units for param in unit.params]
        is_shown = not first_only or all(param.is_first for param in params)
        self._parts: dict[ShardedParam, list[nn.Parameter]] = {}
        self._before: dict[ShardedParam, torch.Tensor] = {}  # shards, where a forward took edits
        self._rest()
        for param in params:
            param.adopt()
            shard, grad = param.sharded, param.sharded.grad if with_grads else None
            whole = _whole(shard, on_host)
            grad = None if grad is None else _whole(grad, on_host)
            if is_shown:
                self._parts[param] = param.parts(whole, grad)
                param.show_parts(self._parts[param])

    def _rest(self) -> None:
        for runtime in self.runtimes:
            runtime.rest()

    def __call__(self, phase: Phase | None) -> None:
        """A phase of the model begins; None: it has ended."""
        if phase is Phase.BACKWARD:
            raise StageError(
                "a backward began inside of summon_full_params, whose parameters get no gradients from it: "
                "leave the context first"
            )
        if phase is None:
            self._rest()  # or what saves would reshard, and so show shards
        for param, parts in self._parts.items():
            if phase is None:
                param.show_parts(parts)
            else:
                self._take(param, parts)
                param.show(param.sharded)

    @torch.no_grad()
    def _take(self, param: ShardedParam, parts: list[nn.Parameter]) -> None:
        """Copy edits into the shard."""
        shard = param.shard_of(param.join(parts)).to(param.local.device)
        if param.extended or not torch.equal(shard, param.local):
            if not self._writeback:
                self._before.setdefault(param, param.local.clone())
            param.local.copy_(shard)

    @torch.no_grad()
    def close(self) -> None:
        """Modules show shards again, with the edits that are kept."""
        for param, parts in self._parts.items():
            if self._writeback:
                self._take(param, parts)
                grads = [part.grad for part in parts if part.grad is not None]
                if self._with_grads and len(grads) == len(parts):
                    param.sharded.grad = sharded_like(param.join(grads), param)  # type: ignore[assignment]
            elif param in self._before:
                param.local.copy_(self._before[param])
            param.show(param.sharded)


def _whole(value: Any, on_host: bool) -> torch.Tensor:
    whole = value.detach().full_tensor()
    # A world of one gives the shard itself; edits are only written back where that was asked for.
    return whole.to("cpu", copy=True) if on_host else whole.clone()
