"""A run's byte-level model as a folder of Hugging Face: a Llama, with a tokenizer whose tokens are the bytes.

Our blocks are Llama's, except that two matrices are several there: qkv, and gate and up. Nothing is imported
for it: the folder is JSON and safetensors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.folder import published
from shardwright.data.text import FILE_START
from shardwright.extras import from_extra
from shardwright.recipe.config import ModelConfig
from shardwright.recipe.resolve import resolve
from shardwright.train.folder import RunFolder

with from_extra("checkpoint"):
    from safetensors.torch import save_file

_PLAIN: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The files of the folder, but for what depends on the run."""


def export_llama(root: Path, folder: Path) -> None:
    """Write the model of the finished run ``root`` as ``folder``, which must not exist and appears when it is
    complete. Raises: InputError where there is no finished run; CheckpointError where ``folder`` exists, or
    can't be written.
    """
    run = RunFolder(root)
    tensors = run.read_model()
    recipe = resolve(run.config).recipe
    with published(folder) as torn:
        torn.mkdir()
        save_file(llama_tensors(tensors, recipe.model), torn / "model.safetensors", {"format": "pt"})
        made = {
            "config.json": llama_config(recipe.model, recipe.training.sequence_length),
            "tokenizer.json": byte_tokenizer(),
        }
        for name, content in (_PLAIN | made).items():
            (torn / name).write_text(json.dumps(content, indent=2) + "\n")


def llama_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """``tensors`` of our transformer under Llama's names."""
    found = {
        "model.embed_tokens.weight": tensors["embedding.weight"],
        "model.norm.weight": tensors["norm.weight"],
    }
    if not config.tied_embedding:
        found["lm_head.weight"] = tensors["head.weight"]
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        q, k, v = tensors[f"{ours}.attention.qkv.weight"].chunk(3)
        gate, up = tensors[f"{ours}.feed_forward.gate_up.weight"].chunk(2)
        found |= {
            f"{theirs}.input_layernorm.weight": tensors[f"{ours}.attention_norm.weight"],
            f"{theirs}.self_attn.q_proj.weight": q,
            f"{theirs}.self_attn.k_proj.weight": k,
            f"{theirs}.self_attn.v_proj.weight": v,
            f"{theirs}.self_attn.o_proj.weight": tensors[f"{ours}.attention.out.weight"],
            f"{theirs}.post_attention_layernorm.weight": tensors[f"{ours}.feed_forward_norm.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": tensors[f"{ours}.feed_forward.down.weight"],
        }
    return {name: tensor.clone() for name, tensor in found.items()}  # slices of one matrix share its storage


def llama_config(config: ModelConfig, length: int) -> dict[str, Any]:
    """``config.json``. RMSNorm without an epsilon of its own has float32's, in bfloat16 too."""
    plain = _PLAIN["config.json"]
    return plain | {
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.dim // config.num_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": torch.finfo(torch.float32).eps,
        "rope_parameters": plain["rope_parameters"] | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied_embedding,
    }


def byte_tokenizer() -> dict[str, Any]:
    """``tokenizer.json``: a token is a byte, its number the byte's value. 0, which no text holds, is the mark
    between texts."""
    plain = _PLAIN["tokenizer.json"]
    vocab = {FILE_START.decode(): 0, **{char: byte for byte, char in _byte_level().items() if byte}}
    return plain | {"model": plain["model"] | {"vocab": vocab}}


def _byte_level() -> dict[int, str]:
    """How a ``ByteLevel`` step writes each byte: what is printable in Latin-1 as that, the others from U+0100
    on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(others)}
