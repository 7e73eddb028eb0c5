"""The model and the data that every system trains: a small decoder-only transformer, 33.7 M parameters."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The sizes of model and batch; the defaults are those of the published tables."""

    layers: int = 8
    width: int = 512
    vocab: int = 8192
    sequence: int = 256
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("layers", "width", "vocab", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}, expected a multiple of 64, or less than 128")

    @property
    def heads(self) -> int:
        """Attention heads of 64 features each; at least one."""
        return max(1, self.width // 64)


PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "bf16-reduced": (torch.bfloat16, torch.bfloat16),
}
"""Name -> dtypes of compute and of sums over ranks; masters and the optimizer's state are fp32 in each."""


class Block(nn.Module):
    """Attention, then a feed-forward network four times as wide; each normalised before, added after."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.contract(F.gelu(self.expand(self.feed_norm(x))))


class Transformer(nn.Module):
    """Token and position embedding, blocks, norm, untied head. Returns the mean cross-entropy, a scalar.

    precision: in which it is to be trained, a name of ``PRECISIONS``; the weights themselves are fp32.
    """

    def __init__(self, size: Size, precision: str = "fp32") -> None:
        super().__init__()
        self.precision = precision
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.position = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence + 1]: inputs, and shifted by one the targets -> loss in nats per token."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(size: Size, precision: str = "fp32") -> Transformer:
    """The same model, bit for bit, on every rank and for every system."""
    torch.manual_seed(0)
    return Transformer(size, precision)


def tokens(size: Size, rank: int, step: int) -> Tensor:
    """This rank's batch of a step, int64 [batch, sequence + 1]."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    return torch.randint(size.vocab, (size.batch, size.sequence + 1), generator=generator)
