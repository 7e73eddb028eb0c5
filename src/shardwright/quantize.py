"""``quantize_``: encode weights of a model in place, before ``fully_shard`` or after it."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.motion.unit import unit_of, units_in
from shardwright.state.codec import Codec, Encoding, codec_of
from shardwright.state.encoded import encodings, set_encoded

Where = str | Sequence[str] | Callable[[str, nn.Parameter], bool]
Shown = dict[nn.Parameter, list[tuple[str, nn.Module, str]]]


def quantize_(
    model: nn.Module, codec: str = "nf4", where: Where | None = None, dequantise: str = "group"
) -> list[str]:
    """Replace weights of ``model`` by codes and scales, in place; returns the names of those weights.

    Call it before ``fully_shard``, on a model that may be on the meta device. A weight ``[..., rows, cols]``
    is then two frozen parameters, which state dicts and checkpoints show under these names::

        nf4    weight uint8 [..., rows, ceil(cols / 2)]   weight_absmax bfloat16 [..., rows, ceil(cols / 64)]
        int8   weight int8 [..., rows, cols]              weight_scale float32 [..., rows, 1]

    ``load_state_dict`` takes the plain weight too, and quantises it. No communication: every rank's rows are
    those of the whole, to the bit.

    Reading ``module.weight`` of a model that isn't sharded decodes it; what is written into that is lost.

    codec: "nf4" (4 bits) or "int8" (8 bits, a scale for each row).
    where: which parameters: a pattern of their names (``"*.mlp.*"``; or several), or ``f(name, parameter)``;
        None: weights of ``nn.Linear`` that no other kind of module shares, and 3-D ones (experts), but for
        adapters.
    dequantise: "group" decodes a group's weights when it is unsharded; "layer" decodes each where it is
        read, so that no more than one is whole, at the price of decoding it for each use.
    Raises: InputError for a pattern that matches nothing, a parameter that isn't a floating-point matrix, or
        a model that is sharded. Nothing is changed then.
    """
    chosen, per_use = codec_of(codec), _per_use(dequantise)
    if units_in(model):
        raise InputError(
            f"{unit_of(units_in(model)[0].modules[0]).name} is sharded already; call quantize_ before "
            "fully_shard (on the meta device it costs no memory)"
        )
    shown = _shown(model)
    picked = {param: places for param, places in shown.items() if _matches(where, param, places)}
    if not picked:
        raise InputError(
            f"where={where!r} matches no parameter that can be quantised; the model has, for example, "
            f"{[places[0][0] for places in shown.values()][:5]}"
        )
    for param, places in picked.items():
        if not param.is_floating_point() or param.ndim < 2:
            raise InputError(
                f"parameter {places[0][0]!r} is {param.dtype} of shape {list(param.shape)}; only "
                "floating-point weights of two dims or more are quantised"
            )
    for param, places in picked.items():
        _encode(param, places, chosen, per_use)
    return [places[0][0] for places in picked.values()]


def _per_use(dequantise: str) -> bool:
    if dequantise not in ("group", "layer"):
        raise InputError(f'dequantise must be "group" or "layer", got {dequantise!r}')
    return dequantise == "layer"


def _shown(model: nn.Module) -> Shown:
    """Each plain parameter and the places that show it."""
    shown: Shown = {}
    for path, module in model.named_modules():
        parts = {f"{name}_{e.codec.scales}" for name, e in encodings(module).items()} | {*encodings(module)}
        for name, param in module._parameters.items():
            if param is not None and name not in parts:
                shown.setdefault(param, []).append((f"{path}.{name}" if path else name, module, name))
    return shown


def _matches(where: Any, param: nn.Parameter, places: list[tuple[str, nn.Module, str]]) -> bool:
    if where is None:
        linear = param.ndim == 2 and all(isinstance(module, nn.Linear) for _, module, _ in places)
        experts = param.ndim == 3 and not any(
            isinstance(module, nn.modules.conv._ConvNd) for _, module, _ in places
        )
        adapter = any(".lora_" in name for name, _, _ in places)
        return param.is_floating_point() and (linear or experts) and not adapter
    if callable(where):
        return any(where(name, param) for name, _, _ in places)
    patterns = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, pattern) for name, _, _ in places for pattern in patterns)


def _encode(
    param: nn.Parameter, places: list[tuple[str, nn.Module, str]], codec: Codec, per_use: bool
) -> None:
    with torch.no_grad():
        codes, scales = (nn.Parameter(part, requires_grad=False) for part in codec.encode(param))
    encoding = Encoding(codec, tuple(param.shape), param.dtype, param.dtype, per_use)
    for _, module, name in places:
        set_encoded(module, name, encoding, (codes, scales))
