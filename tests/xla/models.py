"""Small models for the XLA tests, and what plain torch makes of them."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from shardwright import xla


def block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), block(16), block(16), nn.Linear(16, 5))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed = block(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(x)


class Transformer(nn.Module):
    """Tokens [rows, length] -> logits of the next ones; the head shares the weight of the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Attention(8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.blocks:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


MODELS = {"mlp": mlp, "transformer": transformer, "convnet": convnet}
UNITS = {"mlp": (nn.Sequential,), "transformer": (Attention,), "convnet": (nn.Sequential,)}


def batch(kind: str, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch drawn from torch's random state."""
    if kind == "transformer":
        tokens = torch.randint(0, 11, (rows, 6))
        return tokens, tokens.roll(-1, 1)
    x = torch.randn(rows, 10) if kind == "mlp" else torch.randn(rows, 3, 8, 8)
    return x, torch.randint(0, 5, (rows,))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y.flatten())


def optimizers(kind: str, model: nn.Module) -> tuple[object, torch.optim.Optimizer]:
    """``(ours, torch's)`` with equal options."""
    if kind == "sgd":
        return xla.SGD(0.1, 0.9, 1e-2), torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-2)
    # eps bounds how much of a rounding error near a gradient of 0 becomes a part of lr
    return xla.AdamW(1e-3, eps=1e-3), torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3)


def reference_step(model, optimizer, rows, parts: int, clip_norm: float | None = None) -> float:
    """One step of plain torch on equal parts of the rows; gradients and buffers are averaged over them."""
    optimizer.zero_grad()
    before = copy.deepcopy(dict(model.named_buffers()))
    after, total = [], 0.0
    for part in zip(*(tensor.chunk(parts) for tensor in rows), strict=True):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        loss = loss_fn(model, *part) / parts
        loss.backward()
        total += loss.item()
        after.append(copy.deepcopy(dict(model.named_buffers())))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(sum(values[name] for values in after) / parts)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return total


def difference(state: dict, model: nn.Module) -> float:
    """The largest difference between a state dict and a model's, which must have the same names."""
    expected = model.state_dict()
    assert list(state) == list(expected)
    return max(float((state[name].double() - expected[name].double()).abs().max()) for name in expected)
