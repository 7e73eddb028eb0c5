"""Blocks of the shape of a 7B model: hidden size 4096, 32 heads, a gated feed-forward network."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.prove_gpu.device import Device


@dataclass(frozen=True)
class Shape:
    """Sizes of a block, and of what goes through it on each rank."""

    hidden: int = 4096
    heads: int = 32
    inner: int = 11008
    batch: int = 1
    sequence: int = 2048

    @classmethod
    def on(cls, device: Device, inner: int = 11008) -> "Shape":
        """That of a 7B model; on a simulated device 1/64 of it."""
        return device.size(cls(inner=inner), cls(hidden=64, heads=2, inner=inner // 64, sequence=16))


class Block(nn.Module):
    """Attention and SwiGLU, normalised before, added after. [batch, sequence, hidden] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        for name in ("query", "key", "value", "output"):
            setattr(self, name, nn.Linear(shape.hidden, shape.hidden, bias=False))
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        split = (each(normed).unflatten(2, (self.heads, -1)) for each in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in split), is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Stack(nn.Module):
    """Blocks and a norm; returns the mean square of what comes out, a scalar."""

    def __init__(self, blocks: list[Block], norm: nn.RMSNorm) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def made(shape: Shape, place: torch.device, dtype: torch.dtype = torch.float32) -> Block:
    """A block that is initialised where it will be."""
    with place:
        return Block(shape).to(dtype)


def norm_of(shape: Shape, place: torch.device, dtype: torch.dtype = torch.float32) -> nn.RMSNorm:
    """The norm after the last block."""
    return nn.RMSNorm(shape.hidden, device=place, dtype=dtype)


def inputs_of(shape: Shape, place: torch.device) -> Tensor:
    """What the first block reads: bfloat16 [batch, sequence, hidden]."""
    return torch.randn(shape.batch, shape.sequence, shape.hidden, device=place, dtype=torch.bfloat16)
