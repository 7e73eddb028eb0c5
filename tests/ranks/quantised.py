"""A model with a frozen base in 4 or 8 bits and a trainable part, and what shards it."""

import torch
from torch import nn

from shardwright import fully_shard, quantize_

ROWS, COLS = 37, 100  # rows that no world divides, a last block of 36 columns


class Layer(nn.Module):
    """A quantised weight, an adapter beside it, and 3-D experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(COLS, ROWS)
        self.down = nn.Linear(ROWS, COLS, bias=False)
        self.experts = nn.Parameter(torch.randn(3, COLS, COLS) * 0.1)
        self.adapter = nn.Linear(COLS, COLS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x))) + self.adapter(x)
        return x + torch.einsum("bi,eij->bj", x, self.experts.to(x.dtype)) * 0.1


QUANTISED = ["*.up.weight", "*.down.weight", "*.experts"]


def build(codec="nf4", dequantise="group", layers=2):
    torch.manual_seed(3)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    model.requires_grad_(False)
    for layer in model:
        layer.adapter.weight.requires_grad_(True)
    if codec:
        quantize_(model, codec, where=QUANTISED, dequantise=dequantise)
    return model


def shard(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)
