"""Models of transformers, small, from their configurations; written by its own ``save_pretrained``."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


FURTHER = {
    "qwen2": transformers.Qwen2Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8),
    "phi": transformers.PhiConfig(**SIZES),
    "phi3": transformers.Phi3Config(**SIZES),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32),
}
"""Families that only ``test_families.py`` goes through."""


def config(kind: str) -> transformers.PretrainedConfig:
    """``kind`` with two layers."""
    makes = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
        "mistral": lambda: transformers.MistralConfig(**SIZES),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
        "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    }
    if kind in makes:
        return makes[kind]()
    if kind in FURTHER:
        return FURTHER[kind]
    assert kind == "gpt2", kind
    return transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


KINDS = ("llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma", "gpt2")


def write(kind: str, folder: Path, max_shard_size: str = "40KB") -> Path:
    """The same random weights each time, in several files with an index."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config(kind))
    with torch.no_grad():  # norms and biases start as constants, which would hide a wrong slice
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def whole(folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers alone loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def loaded_whole(folder: Path) -> transformers.PreTrainedModel:
    """The same, once it has been seen that the folder has every weight and no other."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model


def without_a_file(folder: Path) -> str:
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    return re.escape(last.name)


def with_an_index_that_lies(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    there = places["model.norm.weight"]
    other = next(file for file in places.values() if file != there)
    places |= {"model.norm.weight": other, "model.extra.weight": other}
    path.write_text(json.dumps(index))
    return r"(?s)disagree about 2 tensor\(s\).*model\.extra\.weight.*model\.norm"


def with_a_tensor_of_another_shape(folder: Path) -> str:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            (size,) = tensors["model.norm.weight"].shape
            tensors["model.norm.weight"] = torch.ones(size - 1)
            save_file(tensors, path, {"format": "pt"})
            return rf"misshapen model/model\.norm\.weight: \[{size - 1}\] in the checkpoint, \[{size}\]"
    raise AssertionError("no file has it")


SPOILT = [without_a_file, with_an_index_that_lies, with_a_tensor_of_another_shape]
"""What makes a folder one that is refused: each spoils it, and returns what is to be said."""


def without_embedding(kind: str) -> tuple[transformers.PreTrainedModel, Callable[[int], dict]]:
    """A model whose ``get_input_embeddings`` raises, and what one rank gives it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(7)
    if kind == "clip":
        text = {**sizes, "vocab_size": 96, "max_position_embeddings": 16}
        text |= {"eos_token_id": 2, "bos_token_id": 1}
        vision = {**sizes, "image_size": 16, "patch_size": 8}
        clip = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        return transformers.CLIPModel(clip), lambda rank: {
            "input_ids": tokens(rank), "pixel_values": noise(rank, 2, 3, 16, 16), "return_loss": True
        }  # fmt: skip
    assert kind == "wav2vec2", kind
    wav2vec2 = transformers.Wav2Vec2Config(
        **sizes, vocab_size=20, num_feat_extract_layers=2, conv_dim=(16, 16), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0,
        activation_dropout=0.0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(wav2vec2), lambda rank: {
        "input_values": noise(rank, 2, 800), "labels": tokens(rank, 5) % 19 + 1
    }  # fmt: skip


def noise(rank: int, *shape: int) -> torch.Tensor:
    """Numbers of one rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def tokens(rank: int, length: int = 12) -> torch.Tensor:
    """(2, length) tokens of one rank."""
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(rank))
