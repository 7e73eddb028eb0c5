"""A model of equal layers, and one step of it, for what is measured by the group."""

import time
from itertools import chain, islice

import torch
from torch import nn


def build_layers(num: int, width: int, depth: int = 1) -> nn.Sequential:
    """``num`` blocks of ``depth`` layers, each of ``width * (width + 1)`` parameters."""
    torch.manual_seed(0)
    layers = ([nn.Linear(width, width), nn.Tanh()] for _ in range(num * depth))
    return nn.Sequential(*(nn.Sequential(*chain(*islice(layers, depth))) for _ in range(num)))


def step_s(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    """Seconds of one training step."""
    start = time.perf_counter()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start
