"""LoRA: a trainable low-rank product beside each frozen ``nn.Linear`` (Hu et al., arXiv:2106.09685).

    y = x W^T + b + scaling * dropout(x) A^T B^T        A [rank, in], B [out, rank] (zeros at first)

With ``dora`` (Liu et al., arXiv:2402.09353) the sum of weight and product has the lengths of its rows from a
trainable vector, at first those of the weight::

    y = x W'^T + b          W' = magnitude * (W + scaling * B A) / |W + scaling * B A|

A 3-D parameter, in which experts are stacked, reads as the sum, as peft's ``target_parameters`` have it::

    W_e + scaling * B_e A_e         A [experts * rank, in], B [out, rank * experts]

The layer keeps its name and its weight's; ``lora_A`` and ``lora_B`` are modules inside of it, so a base loads
as before and a base that ``quantize_`` has encoded works the same. Files are peft's.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional as F

from shardwright.checkpoint.agree import ranks
from shardwright.checkpoint.live import Whole
from shardwright.engine.building.grouping import hints_of
from shardwright.engine.unit import units_in
from shardwright.errors import CheckpointError, InputError, StageError
from shardwright.extras import from_extra
from shardwright.files import json_file, opened, reading
from shardwright.module import FSDPModule
from shardwright.params.placement import part_of
from shardwright.params.ragged import placed_as
from shardwright.policy import Lora
from shardwright.quantized import encodings
from shardwright.quantized.codec import scales_name
from shardwright.quantized.module import added_to, become, own_class, set_added
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


@dataclass(eq=False)
class LoraStacked:
    """The adapter of a 3-D parameter, ``name`` of ``module``. Made by ``add_lora``.

    holder: has ``lora_A`` and ``lora_B``: the module itself, or for all but its last parameter a
        ``base_layer`` in it (and so on), since peft nests them.
    """

    module: nn.Module
    name: str
    holder: Any
    lora: Lora
    is_off: bool = False

    @property
    def lora_A(self) -> nn.Linear:
        """Its weight: [experts * rank, in]."""
        return self.holder.lora_A

    @property
    def lora_B(self) -> nn.Linear:
        """Its weight: [out, rank * experts]."""
        return self.holder.lora_B

    @property
    def transposed(self) -> bool:
        """See ``is_transposed``."""
        return is_transposed(self.module, self.name)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Two factors [experts, ., rank] and [experts, rank, .], and what their product is multiplied by;
        None: nothing is added now. Raises: StageError where experts are gathered without their adapter."""
        if self.is_off:
            return None
        a, b = self.lora_A.weight, self.lora_B.weight
        if isinstance(a, DTensor) or isinstance(b, DTensor):
            raise StageError(
                f"the adapter of {self.name!r} isn't gathered with it: call fully_shard on the module that "
                "has the parameter or one around it, and not on lora_A, lora_B or base_layer"
            )
        return (*_factors(a, b, len(a) // self.lora.rank, self.transposed), self.lora.scaling)


Adapters = Mapping[str, LoraLinear | LoraStacked]


def add_lora(model: nn.Module, lora: Lora, dtype: torch.dtype | None = None) -> list[str]:
    """Freeze a model and give what ``lora`` names an adapter, in place: each ``nn.Linear`` and 3-D parameter.

    Call it before ``fully_shard``, before or after ``quantize_``, and after ``tensor_parallel``. A is drawn
    as ``nn.Linear`` is, B is zeros: at first nothing changes.

    Args:
        model: a model that isn't sharded, on the meta device or any.
        lora: which layers, and what adapters are like.
        dtype: of the adapters; None: of a layer's weight, before it was quantised.

    Returns:
        The names of the layers with an adapter, and of the 3-D parameters.

    Raises:
        InputError: a target matches nothing, or the model is sharded; 3-D parameters that ranks share, with
            dropout or DoRA, or of a module around another layer with an adapter (peft has neither). Nothing
            is changed then.

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
    layers, stacked = _chosen(model, lora)
    model.requires_grad_(False)
    for layer in layers.values():
        _adapt(layer, lora, dtype)
    for path, names in stacked.items():
        _adapt_stacked(model.get_submodule(path), names, lora, dtype)
    return [*layers, *(_joined(path, name) for path, names in stacked.items() for name in names)]


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
    quantised = [name for name, layer in layers.items() if _encoding(layer) is not None]
    if quantised and not requantise:
        raise InputError(
            f"{quantised[0]!r} is quantised, merging rounds it anew: "
            "pass requantise=True, or merge into a plain base"
        )
    for layer in layers.values():
        _merge(layer)


def adapters_in(model: nn.Module) -> dict[str, LoraLinear | LoraStacked]:
    """The layers with an adapter, and the adapters of 3-D parameters by the parameters' names. Local.

    Args:
        model: sharded or not.

    Returns:
        Name -> layer.
    """
    found: dict[str, LoraLinear | LoraStacked] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            found[path] = module
        found |= {_joined(path, name): adapter for name, adapter in added_to(module).items()}
    return found


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
        if isinstance(layer, LoraLinear) and layer.lora.dora and layer.lora_magnitude_vector.is_meta
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
        if isinstance(layer, LoraLinear) and name in unknown:
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
    if isinstance(old, DTensor):  # perhaps on the meta device still
        own = part_of(old, full).to(old.device_mesh.device_type)
        full = placed_as(old.detach(), own.clone(memory_format=torch.contiguous_format))
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
                if isinstance(full, DTensor):  # of a layer that ranks share
                    full = full.full_tensor()
                vector.to_local().copy_(part_of(vector, full))
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
    config = _config_of(model, layers, base)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if units:
        ranks().arrive("save_adapter")
        ranks().together("save_adapter", lambda: _write(folder, config, tensors) if writes else None)
    elif writes:
        _write(folder, config, tensors)


def _config_of(model: nn.Module, layers: Adapters, base: str | None) -> dict[str, Any]:
    """adapter_config.json. A model that generates has a task, by which peft finds the class to load it."""
    lora = next(iter(layers.values())).lora
    stacked = sorted(name for name, layer in layers.items() if isinstance(layer, LoraStacked))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": sorted(layers.keys() - stacked),
        "target_parameters": stacked or None,
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
        targets: Sequence[str] = config["target_modules"] or ()
        stacked: Sequence[str] = config.get("target_parameters") or ()
        rank, alpha = config["r"], config["lora_alpha"]
    other = [k for k in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or other:
        raise CheckpointError(f"{path}: only plain LoRA can be read, this has {other or config}")
    if isinstance(targets, str):
        raise CheckpointError(f"{path}: target_modules is a regular expression ({targets!r}); list the names")
    dropout, rslora = config.get("lora_dropout", 0.0), config.get("use_rslora", False)
    with reading(path, "a readable adapter"):
        return Lora((*targets, *stacked), rank, alpha, dropout, rslora, bool(config.get("use_dora", False)))


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


def parts_of(layer: LoraLinear | LoraStacked) -> dict[str, nn.Parameter]:
    """What is trained of an adapter, by the ends of its names in files. Local."""
    found = {f"{part}.weight": getattr(layer, part).weight for part in ("lora_A", "lora_B")}
    return found | ({_MAGNITUDE: getattr(layer, _MAGNITUDE)} if layer.lora.dora else {})


def _parts(layers: Adapters) -> dict[str, nn.Parameter]:
    """What is trained, under peft's names."""
    nested = _nested(name for name, layer in layers.items() if isinstance(layer, LoraStacked))
    return {
        _joined(nested.get(name, name), end): param
        for name, layer in layers.items()
        for end, param in parts_of(layer).items()
    }


def _nested(stacked: Iterable[str]) -> dict[str, str]:
    """Where peft nests the adapters of 3-D parameters: name -> a module's name. In each module the first
    parameter's is the innermost."""
    found: dict[str, str] = {}
    inner: dict[str, str] = {}
    for name in reversed([*stacked]):
        path = name.rpartition(".")[0]
        found[name] = inner[path] = _joined(inner[path], "base_layer") if path in inner else path
    return found


def merged_weight(
    weight: torch.Tensor, lora: Lora, parts: Mapping[str, torch.Tensor], transposed: bool = False
) -> torch.Tensor:
    """``weight`` [out, in] or [experts, out, in] with its adapter added, float32. parts: the adapter's
    tensors, by the ends of their names in files (``lora_A.weight`` and so on). transposed: experts lie as
    [in, out]. Method: as peft's ``merge``, before it rounds."""
    merged = _sum(weight, parts["lora_A.weight"], parts["lora_B.weight"], lora.scaling, transposed)
    if lora.dora:
        merged *= (parts["lora_magnitude_vector"].float() / merged.norm(dim=1)).unsqueeze(1)
    return merged


def adapter_parts(folder: str | Path, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of an adapter in peft's form for ``model``, by the weight's name and the ends of their own
    (as ``merged_weight`` takes them). Raises: CheckpointError where they can't be read."""
    path, lora = Path(folder, _WEIGHTS), read_lora(folder)
    tensors = _tensors_of(path)
    stacked = [n for n in stacked_in(model) if any(_matches(target, n) for target in lora.targets)]
    weights = {nested: name for name, nested in _nested(stacked).items()}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.(lora_[AB]\.weight|lora_magnitude_vector)", name)
        if found is None:
            raise CheckpointError(f"{path}: {name!r} is no part of a LoRA adapter on linear layers")
        layers.setdefault(weights.get(found[1], f"{found[1]}.weight"), {})[found[2]] = tensor
    for name, parts in layers.items():
        if not {"lora_A.weight", "lora_B.weight"} <= parts.keys():
            raise CheckpointError(f"{path}: the adapter of {name!r} has only {', '.join(parts)}")
    return layers


def _sum(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, transposed: bool = False
) -> torch.Tensor:
    """Weight and product, float32, of the weight's shape."""
    left, right = (b, a) if weight.ndim == 2 else _factors(a, b, len(weight), transposed)
    return weight.float() + left.float() @ right.float() * scaling


def _factors(
    a: torch.Tensor, b: torch.Tensor, experts: int, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What multiplies to the products of stacked experts: [experts, ., rank] and [experts, rank, .]. In A an
    expert's rows lie together, in B the columns of a rank: peft's order."""
    a = a.unflatten(0, (experts, -1))
    b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return (a.mT, b.mT) if transposed else (b, a)


def _lengths(layer: LoraLinear) -> torch.Tensor:
    """Return the lengths of that sum's rows, float32 [out]; constants to the gradient."""
    with torch.no_grad():
        a, b = layer.lora_A.weight, layer.lora_B.weight
        lengths = _sum(layer.weight, a, b, layer.lora.scaling).norm(dim=1)
        if isinstance(lengths, DTensor):  # of columns that ranks share each has a part
            whole = [Replicate() if each.is_partial() else each for each in lengths.placements]
            return lengths.redistribute(placements=whole)
        return lengths


def _chosen(model: nn.Module, lora: Lora) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The layers that get an adapter, and the 3-D parameters by the paths of their modules. Raises:
    InputError where a target matches nothing, or peft has no such adapter."""
    layers = {name: m for name, m in model.named_modules() if own_class(type(m)) is nn.Linear}
    stacked, head, found = stacked_in(model), hints_of(model).head, set[str]()
    for target in lora.targets:
        if target == "auto":
            names = {name for name, layer in layers.items() if name != head and not _is_router(name, layer)}
        else:
            names = {name for name in (*layers, *stacked) if _matches(target, name)}
        if not names:
            raise InputError(
                f"target {target!r} matches no nn.Linear or 3-D parameter of this {type(model).__name__}; it "
                f"has, for example {sorted({name.rpartition('.')[2] for name in (*layers, *stacked)})[:10]}"
            )
        found |= names
    layers = {name: layer for name, layer in layers.items() if name in found}
    chosen: dict[str, list[str]] = {}
    for name in (name for name in stacked if name in found):
        path, _, own = name.rpartition(".")
        chosen.setdefault(path, []).append(own)
        if isinstance(parameters_of(model.get_submodule(path))[own], DTensor):
            raise InputError(
                f"{name!r} is shared by ranks (expert_parallel), and its adapter would be whole: leave it "
                "out of Lora.targets, or take ep=1"
            )
        if lora.dropout or lora.dora:
            raise InputError(
                f"{name!r} is a 3-D parameter, whose adapters have no dropout and no DoRA (as in peft): set "
                "both off, or leave it out of Lora.targets"
            )
    for path in chosen:
        inside = [n for n in (*layers, *chosen) if n != path and n.startswith(path and f"{path}.")]
        if inside:
            raise InputError(
                f"{inside[0]!r} lies in {path!r}, whose {chosen[path][0]!r} is to have an adapter, and peft "
                "names it otherwise then: leave one of them out of Lora.targets"
            )
    return layers, chosen


def _matches(target: str, name: str) -> bool:
    return f".{name}".endswith(f".{target}") or fnmatchcase(name, target)


def stacked_in(model: nn.Module) -> list[str]:
    """Names of the 3-D parameters that can have an adapter: of experts, say, and not of convolutions."""
    found = []
    for path, module in model.named_modules():
        encoded = encodings(module)
        if added_to(module) or isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            continue
        scales = {scales_name(name, encoding.codec) for name, encoding in encoded.items()}
        for name, param in parameters_of(module).items():
            floating = param is not None and param.is_floating_point() and name not in scales
            if param is not None and param.ndim == 3 and (floating or name in encoded):
                found.append(_joined(path, name))
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_router(name: str, layer: Any) -> bool:
    """Whether a layer scores experts: it has a router's name, and fewer outputs than inputs (a SwiGLU's gate
    has more)."""
    last = name.rpartition(".")[2]
    return (last in ("gate", "router") or last.endswith("_gate")) and layer.out_features < layer.in_features


def _base(layer: LoraLinear | LoraStacked) -> tuple[Any, str]:
    """The module and the name of the weight beside which an adapter is."""
    return (layer.module, layer.name) if isinstance(layer, LoraStacked) else (layer, "weight")


def _encoding(layer: LoraLinear | LoraStacked) -> Any:
    module, name = _base(layer)
    return encodings(module).get(name)


def stored_weight(layer: LoraLinear | LoraStacked) -> torch.Tensor:
    """The weight beside which an adapter is, or its codes. Local."""
    module, name = _base(layer)
    weight = parameters_of(module)[name]
    assert weight is not None
    return weight


def _of_base(
    module: nn.Module, name: str, dtype: torch.dtype | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of a weight and what layers beside it are made with."""
    stored, encoding = parameters_of(module)[name], encodings(module).get(name)
    assert stored is not None
    held = stored if encoding is None else encoding
    return tuple(held.shape), {"bias": False, "device": stored.device, "dtype": dtype or held.dtype}


def _give(holder: Any, in_features: int, out_features: int, rank: int, options: dict[str, Any]) -> None:
    holder.lora_A = nn.Linear(in_features, rank, **options)
    holder.lora_B = nn.Linear(rank, out_features, **options)
    nn.init.zeros_(holder.lora_B.weight)


def _adapt(layer: Any, lora: Lora, dtype: torch.dtype | None) -> None:
    _, options = _of_base(layer, "weight", dtype)
    layer.lora = lora
    _give(layer, layer.in_features, layer.out_features, lora.rank, options)
    become(layer, LoraLinear)
    if isinstance(layer.weight, DTensor):
        _place_beside(layer.weight, layer)
    if lora.dora:
        layer.lora_magnitude_vector = nn.Parameter(_lengths(layer).to(options["dtype"]))


def _place_beside(weight: DTensor, layer: LoraLinear) -> None:
    """Cut A and B as tensor parallelism has cut the weight: B by its rows, or A by its columns."""
    for part, cut in ((layer.lora_A, 1), (layer.lora_B, 0)):
        where = [each if each.is_shard(cut) else Replicate() for each in weight.placements]
        whole = distribute_tensor(part.weight.detach(), weight.device_mesh, where, src_data_rank=None)
        part.weight = nn.Parameter(whole)


def _adapt_stacked(module: nn.Module, names: Sequence[str], lora: Lora, dtype: torch.dtype | None) -> None:
    holder: Any = module
    added: dict[str, LoraStacked] = {}
    for name in reversed(names):
        if added:
            holder.base_layer = nn.Module()
            holder = holder.base_layer
        added[name] = LoraStacked(module, name, holder, lora)
        (experts, out, into), options = _of_base(module, name, dtype)
        if added[name].transposed:
            out, into = into, out
        _give(holder, into, out, lora.rank * experts, options)
    set_added(module, {name: added[name] for name in names})


def is_transposed(model: nn.Module, name: str) -> bool:
    """Whether a parameter's experts lie as [in, out], by the mark that transformers and peft use. Local."""
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


@torch.no_grad()
def _merge(layer: LoraLinear | LoraStacked) -> None:
    layer.is_off = True  # a 3-D parameter would read as the sum
    module, name = _base(layer)
    transposed = isinstance(layer, LoraStacked) and layer.transposed
    merged = merged_weight(getattr(module, name), layer.lora, parts_of(layer), transposed)
    encoding, stored = _encoding(layer), stored_weight(layer)
    if encoding is None:
        stored.copy_(merged)
    else:
        codes, scales = encoding.codec.encode(merged)
        stored.copy_(codes)
        module.get_parameter(scales_name(name, encoding.codec)).copy_(scales)
    if isinstance(layer, LoraStacked):
        others = {each: adapter for each, adapter in added_to(module).items() if adapter is not layer}
        set_added(module, others)
        if not others:
            del module.lora_A, module.lora_B
            if hasattr(module, "base_layer"):
                del module.base_layer
        return
    if layer.lora.dora:
        del layer.lora_magnitude_vector
    del layer.lora_A, layer.lora_B, layer.lora, layer.is_off
    become(layer, nn.Linear)


def _whole(param: torch.Tensor) -> torch.Tensor:
    whole = param.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu().contiguous()
