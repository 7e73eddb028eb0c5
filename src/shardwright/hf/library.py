"""The only file that imports transformers for models: built without weights, their file format.

What isn't its public interface stands here too: the conversion between the names in files and those in the
model (``core_model_loading``), which tensors are initialised already (``_is_hf_initialized``), and whether
transformers has sharded a model.
"""
# pyright: reportMissingImports=false

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.extras import from_extra
from shardwright.torch_private import buffers_of, unsaved_buffers_of

with from_extra("hf"):
    import transformers
    from transformers import core_model_loading as conversion
    from transformers.conversion_mapping import get_model_conversion_mapping

CONFIG = "config.json"
_FILLS = (0, 1)  # any two bytes that differ


@dataclass(frozen=True)
class TensorTarget:
    """Where a tensor of a file goes: into ``target`` of the model; ``source`` is the pattern of a conversion
    that its name matched, None if it is only renamed; ``stacked`` and ``dim`` say what the conversion does:
    stack the tensors of one pattern along a new first dim, and concatenate the patterns along ``dim``.
    ``order`` is the place of ``source`` among the conversion's patterns."""

    target: str
    source: str | None = None
    order: int = 0
    stacked: bool = False
    dim: int = 0


def build(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model that ``config.json`` describes, on the meta device; tied weights are tied.

    Raises: InputError for a configuration that can't be read, or of a class that transformers doesn't have.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder / CONFIG}: transformers can't read it ({error})") from error
    names = config.architectures or []
    cls = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
    if cls is None:
        raise InputError(
            f"{folder / CONFIG}: architecture {names[0]!r} is not in transformers "
            f"{transformers.__version__}; install the version that has it, or "
            "build the model and call hf.shard and hf.read_weights"
        )
    wanted = dtype or config.dtype or torch.float32
    make = cls.from_config if cls is transformers.AutoModelForCausalLM else cls._from_config
    with torch.device("meta"):
        model = make(config, dtype=wanted)
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def version() -> tuple[int, int]:
    """Major and minor version of transformers."""
    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def take_from_trainer(model: Any) -> None:
    """Have Trainer treat a model that transformers has sharded (``distributed_config``) as any other: of such
    a one it refuses to checkpoint the optimizer."""
    model._is_distributed_loading_by_transformers = False


def tokenizer(folder: Path) -> Any:
    """The tokenizer of a local folder.

    Raises: InputError where there is none that transformers can read.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(
            f"{folder}: transformers finds no tokenizer it can read there ({error}); put the model's "
            "tokenizer files into the folder"
        ) from error


def streamer(tokenizer: Any) -> Any:
    """What prints the text of ``generate`` while it is written, without the prompt."""
    return transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def places(model: Any, names: list[str]) -> Mapping[str, TensorTarget]:
    """Where the tensors ``names`` of its files go; those that its class says it has no use for are left out.

    Raises: InputError for a conversion that changes values.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if not isinstance(t, conversion.WeightConverter)]
    converters = [t for t in transforms if isinstance(t, conversion.WeightConverter)]
    by_source = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    found: dict[str, TensorTarget] = {}
    for name in sorted(names, key=conversion.dot_natural_key):
        target, source = conversion.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if target in state or not any(re.search(pattern, target) for pattern in ignored):
            found[name] = (
                TensorTarget(target) if source is None else _converted(target, source, by_source[source])
            )
    return found


def _converted(target: str, source: str, converter: Any) -> TensorTarget:
    kinds = [type(op) for op in converter.operations]
    stacks = kinds[:1] == [conversion.MergeModulelist] and converter.operations[0].dim == 0
    rest = converter.operations[1:] if stacks else converter.operations
    if len(rest) > 1 or not all(type(op) is conversion.Concatenate for op in rest):
        raise InputError(
            f"{target}: its files store it as {source}, converted by {converter.operations}, which can't be "
            "read in slices (stacking and concatenating can); load it with from_pretrained, save it with "
            "save_pretrained(save_original_format=False), and load that folder"
        )
    order = converter.source_patterns.index(source)
    return TensorTarget(target, source, order, stacks, rest[0].dim if rest else 0)


def in_file_names(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the model as its files store them."""
    return conversion.revert_weight_conversion(model, dict(state))


def tied_names(model: Any) -> frozenset[str]:
    """Names that only show another's weight; files leave them out."""
    shown = dict(model.named_parameters(remove_duplicate=False))
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    return frozenset(a for a, b in pairs if a in shown and shown[a] is shown.get(b))


def rebuild_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no file has (rotary tables, scales), on ``device``, from the configuration.

    Done twice, over memory filled with different bytes: an element that the model's own initialisation leaves
    unwritten differs. Raises: InputError that names such a buffer.
    """
    for param in model.parameters():
        param._is_hf_initialized = True  # its initialisation then leaves parameters alone
    owners = [(name, m) for name, m in model.named_modules() if _unsaved(m)]
    for name, module in owners:
        results = []
        for fill in _FILLS:
            for buffer_name, buffer in _unsaved(module):
                fresh = torch.empty_like(buffer, device=device)
                fresh.view(-1).view(torch.uint8).fill_(0xFF * fill)
                buffers_of(module)[buffer_name] = fresh
            with torch.no_grad():
                model._init_weights(module)
            results.append({key: buffer.view(-1).view(torch.uint8) for key, buffer in _unsaved(module)})
        for key in results[0]:
            if not torch.equal(results[0][key], results[1][key]):
                raise InputError(
                    f"buffer {name}.{key} is in no file and {type(model).__name__}._init_weights doesn't "
                    "fill it; set it in _init_weights, or register it as persistent"
                )


def _unsaved(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers, unsaved = buffers_of(module), unsaved_buffers_of(module)
    return [(key, buffer) for key, buffer in buffers.items() if key in unsaved and buffer is not None]


def save_config(model: Any, cls: type, folder: Path, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``generation_config.json`` for weights of ``dtype``; ``cls``: the model's own
    class."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [cls.__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
