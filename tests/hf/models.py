"""Models of transformers, small, from their configurations; written by its own ``save_pretrained``."""

from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def config(kind: str) -> transformers.PretrainedConfig:
    """``kind`` with two layers."""
    if kind == "llama":
        return transformers.LlamaConfig(**SIZES)
    if kind == "qwen3":
        return transformers.Qwen3Config(**SIZES, head_dim=8)
    if kind == "mistral":
        return transformers.MistralConfig(**SIZES)
    if kind == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
    if kind == "gemma":
        return transformers.GemmaConfig(**SIZES, head_dim=8)
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


def tokens(rank: int, length: int = 12) -> torch.Tensor:
    """(2, length) tokens of one rank."""
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(rank))
