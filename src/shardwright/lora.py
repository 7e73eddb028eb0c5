"""LoRA: a trainable low-rank product beside each frozen ``nn.Linear`` (Hu et al., arXiv:2106.09685).

    y = x W^T + b + scaling * dropout(x) A^T B^T        A [rank, in], B [out, rank] (zeros at first)

With ``dora`` (Liu et al., arXiv:2402.09353) the sum of weight and product has the lengths of its rows from a
trainable vector, at first those of the weight::

    y = x W'^T + b          W' = magnitude * (W + scaling * B A) / |W + scaling * B A|

The layer keeps its name and its weight's; ``lora_A`` and ``lora_B`` are modules inside of it, so a base loads
as before and a base that ``quantize_`` has encoded works the same. Files are peft's.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from shardwright.checkpoint.agree import ranks
from shardwright.checkpoint.live import Whole
from shardwright.engine.building.grouping import hints_of
from shardwright.engine.unit import units_in
from shardwright.errors import CheckpointError, InputError
from shardwright.extras import from_extra
from shardwright.files import json_file, opened, reading
from shardwright.module import FSDPModule
from shardwright.policy import Lora
from shardwright.quantized import encodings
from shardwright.quantized.module import encoded_class, own_class
from shardwright.torch_private import look_up_again, parameters_of

with from_extra("checkpoint"):
    from safetensors.torch import load_file, save_file

__all__ = ["Lora", "LoraLinear", "adapters_in", "add_lora", "load_adapter", "merge_lora", "save_adapter"]

_PREFIX = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector"
ADAPTER_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter in peft's form."""


class LoraLinear(nn.Linear):
    """A frozen ``nn.Linear`` with an adapter: ``lora_A`` [rank, in] and ``lora_B`` [out, rank]. Made by
    ``add_lora``.
    """

    lora: Lora
    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_magnitude_vector: nn.Parameter  # [out], with ``dora``
    is_off = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output and the adapter's; the adapter computes in its own dtype.

        Args:
            input: [..., in], of a dtype that the layer takes.

        Returns:
            [..., out], in the dtype of the layer's output.
        """
        output = super().forward(input)
        if self.is_off:
            return output
        dropped = F.dropout(input, self.lora.dropout, self.training)
        product = self.lora_B(self.lora_A(dropped.to(self.lora_A.weight.dtype))) * self.lora.scaling
        if not self.lora.dora:
            return output + product.to(output.dtype)
        # The lengths are constants to the gradient: the paper's 4.3, as peft has it.
        factor = self.lora_magnitude_vector / _lengths(self).to(product.dtype)
        plain = F.linear(dropped, self.weight)
        return output + ((factor - 1) * plain + factor * product).to(output.dtype)


def add_lora(model: nn.Module, lora: Lora, dtype: torch.dtype | None = None) -> list[str]:
    """Freeze a model and give each ``nn.Linear`` that ``lora`` names an adapter, in place.

    Call it before ``fully_shard``, and before or after ``quantize_``. A is drawn as ``nn.Linear`` is, B is
    zeros: at first nothing changes.

    Args:
        model: a model that isn't sharded, on the meta device or any.
        lora: which layers, and what adapters are like.
        dtype: of the adapters; None: of a layer's weight, before it was quantised.

    Returns:
        The names of the layers with an adapter.

    Raises:
        InputError: a target matches nothing, or the model is sharded. Nothing is changed then.

    Examples:
        >>> from shardwright.lora import Lora, add_lora
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> add_lora(model, Lora(targets=("0",), rank=2))
        ['0']
        >>> [name for name, param in model.named_parameters() if param.requires_grad]
        ['0.lora_A.weight', '0.lora_B.weight']
    """
    if units_in(model):
        raise InputError("the model is sharded already; call add_lora before fully_shard")
    chosen = _chosen(model, lora)
    model.requires_grad_(False)
    for layer in chosen.values():
        _adapt(layer, lora, dtype)
    return list(chosen)


def merge_lora(model: nn.Module, requantise: bool = False) -> None:
    """Add every adapter into its layer's weight, in place; the layers are plain ``nn.Linear`` again.

    It is computed in float32 and rounded once to the weight's dtype. The adapters' memory is freed. One
    process.

    Args:
        model: a model with adapters that isn't sharded.
        requantise: do it to quantised weights too, which rounds them to their levels anew.

    Raises:
        InputError: the model is sharded or has no adapters, or weights are quantised and ``requantise`` is
            False. Nothing is changed then.
    """
    if units_in(model):
        raise InputError(
            "merge_lora needs whole weights: save the adapters, and merge them into a plain model"
        )
    layers = adapters_in(model)
    if not layers:
        raise InputError(f"{type(model).__name__} has no adapters; nothing to merge")
    quantised = [name for name, layer in layers.items() if "weight" in encodings(layer)]
    if quantised and not requantise:
        raise InputError(
            f"{quantised[0]!r} is quantised, merging rounds it anew: "
            "pass requantise=True, or merge into a plain base"
        )
    for layer in layers.values():
        _merge(layer)


def adapters_in(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter. Local.

    Args:
        model: sharded or not.

    Returns:
        Name -> layer.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_names(model: nn.Module) -> set[str]:
    """Names of the adapters' own parameters, as state dicts have them."""
    return set(_parts(adapters_in(model)))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes as its base alone for the length of the block. Every rank enters, between steps."""
    layers = adapters_in(model).values()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def trained_part(model: nn.Module) -> nn.Module:
    """What a checkpoint of training holds, for ``save`` and ``load``: the model, or of one with adapters
    (peft's too) what is trained: the base is in files of its own. Every rank calls it, between steps."""
    if not adapters_in(model) and not hasattr(model, "peft_config"):
        return model
    for unit in units_in(model):
        unit.runtime.rest()
    return Whole({name: param for name, param in model.named_parameters() if param.requires_grad})


def reset_adapters(model: nn.Module) -> None:
    """Give adapters that are on the meta device memory and their first values; sharded or not.

    A is drawn as ``nn.Linear`` draws, from the layer's name alone, so that it is the same at every number of
    ranks; B is zeros. With ``dora`` the lengths are the weights', which are there. Every rank calls it,
    between steps.
    """
    unknown = [
        name
        for name, layer in adapters_in(model).items()
        if layer.lora.dora and layer.lora_magnitude_vector.is_meta
    ]
    for name, layer in adapters_in(model).items():
        for part in (layer.lora_A, layer.lora_B):
            old = part.weight
            if not old.is_meta:
                continue
            full = torch.zeros(old.shape, dtype=old.dtype)
            if part is layer.lora_A:
                digest = hashlib.sha256(name.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            _replace(part, "weight", full)
        if name in unknown:
            _replace(
                layer, _MAGNITUDE, torch.ones(layer.out_features, dtype=layer.lora_magnitude_vector.dtype)
            )
    look_up_again(model)
    if unknown:
        _set_magnitudes(model, unknown)


def _replace(module: nn.Module, name: str, full: torch.Tensor) -> None:
    """The parameter of that name by ``full``, sharded as it is."""
    old = parameters_of(module)[name]
    assert old is not None
    if isinstance(old, DTensor):
        full = distribute_tensor(full, old.device_mesh, old.placements, src_data_rank=None)
    parameters_of(module)[name] = nn.Parameter(full, requires_grad=old.requires_grad)


@torch.no_grad()
def _set_magnitudes(model: nn.Module, names: Sequence[str]) -> None:
    """The lengths of the rows of weight and product; one sharded module after another is gathered for
    them."""
    modules: dict[str, Any] = dict(model.named_modules())
    owners: dict[str, list[str]] = {}
    for name in names:
        above = [name.rsplit(".", i)[0] for i in range(name.count(".") + 1)] + [""]
        owners.setdefault(next((n for n in above if isinstance(modules[n], FSDPModule)), ""), []).append(name)
    for owner, members in owners.items():
        module = modules[owner]
        if isinstance(module, FSDPModule):
            module.unshard()
        lengths = {name: _lengths(modules[name]) for name in members}
        if isinstance(module, FSDPModule):
            module.reshard()
        for name, full in lengths.items():
            vector = parameters_of(modules[name])[_MAGNITUDE]
            assert vector is not None
            if isinstance(vector, DTensor):
                full = distribute_tensor(full, vector.device_mesh, vector.placements, src_data_rank=None)
                vector.to_local().copy_(full.to_local())
            else:
                vector.copy_(full)


def save_adapter(folder: str | Path, model: nn.Module, base: str | None = None) -> None:
    """Write the adapters in peft's form: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Every rank calls it, between steps; rank 0 writes, and the files are there when it returns on any rank.

    Args:
        folder: where to; it is made where it is missing.
        model: a model with adapters, sharded or not.
        base: name or path of the base model, for the reader.

    Raises:
        InputError: the model has no adapters.
        CheckpointError: writing failed; raised on all ranks.
    """
    layers = adapters_in(model)
    if not layers:
        raise InputError(f"{type(model).__name__} has no adapters to save; call add_lora first")
    units = units_in(model)
    for unit in units:
        unit.runtime.rest()
    tensors = {_PREFIX + name: _whole(param) for name, param in _parts(layers).items()}
    config = _config_of(model, next(iter(layers.values())).lora, list(layers), base)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if units:
        ranks().arrive("save_adapter")
        ranks().together("save_adapter", lambda: _write(folder, config, tensors) if writes else None)
    elif writes:
        _write(folder, config, tensors)


def _config_of(model: nn.Module, lora: Lora, targets: list[str], base: str | None) -> dict[str, Any]:
    """adapter_config.json. A model that generates has a task, by which peft finds the class to load it."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
    }


def _write(folder: str | Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder, _WEIGHTS), metadata={"format": "pt"})
    Path(folder, ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_lora(folder: str | Path) -> Lora:
    """What the adapters in a folder are like, for ``add_lora``.

    Raises: CheckpointError where they can't be read, or are of a kind that isn't supported.
    """
    path = Path(folder, ADAPTER_CONFIG)
    with reading(path, "a readable adapter"):
        config = json_file(path, "a readable adapter")
        targets: Sequence[str] = config["target_modules"]
        rank, alpha = config["r"], config["lora_alpha"]
    other = [k for k in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or other:
        raise CheckpointError(f"{path}: only plain LoRA can be read, this has {other or config}")
    if isinstance(targets, str):
        raise CheckpointError(f"{path}: target_modules is a regular expression ({targets!r}); list the names")
    dropout, rslora = config.get("lora_dropout", 0.0), config.get("use_rslora", False)
    with reading(path, "a readable adapter"):
        return Lora(tuple(targets), rank, alpha, dropout, rslora, bool(config.get("use_dora", False)))


def base_of_adapter(folder: str | Path) -> str:
    """Name or path of the base that an adapter in peft's form is for, "" where it doesn't say.

    Raises: CheckpointError where it can't be read."""
    path = Path(folder, ADAPTER_CONFIG)
    return json_file(path, "a readable adapter").get("base_model_name_or_path") or ""


def load_adapter(folder: str | Path, model: nn.Module) -> None:
    """Fill the adapters of a model from files in peft's form, on any number of ranks.

    Every rank calls it and reads the file; no communication.

    Args:
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``.
        model: a model with adapters, sharded or not.

    Raises:
        CheckpointError: the files can't be read, or names, shapes or the scaling differ. Nothing is changed
            then.
        InputError: the file describes adapters with values out of range.
    """
    path, layers, saved = Path(folder, _WEIGHTS), adapters_in(model), read_lora(folder)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in _tensors_of(path).items()}
    expected = {name: tuple(param.shape) for name, param in _parts(layers).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
    if differing:
        lines = [f"{n}: {found.get(n, 'absent')}, expected {expected.get(n, 'none')}" for n in differing[:10]]
        raise CheckpointError(f"{path}: {len(differing)} tensors don't fit\n    " + "\n    ".join(lines))
    scalings = {layer.lora.scaling for layer in layers.values()}
    if scalings != {saved.scaling}:
        raise CheckpointError(
            f"{path}: scaled by {saved.scaling}, the model's adapters by {sorted(scalings)}"
        )
    model.load_state_dict(tensors, strict=False)


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with opened(path, f"readable; an adapter is {ADAPTER_CONFIG} and {_WEIGHTS}"):  # not a FIFO, to wait for
        return load_file(path)


def _parts(layers: dict[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """What is trained, under peft's names."""
    found = {}
    for name, layer in layers.items():
        found |= {f"{name}.{part}.weight": getattr(layer, part).weight for part in ("lora_A", "lora_B")}
        if layer.lora.dora:
            found[f"{name}.{_MAGNITUDE}"] = layer.lora_magnitude_vector
    return found


def merged_weight(weight: torch.Tensor, lora: Lora, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``weight`` [out, in] with its adapter added, float32. parts: the adapter's tensors, by the ends of
    their names in files (``lora_A.weight`` and so on). Method: as peft's ``merge``, before it rounds."""
    merged = _sum(weight, parts["lora_A.weight"], parts["lora_B.weight"], lora.scaling)
    if lora.dora:
        merged *= (parts["lora_magnitude_vector"].float() / merged.norm(dim=1)).unsqueeze(1)
    return merged


def adapter_parts(folder: str | Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of an adapter in peft's form, by the layer's name and the ends of their own (as
    ``merged_weight`` takes them). Raises: CheckpointError where they can't be read."""
    path = Path(folder, _WEIGHTS)
    tensors = _tensors_of(path)
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.(lora_[AB]\.weight|lora_magnitude_vector)", name)
        if found is None:
            raise CheckpointError(f"{path}: {name!r} is no part of a LoRA adapter on linear layers")
        layers.setdefault(found[1], {})[found[2]] = tensor
    for name, parts in layers.items():
        if not {"lora_A.weight", "lora_B.weight"} <= parts.keys():
            raise CheckpointError(f"{path}: the adapter of {name!r} has only {', '.join(parts)}")
    return layers


def _sum(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Weight and product, float32 [out, in]."""
    return weight.float() + b.float() @ a.float() * scaling


def _lengths(layer: LoraLinear) -> torch.Tensor:
    """Return the lengths of that sum's rows, float32 [out]; constants to the gradient."""
    with torch.no_grad():
        a, b = layer.lora_A.weight, layer.lora_B.weight
        return _sum(layer.weight, a, b, layer.lora.scaling).norm(dim=1)


def _chosen(model: nn.Module, lora: Lora) -> dict[str, nn.Module]:
    """The layers that get an adapter. Raises: InputError where a target matches none of them."""
    layers = {name: m for name, m in model.named_modules() if own_class(type(m)) is nn.Linear}
    head, found = hints_of(model).head, set[str]()
    for target in lora.targets:
        if target == "auto":
            names = {name for name, layer in layers.items() if name != head and not _is_router(name, layer)}
        else:
            names = {n for n in layers if f".{n}".endswith(f".{target}") or fnmatchcase(n, target)}
        if not names:
            raise InputError(
                f"target {target!r} matches no nn.Linear of this {type(model).__name__}; it has, for example "
                f"{sorted({name.rpartition('.')[2] for name in layers})[:10]}"
            )
        found |= names
    return {name: layer for name, layer in layers.items() if name in found}


def _is_router(name: str, layer: Any) -> bool:
    """Whether a layer scores experts: it has a router's name, and fewer outputs than inputs (a SwiGLU's gate
    has more)."""
    last = name.rpartition(".")[2]
    return (last in ("gate", "router") or last.endswith("_gate")) and layer.out_features < layer.in_features


def _become(layer: nn.Module, cls: type) -> None:
    names = tuple(encodings(layer))
    layer.__class__ = encoded_class(cls, names) if names else cls


def _stored(layer: nn.Module) -> torch.Tensor:
    """The weight, or its codes."""
    weight = parameters_of(layer)["weight"]
    assert weight is not None
    return weight


def _adapt(layer: Any, lora: Lora, dtype: torch.dtype | None) -> None:
    encoding, stored = encodings(layer).get("weight"), _stored(layer)
    dtype = dtype or (stored.dtype if encoding is None else encoding.dtype)
    options: dict[str, Any] = {"bias": False, "device": stored.device, "dtype": dtype}
    layer.lora = lora
    layer.lora_A = nn.Linear(layer.in_features, lora.rank, **options)
    layer.lora_B = nn.Linear(lora.rank, layer.out_features, **options)
    nn.init.zeros_(layer.lora_B.weight)
    _become(layer, LoraLinear)
    if lora.dora:
        layer.lora_magnitude_vector = nn.Parameter(_lengths(layer).to(dtype))


def _merge(layer: LoraLinear) -> None:
    with torch.no_grad():
        parts = {name.removeprefix("."): param for name, param in _parts({"": layer}).items()}
        merged = merged_weight(layer.weight, layer.lora, parts)
        encoding, stored = encodings(layer).get("weight"), _stored(layer)
        if encoding is None:
            stored.copy_(merged)
        else:
            codes, scales = encoding.codec.encode(merged)
            stored.copy_(codes)
            layer.get_parameter(f"weight_{encoding.codec.scales}").copy_(scales)
    if layer.lora.dora:
        del layer.lora_magnitude_vector
    del layer.lora_A, layer.lora_B, layer.lora
    _become(layer, nn.Linear)


def _whole(param: torch.Tensor) -> torch.Tensor:
    whole = param.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu().contiguous()
