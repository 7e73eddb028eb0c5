"""``quantize_``: encode weights of a model in place, before ``fully_shard`` or after it."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.groups.decoding import encode_sharded
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.unit import Unit, remember_replaced, units_in
from shardwright.errors import InputError, StageError
from shardwright.module import FSDPModule, become_fsdp_modules, original_class
from shardwright.params.param import ShardedParam
from shardwright.quantized import encodings
from shardwright.quantized.codec import Encoding
from shardwright.quantized.codecs import NF4, codec_of
from shardwright.quantized.interchange import from_nf4_tensor, is_nf4_tensor
from shardwright.quantized.module import is_base, set_encoded
from shardwright.torch_private import parameters_of

Where = str | Sequence[str] | Callable[[str, nn.Parameter], bool]
Shown = dict[nn.Parameter, list[tuple[str, nn.Module, str]]]
Owners = dict[nn.Parameter, tuple[Unit, ParamGroup, ShardedParam]]


def quantize_(
    model: nn.Module, codec: str = "nf4", where: Where | None = None, dequantise: str = "group"
) -> list[str]:
    """Replace weights of a model by codes and scales of 4 or 8 bits, in place; they are frozen from then on.

    Call it before ``fully_shard``, or after it on every rank, between steps. The model may be on the meta
    device. A weight ``[..., rows, cols]`` is then two frozen parameters, with these names in state dicts and
    checkpoints::

        nf4          weight uint8 [..., rows, ceil(cols / 2)]  weight_absmax bfloat16 [..., rows, blocks]
        nf4-double   the same                                  weight_scales uint8 [..., rows, blocks + 2]
        int8         weight int8 [..., rows, cols]             weight_scale float32 [..., rows, 1]

    with ``blocks = ceil(cols / 64)``. ``load_state_dict`` accepts the plain weight too, and quantises it.
    Each rank quantises its own rows without communication; the result is bit for bit that of the whole
    weight. The exception is a weight that is sharded on its last dim, along which the blocks run: it is
    gathered first, one weight at a time. The memory of the plain weights is freed; an optimizer that holds
    one must be rebuilt. If a weight is torchao's ``NF4Tensor``, its codes are kept. Reading ``module.weight``
    of a model that isn't sharded decodes it; changes to the result are lost.

    Args:
        model: a model that is plain or sharded, with weights of any floating-point dtype.
        codec: "nf4" (4 bits), "nf4-double" (4 bits and smaller scales) or "int8" (8 bits, a scale for each
            row).
        where: which parameters: a pattern of their names (``"*.mlp.*"``), several patterns, or ``f(name,
            parameter)``. None: weights of ``nn.Linear`` that no other kind of module shares, and 3-D ones
            (experts), without adapters.
        dequantise: "group" decodes a group's weights when it is unsharded. "layer" decodes each weight when
            it is read, so that only one is decoded at a time; it is decoded again for each use.

    Returns:
        The names of the weights that were replaced.

    Raises:
        InputError: ``codec`` or ``dequantise`` isn't one of these, a pattern matches nothing, or a parameter
            isn't a floating-point matrix or is split by tensor parallelism. Nothing is changed then.
        StageError: it was called inside a step, or ``offload_states`` has put the parameters on the host.

    Examples:
        >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
        >>> shardwright.quantize_(model, "nf4", where="0.weight")
        ['0.weight']
        >>> model.state_dict()["0.weight"].shape  # two elements to a byte
        torch.Size([128, 64])
    """
    chosen, per_use = codec_of(codec), dequantise == "layer"
    if dequantise not in ("group", "layer"):
        raise InputError(f'dequantise must be "group" or "layer", got {dequantise!r}')
    owners = _owners(model)
    shown = _shown(model)
    picked = {param: places for param, places in shown.items() if _matches(where, param, places)}
    if not picked:
        raise InputError(
            f"where={where!r} matches no parameter that can be quantised; the model has, for example, "
            f"{[places[0][0] for places in shown.values()][:5]}"
        )
    unpacked: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
    for param, places in picked.items():
        _check(param, places[0][0], owners.get(param))
        if chosen is NF4 and is_nf4_tensor(param):
            unpacked[param] = from_nf4_tensor(param, places[0][0])
    changed: dict[ParamGroup, tuple[Unit, dict[ShardedParam, ShardedParam]]] = {}
    for param, places in picked.items():
        encoding = Encoding(chosen, tuple(param.shape), param.dtype, param.dtype, per_use)
        if param in owners:
            unit, group, sharded = owners[param]
            scales = _encode_sharded(sharded, unit, encoding)
            changed.setdefault(group, (unit, {}))[1][sharded] = scales
        else:
            _encode(param, places, encoding, unpacked.pop(param, None))
    for group, (unit, scales) in changed.items():
        params = [part for p in group.params for part in ((p, scales[p]) if p in scales else (p,))]
        unit.runtime.regroup(group, params)
    return [places[0][0] for places in picked.values()]


def quantisable(model: nn.Module, where: Where | None = None) -> list[str]:
    """Names of the parameters that ``quantize_`` would take. Local."""
    return [places[0][0] for param, places in _shown(model).items() if _matches(where, param, places)]


def _owners(model: nn.Module) -> Owners:
    """What is sharded: parameter at rest -> where it belongs. Everything is at rest afterwards."""
    owners: Owners = {}
    for unit in units_in(model):
        if unit.runtime.running() is not None:
            raise StageError("quantize_ was called inside a forward or backward; call it between steps")
        unit.runtime.rest()
        for group in unit.groups:
            for param in group.params:
                param.adopt()
                owners[param.sharded] = (unit, group, param)
    return owners


def _check(param: nn.Parameter, name: str, owner: tuple[Unit, ParamGroup, ShardedParam] | None) -> None:
    if not param.is_floating_point() or param.ndim < 2:
        raise InputError(
            f"parameter {name!r} is {param.dtype} of shape {list(param.shape)}; only floating-point weights "
            "of two dims or more are quantised"
        )
    if (owner is None and isinstance(param, DTensor)) or (owner is not None and owner[2].inner is not None):
        raise InputError(
            f"parameter {name!r} is split by tensor parallelism; leave it out of quantize_, or quantise it "
            "in a model that only fully_shard shards"
        )


def _shown(model: nn.Module) -> Shown:
    """Each plain parameter and the places that show it."""
    shown: Shown = {}
    for path, module in model.named_modules():
        parts = {f"{name}_{e.codec.scales}" for name, e in encodings(module).items()} | {*encodings(module)}
        for name, param in parameters_of(module).items():
            if param is not None and name not in parts:
                shown.setdefault(param, []).append((f"{path}.{name}" if path else name, module, name))
    return shown


def _matches(where: Any, param: nn.Parameter, places: list[tuple[str, nn.Module, str]]) -> bool:
    if where is None:
        return is_base(param, [name for name, _, _ in places], [module for _, module, _ in places])
    if callable(where):
        return any(where(name, param) for name, _, _ in places)
    patterns = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, pattern) for name, _, _ in places for pattern in patterns)


def _encode(
    param: nn.Parameter,
    places: Sequence[tuple[str, nn.Module, str]],
    encoding: Encoding,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    with torch.no_grad():
        parts = encoding.codec.encode(param) if parts is None else parts
        codes, scales = (nn.Parameter(part, requires_grad=False) for part in parts)
    for _, module, name in places:
        set_encoded(module, name, encoding, (codes, scales))


def _encode_sharded(param: ShardedParam, unit: Unit, encoding: Encoding) -> ShardedParam:
    remember_replaced(param.sharded, unit, param)
    with torch.no_grad():
        scales = encode_sharded(param, encoding)
    for site in param.sites:
        is_sharded = isinstance(site.module, FSDPModule)
        site.module.__class__ = original_class(type(site.module))
        set_encoded(site.module, site.name, encoding, (param.sharded, scales.sharded))
        if is_sharded:
            become_fsdp_modules([site.module])
    return scales
