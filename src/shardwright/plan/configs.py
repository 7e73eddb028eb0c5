"""The numbers of a model of Hugging Face, from its ``config.json`` alone."""

import json
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError
from shardwright.files import parsed
from shardwright.plan.transformer import Architecture

_TIED = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False}
_TIED |= {"gemma": True, "gemma2": True, "gemma3_text": True}
_TIED |= {"mixtral": False, "qwen3_moe": False}
"""Type of a model -> whether its head is its embedding where the file doesn't say so."""

_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
"""Type of a model with experts in every block -> fields with their number, and with the width of one."""

_NUMBERS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def is_config(path: str | Path) -> bool:
    """Whether it is a ``config.json``, or a folder with one."""
    return Path(path).suffix == ".json" or (Path(path) / "config.json").is_file()


def has_numbers(path: str | Path) -> bool:
    """Whether ``architecture`` knows its type; else the model itself is to be traced. Raises: ConfigError."""
    return _fields(path)[1] in _TIED


def architecture(path: str | Path) -> Architecture:
    """The model of a folder of Hugging Face, or of its ``config.json``. Weights aren't looked at.

    Of Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, and Mixtral and Qwen 3 with experts in every block.
    Attention counts whole, also where it is to a window.
    Raises: ConfigError for a file that can't be read, another type of model, or a field that isn't there.
    """
    fields, kind, file = _fields(path)
    if kind not in _TIED:
        raise ConfigError(
            f"{file}: model_type {kind!r} isn't supported, expected one of {', '.join(_TIED)}; "
            "describe it by a row of a table of models (--models), or pass the module to plan.estimate"
        )
    if kind == "llama":  # the first ones had no such field
        fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
    experts = (*_EXPERTS[kind], "num_experts_per_tok") if kind in _EXPERTS else ()
    wanted = (*_NUMBERS, "num_key_value_heads", *experts)
    wrong = [name for name in wanted if type(fields.get(name)) is not int or fields[name] < 1]
    if wrong:
        raise ConfigError(
            f"{file}: {wrong[0]} is {fields.get(wrong[0], 'missing')}, expected a whole number above 0; "
            f"a {kind} needs {', '.join(wanted)}"
        )
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"{file}: only some blocks have experts, which numbers alone can't say; pass the module"
        )
    layers, width, heads, ffn, vocabulary = (fields[name] for name in _NUMBERS)
    number, ffn, chosen = (fields[name] for name in experts) if experts else (0, ffn, 1)
    return Architecture(
        layers,
        width,
        heads,
        fields["num_key_value_heads"],
        fields.get("head_dim") or width // heads,
        ffn,
        vocabulary,
        tied=bool(fields.get("tie_word_embeddings", _TIED[kind])),
        experts=number,
        chosen=chosen,
    )


def _fields(path: str | Path) -> tuple[dict[str, Any], Any, Path]:
    """What the file says, the type of its model, and where it is. Raises: ConfigError."""
    file = Path(path) if Path(path).suffix == ".json" else Path(path) / "config.json"
    try:
        fields: dict[str, Any] = parsed(json.loads, file.read_text(encoding="utf-8"))
        return fields, fields.get("model_type"), file
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"can't read {file} as the config of a model of Hugging Face: {error}") from None
