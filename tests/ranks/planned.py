"""Small models whose live bytes are predicted: each with inputs, groups and precision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench import model as bench_model
from shardwright import MixedPrecisionPolicy

SIZE = bench_model.Size(layers=2, width=32, vocab=48, sequence=12, batch=3)
LARGE = bench_model.Size(layers=2, width=320, vocab=48, sequence=12, batch=1)  # its first block is cut
DEFAULT = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens(high: int = 48, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape or (3, 11), generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(10, 30), nn.GELU(), nn.Linear(30, 10)) for _ in range(3))
    return nn.Sequential(nn.Linear(7, 10), *layers, nn.Linear(10, 3))


class Tied(nn.Module):
    """An embedding that is the head's weight, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden)


class Shared(nn.Module):
    """One block that runs three times, between others that run once."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(14, 14) for _ in range(3))

    def forward(self, x):
        x = self.first(x).tanh()
        for _ in range(3):
            x = x + self.again(x).tanh()
        return self.last(x)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
            for i, o in ((3, 6), (6, 9))
        )
        self.head = nn.Linear(9 * 4, 5)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x.flatten(1))


class Adapted(nn.Module):
    """A frozen layer, and two small ones beside it that are trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters() -> nn.Module:
    layers = (nn.Sequential(Adapted(), nn.GELU(), Adapted()) for _ in range(3))
    return nn.Sequential(nn.Linear(12, 12).requires_grad_(False), *layers)


class Experts(nn.Module):
    """Every expert sees every token, weighed by a gate."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(10, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 18), nn.SiLU(), nn.Linear(18, 10)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        return self.scale * sum(gates[..., i, None] * each(x) for i, each in enumerate(self.experts))


class Recurrent(nn.Module):
    """Of cells: the workspace of a whole ``nn.LSTM`` is the matter of a library of the host."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(29, 12), nn.Linear(15, 29)
        self.cell = nn.LSTMCell(12, 15)

    def forward(self, x):
        state = None
        for each in self.embedding(x).unbind(1):
            state = self.cell(each, state)
        return self.head(state[0])


class Recomputed(nn.Module):
    """Blocks whose forward runs again in the backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Wide(nn.Module):
    """Nearly all of it is an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.out = nn.Embedding(997, 24), nn.Linear(24, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.hidden(self.embedding(x).mean(1)).relu())


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out if not out.dim() else F.mse_loss(out.float(), torch.zeros_like(out, dtype=torch.float32))


@dataclass(frozen=True)
class Planned:
    """make: the model. inputs: one batch. groups, precision: as ``fully_shard`` takes them."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    groups: Any
    precision: MixedPrecisionPolicy = DEFAULT


def _transformer() -> nn.Module:
    return bench_model.Transformer(SIZE)


def _batch() -> torch.Tensor:
    return tokens(48, 3, 13)


BY_HAND = [["embedding", "position"], ["blocks.0.qkv"], ["blocks.0", "blocks.1"], ["norm", "head"]]
MODELS = {
    "mlp": Planned(mlp, lambda: numbers(5, 7), [["0"], ["1"], ["2"], ["3"], ["4"]]),
    "transformer": Planned(_transformer, _batch, "auto"),
    "tied embedding": Planned(Tied, lambda: tokens(33), [["embedding"], ["blocks.0", "blocks.1"]]),
    "shared module": Planned(Shared, lambda: numbers(6, 14), [["first"], ["again"], ["last"]]),
    "convolutions": Planned(Convolutions, lambda: numbers(2, 3, 8, 8), [["stages.0"], ["stages.1"]]),
    "adapters": Planned(adapters, lambda: numbers(4, 12), [["0"], ["1"], ["2"], ["3"]]),
    "experts": Planned(Experts, lambda: numbers(4, 10), [["experts.0"], ["experts.1", "experts.2"]]),
    "recurrent": Planned(Recurrent, lambda: tokens(29), [["embedding"], ["cell"], ["head"]]),
    "mixed precision": Planned(mlp, lambda: numbers(5, 7), [["1"], ["2"], ["3"]], BF16),
    "bf16 sums": Planned(Experts, lambda: numbers(4, 10), [["experts.0"], ["experts.1"]], BF16_SUMS),
    "mixed transformer": Planned(_transformer, _batch, "auto", BF16),
    "cut block": Planned(lambda: bench_model.Transformer(LARGE), lambda: tokens(48, 1, 13), "auto"),
    "by hand": Planned(_transformer, _batch, BY_HAND),
    "recomputed": Planned(Recomputed, lambda: numbers(4, 12), "auto"),
    "wide embedding": Planned(Wide, lambda: tokens(997), [["embedding"], ["hidden"]]),
}
