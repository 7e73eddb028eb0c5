"""A decoder-only transformer over bytes: RMSNorm, rotary embedding, SDPA, SwiGLU.

    bytes (b, t) -> embedding (b, t, d) -> num_layers x Block -> norm -> head -> logits (b, t, 256)

    Block:   x + attention(norm(x)),   then   x + feed_forward(norm(x))

Built on the meta device, sharded, given memory by ``to_empty`` and filled by ``reset_parameters(seed)``.
There are no buffers: the rotary angles are computed in each forward, because ``to_empty`` would leave garbage
in a table.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwright.ops.activations import inputs_on_host as on_host
from shardwright.params.placement import part_of
from shardwright.recipe.config import ModelConfig
from shardwright.train.flops import flops_per_token

VOCABULARY = 256


def rotary_angles(length: int, head_dim: int, theta: float, like: Tensor, first: int = 0) -> Tensor:
    """cos and sin of ``length`` positions from ``first`` on, stacked: (2, length, head_dim / 2), in the dtype
    and on the device of ``like``."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    positions = torch.arange(first, first + length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``x`` (b, heads, t, head_dim) by its position's angle."""
    cos, sin = rotary[0], rotary[1]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer, pre-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """The whole model.

    With ``tied_embedding`` there is no head: the root multiplies by the embedding's weight itself, so that no
    parameter is shared between two modules, and the embedding must be sharded with the root.
    """

    def __init__(
        self, config: ModelConfig, *, activation_checkpointing: bool = False, inputs_on_host: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.checkpoint = on_host(checkpoint) if inputs_on_host else checkpoint
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = None if config.tied_embedding else nn.Linear(config.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """int64 (b, t) -> logits (b, t, 256). first: the place of the first token in its sequence."""
        x = self.embedding(tokens)
        head_dim = self.config.dim // self.config.num_heads
        rotary = rotary_angles(tokens.shape[1], head_dim, self.config.rope_theta, x, first)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = self.checkpoint(block, x, rotary, use_reentrant=False)
            else:
                x = block(x, rotary)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fill every parameter, sharded or not, on whatever device it is; needs no other rank.

        A value depends on the seed and the parameter's name only, so the weights are the same for every
        number of ranks. One parameter at a time exists whole (fp32, on the CPU).
        """
        for name, parameter in self.named_parameters():
            full = self._initial(name, parameter.shape, seed)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(part_of(parameter, full))
            else:
                parameter.copy_(full)

    def _initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        # Each of the 2 x num_layers additions to the residual stream has a smaller share of it (GPT-2's
        # scaling).
        adds = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        std = 0.02 / (2 * self.config.num_layers) ** 0.5 if adds else 0.02
        return torch.empty(shape).normal_(std=std, generator=generator)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, in fp32: logits (b, t, 256), targets int64 (b, t) -> scalar."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def flops_of(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of a trained token, as ``train.flops`` counts them."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in Transformer(config).parameters())
    read = numel - (0 if config.tied_embedding else VOCABULARY * config.dim)
    return flops_per_token(read, read, config.num_layers * config.dim * sequence_length)
